//! Latencies of many segments, summed such that equal plans have exactly equal times.

use crate::cost::{Mask, Passes};
use crate::error::Result;
use crate::sharding::shard::{Segment, Shard};

use super::model::{KernelModel, Query, Table};

/// Sums of latencies are sums of integers, so they do not depend on the order of segments. One tick is 2^-44 s, or 57
/// femtoseconds.
const TICKS_PER_SECOND: f64 = (1_u64 << 44) as f64;

impl KernelModel {
    /// Seconds of each rank's call: its segments, each rounded to 2^-44 s, and the launch; 0 for a rank without
    /// segments.
    ///
    /// # Errors
    /// [`crate::Error::Combination`] when the shard has another mask than the model.
    ///
    /// # Complexity
    /// O(segments).
    pub fn rank_seconds(&self, shard: &Shard, passes: Passes) -> Result<Vec<f64>> {
        self.check_mask("shard", shard.mask)?;
        let mut clock = Clock::new(self, passes);
        let of_rank = |segments: &Vec<Segment>| {
            let ticks = segments
                .iter()
                .fold(0_i64, |sum, segment| sum.saturating_add(clock.ticks(segment.length, shard.sees(segment))));
            if segments.is_empty() { 0.0 } else { ticks as f64 / TICKS_PER_SECOND + self.launch_seconds(passes) }
        };
        Ok(shard.ranks.iter().map(of_rank).collect())
    }
}

/// Gives latencies of segments in ticks. It remembers the last number of queries, since neighbours often have the same.
pub(in crate::sharding) struct Clock<'a> {
    model: &'a KernelModel,
    tables: &'a [Table],
    last: Query,
}

impl<'a> Clock<'a> {
    pub(in crate::sharding) fn new(model: &'a KernelModel, passes: Passes) -> Self {
        let tables = model.table(passes);
        Self { model, tables, last: model.query(tables, 1) }
    }

    /// Keys that a segment sees if it ends at `end`.
    #[inline]
    pub(in crate::sharding) fn keys(&self, lengths: &[i32], document: usize, end: i32) -> i32 {
        match self.model.mask {
            Mask::Causal => end,
            Mask::Full => lengths[document],
        }
    }

    #[inline]
    pub(in crate::sharding) fn ticks(&mut self, queries: i32, keys: i32) -> i64 {
        if queries != self.last.length {
            self.last = self.model.query(self.tables, queries);
        }
        whole_ticks(self.model.seconds(&self.last, keys, self.tables))
    }
}

#[inline]
pub(in crate::sharding) fn whole_ticks(seconds: f64) -> i64 {
    // The cast saturates; adding 0.5 rounds to the nearest tick.
    (seconds * TICKS_PER_SECOND + 0.5) as i64
}
