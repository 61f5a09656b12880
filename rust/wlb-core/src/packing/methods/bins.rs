//! Algorithm 1's rule: a document goes where the cost is least, or, without room there, where the tokens are fewest.

use crate::ladder::Ladder;
use crate::packing::placement::Placement;

/// Micro-batches being filled by Algorithm 1's rule.
pub(in crate::packing) struct Bins {
    pub(in crate::packing) placement: Placement,
    max_tokens: i64,
    by_cost: Ladder,
    /// Built at the first document that does not fit where the cost is least: most batches never need it.
    by_tokens: Option<Ladder>,
}

impl Bins {
    /// Goes on from micro-batches that may already hold documents.
    pub(in crate::packing) fn resume(placement: Placement, max_tokens: i32) -> Self {
        let by_cost = Ladder::new(placement.costs.iter().copied());
        Self { placement, max_tokens: i64::from(max_tokens), by_cost, by_tokens: None }
    }

    /// Puts a document where the cost is least; else where the tokens are fewest; else leaves it over.
    #[inline]
    pub(in crate::packing) fn place(&mut self, index: usize, length: i32, cost: f64) {
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
    /// Documents that all find room in this way find it too when some of them are taken away (no micro-batch gets
    /// longer then); that does not hold of [`Bins::place`].
    pub(in crate::packing) fn place_by_tokens(&mut self, index: usize, length: i32, cost: f64) {
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
    }

    #[inline]
    fn put(&mut self, index: usize, micro_batch: usize, length: i32, cost: f64) {
        self.placement.put(index, micro_batch, length, cost);
        self.by_cost.set(micro_batch, self.placement.costs[micro_batch]);
        if let Some(by_tokens) = &mut self.by_tokens {
            by_tokens.set(micro_batch, self.placement.tokens[micro_batch] as f64);
        }
    }

    #[cold]
    fn fewest_tokens(&mut self) -> usize {
        let tokens = &self.placement.tokens;
        self.by_tokens.get_or_insert_with(|| Ladder::new(tokens.iter().map(|&tokens| tokens as f64))).lightest()
    }
}
