//! Plans in which keys are sent to the ranks that need them, by all-gather or all-to-all.
//!
//! If a rank holds all keys that its runs of a path see, these runs attend in *local* calls over the rank's own tensors
//! while other ranks' keys arrive; but only if there are enough such runs (see `pays_alone`). All other runs attend
//! over a *buffer* of keys: the rank's own rows, from the first that these runs or other ranks need, then the keys that
//! arrive. With either transport, a rank sums its gradients of each other rank's keys and sends the sums home.

use crate::error::Result;

use super::super::shard::pays_alone;
use super::buckets::Buckets;
use super::calls::{Call, Calls, Indices, Part, Rows, Spans, span};
use super::intervals::{self, Interval, Place, among, contain, count, find, places, seen, union, without};
use super::layout::Layout;
use super::paths::{Reach, Run, tokens};
use super::shared_prefixes::{copied, shared_prefixes};
use super::sums::{Share, Sum};

/// Transport of keys to the ranks that need them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// All ranks get every key that some rank needs from another; all ranks send equally many rows.
    AllGather,
    /// Every rank gets only the keys that it needs.
    Fetch,
}

/// Plan of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeysPlan {
    /// Calls over the rank's own keys, which run while others' keys arrive.
    pub local: Vec<Call>,
    /// Calls over the buffer. A query is in two calls only if it has a shared prefix, a part of its keys that is not
    /// copied for it (see `shared_prefixes`).
    pub remote: Vec<Call>,
    /// First of the rank's rows whose keys are in the buffer; all later rows are in it, too.
    pub first: i64,
    /// Rows of the buffer before those that arrive: the rank's own keys, and filler up to the number of rows that it
    /// sends.
    pub own_rows: i64,
    /// Rows of the buffer that the rank sends: for `AllGather` as many as every other rank, for `Fetch` ordered by
    /// destination.
    pub sent: Rows,
    /// For `Fetch`: number of rows for each rank.
    pub sent_rows: Vec<i64>,
    /// Number of rows that arrive from each rank.
    pub arriving_rows: Vec<i64>,
    /// Whether any rank sends any key.
    pub moves: bool,
    /// Rows of keys that are copied or brought together, at most, on any rank: those of all ranks, or those that the
    /// runs of a forest see.
    pub gathered: i64,
    /// Sums of the gradients of other ranks' keys, which are sent home. The summed tensor holds the gradients of all
    /// calls' keys one after the other.
    pub going: Sum,
    /// Number of rows that go home to each rank.
    pub going_rows: Vec<i64>,
    /// Number of rows with gradients of own keys that come from each rank.
    pub coming_rows: Vec<i64>,
    /// Sums of the gradients of own keys, for each row. The summed tensor holds the gradients of all calls' keys,
    /// followed by the rows that come home.
    pub own: Sum,
    /// Indices that calls and rows refer to.
    pub indices: Indices,
}

