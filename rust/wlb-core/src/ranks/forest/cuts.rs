//! Cuts trees into pieces that fit.

use std::ops::Range;

use super::leaves::{Leaves, Load};

/// Last part of the fitting samples in which a cut is looked for.
const LATE: f64 = 0.25;

/// How many samples, from the first on, fit within a limit. Among places that are nearly as far, the one is chosen
/// where the next sample shares least. `None` if not even the first sample fits.
pub(super) fn within(leaves: &Leaves, piece: &[u32], fits: impl Fn(Load, usize) -> bool) -> Option<usize> {
    let (mut sum, mut before, mut most) = (Load::default(), None, 0);
    for &leaf in piece {
        sum = sum + leaves.added(before.replace(leaf), leaf);
        if !fits(sum, most + 1) {
            break;
        }
        most += 1;
    }
    if most == 0 || most == piece.len() {
        return (most > 0).then_some(most);
    }
    let least = most - (most as f64 * LATE) as usize;
    (least..=most).rev().min_by_key(|&at| leaves.shared(piece[at - 1], piece[at]).tokens)
}

/// Pieces of a tree, as equal as possible, none of which costs much more than `most`.
pub(super) fn of_cost(leaves: &Leaves, tree: Range<u32>, most: f64) -> Vec<Vec<u32>> {
    let all: Vec<u32> = tree.collect();
    let cost = leaves.together(all.iter().copied()).cost;
    if cost <= most || all.len() == 1 {
        return vec![all];
    }
    let parts = (cost / most).ceil().min(all.len() as f64);
    let (mut pieces, mut rest) = (Vec::new(), &all[..]);
    while !rest.is_empty() {
        let share = leaves.together(rest.iter().copied()).cost / (parts - pieces.len() as f64).max(1.0);
        let count = within(leaves, rest, |sum, _| sum.cost <= share * (1.0 + 1e-9)).unwrap_or(1);
        let (piece, others) = rest.split_at(count);
        pieces.push(piece.to_vec());
        rest = others;
    }
    pieces
}
