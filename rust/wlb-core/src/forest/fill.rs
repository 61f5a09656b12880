//! Pieces of trees put into micro-batches; what fits nowhere is cut.

use std::collections::BinaryHeap;

use super::bins::Bins;
use super::cuts::within;

/// In which order micro-batches are filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// Costliest piece first, to the micro-batch that lacks most cost to its target.
    LeastLoad,
    /// Longest piece first, to the fullest micro-batch that has room.
    BestFit,
    /// One micro-batch after the other to the brim.
    InTurn,
}

/// Puts pieces into some of the micro-batches, and leaves none empty that need not be; false if they do not hold all.
///
/// # Arguments
/// * `targets` - of all micro-batches, what they should cost.
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

/// Bits of a number of 0 or above, which order like the numbers.
fn ordered(weight: f64) -> u64 {
    weight.max(0.0).to_bits()
}

fn by_piece(bins: &mut Bins, among: &[usize], targets: &[f64], pieces: &[Vec<u32>], rule: Rule) -> bool {
    let leaves = bins.leaves;
    let weight = |piece: &[u32]| {
        let load = leaves.together(piece.iter().copied());
        if rule == Rule::BestFit { load.tokens as u64 } else { ordered(load.cost) }
    };
    // Of equal ones the first; all begin at another place.
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

/// Gives every empty micro-batch something of the one with the most samples, as long as that has two: what is dearest
/// of what costs least tokens twice.
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
