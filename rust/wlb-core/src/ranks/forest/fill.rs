//! Puts pieces of trees into micro-batches; a piece that fits nowhere is cut.

use std::collections::BinaryHeap;

use super::bins::Bins;
use super::cuts::within;

/// Order in which micro-batches are filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// Costliest piece first, to the micro-batch that lacks the most cost to its target.
    LeastLoad,
    /// Longest piece first, to the fullest micro-batch with room.
    BestFit,
    /// One micro-batch after the other, each until it is full.
    InTurn,
}

/// Puts pieces into some of the micro-batches, and leaves none empty if it can be avoided. Returns false if they do not
/// hold all pieces.
///
/// # Arguments
/// * `targets` - target cost of each micro-batch.
pub(super) fn fill(bins: &mut Bins, among: &[usize], targets: &[f64], pieces: &[Vec<u32>], rule: Rule) -> bool {
    let filled = match rule {
        Rule::InTurn => in_turn(bins, among, pieces),
        _ => by_piece(bins, among, targets, pieces, rule),
    };
    if filled {
        leave_none_empty(bins, among);
    }
    filled
}

/// Bits of a number that is at least 0; they sort like the numbers.
fn ordered(weight: f64) -> u64 {
    weight.max(0.0).to_bits()
}

fn by_piece(bins: &mut Bins, among: &[usize], targets: &[f64], pieces: &[Vec<u32>], rule: Rule) -> bool {
    let leaves = bins.leaves;
    let weight = |piece: &[u32]| {
        let load = leaves.together(piece.iter().copied());
        if rule == Rule::BestFit { load.tokens as u64 } else { ordered(load.cost) }
    };
    // Equal pieces stay in order; no two begin at the same sample.
    let entry = |piece: Vec<u32>| (weight(&piece), std::cmp::Reverse(piece[0]), piece);
    let mut waiting: BinaryHeap<_> = pieces.iter().cloned().map(entry).collect();
    while let Some((_, _, piece)) = waiting.pop() {
        let (tokens, documents) = (leaves.together(piece.iter().copied()).tokens, piece.len() as i64);
        let open = among.iter().copied().filter(|&bin| bins.has_room(bin, tokens, documents));
        let lacks = |bin: usize| bins.loads[bin].cost - targets[bin];
        let found = match rule {
            Rule::BestFit => open.max_by_key(|&bin| (bins.loads[bin].tokens, std::cmp::Reverse(bin))),
            _ => open.min_by(|&a, &b| lacks(a).total_cmp(&lacks(b)).then(a.cmp(&b))),
        };
        if let Some(bin) = found {
            bins.put(bin, &piece);
            continue;
        }
        let roomy = |&bin: &usize| bins.contents[bin].len() < bins.limits.documents;
        let emptiest = among.iter().copied().filter(roomy).min_by_key(|&bin| (bins.loads[bin].tokens, bin));
        let Some(bin) = emptiest else { return false };
        let fits = |sum: super::leaves::Load, documents: usize| bins.has_room(bin, sum.tokens, documents as i64);
        let Some(count) = within(leaves, &piece, fits) else { return false };
        let (front, rest) = piece.split_at(count);
        bins.put(bin, front);
        if !rest.is_empty() {
            waiting.push(entry(rest.to_vec()));
        }
    }
    true
}

fn in_turn(bins: &mut Bins, among: &[usize], pieces: &[Vec<u32>]) -> bool {
    let leaves = bins.leaves;
    let mut open = among.iter().copied();
    let Some(mut bin) = open.next() else { return pieces.is_empty() };
    for piece in pieces {
        let mut rest = &piece[..];
        while !rest.is_empty() {
            let fits = |sum: super::leaves::Load, documents: usize| bins.has_room(bin, sum.tokens, documents as i64);
            match within(leaves, rest, fits) {
                Some(count) => {
                    bins.put(bin, &rest[..count]);
                    rest = &rest[count..];
                }
                None => match open.next() {
                    Some(next) => bin = next,
                    None => return false,
                },
            }
        }
    }
    true
}

/// Gives every empty micro-batch a run from the micro-batch with the most samples, if that has at least two: of the
/// runs that repeat the fewest tokens, the costliest.
fn leave_none_empty(bins: &mut Bins, among: &[usize]) {
    let mut runs = Vec::new();
    for &empty in among {
        if !bins.contents[empty].is_empty() {
            continue;
        }
        let most = among.iter().copied().max_by_key(|&bin| (bins.contents[bin].len(), std::cmp::Reverse(bin)));
        let Some(from) = most.filter(|&bin| bins.contents[bin].len() > 1) else { return };
        bins.runs(from, true, &mut runs);
        let half = bins.loads[from].cost / 2.0;
        let some = |run: &&super::bins::Run| run.documents < bins.contents[from].len();
        let twice = |run: &super::bins::Run| run.alone.tokens - run.loss.tokens;
        let off = |run: &super::bins::Run| (run.alone.cost - half).abs();
        let best =
            runs.iter().filter(some).min_by(|a, b| twice(a).cmp(&twice(b)).then(off(a).total_cmp(&off(b)))).copied();
        if let Some(run) = best {
            bins.hand_over(&run, empty);
        }
    }
}
