//! Time of a step in which every op runs as soon as its rank is free and its input has arrived.

use crate::error::Result;

use super::op::{Kind, Op};
use super::program::{Instruction, NOTHING, Pipeline};
use super::times::{Detail, Times};

/// Memory for timing, kept between calls.
#[derive(Clone, Debug, Default)]
pub struct Buffers {
    ends: Vec<f64>,
    pub(super) clocks: Vec<f64>,
}

impl Pipeline {
    /// Seconds from the begin of the step to the end of the last op.
    ///
    /// # Arguments
    /// * `times` - seconds of every micro-batch.
    /// * `buffers` - memory for timing; it may have served another pipeline.
    ///
    /// # Errors
    /// [`crate::Error::Mismatch`] when `times` have another shape.
    ///
    /// # Complexity
    /// O(ops), nanoseconds each; nothing is allocated once `buffers` are large enough.
    ///
    /// # Example
    /// ```
    /// use wlb_core::pipeline::{Buffers, PipelineOptions, Times};
    /// use wlb_core::{Pipeline, Schedule};
    ///
    /// let schedule = Schedule::OneForwardOneBackward;
    /// let options = PipelineOptions { schedule, num_stages: 2, num_virtual_stages: 1, num_micro_batches: 2 };
    /// let pipeline = Pipeline::new(&options)?;
    /// // 3 s on each of two stages: two micro-batches, and one forward and one backward to fill and drain.
    /// let seconds = pipeline.makespan(&Times::per_micro_batch(&[6.0, 6.0])?, &mut Buffers::default())?;
    /// assert_eq!(seconds, 9.0);
    /// # Ok::<(), wlb_core::Error>(())
    /// ```
    pub fn makespan(&self, times: &Times<'_>, buffers: &mut Buffers) -> Result<f64> {
        times.check_shape(self.num_micro_batches, self.total_stages)?;
        Ok(self.run(times, |j| j, buffers, |_, _, _, _| {}))
    }

    /// The makespan if the schedule's micro-batch `j` has the times number `order[j]`; `times` may have further ones.
    ///
    /// # Panics
    /// When `order` has another length, or names a micro-batch that `times` lacks; callers inside the crate ensure
    /// both.
    #[inline]
    pub(crate) fn makespan_in_order(&self, times: &Times<'_>, order: &[usize], buffers: &mut Buffers) -> f64 {
        self.run(times, |j| order[j], buffers, |_, _, _, _| {})
    }

    /// The makespan under one cost for each micro-batch ([`Detail::MicroBatch`]). Writes into `parts` the share of each
    /// micro-batch's cost that lies on one critical path: a chain of ops, each of which starts when the one before it
    /// ends, up to the last op. So under any other costs `c` a step takes at least the sum of `parts[j] * c[j]` plus
    /// the latencies of that path.
    ///
    /// # Panics
    /// When there are fewer costs than micro-batches; callers inside the crate ensure this.
    pub(crate) fn critical_path(
        &self,
        costs: &[f64],
        p2p_seconds: f64,
        buffers: &mut Buffers,
        parts: &mut Vec<f64>,
    ) -> f64 {
        let third = 1.0 / (3 * self.total_stages) as f64;
        let Buffers { ends, clocks, .. } = buffers;
        clocks.clear();
        clocks.resize(self.num_ranks, 0.0);
        // `ends[i + 1]` is the end of op `i`; `ends[0]` stands for "no op" and is before everything.
        ends.resize(self.instructions.len() + 1, f64::NEG_INFINITY);
        ends[0] = f64::NEG_INFINITY;
        let part = |op: &Op| if op.kind == Kind::Backward { third + third } else { third };
        for (place, &Instruction { op, rank, input, .. }) in self.instructions.iter().enumerate() {
            let clock = &mut clocks[usize::from(rank)];
            let arrival = ends[input as usize] + p2p_seconds;
            let start = if arrival > *clock { arrival } else { *clock };
            *clock = start + costs[op.micro_batch as usize] * part(&op);
            ends[place + 1] = *clock;
        }
        parts.clear();
        parts.resize(self.num_micro_batches, 0.0);
        let last = (0..self.num_ranks).reduce(|a, b| if clocks[b] > clocks[a] { b } else { a }).unwrap_or(0);
        let is_last = |instruction: &Instruction| usize::from(instruction.rank) == last;
        let mut place = self.instructions.iter().rposition(is_last).map_or(NOTHING, |at| at as u32 + 1);
        while place != NOTHING {
            let Instruction { op, input, previous, .. } = self.instructions[place as usize - 1];
            parts[op.micro_batch as usize] += part(&op);
            // The op that it waited for.
            let free = if previous == NOTHING { 0.0 } else { ends[previous as usize] };
            place = if ends[input as usize] + p2p_seconds > free { input } else { previous };
        }
        clocks[last]
    }

