//! The tokens that ranks hold and the keys that they see, derived from a shard.

use crate::cost::Mask;

use super::super::shard::{Segment, Shard};
use super::forest::layout;
use super::paths::{Paths, Piece, Reach, Run};

/// Tokens of every rank, and the keys that its queries can see.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Keys that queries can see.
    pub paths: Paths,
    /// Runs of each rank, whose rows count up from 0.
    pub held: Vec<Vec<Run>>,
    /// Whether a query sees only keys before it.
    pub causal: bool,
}

impl Layout {
    /// The layout of a shard, in which every document is a path, and of a forest every chain of nodes.
    ///
    /// # Complexity
    /// O(segments).
    pub fn of(shard: &Shard) -> Self {
        if let Some(forest) = &shard.forest {
            let (paths, held) = layout(shard, forest);
            return Self { paths, held, causal: true };
        }
        let mut paths = Paths::default();
        for (&length, &token) in shard.lengths.iter().zip(&shard.document_starts) {
            paths.push([Piece { position: 0, token: token.into(), length: length.into() }]);
        }
        let of_rank = |segments: &Vec<Segment>| {
            let mut row = 0;
            let run = |segment: &Segment| {
                let run = Run {
                    path: segment.document as usize,
                    position: segment.start.into(),
                    token: shard.packed_start(segment).into(),
                    row,
                    length: segment.length.into(),
                };
                row += run.length;
                run
            };
            segments.iter().map(run).collect()
        };
        Self { paths, held: shard.rows().iter().map(of_rank).collect(), causal: shard.mask == Mask::Causal }
    }

    /// The reach of a query with a window of this many tokens, itself included; `None` for its whole path.
    pub fn reach(&self, window: Option<i64>) -> Reach {
        let side = window.map_or(Reach::UNLIMITED, |window| (window - 1).min(Reach::UNLIMITED));
        Reach { left: side, right: if self.causal { 0 } else { side } }
    }
}
