//! Finds the micro-batch for the next document, where most micro-batches cannot take it but may take a later one.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::ladder::Ladder;

/// Micro-batches by weight, where items come in a known order and a micro-batch may be unable to take an item.
///
/// A micro-batch that is lightest but may not take the item is set aside until the first item that it may take. So it
/// is looked at once, and not for every item in between.
pub(crate) struct OpenBins {
    ready: Ladder,
    /// `rank of the item << 32 | micro-batch that waits for it`.
    waiting: BinaryHeap<Reverse<u64>>,
}

impl OpenBins {
    /// All micro-batches with their weights, ready.
    pub(crate) fn new(weights: impl ExactSizeIterator<Item = f64>) -> Self {
        // Mostly all bins are empty and equal.
        Self { ready: Ladder::of_mostly_sorted(weights.zip(0..).collect()), waiting: BinaryHeap::new() }
    }

    /// The lightest micro-batch that may take the item of this rank, the lowest index if several are equal.
    ///
    /// # Arguments
    /// * `weight` - present weight of a micro-batch; since it was last set, it must not have decreased.
    /// * `next` - rank of the first item, from this rank on, that a micro-batch may take; `None` if there is none.
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
            let bin = key as u32 as usize;
            self.ready.come_back(bin, weight(bin), false);
        }
        loop {
            let bin = self.ready.lightest_by(&weight)?;
            let next = next(bin);
            if next == Some(rank) {
                return Some(bin);
            }
            self.ready.remove(bin);
            self.waiting.extend(next.map(|next| Reverse((next as u64) << 32 | bin as u64)));
        }
    }

    /// Sets the weight of a micro-batch that may have become lighter.
    #[inline]
    pub(crate) fn set(&mut self, bin: usize, weight: f64) {
        self.ready.set_lightest(bin, weight);
    }
}
