//! Prepares a schedule for timing: all ops in one sequence in which no op waits for a later one.

use crate::error::{Error, Result, check_range};
use crate::limits::{MAX_CELLS, MAX_STAGES};

use super::op::{Kind, Op};
use super::options::PipelineOptions;

/// Stands for "no op": it ends before everything, so waiting for it takes no time.
pub(super) const NOTHING: u32 = 0;

/// An op in the sequence; the ops that it waits for are earlier in the sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Instruction {
    pub(super) op: Op,
    pub(super) rank: u16,
    /// The op on another rank that sends its input: its place in the sequence plus one, or [`NOTHING`]. Inputs from the
    /// own rank need no entry: they are earlier in the rank's order.
    pub(super) input: u32,
    /// The op before it on its own rank: its place in the sequence plus one, or [`NOTHING`].
    pub(super) previous: u32,
}

/// A schedule that is ready to be timed under any costs.
///
/// The order of ops does not depend on how long they take. So deadlocks are found here, once, and timing is one pass
/// over a sequence.
#[derive(Clone, Debug)]
pub struct Pipeline {
    pub(super) instructions: Vec<Instruction>,
    pub(super) num_ranks: usize,
    pub(super) stages_of_rank: Vec<usize>,
    pub(super) total_stages: usize,
    pub(super) num_micro_batches: usize,
}

impl Pipeline {
    /// The program of a schedule.
    ///
    /// # Errors
    /// The errors of [`PipelineOptions::orders`].
    pub fn new(options: &PipelineOptions) -> Result<Self> {
        Self::from_orders(&options.orders()?, options.total_stages(), options.num_micro_batches)
    }

    /// The program of any order of ops for each rank. A stage belongs to the rank that runs its ops.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for sizes; [`Error::Order`] for an op that appears twice, is missing, belongs to a stage
    /// of another rank, or would wait for ever.
    ///
    /// # Complexity
    /// O(ops).
    pub fn from_orders(orders: &[Vec<Op>], total_stages: usize, num_micro_batches: usize) -> Result<Self> {
        check_range("num_stages", orders.len() as i64, 1, MAX_STAGES as i64)?;
        check_range("total_stages", total_stages as i64, 1, MAX_CELLS as i64)?;
        check_range("num_micro_batches", num_micro_batches as i64, 1, (MAX_CELLS / total_stages) as i64)?;
        let ranks = ranks_of_stages(orders, total_stages, num_micro_batches)?;
        let cell = |micro_batch: u32, stage: usize| micro_batch as usize * total_stages + stage;
        // Place in the sequence plus one, of the forward and of the backward of each micro-batch and stage.
        let mut forwards = vec![NOTHING; num_micro_batches * total_stages];
        let mut backwards = forwards.clone();
        let mut instructions: Vec<Instruction> = Vec::with_capacity(orders.iter().map(Vec::len).sum());
        let mut next = vec![0; orders.len()];
        let mut latest = vec![NOTHING; orders.len()];
        // `ready`: ranks that can go on. `awaited`: for each other rank, the op that it waits for.
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
                    // On its own rank the input is earlier in the order, and nothing is sent.
                    input = if ranks[from] == rank { NOTHING } else { sender };
                }
                instructions.push(Instruction { op, rank: rank as u16, input, previous: latest[rank] });
                next[rank] += 1;
                let place = instructions.len() as u32;
                latest[rank] = place;
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
                Ok(Self { instructions, num_ranks: orders.len(), stages_of_rank, total_stages, num_micro_batches })
            }
        }
    }

    /// The ops in a sequence in which no op waits for a later one: each with its rank, and whether it waits for another
    /// rank.
    pub(crate) fn program(&self) -> impl Iterator<Item = (Op, usize, bool)> {
        self.instructions
            .iter()
            .map(|instruction| (instruction.op, usize::from(instruction.rank), instruction.input != NOTHING))
    }

    /// Number of ops in a step.
    pub fn num_ops(&self) -> usize {
        self.instructions.len()
    }
}

fn deadlock(rank: usize, position: usize) -> Error {
    Error::Order { rank, position, problem: "waits for an op that never runs before it: deadlock" }
}

/// The rank of every stage. Also checks that every op appears exactly once.
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
            // No rank has ops of this stage, so the error names the end of the last rank's order.
            let rank = ranks[cell % total_stages].min(orders.len() - 1);
            let problem = "the order ends, but an op of one of its stages is missing";
            Err(Error::Order { rank, position: orders[rank].len(), problem })
        }
    }
}
