//! Greedy packing into sequences of fixed length, and the stronger baseline.

use crate::cost::CostModel;
use crate::longest_first::longest_first;

use crate::packing::options::Method;
use crate::packing::piece::Piece;
use crate::packing::placement::Cuts;
use crate::packing::plan::Packing;

/// Longest first, each to the micro-batch with the least attention work that still has room (Fixed-4D).
///
/// A document that fits nowhere whole is cut: its first part fills the micro-batch with the most room, and the rest is
/// placed in the same way at once.
///
/// # Complexity
/// O(n N).
pub(crate) fn pack(lengths: &[i32], num_micro_batches: usize, max_tokens: i32, cost_model: &CostModel) -> Packing {
    let mut cuts = Cuts::new(lengths.len(), num_micro_batches);
    let mut pairs = vec![0_u128; num_micro_batches];
    for (length, id) in longest_first(lengths) {
        let mut piece = Piece { id: id as i64, start: 0, length };
        while piece.length > 0 {
            let room = |j: usize| i64::from(max_tokens) - cuts.tokens()[j];
            let with_room = (0..num_micro_batches).filter(|&j| room(j) >= i64::from(piece.length));
            let (micro_batch, taken) = match with_room.min_by_key(|&j| pairs[j]) {
                Some(micro_batch) => (micro_batch, piece.length),
                // `min_by_key` keeps the first of equals, `max_by_key` the last.
                None => match (0..num_micro_batches).rev().max_by_key(|&j| room(j)) {
                    Some(micro_batch) if room(micro_batch) > 0 => (micro_batch, room(micro_batch) as i32),
                    _ => break,
                },
            };
            pairs[micro_batch] += u128::from(cost_model.mask().pairs(taken));
            cuts.put(micro_batch, Piece { length: taken, ..piece });
            piece = Piece { start: piece.start + taken, length: piece.length - taken, ..piece };
        }
        if piece.length > 0 {
            cuts.leave_over(piece);
        }
    }
    cuts.into_packing(Method::FixedLength, max_tokens, lengths, cost_model.into())
}
