//! Algorithm 1 of WLB-LLM: micro-batches of equal work and unequal length.

use crate::cost::CostModel;
use crate::longest_first::longest_first;

use crate::packing::options::Method;
use crate::packing::piece::Piece;
use crate::packing::placement::Placement;
use crate::packing::plan::Packing;

use super::bins::Bins;

/// Longest first, each document to the micro-batch with the least cost.
///
/// # Complexity
/// O(n) for the sort, and a few steps for each document (see [`Ladder`](crate::ladder::Ladder)); O(n N) at worst.
pub(crate) fn pack(lengths: &[i32], num_micro_batches: usize, max_tokens: i32, cost_model: &CostModel) -> Packing {
    let empty = Placement::new(lengths.len(), num_micro_batches, cost_model.micro_batch());
    let mut bins = Bins::resume(empty, max_tokens);
    let costs = cost_model.costs(lengths);
    for (length, index) in longest_first(lengths) {
        bins.place(index, length, costs[index]);
    }
    let piece = |index| Piece::whole(index, lengths[index]);
    bins.placement.into_packing(Some(Method::VarLength), max_tokens, cost_model, piece)
}
