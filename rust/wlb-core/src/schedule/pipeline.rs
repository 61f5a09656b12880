//! The engine: any order of ops, executed as soon as their inputs are there.

use crate::error::{Error, Result};

use super::order::{Kind, Layout, Op};

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
    total_stages: usize,
    num_micro_batches: usize,
}

/// How long everything takes, in seconds. Borrowed; checked once.
#[derive(Clone, Copy, Debug)]
pub struct Times<'a> {
    costs: &'a [f64],
    detail: Detail,
    p2p_seconds: &'a [f64],
}

#[derive(Clone, Copy, Debug)]
enum Detail {
    MicroBatch,
    Stage,
    Pass,
}

/// Room to work in, kept between calls.
#[derive(Clone, Debug, Default)]
pub struct Buffers {
    ends: Vec<f64>,
    clocks: Vec<f64>,
}

impl<'a> Times<'a> {
    /// `costs[j]`: micro-batch `j` through the whole model, forward and backward. Every stage takes an equal part, and of that
    /// a third each the forward and the gradients of input and weights.
    ///
    /// # Errors
    /// [`Error::Entry`] for a cost that is negative or not finite.
    pub fn per_micro_batch(costs: &'a [f64]) -> Result<Self> {
        Self::new(costs, Detail::MicroBatch)
    }

    /// `costs[j * total_stages + s]`: micro-batch `j` in stage `s`, a third for each of its passes.
    ///
    /// # Errors
    /// [`Error::Entry`] for a cost that is negative or not finite.
    pub fn per_stage(costs: &'a [f64]) -> Result<Self> {
        Self::new(costs, Detail::Stage)
    }

    /// `costs[(j * total_stages + s) * 3 + k]`: micro-batch `j` in stage `s`, forward, input gradient, weight gradient.
    ///
    /// # Errors
    /// [`Error::Entry`] for a cost that is negative or not finite.
    pub fn per_pass(costs: &'a [f64]) -> Result<Self> {
        Self::new(costs, Detail::Pass)
    }

    /// The same with latency: from the end of an op to where a stage on another rank can start on what it sends. It
    /// occupies neither. One value for all micro-batches, or one for each.
    ///
    /// # Errors
    /// [`Error::Entry`] for a latency that is negative or not finite.
    pub fn with_p2p(self, p2p_seconds: &'a [f64]) -> Result<Self> {
        check_seconds("p2p_seconds", p2p_seconds)?;
        Ok(Self { p2p_seconds, ..self })
    }

    fn new(costs: &'a [f64], detail: Detail) -> Result<Self> {
        check_seconds("costs", costs)?;
        Ok(Self { costs, detail, p2p_seconds: &[0.0] })
    }
}

fn check_seconds(argument: &'static str, values: &[f64]) -> Result<()> {
    match values.iter().position(|value| !(0.0..=f64::MAX).contains(value)) {
        None => Ok(()),
        Some(index) => {
            Err(Error::Entry { argument, index, value: values[index], requirement: "must be finite and not negative" })
        }
    }
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
    /// [`Error::Order`] for an op that stands twice, is missing, belongs to a stage of another rank, or would wait for
    /// ever.
    ///
    /// # Complexity
    /// O(ops).
    pub fn from_orders(orders: &[Vec<Op>], total_stages: usize, num_micro_batches: usize) -> Result<Self> {
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
            None => Ok(Self { steps, num_ranks: orders.len(), total_stages, num_micro_batches }),
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
        self.run(times, buffers, |_, _, _| {})
    }

    fn run(&self, times: &Times<'_>, buffers: &mut Buffers, record: impl FnMut(Op, f64, f64)) -> Result<f64> {
        let (stages, costs) = (self.total_stages, times.costs);
        let entries = match times.detail {
            Detail::MicroBatch => self.num_micro_batches,
            Detail::Stage => self.num_micro_batches * stages,
            Detail::Pass => self.num_micro_batches * stages * 3,
        };
        expect("costs", costs.len(), "the schedule", entries)?;
        if times.p2p_seconds.len() != 1 {
            expect("p2p_seconds", times.p2p_seconds.len(), "the schedule", self.num_micro_batches)?;
        }
        let at = |op: Op| op.micro_batch as usize * stages + op.stage as usize;
        let equal = |third: f64, kind| if kind == Kind::Backward { third + third } else { third };
        let parts = 3.0 * stages as f64;
        Ok(match times.detail {
            Detail::MicroBatch => {
                self.execute(times, buffers, |op| equal(costs[op.micro_batch as usize] / parts, op.kind), record)
            }
            Detail::Stage => self.execute(times, buffers, |op| equal(costs[at(op)] / 3.0, op.kind), record),
            Detail::Pass => {
                let duration = |op: Op| {
                    let passes = &costs[at(op) * 3..][..3];
                    match op.kind {
                        Kind::Forward => passes[0],
                        Kind::InputGradient => passes[1],
                        Kind::WeightGradient => passes[2],
                        Kind::Backward => passes[1] + passes[2],
                    }
                };
                self.execute(times, buffers, duration, record)
            }
        })
    }

    #[inline]
    fn execute(
        &self,
        times: &Times<'_>,
        buffers: &mut Buffers,
        duration: impl Fn(Op) -> f64,
        mut record: impl FnMut(Op, f64, f64),
    ) -> f64 {
        let Buffers { ends, clocks } = buffers;
        clocks.clear();
        clocks.resize(self.num_ranks, 0.0);
        ends.clear();
        ends.push(f64::NEG_INFINITY);
        let p2p = times.p2p_seconds;
        let each = usize::from(p2p.len() > 1);
        for step in &self.steps {
            let clock = &mut clocks[usize::from(step.rank)];
            let start = clock.max(ends[step.input as usize] + p2p[step.op.micro_batch as usize * each]);
            let end = start + duration(step.op);
            *clock = end;
            ends.push(end);
            record(step.op, start, end);
        }
        clocks.iter().copied().fold(0.0, f64::max)
    }
}

fn expect(argument: &'static str, found: usize, other: &'static str, expected: usize) -> Result<()> {
    if found == expected { Ok(()) } else { Err(Error::Mismatch { argument, found, other, expected }) }
}

fn deadlock(rank: usize, position: usize) -> Error {
    Error::Order { rank, position, problem: "waits for an op that never runs before it: deadlock" }
}

/// The rank of every stage; on the way, that every op is there once.
fn ranks_of_stages(orders: &[Vec<Op>], total_stages: usize, num_micro_batches: usize) -> Result<Vec<usize>> {
    const COMPLETE: [u8; 2] = [0b0011, 0b1101];
    let mut ranks = vec![usize::MAX; total_stages];
    let mut seen = vec![0_u8; num_micro_batches * total_stages];
    for (rank, ops) in orders.iter().enumerate() {
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
            let seen = &mut seen[micro_batch * total_stages + stage];
            let bit = 1 << op.kind as u8;
            *seen |= bit;
            if COMPLETE.iter().all(|complete| *seen & !complete != 0) {
                return wrong("is a gradient computed both whole and in parts");
            }
        }
    }
    let total: usize = orders.iter().map(Vec::len).sum();
    let expected: usize = seen.iter().map(|seen| seen.count_ones() as usize).sum();
    let complete = seen.iter().all(|seen| COMPLETE.contains(seen));
    if complete && total == expected {
        return Ok(ranks);
    }
    let problem = if complete { "has an op that stands twice" } else { "ends, and an op is missing" };
    Err(Error::Order { rank: 0, position: 0, problem })
}
