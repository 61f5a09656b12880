//! Chooses the strategy whose slowest rank is fastest, by attention and fetched keys, without building a shard.
//!
//! One observation makes every threshold of the hybrid affordable: documents are cut longest first, and the cursor of
//! [`per_document`] at a document does not depend on shorter documents. So under *any* threshold the long documents are
//! cut as [`per_document`] cuts them. One pass over all documents, longest first, gives their latency under every
//! threshold; the last threshold is [`per_document`] itself. For each threshold only the short documents remain to be
//! dealt, and the latency of a whole short document is known, too.

use crate::cost::Passes;
use crate::lengths::Lengths;
use crate::longest_first::longest_first;

use super::builder::Ranks;
use super::kernel::{Clock, KernelModel, whole_ticks};
use super::options::{ShardOptions, Strategy};
use super::shard::Segment;
use super::{auto, hybrid, per_document, per_sequence};

/// The chosen strategy.
pub(super) struct Choice {
    pub(super) strategy: Strategy,
    pub(super) hybrid_threshold: Option<i64>,
}

/// Chooses between all strategies, or only between the thresholds of the hybrid.
pub(super) fn choose(lengths: &Lengths, options: &ShardOptions, model: &KernelModel, seconds_per_key: f64) -> Choice {
    let ShardOptions { cp_size, mask, max_imbalance, .. } = *options;
    let any_strategy = options.strategy == Strategy::Adaptive;
    let mut stopwatch = Stopwatch::new(lengths, cp_size, model, seconds_per_key);
    let order: Vec<(i32, usize)> = longest_first(lengths).collect();
    let whole: Vec<i64> = order.iter().map(|&(length, _)| stopwatch.clock.ticks(length, length)).collect();

    // For every candidate `k` (the `k` longest documents are long): the latency and tokens of the long documents on
    // each rank.
    let mut candidates = Vec::new();
    let (mut long_ticks, mut long_tokens) = (Vec::new(), Vec::new());
    let (mut number, mut next) = (0, 0);
    let mut cursor = per_document::Cursor::new(cp_size);
    for (k, &(length, document)) in order.iter().enumerate() {
        if k == 0 || length < order[k - 1].0 {
            if number == next {
                stopwatch.close_all();
                candidates.push(k);
                long_ticks.extend_from_slice(&stopwatch.ticks);
                long_tokens.extend_from_slice(&stopwatch.tokens);
                next = number + 1 + number / 64;
            }
            number += 1;
        }
        per_document::cut_document(&mut stopwatch, document, length, cursor.step(length));
    }
    let shortest = order.last().map_or(1, |&(length, _)| i64::from(length));
    let mut best = if any_strategy {
        Choice { strategy: Strategy::PerDocument, hybrid_threshold: None }
    } else {
        Choice { strategy: Strategy::Hybrid, hybrid_threshold: Some(shortest) }
    };
    let mut least = stopwatch.slowest();
    if any_strategy {
        stopwatch.reset();
        per_sequence::cut(&mut stopwatch, lengths);
        let ticks = stopwatch.slowest();
        if ticks <= least {
            least = ticks;
            best.strategy = Strategy::PerSequence;
        }
        stopwatch.reset();
        auto::cut(&mut stopwatch, lengths, mask, max_imbalance);
        let ticks = stopwatch.slowest();
        if ticks < least {
            least = ticks;
            best.strategy = Strategy::Auto;
        }
    }

    let total = lengths.total();
    let (mut ticks, mut room) = (vec![0; cp_size], Vec::with_capacity(cp_size));
    let (clock, ticks_per_key) = (&mut stopwatch.clock, stopwatch.ticks_per_key);
    for (candidate, &k) in candidates.iter().enumerate() {
        let ranks = candidate * cp_size..(candidate + 1) * cp_size;
        ticks.copy_from_slice(&long_ticks[ranks.clone()]);
        hybrid::fill_room(&mut room, &long_tokens[ranks], total);
        let mut slowest = ticks.iter().copied().max().unwrap_or(0);
        for (&(length, document), &whole) in order[k..].iter().zip(&whole[k..]) {
            // Time only grows from here, so a candidate that is no better now never will be.
            if slowest >= least {
                break;
            }
            hybrid::deal(&mut room, length, |rank, start, taken| {
                let keys = clock.keys(lengths, document, start + taken);
                let of_segment = if taken == length {
                    whole
                } else {
                    // A rank gets at most one part of a short document, so it fetches all other keys that the part
                    // sees.
                    let fetching = ticks_per_key.saturating_mul(i64::from(keys - taken));
                    clock.ticks(taken, keys).saturating_add(fetching)
                };
                ticks[rank] = ticks[rank].saturating_add(of_segment);
                slowest = slowest.max(ticks[rank]);
            });
        }
        if slowest < least {
            least = slowest;
            let threshold = if k == 0 { i64::from(order[0].0) + 1 } else { i64::from(order[k - 1].0) };
            best = Choice { strategy: Strategy::Hybrid, hybrid_threshold: Some(threshold) };
        }
    }
    best
}

