//! Timeline of a simulated step, and the cause of its idle time.

use super::op::{Kind, Op};

/// One op, when it ran.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Record {
    /// The op that ran.
    pub op: Op,
    /// On which pipeline rank.
    pub rank: u32,
    /// Seconds since the step began.
    pub start: f64,
    /// Seconds since the step began.
    pub end: f64,
}

/// One pipeline's step in a few numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// When its last op ends.
    pub seconds: f64,
    /// Seconds that each rank computes, or communicates with nothing to hide it.
    pub busy: Vec<f64>,
    /// The part of `busy` that is exposed communication.
    pub exposed: Vec<f64>,
    /// Seconds from each rank's first op to the end of its last.
    pub spans: Vec<f64>,
    /// The most activation that each rank holds at a time.
    pub peak_activation: Vec<f64>,
}

impl Summary {
    /// Seconds between two steps of ranks that start on the next without waiting for each other, which takes an
    /// optimizer step that validates afterwards (Qi et al. 2023, section 4): the longest of the spans.
    pub fn period(&self) -> f64 {
        self.spans.iter().copied().fold(0.0, f64::max)
    }

    /// Idle time over busy time, of all ranks.
    pub fn bubble_ratio(&self) -> f64 {
        let busy: f64 = self.busy.iter().sum();
        let total = self.seconds * self.busy.len() as f64;
        if busy > 0.0 { (total - busy) / busy } else { 0.0 }
    }
}

/// One pipeline's step, op by op.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// The whole in a few numbers.
    pub summary: Summary,
    /// All ops; behind what they waited for, and those of a rank in the order in which it ran them.
    pub records: Vec<Record>,
    pub(super) total_stages: usize,
}

impl Timeline {
    /// Ops that, one after the other, take the whole step: each starts when the one before is done (and what it sent is
    /// there). Indices of records, ascending. Shorten one of these or gain nothing.
    ///
    /// # Complexity
    /// O(ops).
    pub fn critical_path(&self) -> Vec<usize> {
        const NONE: usize = usize::MAX;
        let cells = self.records.iter().map(|record| record.op.micro_batch as usize + 1).max().unwrap_or(0);
        let mut before_on_rank = vec![NONE; self.records.len()];
        let mut last_of_rank = vec![NONE; self.summary.busy.len()];
        // Of each micro-batch and stage, the forward and the gradient of the input.
        let mut places = [vec![NONE; cells * self.total_stages], vec![NONE; cells * self.total_stages]];
        let cell = |op: Op, stage: usize| op.micro_batch as usize * self.total_stages + stage;
        for (index, Record { op, rank, .. }) in self.records.iter().enumerate() {
            before_on_rank[index] = std::mem::replace(&mut last_of_rank[*rank as usize], index);
            if op.kind != Kind::WeightGradient {
                places[usize::from(op.kind != Kind::Forward)][cell(*op, op.stage as usize)] = index;
            }
        }
        let input = |op: Op| match op.kind {
            Kind::Forward => (op.stage as usize).checked_sub(1).map(|stage| places[0][cell(op, stage)]),
            Kind::WeightGradient => None,
            Kind::Backward | Kind::InputGradient => {
                let stage = op.stage as usize + 1;
                (stage < self.total_stages).then(|| places[1][cell(op, stage)])
            }
        };
        let ends_last = |&(_, a): &(usize, &Record), &(_, b): &(usize, &Record)| a.end.total_cmp(&b.end);
        let mut path = Vec::new();
        let mut at = self.records.iter().enumerate().max_by(ends_last).map(|(index, _)| index);
        while let Some(index) = at {
            path.push(index);
            let Record { op, start, .. } = self.records[index];
            let before = before_on_rank[index];
            at = match (before != NONE).then(|| self.records[before].end) {
                // It starts when its rank is free, to the last bit, or when its input arrives.
                Some(free) if free == start => Some(before),
                _ => input(op),
            };
        }
        path.reverse();
        path
    }
}

/// Sums of one step over all ranks, in seconds: data-parallel replicas of one pipeline, which wait for each other at
/// the end of the step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTotals {
    /// Time of the step: until the slowest replica is done.
    pub seconds: f64,
    /// Computing.
    pub compute: f64,
    /// Communicating with nothing to hide it.
    pub exposed: f64,
    /// Idle before the own replica is done: its pipeline's bubble.
    pub bubble: f64,
    /// Waiting for the slowest replica after that.
    pub dp_wait: f64,
}

impl StepTotals {
    /// `compute + exposed + bubble + dp_wait` is the number of ranks times `seconds`, up to rounding.
    pub fn new(replicas: &[Summary]) -> Self {
        let seconds = replicas.iter().map(|replica| replica.seconds).fold(0.0, f64::max);
        let mut totals = Self { seconds, ..Self::default() };
        for Summary { seconds: own, busy, exposed, .. } in replicas {
            let ranks = busy.len() as f64;
            let (busy, exposed) = (busy.iter().sum::<f64>(), exposed.iter().sum::<f64>());
            totals.compute += busy - exposed;
            totals.exposed += exposed;
            totals.bubble += ranks * own - busy;
            totals.dp_wait += ranks * (seconds - own);
        }
        totals
    }
}