impl KeysPlan {
    /// The plan of `rank`.
    ///
    /// # Arguments
    /// * `biased` - whether scores have a bias by position.
    /// * `buckets` - how the kernel starts its blocks, if it gains by calls that are divided into buckets.
    ///
    /// # Errors
    /// [`Error::TotalTooLong`](crate::Error::TotalTooLong) when a call has more keys than int32 can count.
    ///
    /// # Complexity
    /// O(s log s) for the segments `s` of all ranks, and O(rows) of the lists in the plan.
    pub fn of(
        layout: &Layout,
        rank: usize,
        transport: Transport,
        reach: Reach,
        biased: bool,
        buckets: Option<Buckets>,
    ) -> Result<Self> {
        let held: Vec<Vec<Place>> = layout.held.iter().map(|held| places(held)).collect();
        // Keys that each rank has to get from others.
        let lacks = |rank: usize| without(&seen(&layout.held[rank], &layout.paths, reach), &held[rank]);
        let lacking: Vec<Vec<Interval>> = (0..held.len()).map(lacks).collect();
        let mut plan = Self { moves: lacking.iter().any(|lacking| !lacking.is_empty()), ..Self::default() };
        let (own, runs) = (&held[rank], &layout.held[rank]);
        let all_rows = tokens(runs);
        if !layout.paths.are_single() {
            let of_rank = |runs: &Vec<Run>| copied(runs, &layout.paths, reach, biased);
            plan.gathered = layout.held.iter().map(of_rank).max().unwrap_or(0);
        }
        if plan.moves {
            plan.gathered = plan.gathered.max(layout.held.iter().map(|runs| tokens(runs)).sum());
        }

        let local = attends_alone(layout, rank, reach, own);
        // `wanted`: the rank's keys that each other rank needs. `first`: the first own row that is read from the
        // buffer.
        let wanted: Vec<Vec<Place>> = lacking.iter().map(|lacking| among(lacking, own).collect()).collect();
        let mut first = wanted.iter().flatten().map(|place| place.row).min().unwrap_or(all_rows);
        for (run, _) in runs.iter().zip(&local).filter(|(_, local)| !**local) {
            let (from, to) = run.sees(&layout.paths, reach);
            for piece in layout.paths.cut(run.path, from, to) {
                let rows = find((piece.token, piece.token + piece.length), own).map(|place| place.row);
                first = rows.min().unwrap_or(first).min(first);
            }
        }
        plan.first = first;
        plan.own_rows = all_rows - first;

        // Places in the buffer of the keys of other ranks.
        let mut arrived: Vec<Place> = Vec::new();
        // Where those of each rank end among them; each rank's ascend.
        let mut ends: Vec<usize> = Vec::with_capacity(held.len());
        match transport {
            Transport::Fetch => {
                let mut row = plan.own_rows;
                for own in &held {
                    let rows = arrive(&mut arrived, among(&lacking[rank], own), row);
                    plan.arriving_rows.push(rows);
                    ends.push(arrived.len());
                    row += rows;
                }
                plan.sent_rows = wanted.iter().map(|places| count(places)).collect();
                plan.sent = plan.indices.list(wanted.iter().flatten().map(|place| (place.row - first, place.length)));
            }
            Transport::AllGather => {
                let wanted = union(lacking.concat());
                let sent: Vec<Vec<Place>> = held.iter().map(|own| among(&wanted, own).collect()).collect();
                let rows = sent.iter().map(|places| count(places)).max().unwrap_or(0);
                // If all rows from the first to the last that a rank sends are few enough, it sends that block as it
                // is.
                let block = |places: &[Place]| {
                    let from = places.iter().map(|place| place.row).min()?;
                    let to = places.iter().map(|place| place.row + place.length).max()?;
                    (to - from <= rows).then_some(from)
                };
                plan.sent = match block(&sent[rank]) {
                    Some(from) => Rows::next_to(from - first, rows),
                    None if sent[rank].is_empty() => Rows::next_to(0, rows),
                    None => {
                        let parts = sent[rank].iter().map(|place| (place.row - first, place.length));
                        let filling = count(&sent[rank])..rows;
                        plan.indices.list(parts.chain(filling.map(|_| (0, 1))))
                    }
                };
                if !plan.sent.listed {
                    plan.own_rows = plan.own_rows.max(plan.sent.first + rows);
                }
                for (other, places) in sent.iter().enumerate() {
                    // The rank's own keys come back as well, but are read where they were.
                    if other != rank {
                        let begin = plan.own_rows + other as i64 * rows;
                        match block(places) {
                            Some(from) => {
                                let moved =
                                    places.iter().map(|place| Place { row: begin + place.row - from, ..*place });
                                arrived.extend(moved);
                            }
                            None => {
                                arrive(&mut arrived, places.iter().copied(), begin);
                            }
                        }
                    }
                    ends.push(arrived.len());
                }
                plan.arriving_rows = vec![rows; held.len()];
            }
        }
        // Keys that this rank lacks, by the rank that has them, in the order in which their gradients go there.
        let mut others: Vec<Place> = Vec::with_capacity(arrived.len());
        let mut begin = 0;
        for end in ends {
            let before = count(&others);
            others.extend(among(&lacking[rank], &arrived[begin..end]));
            plan.going_rows.push(count(&others) - before);
            begin = end;
        }

        // Own keys by their rows in the buffer, and those of others that this rank sees.
        let mut in_buffer: Vec<Place> = own
            .iter()
            .filter(|place| place.row + place.length > first)
            .map(|place| {
                let cut = (first - place.row).max(0);
                Place { token: place.token + cut, row: place.row + cut - first, length: place.length - cut }
            })
            .collect();
        in_buffer.extend(&others);
        intervals::sort(&mut in_buffer, |place| place.token);
        let spans = |wanted: bool, places: &[Place]| {
            let mut spans = Spans::default();
            let runs: Vec<Run> =
                runs.iter().zip(&local).filter(|(_, local)| **local == wanted).map(|(run, _)| *run).collect();
            let prefixes = shared_prefixes(&runs, &layout.paths, reach, biased);
            for (of_run, &prefix) in runs.iter().enumerate().zip(&prefixes) {
                let run = of_run.1;
                let (from, to) = run.sees(&layout.paths, reach);
                let mut add = |from: i64, to: i64| {
                    let begin = spans.parts.len();
                    for piece in layout.paths.cut(run.path, from, to) {
                        let found = find((piece.token, piece.token + piece.length), places);
                        spans.parts.extend(found.map(|place| (place.row, place.length)));
                    }
                    let (q, keys) = ((run.position, run.position + run.length), (begin, spans.parts.len()));
                    spans.spans.push(span(of_run, reach, q, (from, to), keys));
                };
                // The call that has all queries comes first.
                add(from.max(prefix), to);
                if prefix > 0 {
                    add(0, prefix);
                }
            }
            spans
        };
        let (alone, together) = (spans(true, own), spans(false, &in_buffer));
        // At once what is written out at most: keys twice, and where the sums of gradients begin.
        let picked = |spans: &Spans| spans.parts.iter().map(|part| part.1).sum::<i64>();
        let summed = wanted.iter().map(|places| count(places)).sum::<i64>() + 2 * all_rows + count(&others);
        let spans_of_runs = 3 * (runs.len() + 2);
        plan.indices.rows.reserve((2 * picked(&together) + picked(&alone) + summed) as usize + spans_of_runs);
        let mut calls = Calls::new(all_rows, biased, buckets);
        let mut local_parts = Vec::new();
        plan.local = calls.add(alone, &mut plan.indices, &mut local_parts)?;
        let mut remote_parts = Vec::new();
        plan.remote = calls.add(together, &mut plan.indices, &mut remote_parts)?;
        plan.add_gradients(all_rows, &local_parts, &remote_parts, &others, &wanted);
        Ok(plan)
    }

