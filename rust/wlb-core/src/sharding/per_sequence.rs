//! Cuts the packed sequence into chunks regardless of documents: two chunks for each rank, or one.

use super::builder::{Ranks, owner};

/// Cuts the sequence into `2*cp` chunks, two for each rank: even for a single document, very uneven for many.
pub(super) fn cut(ranks: &mut impl Ranks, lengths: &[i32]) {
    let cp_size = ranks.cp_size();
    in_chunks(ranks, lengths, 2 * cp_size, |chunk| owner(chunk, cp_size));
}

/// Cuts the sequence into `cp` chunks, one for each rank in their order.
pub(super) fn cut_contiguous(ranks: &mut impl Ranks, lengths: &[i32]) {
    in_chunks(ranks, lengths, ranks.cp_size(), |chunk| chunk);
}

/// Cuts the sequence into chunks; the first `total % chunks` of them are one token longer.
fn in_chunks(ranks: &mut impl Ranks, lengths: &[i32], chunks: usize, owner: impl Fn(usize) -> usize) {
    let total: i32 = lengths.iter().sum();
    let (base, longer) = (total / chunks as i32, total as usize % chunks);
    let size = |chunk: usize| base + i32::from(chunk < longer);

    let (mut chunk, mut room) = (0, size(0));
    for (document, &length) in lengths.iter().enumerate() {
        let mut start = 0;
        while start < length {
            while room == 0 {
                chunk += 1;
                room = size(chunk);
            }
            let taken = room.min(length - start);
            ranks.push(owner(chunk), document, start, taken);
            start += taken;
            room -= taken;
        }
    }
}
