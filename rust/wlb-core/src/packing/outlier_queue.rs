//! Documents too long to be balanced wait for others of their size (section 4.3 of WLB-LLM).

use std::collections::VecDeque;

use crate::error::named_choices;

use super::plan::Piece;

named_choices! {
    /// Which waiting documents join a batch.
    #[derive(Default)]
    Release, "release" {
        /// Each level lets its oldest `N` go while it holds that many (WLB-LLM).
        #[default]
        Fifo = "fifo",
        /// All but the longest, as many of which wait as balance is worth ([`super::adaptive`]).
        Adaptive = "adaptive",
    }
}

/// A piece that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// What waits.
    pub piece: Piece,
    /// The iteration in which it was pushed.
    pub arrived: u64,
}

/// FIFO levels: level `i` holds documents with `thresholds[i] <= length < thresholds[i + 1]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutlierQueue {
    thresholds: Vec<i32>,
    levels: Vec<VecDeque<Waiting>>,
}

impl OutlierQueue {
    /// Empty levels; `thresholds` ascend.
    pub(super) fn new(thresholds: &[i32]) -> Self {
        Self { thresholds: thresholds.to_vec(), levels: vec![VecDeque::new(); thresholds.len()] }
    }

    /// The level that a document of this length waits in; `None` if it is no outlier.
    pub fn level(&self, length: i32) -> Option<usize> {
        self.thresholds.partition_point(|&threshold| threshold <= length).checked_sub(1)
    }

    /// The levels, each oldest first.
    pub fn levels(&self) -> &[VecDeque<Waiting>] {
        &self.levels
    }

    /// Waiting pieces in all levels.
    pub fn len(&self) -> usize {
        self.levels.iter().map(VecDeque::len).sum()
    }

    /// Tokens that wait in all levels.
    pub(super) fn tokens(&self) -> i64 {
        self.levels.iter().flatten().map(|waiting| i64::from(waiting.piece.length)).sum()
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.levels.iter().all(VecDeque::is_empty)
    }

    pub(super) fn push(&mut self, level: usize, waiting: Waiting) {
        self.levels[level].push_back(waiting);
    }

    /// Takes out what joins the batch of `iteration`: level by level, each oldest first.
    ///
    /// While a level holds `num_micro_batches`, that many leave it. Then whatever has waited for `max_delay`
    /// iterations leaves too, however few hold out with it: without that, single documents wait 40 to 90 iterations.
    pub(super) fn release(
        &mut self,
        num_micro_batches: usize,
        iteration: u64,
        max_delay: Option<u64>,
        released: &mut Vec<Waiting>,
    ) {
        for level in &mut self.levels {
            let full = level.len() - level.len() % num_micro_batches;
            let due = |waiting: &&Waiting| max_delay.is_some_and(|delay| iteration - waiting.arrived >= delay);
            // Oldest first, so that what is due is a prefix.
            let overdue = level.iter().skip(full).take_while(due).count();
            released.extend(level.drain(..full + overdue));
        }
    }

    /// Takes out the oldest, whatever their levels hold, until they are `tokens` or more; of equally old ones those of the
    /// lowest level first.
    pub(super) fn release_oldest(&mut self, mut tokens: i64, released: &mut Vec<Waiting>) {
        while tokens > 0 {
            let oldest = self.levels.iter_mut().filter(|level| !level.is_empty());
            let oldest = oldest.min_by_key(|level| level.front().map(|waiting| waiting.arrived));
            let Some(waiting) = oldest.and_then(VecDeque::pop_front) else { break };
            tokens -= i64::from(waiting.piece.length);
            released.push(waiting);
        }
    }

    /// Takes out everything, at the end of a stream.
    pub(super) fn release_all(&mut self, released: &mut Vec<Waiting>) {
        for level in &mut self.levels {
            released.extend(level.drain(..));
        }
    }
}
