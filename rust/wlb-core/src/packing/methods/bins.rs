//! Algorithm 1's rule: a document goes where the cost is least, or, without room there, where the tokens are fewest.

use crate::ladder::Ladder;
use crate::packing::placement::Placement;

use super::counts::Counts;

/// Micro-batches being filled by Algorithm 1's rule.
pub(crate) struct Bins {
    pub(crate) placement: Placement,
    max_tokens: i64,
    /// Number of documents in each micro-batch, if it is limited.
    pub(crate) counts: Option<Counts>,
    by_cost: Ladder,
    /// Micro-batches by tokens, or by sizes if the number of documents is limited. Built at the first document that
    /// does not fit where the cost is least: most batches never need it.
    by_tokens: Option<Ladder>,
}

impl Bins {
    /// Bins that may already hold documents.
    pub(crate) fn resume(placement: Placement, max_tokens: i32) -> Self {
        Self::limited(placement, i64::from(max_tokens), None)
    }

    /// Empty bins with a limit on the number of documents.
    pub(crate) fn limited(placement: Placement, max_tokens: i64, max_documents: Option<usize>) -> Self {
        let by_cost = Ladder::new(placement.costs.iter().copied());
        let counts = max_documents.map(|most| Counts::new(placement.tokens.len(), max_tokens, most));
        Self { placement, max_tokens, counts, by_cost, by_tokens: None }
    }

    /// Puts a document where the cost is least; else where the tokens are fewest; else leaves it over.
    #[inline]
    pub(crate) fn place(&mut self, index: usize, length: i32, cost: f64) {
        let mut micro_batch = self.by_cost.lightest();
        if !self.has_room(micro_batch, length) {
            micro_batch = self.fewest_tokens();
            if !self.has_room(micro_batch, length) {
                self.placement.leftover.push(index);
                return;
            }
            self.placement.length_fallbacks += 1;
        }
        self.put(index, micro_batch, length, cost);
    }

    /// Puts a document where the tokens are fewest; else leaves it over.
    ///
    /// If a list of documents fits in this way, any part of the list fits too, since no micro-batch gets longer. That
    /// is not true of [`Bins::place`].
    pub(crate) fn place_by_tokens(&mut self, index: usize, length: i32, cost: f64) {
        let micro_batch = self.fewest_tokens();
        if self.has_room(micro_batch, length) {
            self.placement.length_fallbacks += usize::from(micro_batch != self.by_cost.lightest());
            self.put(index, micro_batch, length, cost);
        } else {
            self.placement.leftover.push(index);
        }
    }

    #[inline]
    fn has_room(&self, micro_batch: usize, length: i32) -> bool {
        self.placement.tokens[micro_batch] + i64::from(length) <= self.max_tokens
            && self.counts.as_ref().is_none_or(|counts| counts.has_room(micro_batch))
    }

    #[inline]
    fn put(&mut self, index: usize, micro_batch: usize, length: i32, cost: f64) {
        self.placement.put(index, micro_batch, length, cost);
        self.by_cost.set(micro_batch, self.placement.costs[micro_batch]);
        if let Some(counts) = &mut self.counts {
            counts.put(micro_batch, length);
        }
        if let Some(by_tokens) = &mut self.by_tokens {
            let tokens = self.placement.tokens[micro_batch];
            by_tokens.set(micro_batch, self.counts.as_ref().map_or(tokens, |counts| counts.size(micro_batch)) as f64);
        }
    }

    #[cold]
    fn fewest_tokens(&mut self) -> usize {
        let Self { placement, counts, by_tokens, .. } = self;
        let size = |j: usize| counts.as_ref().map_or(placement.tokens[j], |counts| counts.size(j)) as f64;
        by_tokens.get_or_insert_with(|| Ladder::new((0..placement.tokens.len()).map(size))).lightest()
    }
}
