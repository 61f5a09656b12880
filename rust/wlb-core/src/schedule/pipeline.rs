//! The engine: any order of ops, executed as soon as their inputs are there.

use crate::error::{Error, Result, check_range};
use crate::interrupt::{Meter, parts};

use super::order::{Kind, Layout, MAX_CELLS, MAX_STAGES, Op};
use super::timeline::{Record, Summary, Timeline};
use super::times::{Detail, Times, check, expect};

/// No op: ends before everything, so that nobody waits for it.
const NOTHING: u32 = 0;

/// An op in a sequence in which everything stands behind what it waits for.
#[derive(Clone, Copy, Debug)]
struct Step {
    op: Op,
    rank: u16,
    /// The op on another rank that hands this one its input: one more than its place in the sequence, or [`NOTHING`].
    /// What an op needs from its own rank stands before it in the order.
    input: u32,
}

/// A schedule made ready to be timed under any costs.
///
/// Which op runs after which does not depend on how long they take, so what could go wrong (deadlock) goes wrong here,
/// and timing is one pass over a sequence.
#[derive(Clone, Debug)]
pub struct Pipeline {
    steps: Vec<Step>,
    num_ranks: usize,
    stages_of_rank: Vec<usize>,
    total_stages: usize,
    num_micro_batches: usize,
}

/// Room to work in, kept between calls.
#[derive(Clone, Debug, Default)]
pub struct Buffers {
    meter: Meter,
    ends: Vec<f64>,
    clocks: Vec<f64>,
    /// What each op waited for, and the latest op of each rank: places in the sequence as in [`Step`].
    before: Vec<u32>,
    latest: Vec<u32>,
}

impl Pipeline {
    /// The schedule of a layout.
    ///
    /// # Errors
    /// Those of [`Layout::orders`].
    pub fn new(layout: &Layout) -> Result<Self> {
        Self::from_orders(&layout.orders()?, layout.total_stages(), layout.num_micro_batches)
    }

    /// Any order of ops for each rank. Where a stage lies follows from whose ops are its.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for sizes; [`Error::Order`] for an op that stands twice, is missing, belongs to a stage of another rank, or would wait for
    /// ever.
    ///
    /// # Complexity
    /// O(ops).
    pub fn from_orders(orders: &[Vec<Op>], total_stages: usize, num_micro_batches: usize) -> Result<Self> {
        check_range("num_stages", orders.len() as i64, 1, MAX_STAGES as i64)?;
        check_range("total_stages", total_stages as i64, 1, MAX_CELLS as i64)?;
        check_range("num_micro_batches", num_micro_batches as i64, 1, (MAX_CELLS / total_stages) as i64)?;
        let ranks = ranks_of_stages(orders, total_stages, num_micro_batches)?;
        let cell = |micro_batch: u32, stage: usize| micro_batch as usize * total_stages + stage;
        // One more than where it stands in the sequence.
        let mut forwards = vec![NOTHING; num_micro_batches * total_stages];
        let mut backwards = forwards.clone();
        let mut steps: Vec<Step> = Vec::with_capacity(orders.iter().map(Vec::len).sum());
        let mut next = vec![0; orders.len()];
        // Ranks that can go on; which op each of the others waits for.
        let mut ready: Vec<usize> = (0..orders.len()).rev().collect();
        let mut awaited = vec![None; orders.len()];
        let mut meter = Meter::default();
        while let Some(rank) = ready.pop() {
            while let Some(&op) = orders[rank].get(next[rank]) {
                let stage = op.stage as usize;
                let here = cell(op.micro_batch, stage);
                let (done, from) = match op.kind {
                    Kind::Forward => (true, stage.checked_sub(1)),
                    Kind::Backward | Kind::InputGradient => {
                        (forwards[here] != NOTHING, (stage + 1 < total_stages).then_some(stage + 1))
                    }
                    Kind::WeightGradient => (backwards[here] != NOTHING, None),
                };
                if !done {
                    return Err(deadlock(rank, next[rank]));
                }
                let mut input = NOTHING;
                if let Some(from) = from {
                    let forward = op.kind == Kind::Forward;
                    let sender = if forward { &forwards } else { &backwards }[cell(op.micro_batch, from)];
                    if sender == NOTHING {
                        awaited[rank] = Some((forward, op.micro_batch, from));
                        break;
                    }
                    // On its own rank it stands before, and nothing is sent.
                    input = if ranks[from] == rank { NOTHING } else { sender };
                }
                meter.spend(1);
                steps.push(Step { op, rank: rank as u16, input });
                next[rank] += 1;
                let place = steps.len() as u32;
                let receiver = match op.kind {
                    Kind::Forward => {
                        forwards[here] = place;
                        stage + 1
                    }
                    Kind::Backward | Kind::InputGradient => {
                        backwards[here] = place;
                        stage.wrapping_sub(1)
                    }
                    Kind::WeightGradient => continue,
                };
                if let Some(&receiver) = ranks.get(receiver)
                    && awaited[receiver] == Some((op.kind == Kind::Forward, op.micro_batch, stage))
                {
                    awaited[receiver] = None;
                    ready.push(receiver);
                }
            }
        }
        match (0..orders.len()).find(|&rank| next[rank] < orders[rank].len()) {
            Some(rank) => Err(deadlock(rank, next[rank])),
            None => {
                let mut stages_of_rank = vec![0; orders.len()];
                ranks.iter().for_each(|&rank| stages_of_rank[rank] += 1);
                Ok(Self { steps, num_ranks: orders.len(), stages_of_rank, total_stages, num_micro_batches })
            }
        }
    }