/// Adds up times of runs without keeping the runs. A rank must get the runs of a document one after the other, in their
/// order.
struct Stopwatch<'a> {
    lengths: &'a [i32],
    clock: Clock<'a>,
    ticks_per_key: i64,
    /// The last segment of each rank, which the next run may lengthen; length 0: none.
    open: Vec<Segment>,
    /// The last document that each rank's queries saw, and the number of its keys that they saw.
    seen: Vec<(u32, i32)>,
    ticks: Vec<i64>,
    tokens: Vec<i64>,
}

impl<'a> Stopwatch<'a> {
    fn new(lengths: &'a [i32], cp_size: usize, model: &'a KernelModel, seconds_per_key: f64) -> Self {
        let none = Segment { document: 0, start: 0, length: 0 };
        let clock = Clock::new(model, Passes::ForwardBackward);
        Self {
            lengths,
            clock,
            ticks_per_key: whole_ticks(seconds_per_key),
            open: vec![none; cp_size],
            seen: vec![(0, 0); cp_size],
            ticks: vec![0; cp_size],
            tokens: vec![0; cp_size],
        }
    }

    fn reset(&mut self) {
        self.seen.fill((0, 0));
        self.ticks.fill(0);
        self.tokens.fill(0);
    }

    #[inline]
    fn close(&mut self, rank: usize) {
        let Segment { document, length, .. } = self.open[rank];
        if length > 0 {
            let keys = self.clock.keys(self.lengths, document as usize, self.open[rank].end());
            self.ticks[rank] = self.ticks[rank].saturating_add(self.clock.ticks(length, keys));
            self.open[rank].length = 0;
            if self.ticks_per_key > 0 {
                let (last, seen) = std::mem::replace(&mut self.seen[rank], (document, keys));
                // Under a full mask the result is negative for a later run: the rank holds keys that an earlier run was
                // charged for.
                let moved = keys - length - if last == document { seen } else { 0 };
                let fetching = self.ticks_per_key.saturating_mul(i64::from(moved));
                self.ticks[rank] = self.ticks[rank].saturating_add(fetching);
            }
        }
    }

    fn close_all(&mut self) {
        (0..self.open.len()).for_each(|rank| self.close(rank));
    }

    fn slowest(&mut self) -> i64 {
        self.close_all();
        self.ticks.iter().copied().max().unwrap_or(0)
    }
}

impl Ranks for Stopwatch<'_> {
    fn cp_size(&self) -> usize {
        self.ticks.len()
    }

    #[inline]
    fn push(&mut self, rank: usize, document: usize, start: i32, length: i32) {
        if length == 0 {
            return;
        }
        self.tokens[rank] += i64::from(length);
        let open = &mut self.open[rank];
        if open.length > 0 && open.document as usize == document && open.end() == start {
            open.length += length;
        } else {
            self.close(rank);
            self.open[rank] = Segment { document: document as u32, start, length };
        }
    }
}
