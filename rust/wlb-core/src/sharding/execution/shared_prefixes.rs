//! Keys that neighbouring runs of a prefix tree see before their own: copied for each run, or computed for all at once.
//!
//! Siblings see all keys of their ancestors, without a mask. These keys are copied for each sibling, and then one call
//! does it; or the queries of all siblings are one span over the keys of the ancestors (a *shared prefix*), and their
//! outputs are merged with those over the keys behind it. What is cheaper depends on the queries: a few behind a long
//! prompt are merged quickly.

use super::paths::{Paths, Reach, Run, tokens};

/// Copied keys that cost as much as merging the parts of one query, forward and backward.
///
/// A key with its value is written, its gradient is written and read for the sum: 16 bytes a channel and key head in
/// half precision. Two outputs, their sum in float32, and two gradients of queries, summed in float32 too, are 50 bytes
/// a channel and query head. With four query heads for a key head that is 12.
const MERGED: i64 = 12;

/// Neighbouring runs with the same keys from position 0 on, while the runs are read in order.
struct Open {
    /// Positions that they share.
    shared: i64,
    first: usize,
    queries: i64,
    /// Keys that need not be copied with the best prefixes inside, less the price of merging.
    saved: i64,
}

impl Open {
    fn absorb(&mut self, other: &Self) {
        self.queries += other.queries;
        self.saved += other.saved;
    }

    /// Decides whether the runs from `first` to `end` have one prefix, in the place of those inside.
    fn close(mut self, end: usize, prefixes: &mut [i64]) -> Self {
        let saved = ((end - self.first) as i64 - 1) * self.shared - MERGED * self.queries;
        if saved > self.saved {
            prefixes[self.first..end].fill(self.shared);
            self.saved = saved;
        }
        self
    }
}

/// Positions, from 0 on, of each run's shared prefix; 0 for a run without one. Neighbours with equal prefixes share its
/// keys.
///
/// All are 0 where that saves less than it takes for another call: fewer copies than the runs have queries.
///
/// # Complexity
/// O(runs * pieces of a path).
pub(super) fn shared_prefixes(runs: &[Run], paths: &Paths, reach: Reach, biased: bool) -> Vec<i64> {
    let mut prefixes = vec![0; runs.len()];
    let is_plain = reach.left == Reach::UNLIMITED && reach.right == 0 && !biased;
    if !is_plain || paths.are_single() || runs.is_empty() {
        return prefixes;
    }
    let mut stack = vec![Open { shared: 0, first: 0, queries: 0, saved: 0 }];
    for (index, run) in runs.iter().enumerate() {
        let mut done = Open { shared: run.position, first: index, queries: run.length, saved: 0 };
        let shared = runs.get(index + 1).map_or(0, |next| shared(run, next, paths));
        while let Some(mut last) = stack.pop_if(|last| last.shared > shared) {
            last.absorb(&done);
            done = last.close(index + 1, &mut prefixes);
        }
        match stack.last_mut() {
            Some(last) if last.shared == shared => last.absorb(&done),
            _ => stack.push(Open { shared, ..done }),
        }
    }
    if stack.pop().is_none_or(|all| all.saved < tokens(runs)) {
        prefixes.fill(0);
    }
    prefixes
}

/// Positions from 0 on that two runs see in the same tokens, before the queries of either.
fn shared(run: &Run, next: &Run, paths: &Paths) -> i64 {
    if run.row + run.length != next.row {
        return 0;
    }
    let most = run.position.min(next.position);
    if run.path == next.path {
        return most;
    }
    let (mine, other) = (paths.pieces(run.path), paths.pieces(next.path));
    let mut shared = 0;
    for (mine, other) in mine.iter().zip(other).take_while(|(mine, other)| mine.token == other.token) {
        shared = mine.position + mine.length.min(other.length);
        if mine.length != other.length {
            break;
        }
    }
    shared.min(most)
}

/// Keys that are copied for these runs, if they compute in one call.
pub(super) fn copied(runs: &[Run], paths: &Paths, reach: Reach, biased: bool) -> i64 {
    let prefixes = shared_prefixes(runs, paths, reach, biased);
    let keys = |(index, run): (usize, &Run)| {
        let ((from, to), prefix) = (run.sees(paths, reach), prefixes[index]);
        let goes_on = index > 0 && prefixes[index - 1] == prefix && shared(&runs[index - 1], run, paths) >= prefix;
        to - from.max(prefix) + if goes_on { 0 } else { prefix }
    };
    runs.iter().enumerate().map(keys).sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::paths::Piece;
    use super::*;

    /// Runs of one tree, each behind a stretch of the run before it, and its paths.
    fn tree(turns: &[(i64, i64)]) -> (Vec<Run>, Paths) {
        let (mut paths, mut runs) = (Paths::default(), Vec::<Run>::new());
        let (mut before, mut row): (Vec<Piece>, i64) = (Vec::new(), 0);
        for &(behind, length) in turns {
            let mut pieces: Vec<Piece> = Vec::new();
            let mut position = 0;
            for piece in &before {
                let length = piece.length.min(behind - position);
                if length > 0 {
                    pieces.push(Piece { length, ..*piece });
                    position += length;
                }
            }
            pieces.push(Piece { position, token: row, length });
            let path = paths.push(pieces.clone());
            runs.push(Run { path, position, token: row, row, length });
            (before, row) = (pieces, row + length);
        }
        (runs, paths)
    }

    /// Keys not copied, less those that merging costs.
    fn saved(runs: &[Run], prefix: i64) -> i64 {
        if prefix == 0 { 0 } else { (runs.len() as i64 - 1) * prefix - MERGED * tokens(runs) }
    }

    proptest! {
        #[test]
        fn trunks_save_the_most(turns in prop::collection::vec((0..400_i64, 1..9_i64), 1..10)) {
            let (runs, paths) = tree(&turns);
            let found = shared_prefixes(&runs, &paths, Reach { left: Reach::UNLIMITED, right: 0 }, false);
            // The best of all partitions into neighbours that have one prefix, as long as may be, or none.
            let mut best = vec![0];
            for end in 1..=runs.len() {
                let of_group = |begin: usize| {
                    let pairs = runs[begin..end].windows(2);
                    let prefix = pairs.map(|pair| shared(&pair[0], &pair[1], &paths)).min().unwrap_or(0);
                    best[begin] + saved(&runs[begin..end], prefix).max(0)
                };
                best.push((0..end).map(of_group).max().unwrap_or(0));
            }
            let groups = found.chunk_by(|one, next| one == next);
            let mut begin = 0;
            let mut total = 0;
            for group in groups {
                total += saved(&runs[begin..begin + group.len()], group[0]);
                begin += group.len();
            }
            let least = tokens(&runs);
            prop_assert_eq!(total, if best[runs.len()] < least { 0 } else { best[runs.len()] });
        }
    }
}