    /// Calls `visit` with instruction, start, end and duration of every op; returns the end of the last. `which` maps
    /// each micro-batch of the schedule to one of `times`.
    #[inline]
    pub(super) fn run(
        &self,
        times: &Times<'_>,
        which: impl Fn(usize) -> usize,
        buffers: &mut Buffers,
        mut visit: impl FnMut(&Instruction, f64, f64, f64),
    ) -> f64 {
        let Buffers { ends, clocks, .. } = buffers;
        clocks.clear();
        clocks.resize(self.num_ranks, 0.0);
        ends.clear();
        ends.push(f64::NEG_INFINITY);
        let p2p = times.p2p_seconds;
        let own = usize::from(p2p.len() > 1);
        self.each(times.costs, times.detail, which, |instruction, micro_batch, duration| {
            let clock = &mut clocks[usize::from(instruction.rank)];
            let start = clock.max(ends[instruction.input as usize] + p2p[micro_batch * own]);
            let end = start + duration;
            *clock = end;
            ends.push(end);
            visit(instruction, start, end, duration);
        });
        clocks.iter().copied().fold(0.0, f64::max)
    }

    /// Calls `visit` with every instruction, its micro-batch, and its share of `seconds`.
    #[inline]
    pub(super) fn each(
        &self,
        seconds: &[f64],
        detail: Detail,
        which: impl Fn(usize) -> usize,
        mut visit: impl FnMut(&Instruction, usize, f64),
    ) {
        let equal = |third: f64, kind| if kind == Kind::Backward { third + third } else { third };
        let parts = 3.0 * self.total_stages as f64;
        let of = |instruction: &Instruction| which(instruction.op.micro_batch as usize);
        let cell = |instruction: &Instruction| of(instruction) * self.total_stages + instruction.op.stage as usize;
        match detail {
            Detail::MicroBatch => {
                self.instructions.iter().for_each(|instruction| {
                    visit(instruction, of(instruction), equal(seconds[of(instruction)] / parts, instruction.op.kind))
                });
            }
            Detail::Stage => {
                self.instructions.iter().for_each(|instruction| {
                    visit(instruction, of(instruction), equal(seconds[cell(instruction)] / 3.0, instruction.op.kind))
                });
            }
            Detail::Pass => self.instructions.iter().for_each(|instruction| {
                let passes = &seconds[cell(instruction) * 3..][..3];
                let duration = match instruction.op.kind {
                    Kind::Forward => passes[0],
                    Kind::InputGradient => passes[1],
                    Kind::WeightGradient => passes[2],
                    Kind::Backward => passes[1] + passes[2],
                };
                visit(instruction, of(instruction), duration);
            }),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::{Buffers, Pipeline};
    use crate::pipeline::options::{PipelineOptions, Schedule};
    use crate::pipeline::times::Times;

    proptest! {
        /// The critical path takes the whole step, and under other costs no longer than the step.
        #[test]
        fn the_critical_path_bounds_every_step(
            (schedule, num_stages, num_virtual_stages, num_micro_batches) in select(vec![
                (Schedule::GPipe, 3_usize, 1_usize, 4_usize),
                (Schedule::OneForwardOneBackward, 1, 1, 3),
                (Schedule::OneForwardOneBackward, 4, 1, 6),
                (Schedule::Interleaved, 2, 3, 4),
                (Schedule::ZbH1, 3, 1, 5),
                (Schedule::ZbV, 2, 2, 5),
            ]),
            costs in proptest::collection::vec(0_u8..20, 12), p2p_seconds in 0_u8..3,
        ) {
            let options = PipelineOptions { schedule, num_stages, num_virtual_stages, num_micro_batches };
            let pipeline = Pipeline::new(&options).unwrap();
            let costs: Vec<f64> = costs.into_iter().map(f64::from).collect();
            let p2p = [f64::from(p2p_seconds)];
            let (mut buffers, mut parts) = (Buffers::default(), Vec::new());
            let makespan = |costs: &[f64], buffers: &mut Buffers| {
                pipeline.makespan(&Times::per_micro_batch(costs).unwrap().with_p2p(&p2p).unwrap(), buffers).unwrap()
            };
            let (costs, others) = costs.split_at(6);
            let (costs, others) = (&costs[..num_micro_batches], &others[..num_micro_batches]);
            let seconds = pipeline.critical_path(costs, p2p[0], &mut buffers, &mut parts);
            prop_assert!((seconds - makespan(costs, &mut buffers)).abs() <= 1e-9);
            let length = |costs: &[f64]| costs.iter().zip(&parts).map(|(cost, part)| cost * part).sum::<f64>();
            let hops = seconds - length(costs);
            prop_assert!(hops >= -1e-9 && (p2p_seconds > 0 || hops <= 1e-9));
            prop_assert!(length(others) + hops <= makespan(others, &mut buffers) + 1e-9);
        }
    }
}
