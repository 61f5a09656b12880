//! Plans for ranks that exchange heads for tokens inside a block of neighbouring ranks.

use super::calls::Indices;
use super::intervals::sort;
use super::paths::{Run, tokens};

/// Plan of one rank of a block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeadsPlan {
    /// Tokens of each rank of the block.
    pub counts: Vec<i64>,
    /// Position of this rank in the block.
    pub place: usize,
    /// Two lists of rows, one after the other: from the order of ranks to the packed order of the block's tokens, and
    /// back.
    pub indices: Indices,
}

impl HeadsPlan {
    /// The plan of the rank at position `place` of a block.
    ///
    /// # Complexity
    /// O(tokens of the block), and O(s log s) for its `s` segments.
    pub fn of(block: &[Vec<Run>], place: usize) -> Self {
        let counts: Vec<i64> = block.iter().map(|held| tokens(held)).collect();
        let runs = in_packed_order(block);
        let total: i64 = counts.iter().sum();
        let mut rows: Vec<i32> = Vec::with_capacity(2 * total as usize);
        for run in &runs {
            rows.extend(run.row as i32..(run.row + run.length) as i32);
        }
        let ascending = rows.len();
        rows.resize(2 * ascending, 0);
        let (ascending, by_rank) = rows.split_at_mut(ascending);
        for (&row, place) in ascending.iter().zip(0..) {
            by_rank[row as usize] = place;
        }
        Self { counts, place, indices: Indices { rows, bounds: Vec::new() } }
    }
}

/// The runs of a block in packed order; rows are counted through all ranks of the block.
fn in_packed_order(block: &[Vec<Run>]) -> Vec<Run> {
    let mut runs = Vec::with_capacity(block.iter().map(Vec::len).sum());
    let mut first = 0;
    for held in block {
        runs.extend(held.iter().map(|run| Run { row: first + run.row, ..*run }));
        first += tokens(held);
    }
    sort(&mut runs, |run| run.token);
    runs
}

/// The runs of a holder that has the tokens of a whole block in packed order; neighbouring runs are joined.
pub(super) fn together(block: &[Vec<Run>]) -> Vec<Run> {
    let mut joined: Vec<Run> = Vec::new();
    let mut row = 0;
    for run in in_packed_order(block) {
        match joined.last_mut() {
            Some(last)
                if last.path == run.path
                    && last.token + last.length == run.token
                    && last.position + last.length == run.position =>
            {
                last.length += run.length;
            }
            _ => joined.push(Run { row, ..run }),
        }
        row += run.length;
    }
    joined
}
