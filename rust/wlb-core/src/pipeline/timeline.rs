//! The timeline of a simulated step, and the causes of its idle time.

use super::op::{Kind, Op};

/// One op and the time at which it ran.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Record {
    /// The op that ran.
    pub op: Op,
    /// Pipeline rank that ran it.
    pub rank: u32,
    /// Begin, in seconds since the step began.
    pub start: f64,
    /// End, in seconds since the step began.
    pub end: f64,
}

/// Figures of one pipeline's step.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Time from the begin of the step to the end of its last op.
    pub seconds: f64,
    /// Seconds in which each rank computes, or communicates without anything that hides it.
    pub busy: Vec<f64>,
    /// The part of `busy` that is exposed communication.
    pub exposed: Vec<f64>,
    /// Seconds from each rank's first op to the end of its last one.
    pub spans: Vec<f64>,
    /// Most activation that each rank holds at one time.
    pub peak_activation: Vec<f64>,
}

impl Summary {
    /// Seconds from one step to the next if each rank starts the next step without waiting for the others: the longest
    /// of the spans. This needs an optimizer step that validates afterwards (Qi et al. 2023, section 4).
    pub fn period(&self) -> f64 {
        self.spans.iter().copied().fold(0.0, f64::max)
    }

    /// Idle time over busy time, summed over all ranks.
    pub fn bubble_ratio(&self) -> f64 {
        let busy: f64 = self.busy.iter().sum();
        let total = self.seconds * self.busy.len() as f64;
        if busy > 0.0 { (total - busy) / busy } else { 0.0 }
    }
}

/// One pipeline's step, op by op.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// Figures of the step.
    pub summary: Summary,
    /// All ops. An op comes after the ops that it waited for, and the ops of a rank are in the order in which it ran
    /// them.
    pub records: Vec<Record>,
    pub(super) total_stages: usize,
}

impl Timeline {
    /// A chain of ops that takes the whole step: each op starts when the one before it ends (plus the latency of what
    /// it sent). Returns indices of records, ascending. The step gets shorter only if an op of this chain does.
    ///
    /// # Complexity
    /// O(ops).
    pub fn critical_path(&self) -> Vec<usize> {
        const NONE: usize = usize::MAX;
        let cells = self.records.iter().map(|record| record.op.micro_batch as usize + 1).max().unwrap_or(0);
        let mut before_on_rank = vec![NONE; self.records.len()];
        let mut last_of_rank = vec![NONE; self.summary.busy.len()];
        // Place of the forward and of the input gradient of each micro-batch and stage.
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
                // An op starts when its rank gets free (then the times are equal to the last bit), or when its input
                // arrives.
                Some(free) if free == start => Some(before),
                _ => input(op),
            };
        }
        path.reverse();
        path
    }
}

/// Sums over all ranks of one step, in seconds. Each data-parallel rank is a replica of one pipeline, and the replicas
/// wait for each other at the end of the step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTotals {
    /// Time of the step, until the slowest replica has finished.
    pub seconds: f64,
    /// Time of computing.
    pub compute: f64,
    /// Time of communication that nothing hides.
    pub exposed: f64,
    /// Idle time before the rank's own replica has finished: its pipeline's bubble.
    pub bubble: f64,
    /// Idle time after that, until the slowest replica has finished.
    pub dp_wait: f64,
}

impl StepTotals {
    /// The sums over these replicas; `compute + exposed + bubble + dp_wait` is the number of ranks times `seconds`, up
    /// to rounding.
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