    /// When the last op ends, in seconds.
    ///
    /// # Errors
    /// [`Error::Mismatch`] when `times` are of another shape.
    ///
    /// # Complexity
    /// O(ops), nanoseconds each; nothing is allocated once `buffers` are large enough.
    pub fn makespan(&self, times: &Times<'_>, buffers: &mut Buffers) -> Result<f64> {
        times.check_shape(self.num_micro_batches, self.total_stages)?;
        Ok(self.run(times, |j| j, buffers, |_, _, _, _| {}))
    }

    /// The ops in a sequence in which everything stands behind what it waits for: the rank that runs it, and whether it waits for
    /// what another rank sends.
    pub(super) fn program(&self) -> impl Iterator<Item = (Op, usize, bool)> {
        self.steps.iter().map(|step| (step.op, usize::from(step.rank), step.input != NOTHING))
    }

    /// The makespan when the schedule's `j`-th micro-batch is `times`' `order[j]`-th; `times` may have others, too.
    ///
    /// # Panics
    /// When `order` is of another length, or names what `times` does not have: both are the crate's own.
    #[inline]
    pub(super) fn makespan_in_order(&self, times: &Times<'_>, order: &[usize], buffers: &mut Buffers) -> f64 {
        self.run(times, |j| order[j], buffers, |_, _, _, _| {})
    }

    /// The makespan of one cost for each micro-batch ([`Detail::MicroBatch`]), and into `parts` how much of each lies on one critical
    /// path: ops that begin as soon as the one before them ends, the last of which ends last. So with any other costs `c` a step
    /// takes at least the sum of `parts[j] * c[j]`, and the latencies of that path.
    ///
    /// # Panics
    /// When there are fewer costs than micro-batches: both are the crate's own.
    pub(super) fn critical_path(
        &self,
        costs: &[f64],
        p2p_seconds: f64,
        buffers: &mut Buffers,
        parts: &mut Vec<f64>,
    ) -> f64 {
        let third = 1.0 / (3 * self.total_stages) as f64;
        buffers.meter.spend(self.steps.len());
        let Buffers { ends, clocks, before, latest, .. } = buffers;
        clocks.clear();
        clocks.resize(self.num_ranks, 0.0);
        latest.clear();
        latest.resize(self.num_ranks, NOTHING);
        ends.clear();
        ends.push(f64::NEG_INFINITY);
        before.clear();
        for &Step { op, rank, input } in &self.steps {
            let (clock, latest) = (&mut clocks[usize::from(rank)], &mut latest[usize::from(rank)]);
            let arrival = ends[input as usize] + p2p_seconds;
            let (start, last) = if arrival > *clock { (arrival, input) } else { (*clock, *latest) };
            let cost = costs[op.micro_batch as usize] * third;
            *clock = start + if op.kind == Kind::Backward { cost + cost } else { cost };
            *latest = ends.len() as u32;
            ends.push(*clock);
            before.push(last);
        }
        parts.clear();
        parts.resize(self.num_micro_batches, 0.0);
        let last = (0..self.num_ranks).reduce(|a, b| if clocks[b] > clocks[a] { b } else { a }).unwrap_or(0);
        let mut place = latest[last];
        while place != NOTHING {
            let index = place as usize - 1;
            let Op { kind, micro_batch, .. } = self.steps[index].op;
            parts[micro_batch as usize] += if kind == Kind::Backward { third + third } else { third };
            place = before[index];
        }
        clocks[last]
    }

