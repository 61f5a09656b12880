//! Plans in which keys come to the rank that needs them: by all-gather, or by all-to-all.
//!
//! A rank computes over a *buffer* of keys: its own, in its order, and behind them what arrives. A rank sends what some
//! other rank's queries see, and nothing else. Runs all of whose keys are there form calls of their own, which run over
//! the rank's own tensors while the others' keys arrive, if there are enough of them (see `pays_alone`).

use crate::error::Result;

use super::super::shard::pays_alone;
use super::calls::{Call, Calls, Indices, Part, Rows, Spans, span};
use super::intervals::{self, Interval, Place, among, contain, count, find, places, seen, union, without};
use super::layout::Layout;
use super::paths::{Reach, Run, tokens};

/// How keys reach the ranks that need them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// All ranks get the keys that some rank needs from another; all send equally many rows.
    AllGather,
    /// Every rank gets what it needs.
    Fetch,
}

/// What one rank does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeysPlan {
    /// Calls over the rank's own keys, while others' arrive.
    pub local: Vec<Call>,
    /// Calls over the buffer. No query is in two calls.
    pub remote: Vec<Call>,
    /// Rows of the buffer before those that arrive: the rank's own keys, and what fills up what it sends.
    pub own_rows: i64,
    /// Rows of the buffer that it sends; of `AllGather` as many as other ranks, filled up with any; of `Fetch` by
    /// destination.
    pub sent: Rows,
    /// How many of these others need.
    pub needed: i64,
    /// `Fetch`: how many rows go to each rank.
    pub sent_rows: Vec<i64>,
    /// How many rows arrive from each rank.
    pub arriving_rows: Vec<i64>,
    /// Whether any rank sends anything.
    pub moves: bool,
    /// For each row of the buffer, one row that belongs to it among the gradients of keys, where those of all calls
    /// stand one behind the other.
    pub gradients: Rows,
    /// Gradients beside these, and the rows of the buffer that they belong to. Rows may be named more than once.
    pub more: Rows,
    /// See `more`.
    pub more_rows: Rows,
    /// Rows of the buffer without a gradient, where `gradients` names any.
    pub without: Rows,
    /// What these refer to.
    pub indices: Indices,
}

impl KeysPlan {
    /// The plan of `rank`.
    ///
    /// # Arguments
    /// * `biased` - scores have a bias by position.
    ///
    /// # Errors
    /// [`Error::TotalTooLong`](crate::Error::TotalTooLong) when the keys of a call are more than int32 can count.
    ///
    /// # Complexity
    /// O(s log s) in the segments `s` of all ranks, and O(rows) of what is written out.
    pub fn of(layout: &Layout, rank: usize, transport: Transport, reach: Reach, biased: bool) -> Result<Self> {
        let held: Vec<Vec<Place>> = layout.held.iter().map(|held| places(held)).collect();
        // What every rank has to get from others.
        let lacks = |rank: usize| without(&seen(&layout.held[rank], &layout.paths, reach), &held[rank]);
        let lacking: Vec<Vec<Interval>> = (0..held.len()).map(lacks).collect();
        let mut plan = Self { moves: lacking.iter().any(|lacking| !lacking.is_empty()), ..Self::default() };
        let own_rows = tokens(&layout.held[rank]);
        plan.own_rows = own_rows;

        // Where in the buffer the keys of others will be.
        let mut arrived: Vec<Place> = Vec::new();
        let mut arrive = |parts: &mut dyn Iterator<Item = Place>, first: i64| {
            let mut row = first;
            for part in parts {
                arrived.push(Place { row, ..part });
                row += part.length;
            }
            row - first
        };
        match transport {
            Transport::Fetch => {
                let mut row = own_rows;
                for own in &held {
                    let rows = arrive(&mut among(&lacking[rank], own), row);
                    plan.arriving_rows.push(rows);
                    row += rows;
                }
                let sent: Vec<Vec<Place>> =
                    lacking.iter().map(|lacking| among(lacking, &held[rank]).collect()).collect();
                plan.sent_rows = sent.iter().map(|places| count(places)).collect();
                plan.sent = plan.indices.list(sent.iter().flatten().map(|place| (place.row, place.length)));
                plan.needed = plan.sent.count;
            }
            Transport::AllGather => {
                let wanted = union(lacking.concat());
                let most = held.iter().map(|own| among(&wanted, own).map(|place| place.length).sum()).max();
                let rows: i64 = most.unwrap_or(0);
                let sent: Vec<Part> = among(&wanted, &held[rank]).map(|place| (place.row, place.length)).collect();
                plan.needed = sent.iter().map(|part| part.1).sum();
                plan.sent = filled_up(&sent, rows, &mut plan.indices);
                if !plan.sent.listed {
                    plan.own_rows = own_rows.max(plan.sent.first + rows);
                }
                for (other, own) in held.iter().enumerate() {
                    // A rank's own keys come back to it, and are read where they were.
                    if other != rank {
                        arrive(&mut among(&wanted, own), plan.own_rows + other as i64 * rows);
                    }
                }
                plan.arriving_rows = vec![rows; held.len()];
            }
        }
        intervals::sort(&mut arrived, |place| place.token);

        let own = &held[rank];
        let runs = &layout.held[rank];
        let is_local = |run: &Run| {
            let (from, to) = run.sees(&layout.paths, reach);
            layout.paths.cut(run.path, from, to).all(|piece| contain(own, (piece.token, piece.token + piece.length)))
        };
        let mut local: Vec<bool> = runs.iter().map(is_local).collect();
        let alone: i64 = runs.iter().zip(&local).filter(|(_, local)| **local).map(|(run, _)| run.length).sum();
        if alone < own_rows && !pays_alone(alone, own_rows) {
            local.fill(false);
        }
        let spans = |wanted: bool| {
            let mut spans = Spans::default();
            for (index, run) in runs.iter().enumerate().filter(|(index, _)| local[*index] == wanted) {
                let (from, to) = run.sees(&layout.paths, reach);
                let begin = spans.parts.len();
                for piece in layout.paths.cut(run.path, from, to) {
                    spans.parts.extend(rows((piece.token, piece.token + piece.length), own, &arrived));
                }
                let (q, keys) = ((run.position, run.position + run.length), (begin, spans.parts.len()));
                spans.spans.push(span((index, run), reach, q, (from, to), keys));
            }
            spans
        };
        let mut calls = Calls::new(own_rows, biased);
        plan.local = calls.add(spans(true), &mut plan.indices)?;
        plan.remote = calls.add(spans(false), &mut plan.indices)?;
        plan.add_gradients();
        Ok(plan)
    }

