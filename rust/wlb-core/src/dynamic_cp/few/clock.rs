//! Time of a layout's step: a lower bound that is quick to compute, and the exact time.

use crate::dynamic_cp::counts::price;
use crate::dynamic_cp::options::DynamicCpOptions;
use crate::error::Result;
use crate::packing::Sync;
use crate::pipeline::{Kind, Pipeline, Schedule};

use super::layout::{Layout, MOST, Parts, SAME};

/// Most ranks of a stage: a set of ranks is one 64-bit number.
pub(in crate::dynamic_cp) const MOST_RANKS: usize = 64;

/// An op, which all ranks of a stage run.
#[derive(Clone, Copy)]
struct Step {
    micro_batch: u16,
    stage: u16,
    /// Part of its micro-batch's seconds that it takes.
    part: f64,
    /// Whether it waits for the result of another stage.
    waits: bool,
    /// False for weight gradients, for which no stage waits.
    is_waited_for: bool,
}

/// The ops of a step of `count` micro-batches.
struct Program {
    count: usize,
    steps: Vec<Step>,
    /// Price for each second, by which plans with different numbers of micro-batches are compared.
    price: f64,
}

/// Neighbouring atoms of one micro-batch that are one group; see [`Clock::lay`] for atoms.
#[derive(Clone, Copy, Default)]
struct Span {
    first: u8,
    end: u8,
    seconds: f64,
}

/// Computes times of layouts. All memory is used again for the next layout.
pub(super) struct Clock<'a> {
    options: &'a DynamicCpOptions,
    programs: Vec<Program>,
    /// Under 1F1B each rank runs the forward of the first micro-batch through all stages but the last, all
    /// micro-batches on the last stage, and the backward of the last micro-batch back. `ends` says how much more the
    /// first and the last micro-batch count for this, and `hops` is the latency of the hops.
    ends: [f64; 2],
    hops: f64,
    /// Seconds of each rank in this layout, and the rank with the most.
    sums: Vec<f64>,
    pub(super) latest: usize,
    /// Mean seconds of the ranks of one stage in this layout.
    pub(super) mean: f64,
    spans: Vec<Span>,
    offsets: Vec<u32>,
    clocks: Vec<f64>,
    done: Vec<f64>,
    /// Number of ops times atoms that were timed; the search is limited by it.
    pub(super) work: usize,
}

impl<'a> Clock<'a> {
    /// Work that counts for drawing a layout and computing its lower bound.
    pub(super) const LEAST: usize = 64;

    pub(super) fn new(options: &'a DynamicCpOptions) -> Self {
        let way = (options.num_stages - 1) as f64;
        let is_plain = options.num_virtual_stages == 1 && options.schedule() == Schedule::OneForwardOneBackward;
        let (ends, hops) =
            if is_plain { ([way / 3.0, way / 1.5], 2.0 * way * options.p2p_seconds) } else { ([0.0; 2], 0.0) };
        let (programs, sums, spans, offsets, clocks, done) = Default::default();
        Self { options, programs, ends, hops, sums, latest: 0, mean: 0.0, spans, offsets, clocks, done, work: 0 }
    }

    /// Prepares for a number of micro-batches.
    pub(super) fn prepare(&mut self, count: usize) -> Result<()> {
        if self.programs.iter().any(|program| program.count == count) {
            return Ok(());
        }
        let pipeline = Pipeline::new(&self.options.pipeline(count))?;
        let third = 1.0 / (3 * self.options.num_stages * self.options.num_virtual_stages) as f64;
        let last = self.options.num_stages * self.options.num_virtual_stages - 1;
        let mut steps: Vec<Step> = Vec::with_capacity(pipeline.num_ops());
        let mut before = None;
        for (op, stage, waits) in pipeline.program() {
            let part = if op.kind == Kind::Backward { 2.0 * third } else { third };
            // On the last stage the backward follows its own forward directly, so both are one op.
            let turns =
                op.kind != Kind::Forward && before == Some((op.micro_batch, op.stage)) && op.stage as usize == last;
            before = (op.kind == Kind::Forward).then_some((op.micro_batch, op.stage));
            if let Some(forward) = steps.last_mut().filter(|_| turns && op.kind == Kind::Backward) {
                forward.part += part;
                continue;
            }
            let is_waited_for = op.kind != Kind::WeightGradient;
            steps.push(Step { micro_batch: op.micro_batch as u16, stage: stage as u16, part, waits, is_waited_for });
        }
        self.programs.push(Program { count, steps, price: price(self.options, count, 1.0) });
        Ok(())
    }