    /// Ops of a step.
    pub fn num_ops(&self) -> usize {
        self.steps.len()
    }

    /// A step in a few numbers.
    ///
    /// `activation[j]` is what a rank holds of micro-batch `j`, over all its stages, from the forward to the weight
    /// gradient; in any unit, such as tokens; 1 each without it. Each stage of a rank has an equal part.
    ///
    /// # Errors
    /// [`Error::Mismatch`] when `times` or `activation` are of another shape, [`Error::Entry`] for an activation that
    /// is negative or not finite, [`Error::Number`] when the costs add up to infinity.
    ///
    /// # Complexity
    /// O(ops).
    pub fn summarize(&self, times: &Times<'_>, activation: Option<&[f64]>, buffers: &mut Buffers) -> Result<Summary> {
        self.summarize_recording(times, activation, buffers, |_| {})
    }

    /// A step op by op.
    ///
    /// # Errors
    /// Those of [`Pipeline::summarize`].
    ///
    /// # Complexity
    /// O(ops).
    pub fn simulate(&self, times: &Times<'_>, activation: Option<&[f64]>) -> Result<Timeline> {
        let mut records = Vec::with_capacity(self.steps.len());
        let summary =
            self.summarize_recording(times, activation, &mut Buffers::default(), |record| records.push(record))?;
        Ok(Timeline { summary, records, total_stages: self.total_stages })
    }

    fn summarize_recording(
        &self,
        times: &Times<'_>,
        activation: Option<&[f64]>,
        buffers: &mut Buffers,
        mut record: impl FnMut(Record),
    ) -> Result<Summary> {
        times.check_shape(self.num_micro_batches, self.total_stages)?;
        let peak_activation = self.peak_activation(activation)?;
        let mut busy = vec![0.0; self.num_ranks];
        let mut first = vec![f64::INFINITY; self.num_ranks];
        let seconds = self.run(
            times,
            |j| j,
            buffers,
            |&Step { op, rank, .. }, start, end, duration| {
                let at = usize::from(rank);
                busy[at] += duration;
                first[at] = start.min(first[at]);
                record(Record { op, rank: u32::from(rank), start, end });
            },
        );
        if !seconds.is_finite() {
            let requirement = "the time of the step must be finite";
            return Err(Error::Number { argument: "costs", value: seconds, requirement });
        }
        let mut exposed = vec![0.0; self.num_ranks];
        if let Some(values) = times.exposed {
            self.each(values, times.detail, |j| j, |step, _, seconds| exposed[usize::from(step.rank)] += seconds);
        }
        let spans = buffers.clocks.iter().zip(&first).map(|(end, start)| end - start.min(*end)).collect();
        Ok(Summary { seconds, busy, exposed, spans, peak_activation })
    }

    /// The most that each rank holds at a time; see [`Pipeline::summarize`].
    pub(super) fn peak_activation(&self, activation: Option<&[f64]>) -> Result<Vec<f64>> {
        if let Some(activation) = activation {
            expect("activation", activation.len(), "the schedule", self.num_micro_batches)?;
            check("activation", activation)?;
        }
        let mut held = vec![0.0_f64; self.num_ranks];
        let mut peaks = held.clone();
        self.steps().for_each(|&Step { op, rank, .. }| {
            let rank = usize::from(rank);
            let amount = activation.map_or(1.0, |activation| activation[op.micro_batch as usize]);
            match op.kind {
                Kind::Forward => held[rank] += amount,
                Kind::Backward | Kind::WeightGradient => held[rank] -= amount,
                Kind::InputGradient => {}
            }
            peaks[rank] = held[rank].max(peaks[rank]);
        });
        Ok(peaks.iter().zip(&self.stages_of_rank).map(|(peak, &stages)| peak / stages.max(1) as f64).collect())
    }

