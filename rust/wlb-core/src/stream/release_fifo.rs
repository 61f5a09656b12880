//! Queues release documents first in, first out, when a level holds enough of them (WLB-LLM, Algorithm 1).

use std::collections::VecDeque;

use super::queue::{OutlierQueue, Waiting};

impl OutlierQueue {
    /// Takes the documents out that join the batch of `iteration`: level by level, each oldest first.
    ///
    /// While a level holds `company` documents, that many leave it. Then documents that have waited `max_delay`
    /// iterations leave too, however few are left with them. (Without `max_delay`, single documents wait 40 to 90
    /// iterations.)
    pub(super) fn release(
        &mut self,
        company: usize,
        iteration: u64,
        max_delay: Option<u64>,
        released: &mut Vec<Waiting>,
    ) {
        for level in &mut self.levels {
            let full = level.len() - level.len() % company;
            let due = |waiting: &&Waiting| max_delay.is_some_and(|delay| iteration - waiting.arrived >= delay);
            // The level is oldest first, so due documents are a prefix.
            let overdue = level.iter().skip(full).take_while(due).count();
            released.extend(level.drain(..full + overdue));
        }
    }

    /// Takes out the oldest documents of all levels, until they have at least `tokens` tokens; of equally old documents
    /// the one in the lowest level goes first.
    pub(super) fn release_oldest(&mut self, mut tokens: i64, released: &mut Vec<Waiting>) {
        while tokens > 0 {
            let oldest = self.levels.iter_mut().filter(|level| !level.is_empty());
            let oldest = oldest.min_by_key(|level| level.front().map(|waiting| waiting.arrived));
            let Some(waiting) = oldest.and_then(VecDeque::pop_front) else { break };
            tokens -= i64::from(waiting.piece.length);
            released.push(waiting);
        }
    }
}
