//! Fills micro-batches to one level of cost under a limit of tokens.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::ladder::Ladder;
use crate::packing::methods::counts::Counts;
use crate::packing::placement::Placement;

/// Micro-batches being filled with documents from the costliest to the cheapest, such that lack of room never makes one
/// of them the heaviest.
pub(super) struct Level {
    pub(super) placement: Placement,
    max_tokens: i64,
    /// Number of documents in each micro-batch, if it is limited.
    counts: Option<Counts>,
    /// Micro-batches by cost; all that had no room for the last document are taken out.
    open: Ladder,
    /// The micro-batches taken out of `open`, by their room.
    full: BinaryHeap<(i64, Reverse<usize>)>,
    /// All micro-batches by cost; built when the first one has no room.
    by_cost: Option<Ladder>,
    /// Cost of the heaviest micro-batch.
    heaviest: f64,
}

impl Level {
    /// Starts from micro-batches that already hold documents, of any length; `counts` must include these documents.
    pub(super) fn new(placement: Placement, max_tokens: i64, counts: Option<Counts>) -> Self {
        let open = Ladder::new(placement.costs.iter().copied());
        let heaviest = placement.costs.iter().copied().fold(0.0, f64::max);
        Self { placement, max_tokens, counts, open, full: BinaryHeap::new(), by_cost: None, heaviest }
    }

    /// Cost of the heaviest micro-batch.
    pub(super) fn heaviest(&self) -> f64 {
        self.heaviest
    }

    /// Puts a document where the cost is least among the micro-batches with room for it, and returns whether it did. If
    /// a micro-batch without room has the least cost of all, the document is put only if the heaviest micro-batch grows
    /// by at most `tolerated`.
    ///
    /// # Complexity
    /// The time of Algorithm 1, if documents get shorter: then a micro-batch is found full at most once for each
    /// document that it holds. Else O(N log N).
    #[inline]
    pub(super) fn place(&mut self, index: usize, length: i32, cost: f64, tolerated: impl FnOnce() -> f64) -> bool {
        while let Some(&(room, Reverse(micro_batch))) = self.full.peek()
            && room >= i64::from(length)
        {
            self.full.pop();
            self.open.set(micro_batch, self.placement.costs[micro_batch]);
        }
        let micro_batch = loop {
            if self.full.len() == self.placement.costs.len() {
                return false;
            }
            let lightest = self.open.lightest();
            if self.room(lightest) >= i64::from(length) {
                break lightest;
            }
            let costs = &self.placement.costs;
            self.by_cost.get_or_insert_with(|| Ladder::new(costs.iter().copied()));
            self.open.remove(lightest);
            self.full.push((self.room(lightest), Reverse(lightest)));
        };
        if self.by_cost.as_ref().is_some_and(|by_cost| by_cost.lightest() != micro_batch) {
            if self.placement.costs[micro_batch] + cost > self.heaviest + tolerated() {
                return false;
            }
            self.placement.length_fallbacks += 1;
        }
        self.placement.put(index, micro_batch, length, cost);
        if let Some(counts) = &mut self.counts {
            counts.put(micro_batch, length);
        }
        let weight = self.placement.costs[micro_batch];
        self.open.set(micro_batch, weight);
        if let Some(by_cost) = &mut self.by_cost {
            by_cost.set(micro_batch, weight);
        }
        self.heaviest = self.heaviest.max(weight);
        true
    }

    /// Free tokens; 0 if the micro-batch may have no further document.
    fn room(&self, micro_batch: usize) -> i64 {
        match &self.counts {
            Some(counts) if !counts.has_room(micro_batch) => 0,
            _ => self.max_tokens - self.placement.tokens[micro_batch],
        }
    }
}