    /// Calls `visit` with step, start, end and duration; gives the end of the last. `which` micro-batch of `times` each of
    /// the schedule's is.
    #[inline]
    fn run(
        &self,
        times: &Times<'_>,
        which: impl Fn(usize) -> usize,
        buffers: &mut Buffers,
        mut visit: impl FnMut(&Step, f64, f64, f64),
    ) -> f64 {
        buffers.meter.spend(self.steps.len());
        let Buffers { ends, clocks, .. } = buffers;
        clocks.clear();
        clocks.resize(self.num_ranks, 0.0);
        ends.clear();
        ends.push(f64::NEG_INFINITY);
        let p2p = times.p2p_seconds;
        let own = usize::from(p2p.len() > 1);
        self.each(times.costs, times.detail, which, |step, micro_batch, duration| {
            let clock = &mut clocks[usize::from(step.rank)];
            let start = clock.max(ends[step.input as usize] + p2p[micro_batch * own]);
            let end = start + duration;
            *clock = end;
            ends.push(end);
            visit(step, start, end, duration);
        });
        clocks.iter().copied().fold(0.0, f64::max)
    }

    /// The sequence, with checks on the way.
    #[inline]
    fn steps(&self) -> impl Iterator<Item = &Step> {
        parts(&self.steps).flatten()
    }

    /// Calls `visit` with every step, the micro-batch it is of, and its part of `seconds`.
    #[inline]
    fn each(
        &self,
        seconds: &[f64],
        detail: Detail,
        which: impl Fn(usize) -> usize,
        mut visit: impl FnMut(&Step, usize, f64),
    ) {
        let equal = |third: f64, kind| if kind == Kind::Backward { third + third } else { third };
        let parts = 3.0 * self.total_stages as f64;
        let of = |step: &Step| which(step.op.micro_batch as usize);
        let cell = |step: &Step| of(step) * self.total_stages + step.op.stage as usize;
        match detail {
            Detail::MicroBatch => {
                self.steps().for_each(|step| visit(step, of(step), equal(seconds[of(step)] / parts, step.op.kind)));
            }
            Detail::Stage => {
                self.steps().for_each(|step| visit(step, of(step), equal(seconds[cell(step)] / 3.0, step.op.kind)));
            }
            Detail::Pass => self.steps().for_each(|step| {
                let passes = &seconds[cell(step) * 3..][..3];
                let duration = match step.op.kind {
                    Kind::Forward => passes[0],
                    Kind::InputGradient => passes[1],
                    Kind::WeightGradient => passes[2],
                    Kind::Backward => passes[1] + passes[2],
                };
                visit(step, of(step), duration);
            }),
        }
    }
}

fn deadlock(rank: usize, position: usize) -> Error {
    Error::Order { rank, position, problem: "waits for an op that never runs before it: deadlock" }
}

/// The rank of every stage; on the way, that every op is there once.
fn ranks_of_stages(orders: &[Vec<Op>], total_stages: usize, num_micro_batches: usize) -> Result<Vec<usize>> {
    const COMPLETE: [u8; 2] = [0b0011, 0b1101];
    let mut ranks = vec![usize::MAX; total_stages];
    let mut seen = vec![0_u8; num_micro_batches * total_stages];
    let mut meter = Meter::default();
    for (rank, ops) in orders.iter().enumerate() {
        meter.spend(ops.len());
        for (position, op) in ops.iter().enumerate() {
            let wrong = |problem| Err(Error::Order { rank, position, problem });
            let (micro_batch, stage) = (op.micro_batch as usize, op.stage as usize);
            if micro_batch >= num_micro_batches || stage >= total_stages {
                return wrong("is of a micro-batch or a stage that does not exist");
            }
            if ranks[stage] != usize::MAX && ranks[stage] != rank {
                return wrong("belongs to a stage of another rank");
            }
            ranks[stage] = rank;
            let (seen, bit) = (&mut seen[micro_batch * total_stages + stage], 1 << op.kind as u8);
            if *seen & bit != 0 {
                return wrong("stands there before");
            }
            *seen |= bit;
            if COMPLETE.iter().all(|complete| *seen & !complete != 0) {
                return wrong("is part of a gradient that is computed as a whole, too");
            }
        }
    }
    match seen.iter().position(|seen| !COMPLETE.contains(seen)) {
        None => Ok(ranks),
        Some(cell) => {
            // A stage that nobody has belongs to nobody's order: the end of the last is as good a place as any.
            let rank = ranks[cell % total_stages].min(orders.len() - 1);
            let problem = "ends, and an op of one of its stages is missing";
            Err(Error::Order { rank, position: orders[rank].len(), problem })
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::{Buffers, Pipeline};
    use crate::schedule::{Layout, Schedule, Times};

    proptest! {
        /// The critical path is as long as the step, and no longer than the step of any other costs.
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
            let layout = Layout { schedule, num_stages, num_virtual_stages, num_micro_batches };
            let pipeline = Pipeline::new(&layout).unwrap();
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
