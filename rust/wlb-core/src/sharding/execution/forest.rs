//! The tokens that ranks hold and the keys that they see, derived from the shard of a forest.

use crate::forest::PrefixForest;

use super::super::shard::Shard;
use super::paths::{Paths, Piece, Run};

/// What the queries of a forest's shard can see, and the runs of each rank.
///
/// A node that follows its parent in memory is on the parent's path. So there is one path for each chain of such nodes,
/// and tokens of a rank that continue in memory and in position are one run.
///
/// # Complexity
/// O(segments, and for each chain the nodes above its end).
pub(super) fn layout(shard: &Shard, forest: &PrefixForest) -> (Paths, Vec<Vec<Run>>) {
    let nodes = forest.num_nodes();
    let mut paths = Paths::default();
    let mut path_of = vec![0; nodes];
    let mut first = 0;
    for node in 0..nodes {
        let goes_on = forest.parents().get(node + 1) == Some(&(node as i32));
        if !goes_on {
            path_of[first..=node].fill(push_path(&mut paths, shard, forest, node));
            first = node + 1;
        }
    }
    let of_rank = |rank: usize| {
        let mut runs: Vec<Run> = Vec::with_capacity(shard.ranks[rank].len());
        let mut row = 0;
        for segment in &shard.ranks[rank] {
            let run = Run {
                path: path_of[segment.document as usize],
                position: shard.position(segment).into(),
                token: shard.packed_start(segment).into(),
                row,
                length: segment.length.into(),
            };
            row += run.length;
            match runs.last_mut() {
                Some(last) if last.path == run.path && last.token + last.length == run.token => {
                    last.length += run.length;
                }
                _ => runs.push(run),
            }
        }
        runs
    };
    let held = (0..shard.cp_size()).map(of_rank).collect();
    (paths, held)
}

/// Adds the path to the end of a node and returns its index.
fn push_path(paths: &mut Paths, shard: &Shard, forest: &PrefixForest, node: usize) -> usize {
    let mut position = 0;
    let piece = |(start, end): (i32, i32)| {
        let piece = Piece { position, token: start.into(), length: (end - start).into() };
        position += piece.length;
        piece
    };
    paths.push(shard.path(forest, node, shard.document_starts[node + 1]).into_iter().map(piece))
}
