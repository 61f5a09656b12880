//! Long documents per document, short ones whole: balance where it matters, long kernels where it does not.

use crate::longest_first::longest_first_of;

use super::per_document;
use super::plan::Builder;

/// Cuts documents of at least `threshold` tokens per document. The others go whole, longest first, to the rank with the
/// most room left under its equal share of the tokens; one is cut only where a share ends, so at most
/// `cp - 1` times in all.
pub(super) fn cut(builder: &mut Builder, lengths: &[i32], threshold: i64) {
    let cp_size = builder.cp_size();
    let is_long = |document: &usize| i64::from(lengths[*document]) >= threshold;
    let long = || (0..lengths.len()).filter(is_long);
    let cursors = per_document::cursors(lengths, cp_size, long());
    for document in long() {
        per_document::cut_document(builder, document, lengths[document], cursors[document]);
    }

    let mut room = room(builder, lengths);
    let short = (0..lengths.len()).filter(|document| !is_long(document));
    for (length, document) in longest_first_of(short.map(|document| (document, lengths[document]))) {
        let (mut start, end) = (0, length);
        while start < end {
            // `max_by_key` keeps the last of equals: reversed, the lowest rank.
            let Some(rank) = (0..cp_size).rev().max_by_key(|&rank| room[rank]) else { break };
            let taken = room[rank].min(i64::from(end - start)) as i32;
            builder.push(rank, document, start, taken);
            room[rank] -= i64::from(taken);
            start += taken;
        }
    }
    builder.sort();
}

/// Tokens that each rank still lacks, when it holds its share of the long documents.
///
/// `total % cp` ranks have one token more. They are taken first among those whose long documents gave them one
/// more: a share is then never below what a rank already holds.
fn room(builder: &Builder, lengths: &[i32]) -> Vec<i64> {
    let cp_size = builder.cp_size();
    let total: i64 = lengths.iter().map(|&length| i64::from(length)).sum();
    let held = builder.tokens_per_rank();
    let mut fullest_first: Vec<usize> = (0..cp_size).collect();
    fullest_first.sort_by_key(|&rank| std::cmp::Reverse(held[rank]));
    let mut room: Vec<i64> = held.iter().map(|held| total / cp_size as i64 - held).collect();
    for &rank in &fullest_first[..total as usize % cp_size] {
        room[rank] += 1;
    }
    room
}
