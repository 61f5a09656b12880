//! The usual packing and the baseline: concatenate and cut.

use crate::packing::options::Method;
use crate::packing::piece::Piece;
use crate::packing::placement::Cuts;
use crate::packing::plan::Packing;
use crate::packing::pricing::Pricing;

/// Concatenates the documents in arrival order and cuts every `max_tokens` tokens (Plain-4D).
///
/// A document that crosses a cut becomes several pieces, which are separate documents for attention.
///
/// # Complexity
/// O(n log n + N).
pub(crate) fn pack(lengths: &[i32], num_micro_batches: usize, max_tokens: i32, costs: Pricing<'_>) -> Packing {
    let mut cuts = Cuts::new(lengths.len(), num_micro_batches);
    let (mut micro_batch, mut room) = (0, max_tokens);
    for (id, &length) in lengths.iter().enumerate() {
        let mut piece = Piece { id: id as i64, start: 0, length };
        while piece.length > 0 && micro_batch < num_micro_batches {
            let taken = piece.length.min(room);
            cuts.put(micro_batch, Piece { length: taken, ..piece });
            piece = Piece { start: piece.start + taken, length: piece.length - taken, ..piece };
            room -= taken;
            if room == 0 {
                (micro_batch, room) = (micro_batch + 1, max_tokens);
            }
        }
        if piece.length > 0 {
            cuts.leave_over(piece);
        }
    }
    cuts.into_packing(Method::Original, max_tokens, lengths, costs)
}
