//! Algorithm 1 of WLB-LLM: micro-batches of equal work and unequal length.

use crate::cost::CostModel;
use crate::longest_first::longest_first;

use super::Method;
use super::ladder::Ladder;
use super::placement::{Placement, whole};
use super::plan::Packing;

/// Longest first, each document to the micro-batch with the least cost.
///
/// # Complexity
/// O(n) for the sort, and a few steps for each document (see [`Ladder`]); O(n N) at worst.
pub(super) fn pack(lengths: &[i32], num_micro_batches: usize, max_tokens: i32, cost_model: &CostModel) -> Packing {
    let (placement, _) = place(lengths, num_micro_batches, max_tokens, cost_model);
    placement.into_packing(Some(Method::VarLength), max_tokens, cost_model, |index| whole(index, lengths[index]))
}

/// Where [`pack`] puts documents, and what each of them costs.
pub(super) fn place(
    lengths: &[i32],
    num_micro_batches: usize,
    max_tokens: i32,
    cost_model: &CostModel,
) -> (Placement, Vec<f64>) {
    let mut bins = Bins::new(lengths.len(), num_micro_batches, max_tokens);
    let costs = cost_model.costs(lengths);
    for (length, index) in longest_first(lengths) {
        bins.place(index, length, costs[index]);
    }
    (bins.placement, costs)
}

/// Micro-batches being filled by Algorithm 1's rule.
pub(super) struct Bins {
    pub(super) placement: Placement,
    max_tokens: i64,
    by_cost: Ladder,
    /// Built at the first document that does not fit where the cost is least: most batches never need it.
    by_tokens: Option<Ladder>,
}

impl Bins {
    pub(super) fn new(num_documents: usize, num_micro_batches: usize, max_tokens: i32) -> Self {
        Self::resume(Placement::new(num_documents, num_micro_batches), max_tokens)
    }

    /// Goes on from micro-batches that already hold documents.
    pub(super) fn resume(placement: Placement, max_tokens: i32) -> Self {
        let by_cost = Ladder::new(placement.costs.iter().copied());
        Self { placement, max_tokens: i64::from(max_tokens), by_cost, by_tokens: None }
    }

    /// Puts a document where the cost is least; else where the tokens are fewest; else leaves it over.
    #[inline]
    pub(super) fn place(&mut self, index: usize, length: i32, cost: f64) {
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
    /// Documents that all find room in this way find it too when some of them are taken away (no micro-batch gets longer then);
    /// that does not hold of [`Bins::place`].
    pub(super) fn place_by_tokens(&mut self, index: usize, length: i32, cost: f64) {
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
