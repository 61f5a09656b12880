//! Plans in which keys pass from position to position of a ring.

use crate::error::Result;

use super::buckets::Buckets;
use super::calls::{Call, Calls, Indices, Spans, span};
use super::heads::{HeadsPlan, together};
use super::intervals::{among, find, places, seen};
use super::layout::Layout;
use super::paths::{Paths, Piece, Reach, Run, tokens};

/// Plan of one position of the ring.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RingPlan {
    /// `steps[s]`: the calls of step `s`, over the keys of position `self - s`.
    pub steps: Vec<Vec<Call>>,
    /// Number of keys of every position.
    pub rows: Vec<i64>,
    /// For each position, the last step in which another position uses its keys; 0 if none does.
    pub last: Vec<usize>,
    /// Indices that calls refer to.
    pub indices: Indices,
}

impl RingPlan {
    /// The plan of `rank`, if blocks of `degree` neighbouring ranks exchange heads and a ring connects the blocks; also
    /// the plan of the exchange inside its block, if the block has several ranks.
    ///
    /// # Errors
    /// [`Error::TotalTooLong`](crate::Error::TotalTooLong) when a call has more keys than int32 can count.
    ///
    /// # Complexity
    /// O(s log s) for the segments `s` of all ranks, times the positions; and O(rows) of the lists in the plan.
    pub fn of(
        layout: &Layout,
        rank: usize,
        degree: usize,
        reach: Reach,
        biased: bool,
        buckets: Option<Buckets>,
    ) -> Result<(Option<HeadsPlan>, Self)> {
        let position = rank / degree;
        if degree == 1 {
            return Ok((None, Self::over(&layout.held, &layout.paths, position, reach, biased, buckets)?));
        }
        let blocks: Vec<Vec<Run>> = layout.held.chunks(degree).map(together).collect();
        let heads = HeadsPlan::of(&layout.held[position * degree..][..degree], rank % degree);
        Ok((Some(heads), Self::over(&blocks, &layout.paths, position, reach, biased, buckets)?))
    }

    fn over(
        held: &[Vec<Run>],
        paths: &Paths,
        position: usize,
        reach: Reach,
        biased: bool,
        buckets: Option<Buckets>,
    ) -> Result<Self> {
        let size = held.len();
        let places: Vec<_> = held.iter().map(|held| places(held)).collect();
        let mut plan = Self { rows: held.iter().map(|held| tokens(held)).collect(), ..Self::default() };
        let seen: Vec<_> = held.iter().map(|held| seen(held, paths, reach)).collect();
        let computes = |at: usize, of: usize| among(&seen[at], &places[of]).next().is_some();
        let last = |of: usize| (1..size).rev().find(|step| computes((of + step) % size, of)).unwrap_or(0);
        plan.last = (0..size).map(last).collect();

        let mut calls = Calls::new(plan.rows[position], biased, buckets);
        for step in 0..size {
            let of = (position + size - step) % size;
            let queries = &held[position];
            let mut spans = Spans::default();
            if step == 0 && reach.left == Reach::UNLIMITED && !biased && paths.are_single() {
                // Among its own tokens only their order matters: one call with a square mask for each path.
                let (closed, paths) = closed_up(queries);
                for (index, run) in closed.iter().enumerate() {
                    let keys = (spans.parts.len(), spans.parts.len() + 1);
                    spans.parts.push((run.row, run.length));
                    let whole = (0, paths.length(run.path));
                    spans.spans.push(span((index, run), reach, whole, whole, keys));
                }
            } else if step == 0 || computes(position, of) {
                for (index, run) in queries.iter().enumerate() {
                    let (from, to) = run.sees(paths, reach);
                    for piece in paths.cut(run.path, from, to) {
                        for place in find((piece.token, piece.token + piece.length), &places[of]) {
                            let from = piece.position + place.token - piece.token;
                            let to = from + place.length;
                            let q_from = run.position.max(from - reach.right);
                            let q_to = (run.position + run.length).min(to + reach.left);
                            let keys = (spans.parts.len(), spans.parts.len() + 1);
                            spans.parts.push((place.row, place.length));
                            spans.spans.push(span((index, run), reach, (q_from, q_to), (from, to), keys));
                        }
                    }
                }
            }
            plan.steps.push(calls.add(spans, &mut plan.indices, &mut Vec::new())?);
        }
        Ok(plan)
    }
}

/// Closes the gaps in the positions of each path: rows stay, and of positions only their order.
fn closed_up(held: &[Run]) -> (Vec<Run>, Paths) {
    let mut closed: Vec<Run> = Vec::with_capacity(held.len());
    let mut before = None;
    for run in held {
        match closed.last_mut() {
            Some(last) if before == Some(run.path) => last.length += run.length,
            _ => closed.push(Run { path: closed.len(), position: 0, ..*run }),
        }
        before = Some(run.path);
    }
    let mut paths = Paths::default();
    for run in &closed {
        paths.push([Piece { position: 0, token: run.row, length: run.length }]);
    }
    (closed, paths)
}
