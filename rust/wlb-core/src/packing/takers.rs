//! Finds the micro-batches that can take the next document, where most cannot take it and may take a later one.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::ladder::Ladder;

/// Micro-batches, the one of least weight that may take the next item first; items come in a known order.
///
/// One that comes first but may not take the item steps aside until the first item that it may take, so that it is
/// looked at once for as long as it waits, and not for every item in between.
pub(crate) struct Takers {
    ready: Ladder,
    /// Rank of the item and, below it, who waits for it.
    waiting: BinaryHeap<Reverse<u64>>,
}

impl Takers {
    /// All of them, by their weights.
    pub(crate) fn new(weights: impl ExactSizeIterator<Item = f64>) -> Self {
        Self { ready: Ladder::new(weights), waiting: BinaryHeap::new() }
    }

    /// The one of least weight that may take the item of this rank, the lowest index of several.
    ///
    /// # Arguments
    /// * `weight` - what one weighs by now: no less than it did before, unless that was set.
    /// * `next` - the first item that it may take, from this rank on; none if there is none.
    #[inline]
    pub(crate) fn first(
        &mut self,
        rank: usize,
        weight: impl Fn(usize) -> f64,
        next: impl Fn(usize) -> Option<usize>,
    ) -> Option<usize> {
        while let Some(&Reverse(key)) = self.waiting.peek()
            && (key >> 32) as usize <= rank
        {
            self.waiting.pop();
            let taker = key as u32 as usize;
            self.ready.set(taker, weight(taker));
        }
        loop {
            let taker = self.ready.lightest_by(&weight)?;
            let next = next(taker);
            if next == Some(rank) {
                return Some(taker);
            }
            self.ready.remove(taker);
            self.waiting.extend(next.map(|next| Reverse((next as u64) << 32 | taker as u64)));
        }
    }

    /// Sets what one weighs that may have become lighter.
    #[inline]
    pub(crate) fn set(&mut self, taker: usize, weight: f64) {
        self.ready.set(taker, weight);
    }
}
