//! Spans of queries and keys, and the kernel calls that they form.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::limits::MAX_TOKENS;

use super::buckets::Buckets;
use super::paths::{Reach, Run};

/// Rows of queries with the rows of keys that they see. `left` and `right` are the window in a flash kernel's meaning.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    /// Index of the run with the queries, among the runs of the rank.
    pub(super) run: usize,
    pub(super) q_row: i64,
    pub(super) q_length: i64,
    /// Range of its keys in `Spans::parts`, in the order of positions.
    pub(super) keys: (usize, usize),
    /// Keys before the diagonal that a query sees; [`Reach::UNLIMITED`] for all.
    pub(super) left: i64,
    pub(super) right: i64,
    /// Tokens from the last key to the last query: the true distance of a query from a key is the kernel's plus this.
    pub(super) shift: i64,
}

/// The span of the queries of `run` at `q_from..q_to` and the keys at `k_from..k_to`; all are positions of one path.
pub(super) fn span(
    (index, run): (usize, &Run),
    reach: Reach,
    (q_from, q_to): (i64, i64),
    (k_from, k_to): (i64, i64),
    keys: (usize, usize),
) -> Span {
    let shift = q_to - k_to;
    let (begin, end) = (run.position, run.position + run.length);
    // A side of the window that hides nothing is dropped. It is kept on the causal diagonal, so that such spans form
    // one call with others there, and for a part of a run, so that spans without a mask are always whole runs.
    let diagonal = shift == 0 && reach.right == 0;
    let cut_left = q_to - 1 - k_from > reach.left || q_to < end || diagonal;
    let cut_right = k_to - 1 - q_from > reach.right || q_from > begin || diagonal;
    let side = |cut: bool, reach: i64, shift: i64| {
        if cut && reach < Reach::UNLIMITED { reach + shift } else { Reach::UNLIMITED }
    };
    Span {
        run: index,
        q_row: run.row + q_from - begin,
        q_length: q_to - q_from,
        keys,
        left: side(cut_left, reach.left, -shift),
        right: side(cut_right, reach.right, shift),
        shift,
    }
}

/// Neighbouring rows of a tensor: the first row and their number.
pub(super) type Part = (i64, i64);

/// Spans, and the rows of their keys.
#[derive(Clone, Debug, Default)]
pub(super) struct Spans {
    pub(super) spans: Vec<Span>,
    pub(super) parts: Vec<Part>,
}

impl Spans {
    fn keys(&self, span: &Span) -> &[Part] {
        &self.parts[span.keys.0..span.keys.1]
    }

    fn num_keys(&self, span: &Span) -> i64 {
        self.keys(span).iter().map(|part| part.1).sum()
    }

    fn parts_of<'a>(&'a self, spans: &'a [Span]) -> impl Iterator<Item = Part> + 'a {
        spans.iter().flat_map(|span| self.keys(span).iter().copied())
    }

    /// Joins spans without a mask: first neighbouring keys of a run, then neighbouring queries with the same keys.
    /// Without a mask, positions do not matter.
    fn joined(&mut self, spans: &[Span]) -> Vec<Span> {
        let mut wide: Vec<Span> = Vec::with_capacity(spans.len());
        for span in spans {
            let (begin, end) = span.keys;
            if let Some(last) = wide.last_mut().filter(|last| last.run == span.run) {
                let (row, length) = self.parts[last.keys.1 - 1];
                if end == begin + 1 && last.keys.1 == last.keys.0 + 1 && row + length == self.parts[begin].0 {
                    // A new entry, since other spans may use the entry that begins at the same row.
                    self.parts.push((row, length + self.parts[begin].1));
                    last.keys = (self.parts.len() - 1, self.parts.len());
                    continue;
                }
            }
            wide.push(*span);
        }
        // A run that still has several spans is not joined with others.
        let is_alone = |at: usize| {
            let is_of = |other: Option<&Span>| other.is_some_and(|other| other.run == wide[at].run);
            !is_of(wide.get(at + 1)) && (at == 0 || !is_of(wide.get(at - 1)))
        };
        let mut tall: Vec<(Span, bool)> = Vec::with_capacity(wide.len());
        for (at, span) in wide.iter().enumerate() {
            let alone = is_alone(at);
            match tall.last_mut() {
                Some((last, true))
                    if alone && last.q_row + last.q_length == span.q_row && self.keys(last) == self.keys(span) =>
                {
                    last.q_length += span.q_length;
                }
                _ => tall.push((*span, alone)),
            }
        }
        tall.into_iter().map(|(span, _)| span).collect()
    }
}

/// Rows of a tensor: neighbouring rows or a list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rows {
    /// The first row; for a list, its begin in [`Indices::rows`].
    pub first: i64,
    /// Number of rows.
    pub count: i64,
    /// Whether the rows are a list.
    pub listed: bool,
}

impl Rows {
    pub(super) fn next_to(first: i64, count: i64) -> Self {
        Self { first, count, listed: false }
    }
}

/// One kernel call: rows of a rank's queries, and rows of a tensor of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Rows of the rank's queries.
    pub queries: Rows,
    /// Rows of the keys.
    pub keys: Rows,
    /// Begin of this call's numbers in [`Indices::bounds`]. First, the first query of each span and the end of the last
    /// (rows of the rank if the queries are neighbours, else indices in the list). Second, the first key of each span
    /// and the end of the last, counted from 0. Third, the shift of each span.
    pub bounds: usize,
    /// Number of spans.
    pub spans: usize,
    /// Queries of the span with the most.
    pub max_queries: i64,
    /// Keys of the span with the most.
    pub max_keys: i64,
    /// Keys before the bottom-right diagonal that a query sees; -1 for all.
    pub left: i64,
    /// Keys after the bottom-right diagonal that a query sees; -1 for all.
    pub right: i64,
    /// Whether no earlier call of the plan has any of these queries.
    pub fresh: bool,
}

