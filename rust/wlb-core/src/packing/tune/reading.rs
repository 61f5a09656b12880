//! The sample enters a packer as training reads it: no more than the packer admits, and steps worth training.
//!
//! The loaders of the Python package read by the same rules (`wlb.filling`), and the tests hold one against the other:
//! what is tuned here is what a run does.

use crate::error::Result;
use crate::interrupt::check;
use crate::packing::plan::Packing;
use crate::packing::stream::{Packer, PackerConfig, Push};

use super::sample::{Pieces, Sample};

/// What a packer made of the sample.
pub(super) struct Run {
    /// Empty, with its metrics.
    pub(super) packer: Packer,
    /// Sum of the steps' heaviest micro-batches over the sum of their means, those flushed at the end not counted; 1
    /// without a step.
    pub(super) lost_time: f64,
}

/// The sample, and how it is read.
pub(super) struct Reading {
    pieces: Pieces,
    /// Tokens up to the end of each document.
    ends: Vec<i64>,
    tokens_per_batch: i64,
    /// Tokens that a step trains at least.
    least: i64,
}

impl Reading {
    /// Documents in order; those longer than the packer allows are cut.
    pub(super) fn new(sample: Sample<'_>, config: &PackerConfig) -> Result<Self> {
        let tokens_per_batch = config.tokens_per_batch();
        let pieces = sample.pieces(config)?;
        let ends = pieces.lengths.iter().scan(0, |end, &length| {
            *end += i64::from(length);
            Some(*end)
        });
        let ends = ends.collect();
        // A third of what a step holds can always be packed.
        let most = config.num_micro_batches as i64 * i64::from(config.max_tokens) / 3;
        let least = (tokens_per_batch / 10).max(1).min(most.max(1));
        Ok(Self { pieces, ends, tokens_per_batch, least })
    }

    pub(super) fn longest(&self) -> i32 {
        self.pieces.lengths.iter().copied().max().unwrap_or(1)
    }

    /// Puts the whole sample through a packer.
    ///
    /// # Complexity
    /// A push, a copy of what waits and a sum of admissions for each step, a few times that where much has to be read.
    pub(super) fn through(&self, mut packer: Packer) -> Result<Run> {
        let (mut read, mut heaviest, mut mean) = (0, 0.0, 0.0);
        while read < self.pieces.lengths.len() {
            check();
            let (after, packing) = self.next_step(packer, &mut read)?;
            packer = after;
            if packing.num_tokens() > 0 {
                let of_step = packing.costs.iter().sum::<f64>() / packing.costs.len() as f64;
                heaviest += packing.rank_imbalance() * of_step;
                mean += of_step;
            }
        }
        packer.flush();
        Ok(Run { packer, lost_time: if mean > 0.0 { heaviest / mean } else { 1.0 } })
    }

    /// The packer after the next step worth training, and that step; `read` documents have entered it.
    fn next_step(&self, mut packer: Packer, read: &mut usize) -> Result<(Packer, Packing)> {
        let mut batches = 1;
        loop {
            let end = self.offered(*read, batches);
            let last = end == self.pieces.lengths.len();
            let entering = self.entering(&packer, *read, end, last)?;
            let (mut after, mut packing) = self.push(&packer, *read, entering, 0)?;
            let tokens: i64 = packing.tokens.iter().sum();
            if tokens < self.least {
                if !last && *read + entering == end {
                    if tokens == 0 && entering > 0 {
                        // All of it waits; it has entered, and the next batch comes.
                        packer = after;
                        *read = end;
                        batches = 1;
                    } else {
                        batches *= 2;
                    }
                    continue;
                }
                (after, packing) = self.push(&packer, *read, entering, self.least)?;
            }
            *read += entering;
            return Ok((after, packing));
        }
    }

    /// Where so many global batches end, but for a rest of less than a step.
    fn offered(&self, read: usize, batches: i64) -> usize {
        let before = self.ends[read] - i64::from(self.pieces.lengths[read]);
        let wanted = before.saturating_add(self.tokens_per_batch.saturating_mul(batches));
        let end = self.ends.partition_point(|&end| end <= wanted).max(read + 1);
        let all = self.ends.len();
        if self.ends[all - 1] - self.ends[end - 1] < self.least { all } else { end }
    }

    /// How many of the offered documents enter: those admitted, or fewer where what stays outside would be less than a
    /// step by itself.
    fn entering(&self, packer: &Packer, read: usize, end: usize, last: bool) -> Result<usize> {
        let (lengths, costs) = self.pieces.slice(read, end)?;
        let admitted = packer.admits(&lengths, costs)?;
        let total = self.ends[end - 1];
        // Tokens of the offered documents from the `count`-th on.
        let rest = |count: usize| total - self.ends[read + count] + i64::from(self.pieces.lengths[read + count]);
        if last && admitted < end - read && rest(admitted) < self.least {
            let fewer = (0..end - read).rev().find(|&count| rest(count) >= self.least);
            return Ok(fewer.filter(|&fewer| fewer > 0).unwrap_or(admitted));
        }
        Ok(admitted)
    }

    fn push(&self, packer: &Packer, read: usize, count: usize, min_step_tokens: i64) -> Result<(Packer, Packing)> {
        let mut after = packer.clone();
        let (lengths, costs) = self.pieces.slice(read, read + count)?;
        let packing = after.push_pieces(&Push { min_step_tokens, costs, ..Push::new(&lengths) })?;
        Ok((after, packing))
    }
}
