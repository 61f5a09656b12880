//! Algorithm 1 of WLB-LLM: micro-batches of equal work and unequal length.

use crate::cost::CostModel;
use crate::longest_first::longest_first;

use crate::packing::options::Method;
use crate::packing::piece::Piece;
use crate::packing::placement::Placement;
use crate::packing::plan::Packing;

use super::bins::Bins;

/// Algorithm 1 ([`place`]).
pub(crate) fn pack(lengths: &[i32], num_micro_batches: usize, max_tokens: i32, cost_model: &CostModel) -> Packing {
    let empty = Placement::new(lengths.len(), num_micro_batches, cost_model.micro_batch());
    let placement = place(longest_first(lengths), &cost_model.costs(lengths), empty, max_tokens);
    let piece = |index| Piece::whole(index, lengths[index]);
    placement.into_packing(Some(Method::VarLength), max_tokens, cost_model, piece)
}

/// Puts each document, given as `(length, index)` from the longest to the shortest, in the micro-batch with the least
/// cost.
///
/// # Complexity
/// O(n) for the sort, and a few steps for each document (see [`Ladder`](crate::ladder::Ladder)); O(n N) at worst.
pub(super) fn place(
    longest_first: impl Iterator<Item = (i32, usize)>,
    costs: &[f64],
    empty: Placement,
    max_tokens: i32,
) -> Placement {
    let mut bins = Bins::resume(empty, max_tokens);
    longest_first.for_each(|(length, index)| bins.place(index, length, costs[index]));
    bins.placement
}