    /// What each row of the buffer gets from which gradient.
    fn add_gradients(&mut self) {
        const NONE: i32 = -1;
        let rows = self.own_rows + self.arriving_rows.iter().sum::<i64>();
        let indices = &mut self.indices;
        let begin = indices.rows.len();
        indices.rows.resize(begin + rows as usize, NONE);
        let (lists, first) = indices.rows.split_at_mut(begin);
        let (mut more, mut more_rows) = (Vec::new(), Vec::new());
        let mut gradient = 0_i32;
        // Neighbouring rows get neighbouring gradients.
        let mut add = |row: usize, length: usize, gradient: i32| {
            let rows = &mut first[row..row + length];
            if rows.iter().all(|&gradient| gradient == NONE) {
                rows.iter_mut().zip(gradient..).for_each(|(row, gradient)| *row = gradient);
                return;
            }
            for ((place, gradient), row) in rows.iter_mut().zip(gradient..).zip(row as i32..) {
                if *place == NONE {
                    *place = gradient;
                } else {
                    more.push(gradient);
                    more_rows.push(row);
                }
            }
        };
        for call in self.local.iter().chain(&self.remote) {
            let (begin, count) = (call.keys.first as usize, call.keys.count as usize);
            if call.keys.listed {
                let neighbours = lists[begin..begin + count].chunk_by(|row, next| row + 1 == *next);
                for rows in neighbours {
                    add(rows[0] as usize, rows.len(), gradient);
                    gradient += rows.len() as i32;
                }
            } else {
                add(begin, count, gradient);
                gradient += count as i32;
            }
        }
        if gradient == 0 {
            indices.rows.truncate(begin);
            return;
        }
        let in_order = gradient as usize == first.len() && first.iter().zip(0..).all(|(at, row)| *at == row);
        let mut without = Vec::new();
        for (row, place) in (0..).zip(first.iter_mut()) {
            if *place == NONE {
                *place = 0;
                without.push(row);
            }
        }
        self.gradients = Rows { first: if in_order { 0 } else { begin as i64 }, count: rows, listed: !in_order };
        let mut list = |rows: &[i32]| {
            let first = indices.rows.len() as i64;
            indices.rows.extend_from_slice(rows);
            Rows { first, count: rows.len() as i64, listed: true }
        };
        self.without = list(&without);
        self.more = list(&more);
        self.more_rows = list(&more_rows);
    }
}

/// Rows of the buffer that hold these keys, in order; all of them have a place.
fn rows(interval: Interval, own: &[Place], arrived: &[Place]) -> impl Iterator<Item = Part> {
    let mut parts: Vec<Place> = find(interval, own).collect();
    if count(&parts) < interval.1 - interval.0 {
        parts.extend(find(interval, arrived));
        parts.sort_unstable_by_key(|place| place.token);
    }
    parts.into_iter().map(|place| (place.row, place.length))
}

/// So many rows, of which these are the first: with those behind them where they are neighbours, else with row 0 again
/// and again.
fn filled_up(parts: &[Part], rows: i64, indices: &mut Indices) -> Rows {
    let sent: i64 = parts.iter().map(|part| part.1).sum();
    if parts.windows(2).all(|pair| pair[0].0 + pair[0].1 == pair[1].0) {
        return Rows { first: parts.first().map_or(0, |part| part.0), count: rows, listed: false };
    }
    indices.list(parts.iter().copied().chain((sent..rows).map(|_| (0, 1))))
}