    /// A lower bound on the price of a layout. Also sets the work of each rank.
    #[inline]
    pub(super) fn least(&mut self, layout: &Layout, parts: &Parts<'_>) -> f64 {
        let &DynamicCpOptions { world_size, num_stages, .. } = self.options;
        let constant = parts.problem.cost.micro_batch_seconds;
        let last = layout.count - 1;
        let idle = constant * (f64::from(layout.count) + self.ends[0] + self.ends[1]);
        let together = self.options.sync == Sync::MicroBatch;
        self.sums.clear();
        self.sums.resize(world_size, if together { 0.0 } else { idle });
        let mut mean = 0.0;
        for team in layout.teams() {
            let slot = parts.slots.get(team.slot);
            let seconds = team.seconds - constant;
            mean += seconds * f64::from(slot.size);
            let mut part = 1.0;
            if team.micro_batch == 0 {
                part += self.ends[0];
            }
            if team.micro_batch == last {
                part += self.ends[1];
            }
            let seconds = seconds * part;
            for sum in &mut self.sums[slot.first as usize..slot.end() as usize] {
                *sum += seconds;
            }
        }
        self.mean = (mean / world_size as f64 + constant * f64::from(layout.count)) / num_stages as f64;
        let mut most = 0.0;
        for (rank, &sum) in self.sums.iter().enumerate() {
            if sum * (1.0 - SAME) > most {
                (most, self.latest) = (sum, rank);
            }
        }
        (most / num_stages as f64 + self.hops) * self.program(layout).price
    }

    fn program(&self, layout: &Layout) -> &Program {
        let count = usize::from(layout.count);
        let found = self.programs.iter().find(|program| program.count == count);
        found.unwrap_or(&self.programs[0])
    }

    /// The exact price of a layout.
    pub(super) fn price(&mut self, layout: &Layout, parts: &Parts<'_>) -> f64 {
        let atoms = self.lay(layout, parts);
        let count = usize::from(layout.count);
        let found = self.programs.iter().find(|program| program.count == count);
        let Some(Program { steps, price, .. }) = found else { return f64::INFINITY };
        self.work += steps.len() * (atoms + 1);
        let p2p = self.options.p2p_seconds;
        self.clocks.clear();
        self.clocks.resize(self.options.num_stages * atoms, 0.0);
        self.done.resize(count * atoms, 0.0);
        for step in steps {
            let j = usize::from(step.micro_batch);
            let clocks = &mut self.clocks[usize::from(step.stage) * atoms..][..atoms];
            let done = &mut self.done[j * atoms..][..atoms];
            for span in &self.spans[self.offsets[j] as usize..self.offsets[j + 1] as usize] {
                let (first, end) = (usize::from(span.first), usize::from(span.end));
                let mut start = clocks[first];
                for &clock in &clocks[first + 1..end] {
                    start = if clock > start { clock } else { start };
                }
                if step.waits {
                    // All ranks of a group ended together.
                    let arrival = done[first] + p2p;
                    start = if arrival > start { arrival } else { start };
                }
                let ended = start + span.seconds * step.part;
                clocks[first..end].fill(ended);
                if step.is_waited_for {
                    done[first..end].fill(ended);
                }
            }
        }
        self.clocks.iter().copied().fold(0.0, f64::max) * price
    }

    /// Lists the spans of a layout, micro-batch by micro-batch. Returns the number of atoms: runs of ranks that are in
    /// the same group in every micro-batch.
    fn lay(&mut self, layout: &Layout, parts: &Parts<'_>) -> usize {
        let count = usize::from(layout.count);
        let constant = parts.problem.cost.micro_batch_seconds;
        self.spans.clear();
        self.offsets.clear();
        self.offsets.push(0);
        if self.options.sync == Sync::MicroBatch {
            for j in 0..count {
                let of = layout.teams().iter().filter(|team| usize::from(team.micro_batch) == j);
                let seconds = of.fold(constant, |slowest, team| slowest.max(team.seconds));
                self.spans.push(Span { first: 0, end: 1, seconds });
                self.offsets.push(self.spans.len() as u32);
            }
            return 1;
        }
        let mut begins = 1_u64;
        for team in layout.teams() {
            let slot = parts.slots.get(team.slot);
            begins |= 1 << slot.first;
            begins |= 1_u64.checked_shl(slot.end()).unwrap_or(0);
        }
        if self.options.world_size < MOST_RANKS {
            begins &= (1 << self.options.world_size) - 1;
        }
        let atoms = begins.count_ones() as usize;
        let atom =
            |rank: u32| if rank >= 64 { atoms as u8 } else { (begins & ((1_u64 << rank) - 1)).count_ones() as u8 };
        // The teams of each micro-batch as a linked list, since teams are not sorted by micro-batch.
        let mut next = [u8::MAX; MOST];
        let mut heads = [u8::MAX; 2 * MOST];
        for (at, team) in layout.teams().iter().enumerate() {
            let head = &mut heads[usize::from(team.micro_batch) % (2 * MOST)];
            next[at] = *head;
            *head = at as u8;
        }
        for j in 0..count {
            let mut idle = u64::MAX >> (64 - atoms);
            let mut at = heads[j % (2 * MOST)];
            while at != u8::MAX {
                let team = &layout.teams()[usize::from(at)];
                if usize::from(team.micro_batch) == j {
                    let slot = parts.slots.get(team.slot);
                    let (first, end) = (atom(slot.first), atom(slot.end()));
                    idle &= !((u64::MAX >> (64 - (end - first))) << first);
                    self.spans.push(Span { first, end, seconds: team.seconds });
                }
                at = next[usize::from(at)];
            }
            while idle != 0 {
                let first = idle.trailing_zeros() as u8;
                self.spans.push(Span { first, end: first + 1, seconds: constant });
                idle &= idle - 1;
            }
            self.offsets.push(self.spans.len() as u32);
        }
        atoms
    }
}