/// The numbers of a plan whose count grows with tokens or spans.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Indices {
    /// Lists of rows.
    pub rows: Vec<i32>,
    /// Numbers of all calls; see [`Call::bounds`].
    pub bounds: Vec<i32>,
}

impl Indices {
    /// Lists neighbouring rows, part after part; a single part needs no list.
    pub(super) fn list(&mut self, parts: impl IntoIterator<Item = Part>) -> Rows {
        let mut parts = parts.into_iter().filter(|part| part.1 > 0);
        let Some(mut one) = parts.next() else { return Rows::default() };
        let mut other = None;
        for part in parts.by_ref() {
            if one.0 + one.1 != part.0 {
                other = Some(part);
                break;
            }
            one.1 += part.1;
        }
        let Some(other) = other else { return Rows::next_to(one.0, one.1) };
        let first = self.rows.len();
        for (row, length) in [one, other].into_iter().chain(parts) {
            self.rows.extend(row as i32..(row + length) as i32);
        }
        Rows { first: first as i64, count: (self.rows.len() - first) as i64, listed: true }
    }
}

/// Turns spans into the calls of one plan, in the order in which they run.
#[derive(Debug)]
pub(super) struct Calls {
    seen: Vec<bool>,
    /// Whether scores have a bias by position: then spans keep their own shift and are not joined.
    biased: bool,
    buckets: Option<Buckets>,
}

impl Calls {
    pub(super) fn new(queries: i64, biased: bool, buckets: Option<Buckets>) -> Self {
        Self { seen: vec![false; queries as usize], biased, buckets }
    }

    /// The calls: each has one window, and no query twice. They are divided into buckets if these are asked for.
    /// Appends the rows of their keys to `keys`.
    ///
    /// # Errors
    /// [`Error::TotalTooLong`] when a call has more keys than int32 can count.
    pub(super) fn add(&mut self, mut spans: Spans, indices: &mut Indices, keys: &mut Vec<Part>) -> Result<Vec<Call>> {
        let mut calls = Vec::new();
        // Windows in the order in which they first appear; the map is only searched, never iterated.
        let mut groups: Vec<Vec<Span>> = Vec::new();
        let mut by_window: BTreeMap<(i64, i64), usize> = BTreeMap::new();
        for span in &spans.spans {
            let group = *by_window.entry((span.left, span.right)).or_insert(groups.len());
            if group == groups.len() {
                groups.push(Vec::new());
            }
            groups[group].push(*span);
        }
        for mut group in groups {
            if group[0].left == Reach::UNLIMITED && group[0].right == Reach::UNLIMITED && !self.biased {
                group = spans.joined(&group);
            }
            // `turns[n]` has the `n`-th span of every run, so that no call has a query twice.
            let mut turns: Vec<Vec<Span>> = Vec::new();
            let (mut run, mut turn) = (usize::MAX, 0);
            for span in group {
                turn = if span.run == run { turn + 1 } else { 0 };
                run = span.run;
                if turns.len() <= turn {
                    turns.push(Vec::new());
                }
                turns[turn].push(span);
            }
            for turn in turns {
                let mut begin = 0;
                for end in self.ends(&turn, &spans) {
                    calls.push(self.call(&turn[begin..end], &spans, indices)?);
                    keys.extend(spans.parts_of(&turn[begin..end]));
                    begin = end;
                }
            }
        }
        Ok(calls)
    }

    /// Ends of the buckets of these spans.
    fn ends(&self, turn: &[Span], spans: &Spans) -> Vec<usize> {
        let Some(buckets) = self.buckets else { return vec![turn.len()] };
        let keys: Vec<i64> = turn.iter().map(|span| spans.num_keys(span)).collect();
        buckets.ends(&keys)
    }

    fn call(&mut self, group: &[Span], spans: &Spans, indices: &mut Indices) -> Result<Call> {
        let total = spans.parts_of(group).map(|part| part.1).sum();
        if total > MAX_TOKENS {
            return Err(Error::TotalTooLong { argument: "cu_seqlens_k", total });
        }
        // Reserved at once: a vector that grows is copied.
        indices.rows.reserve(total as usize);
        let bounds = indices.bounds.len();
        let longest = |first: i64, lengths: &mut dyn Iterator<Item = i64>, bounds: &mut Vec<i32>| {
            let (mut end, mut longest) = (first, 0);
            bounds.push(end as i32);
            for length in lengths {
                end += length;
                longest = longest.max(length);
                bounds.push(end as i32);
            }
            longest
        };
        let queries = indices.list(group.iter().map(|span| (span.q_row, span.q_length)));
        let first = if queries.listed { 0 } else { queries.first };
        let max_queries = longest(first, &mut group.iter().map(|span| span.q_length), &mut indices.bounds);
        let max_keys = longest(0, &mut group.iter().map(|span| spans.num_keys(span)), &mut indices.bounds);
        indices.bounds.extend(group.iter().map(|span| span.shift as i32));

        let mut fresh = true;
        for span in group {
            let rows = &mut self.seen[span.q_row as usize..(span.q_row + span.q_length) as usize];
            fresh &= !rows.contains(&true);
            rows.fill(true);
        }
        let open = |side: i64| if side >= Reach::UNLIMITED { -1 } else { side };
        Ok(Call {
            queries,
            keys: indices.list(spans.parts_of(group)),
            bounds,
            spans: group.len(),
            max_queries,
            max_keys,
            left: open(group[0].left),
            right: open(group[0].right),
            fresh,
        })
    }
}
