//! Long documents per document, short ones whole: balance where it matters, long kernels where it does not.

use crate::longest_first::longest_first_of;

use super::builder::{Builder, Ranks};
use super::per_document;

/// Cuts documents of at least `threshold` tokens per document. Shorter ones go whole, longest first, to the rank with
/// the most room left under its equal share of the tokens; one is cut only if a share ends inside it, at most `cp - 1`
/// times in all.
pub(super) fn cut(builder: &mut Builder, lengths: &[i32], threshold: i64) {
    let cp_size = builder.cp_size();
    let is_long = |document: &usize| i64::from(lengths[*document]) >= threshold;
    let long = || (0..lengths.len()).filter(is_long);
    let cursors = per_document::cursors(lengths, cp_size, long());
    for document in long() {
        per_document::cut_document(builder, document, lengths[document], cursors[document]);
    }

    let total = lengths.iter().map(|&length| i64::from(length)).sum();
    let mut room = Vec::with_capacity(cp_size);
    fill_room(&mut room, &builder.tokens_per_rank(), total);
    let short = (0..lengths.len()).filter(|document| !is_long(document));
    for (length, document) in longest_first_of(short.map(|document| (document, lengths[document]))) {
        deal(&mut room, length, |rank, start, taken| {
            builder.push(rank, document, start, taken);
        });
    }
    builder.sort();
}

/// Tokens that each rank still lacks to its share, beside its part of the long documents.
///
/// `total % cp` ranks have one token more. They are chosen first among the ranks whose long documents gave them one
/// token more (ranks differ by at most one there), so a share is never below the tokens that a rank already has.
pub(crate) fn fill_room(room: &mut Vec<i64>, held: &[i64], total: i64) {
    let cp_size = held.len();
    let most = held.iter().copied().max().unwrap_or(0);
    room.clear();
    room.extend(held.iter().map(|held| total / cp_size as i64 - held));
    let fullest = (0..cp_size).filter(|&rank| held[rank] == most);
    let others = (0..cp_size).filter(|&rank| held[rank] < most);
    for rank in fullest.chain(others).take(total as usize % cp_size) {
        room[rank] += 1;
    }
}

/// Gives a short document to the rank with the most room, and the tokens that do not fit there to the next: calls
/// `place(rank, start, length)`.
#[inline]
pub(crate) fn deal(room: &mut [i64], length: i32, mut place: impl FnMut(usize, i32, i32)) {
    let mut start = 0;
    while start < length {
        // `max_by_key` keeps the last of equals, so the reversed order finds the lowest rank.
        let Some(rank) = (0..room.len()).rev().max_by_key(|&rank| room[rank]) else { break };
        let taken = room[rank].min(i64::from(length - start)) as i32;
        place(rank, start, taken);
        room[rank] -= i64::from(taken);
        start += taken;
    }
}