    /// Plans the sums of gradients of this rank's keys and of other ranks' keys.
    ///
    /// # Arguments
    /// * `others` - places in the buffer of others' keys that this rank sees, in the order in which gradients go home.
    fn add_gradients(
        &mut self,
        all_rows: i64,
        local: &[Part],
        remote: &[Part],
        others: &[Place],
        wanted: &[Vec<Place>],
    ) {
        let mut own = Vec::with_capacity(local.len() + remote.len());
        let mut gradient = 0;
        for &(row, length) in local {
            own.push(Share { to: row, from: gradient, length });
            gradient += length;
        }
        // For each arrived key, by its row in the buffer, the row among the sums that go home.
        let mut goes: Vec<Share> = Vec::with_capacity(others.len());
        let mut place = 0;
        for other in others {
            match goes.last_mut() {
                Some(last) if last.from + last.length == other.row => last.length += other.length,
                _ => goes.push(Share { to: place, from: other.row, length: other.length }),
            }
            place += other.length;
        }
        intervals::sort(&mut goes, |share| share.from);
        let mut going = Vec::with_capacity(remote.len());
        for &(mut row, mut length) in remote {
            let of_own = (self.own_rows - row).clamp(0, length);
            if of_own > 0 {
                own.push(Share { to: self.first + row, from: gradient, length: of_own });
                (row, length, gradient) = (row + of_own, length - of_own, gradient + of_own);
            }
            if length > 0 {
                let begin = goes.partition_point(|share| share.from + share.length <= row);
                for share in goes[begin..].iter().take_while(|share| share.from < row + length) {
                    let (from, to) = (share.from.max(row), (share.from + share.length).min(row + length));
                    going.push(Share {
                        to: share.to + from - share.from,
                        from: gradient + from - row,
                        length: to - from,
                    });
                }
            }
            gradient += length;
        }
        for places in wanted {
            for place in places {
                own.push(Share { to: place.row, from: gradient, length: place.length });
                gradient += place.length;
            }
            self.coming_rows.push(count(places));
        }
        self.going = Sum::of(going, place, &mut self.indices);
        self.own = Sum::of(own, all_rows, &mut self.indices);
    }
}

/// Gives consecutive rows to parts that other ranks hold; returns the number of rows.
fn arrive(arrived: &mut Vec<Place>, parts: impl Iterator<Item = Place>, first: i64) -> i64 {
    let mut row = first;
    for part in parts {
        arrived.push(Place { row, ..part });
        row += part.length;
    }
    row - first
}

/// For each run of a rank, whether all runs of its path need no keys of other ranks. All false if such runs are too few
/// for a call of their own.
fn attends_alone(layout: &Layout, rank: usize, reach: Reach, own: &[Place]) -> Vec<bool> {
    let runs = &layout.held[rank];
    let here = |run: &Run| {
        let (from, to) = run.sees(&layout.paths, reach);
        layout.paths.cut(run.path, from, to).all(|piece| contain(own, (piece.token, piece.token + piece.length)))
    };
    let mut local = Vec::with_capacity(runs.len());
    for of_path in runs.chunk_by(|one, next| one.path == next.path) {
        local.resize(local.len() + of_path.len(), of_path.iter().all(here));
    }
    let alone: i64 = runs.iter().zip(&local).filter(|(_, local)| **local).map(|(run, _)| run.length).sum();
    let all = tokens(runs);
    if alone < all && !pays_alone(alone, all) {
        local.fill(false);
    }
    local
}
