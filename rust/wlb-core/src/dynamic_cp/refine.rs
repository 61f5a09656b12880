//! A plan made faster: its groups, the order of its micro-batches, and, of few documents, where each is.

use super::draft::{Draft, Group};
use super::problem::Problem;
use super::tighten::{Share, Shares};

/// A gain below this part of a step does not count.
const GAIN: f64 = 1e-6;

/// A draft whose micro-batches are in the order in which they run, while documents move between them.
pub(super) struct Refined<'a> {
    problem: &'a Problem,
    micro_batches: Vec<Shares>,
}

impl<'a> Refined<'a> {
    /// Every micro-batch of a draft in groups that take no longer, and mostly less.
    pub(super) fn new(problem: &'a Problem, draft: &Draft, order: &[usize]) -> Self {
        let mut tightened = |&j: &usize| {
            let groups: Vec<Share> =
                (draft.offsets[j]..draft.offsets[j + 1]).map(|group| share(problem, draft, group)).collect();
            let seconds = groups.iter().map(|group| group.seconds).fold(0.0, f64::max);
            let shares = Shares { groups, seconds };
            let documents = shares.documents();
            Shares::of(problem, &documents, seconds).unwrap_or(shares)
        };
        Self { problem, micro_batches: order.iter().map(&mut tightened).collect() }
    }

    /// Seconds of each micro-batch.
    pub(super) fn costs(&self) -> Vec<f64> {
        self.micro_batches.iter().map(|shares| shares.seconds).collect()
    }

    /// Lets micro-batches change places, and documents micro-batches, as long as a step gets faster; gives its seconds.
    ///
    /// # Arguments
    /// * `step` - seconds of a step with micro-batches of these seconds.
    /// * `tries` - micro-batches that are made anew, at most.
    pub(super) fn improve(&mut self, mut step: impl FnMut(&[f64]) -> f64, mut tries: usize) -> f64 {
        let mut costs = self.costs();
        let mut best = step(&costs);
        loop {
            let before = best;
            for a in 0..costs.len() {
                for b in a + 1..costs.len() {
                    if costs[a] == costs[b] {
                        continue;
                    }
                    costs.swap(a, b);
                    let seconds = step(&costs);
                    if seconds < best * (1.0 - GAIN) {
                        best = seconds;
                        self.micro_batches.swap(a, b);
                    } else {
                        costs.swap(a, b);
                    }
                }
            }
            for document in 0..self.problem.documents.len() as u32 {
                best = self.move_one(document, &mut costs, best, &mut step, &mut tries);
            }
            if tries == 0 || best >= before * (1.0 - GAIN) {
                return best;
            }
        }
    }

    /// Moves a document to the first micro-batch where the step is faster with it. The seconds of the step.
    fn move_one(
        &mut self,
        document: u32,
        costs: &mut [f64],
        best: f64,
        step: &mut impl FnMut(&[f64]) -> f64,
        tries: &mut usize,
    ) -> f64 {
        let holds = |shares: &Shares| shares.groups.iter().any(|group| group.documents.contains(&document));
        let Some(from) = self.micro_batches.iter().position(holds) else { return best };
        let mut rest = self.micro_batches[from].documents();
        rest.retain(|&other| other != document);
        let without = Shares::least(self.problem, &rest);
        let mut left: Option<Shares> = None;
        for to in (0..costs.len()).filter(|&to| to != from) {
            let mut joined = self.micro_batches[to].documents();
            let place = joined.partition_point(|&other| other < document);
            joined.insert(place, document);
            let now = (costs[from], costs[to]);
            // Even if both were done as soon as can be.
            (costs[from], costs[to]) = (without, Shares::least(self.problem, &joined));
            if step(costs) < best * (1.0 - GAIN) && *tries > 0 {
                *tries -= 1;
                if left.is_none() {
                    left = Shares::of(self.problem, &rest, f64::INFINITY);
                }
                if let (Some(left), Some(joined)) = (&left, Shares::of(self.problem, &joined, f64::INFINITY)) {
                    (costs[from], costs[to]) = (left.seconds, joined.seconds);
                    let seconds = step(costs);
                    if seconds < best * (1.0 - GAIN) {
                        self.micro_batches[from] = left.clone();
                        self.micro_batches[to] = joined;
                        return seconds;
                    }
                }
            }
            (costs[from], costs[to]) = now;
        }
        best
    }

    /// The draft; its micro-batches are in the order in which they run.
    pub(super) fn into_draft(self) -> Draft {
        let mut draft = Draft { offsets: vec![0], ..Draft::default() };
        for shares in self.micro_batches {
            for Share { first_rank, cp_size, seconds, documents, .. } in shares.groups {
                draft.documents.extend(documents);
                draft.groups.push(Group { first_rank, cp_size, seconds, end: draft.documents.len() as u32 });
            }
            draft.offsets.push(draft.groups.len());
        }
        draft
    }
}

fn share(problem: &Problem, draft: &Draft, group: usize) -> Share {
    let Group { first_rank, cp_size, seconds, end } = draft.groups[group];
    let start = if group == 0 { 0 } else { draft.groups[group - 1].end };
    let documents = draft.documents[start as usize..end as usize].to_vec();
    let loads = documents.iter().map(|&document| problem.documents[document as usize].load);
    let load = loads.reduce(|a, b| a + b).unwrap_or_default();
    Share { first_rank, cp_size, load, seconds, documents }
}
