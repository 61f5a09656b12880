//! The tokens that ranks hold and the keys that they see, derived from the shard of a forest.

use crate::sharding::execution::{Layout, Paths, Piece, Run};

use super::shard::ForestShard;

impl ForestShard {
    /// The tokens that each rank holds and the keys that its queries see. Execution plans are made from this alone.
    ///
    /// A node that follows its parent in memory is on the parent's path. So there is one path for each chain of such
    /// nodes, and tokens of a rank that continue in memory and in position are one run.
    ///
    /// # Complexity
    /// O(segments, and for each chain the nodes above its end).
    pub fn layout(&self) -> Layout {
        let nodes = self.forest.num_nodes();
        let mut paths = Paths::default();
        let mut path_of = vec![0; nodes];
        let mut first = 0;
        for node in 0..nodes {
            let goes_on = self.forest.parents().get(node + 1) == Some(&(node as i32));
            if !goes_on {
                path_of[first..=node].fill(self.push_path(&mut paths, node));
                first = node + 1;
            }
        }
        let of_rank = |rank: usize| {
            let mut runs: Vec<Run> = Vec::with_capacity(self.ranks[rank].len());
            let mut row = 0;
            for segment in &self.ranks[rank] {
                let run = Run {
                    path: path_of[segment.document as usize],
                    position: self.position(segment).into(),
                    token: self.packed_start(segment).into(),
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
        Layout { held: (0..self.cp_size()).map(of_rank).collect(), paths, causal: true }
    }

    /// Adds the path to the end of a node and returns its index.
    fn push_path(&self, paths: &mut Paths, node: usize) -> usize {
        let mut position = 0;
        let piece = |(start, end): (i32, i32)| {
            let piece = Piece { position, token: start.into(), length: (end - start).into() };
            position += piece.length;
            piece
        };
        paths.push(self.path(node, self.node_starts[node + 1]).into_iter().map(piece))
    }
}
