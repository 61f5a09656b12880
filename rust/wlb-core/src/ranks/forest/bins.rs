//! Micro-batches as sets of samples, with exact costs.

use super::leaves::{Leaves, Load};

/// The limits of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) tokens: i64,
    pub(super) documents: usize,
}

/// Samples of one tree that are neighbours in a micro-batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) bin: usize,
    /// The first and the last of these samples.
    first: u32,
    last: u32,
    pub(super) documents: usize,
    /// Load of these samples alone.
    pub(super) alone: Load,
    /// Load that the micro-batch loses if they leave it.
    pub(super) loss: Load,
}

impl Run {
    /// The tree of these samples.
    pub(super) fn tree(&self, bins: &Bins) -> u32 {
        bins.leaves.trees[self.first as usize]
    }
}

/// The micro-batches.
#[derive(Clone)]
pub(super) struct Bins<'a> {
    pub(super) leaves: &'a Leaves,
    pub(super) limits: Limits,
    /// Samples of each micro-batch, as indices of leaves, ascending.
    pub(super) contents: Vec<Vec<u32>>,
    pub(super) loads: Vec<Load>,
}

impl<'a> Bins<'a> {
    pub(super) fn new(leaves: &'a Leaves, limits: Limits, count: usize) -> Self {
        Self { leaves, limits, contents: vec![Vec::new(); count], loads: vec![Load::default(); count] }
    }

    /// Cost of each micro-batch.
    pub(super) fn costs(&self) -> Vec<f64> {
        self.loads.iter().map(|load| load.cost).collect()
    }

    /// Whether a micro-batch stays within the limits with this many tokens and documents more.
    #[inline]
    pub(super) fn has_room(&self, bin: usize, tokens: i64, documents: i64) -> bool {
        self.loads[bin].tokens + tokens <= self.limits.tokens
            && self.contents[bin].len() as i64 + documents <= self.limits.documents as i64
    }

    /// Adds samples, in ascending order.
    pub(super) fn put(&mut self, bin: usize, added: &[u32]) {
        let held = &mut self.contents[bin];
        let after_all = held.last().zip(added.first()).is_none_or(|(last, first)| last < first);
        held.extend_from_slice(added);
        if !after_all {
            held.sort_unstable();
        }
        self.loads[bin] = self.leaves.together(held.iter().copied());
    }

    /// Takes the samples of a run out of their micro-batch.
    pub(super) fn take(&mut self, run: &Run) -> Vec<u32> {
        let held = &mut self.contents[run.bin];
        let from = held.partition_point(|&leaf| leaf < run.first);
        let to = held.partition_point(|&leaf| leaf <= run.last);
        let taken = held.drain(from..to).collect();
        self.loads[run.bin] = self.leaves.together(held.iter().copied());
        taken
    }

    /// Moves a run to another micro-batch.
    pub(super) fn hand_over(&mut self, run: &Run, to: usize) {
        let taken = self.take(run);
        self.put(to, &taken);
    }

    /// Load that a micro-batch gains with the samples of another's run.
    pub(super) fn gain(&self, bin: usize, run: &Run) -> Load {
        let held = &self.contents[bin];
        let at = held.partition_point(|&leaf| leaf < run.first);
        let before = at.checked_sub(1).map(|at| held[at]);
        let behind = held.get(at).copied();
        let shared = |a: Option<u32>, b: Option<u32>| match (a, b) {
            (Some(a), Some(b)) => self.leaves.shared(a, b),
            _ => Load::default(),
        };
        if behind.is_some_and(|behind| behind < run.last) {
            let from = &self.contents[run.bin];
            let start = from.partition_point(|&leaf| leaf < run.first);
            let mut all: Vec<u32> = held.iter().chain(&from[start..start + run.documents]).copied().collect();
            all.sort_unstable();
            return self.leaves.together(all.into_iter()) - self.loads[bin];
        }
        run.alone - shared(before, Some(run.first)) + shared(before, behind) - shared(Some(run.last), behind)
    }

    /// Runs of one micro-batch: all of its samples of each tree; with `parted`, also the first and the last ones of
    /// each tree, in any number.
    pub(super) fn runs(&self, bin: usize, parted: bool, found: &mut Vec<Run>) {
        found.clear();
        let leaves = self.leaves;
        for held in self.contents[bin].chunk_by(|&a, &b| leaves.trees[a as usize] == leaves.trees[b as usize]) {
            let all = leaves.together(held.iter().copied());
            let (first, last) = (held[0], held[held.len() - 1]);
            let documents = held.len();
            found.push(Run { bin, first, last, documents, alone: all, loss: all });
            if !parted {
                continue;
            }
            let mut front = Load::default();
            for (at, pair) in held.windows(2).enumerate() {
                let before = at.checked_sub(1).map(|at| held[at]);
                front = front + leaves.added(before, pair[0]);
                let shared = leaves.shared(pair[0], pair[1]);
                let back = all - front + shared;
                let part = |first, last, documents, alone, loss| Run { bin, first, last, documents, alone, loss };
                found.push(part(first, pair[0], at + 1, front, front - shared));
                found.push(part(pair[1], last, documents - at - 1, back, back - shared));
            }
        }
    }
}
