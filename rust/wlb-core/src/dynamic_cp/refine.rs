//! Improves a plan: regroups each micro-batch so that it takes the shortest time on its ranks ([`Shares`]), reorders
//! micro-batches, and, for few documents, moves documents between micro-batches.

use super::cost::Load;
use super::first_fit::FirstFit;
use super::plan::{Draft, DraftGroup};
use super::problem::Problem;
use super::ranks::FreeRanks;

/// Least relative gain in the time of a step that counts.
const GAIN: f64 = 1e-6;

/// A draft with its micro-batches in running order, while documents move between them.
pub(super) struct Refined<'a> {
    problem: &'a Problem,
    micro_batches: Vec<Shares>,
}

impl<'a> Refined<'a> {
    /// Regroups every micro-batch of a draft; none takes longer than before, and most take less.
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

    /// Swaps micro-batches and moves documents while the step gets faster; returns its seconds.
    ///
    /// # Arguments
    /// * `step` - computes the seconds of a step from the seconds of its micro-batches.
    /// * `tries` - most micro-batches that are regrouped.
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

    /// Moves a document to the first micro-batch that makes the step faster, if any. Returns the seconds of the step.
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
            // First with lower bounds for both micro-batches, which are quick to compute.
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

    /// The draft, with its micro-batches in running order.
    pub(super) fn into_draft(self) -> Draft {
        let mut draft = Draft { offsets: vec![0], ..Draft::default() };
        for shares in self.micro_batches {
            for Share { first_rank, cp_size, seconds, documents, .. } in shares.groups {
                draft.documents.extend(documents);
                draft.groups.push(DraftGroup { first_rank, cp_size, seconds, end: draft.documents.len() as u32 });
            }
            draft.offsets.push(draft.groups.len());
        }
        draft
    }
}

fn share(problem: &Problem, draft: &Draft, group: usize) -> Share {
    let DraftGroup { first_rank, cp_size, seconds, end } = draft.groups[group];
    let start = if group == 0 { 0 } else { draft.groups[group - 1].end };
    let documents = draft.documents[start as usize..end as usize].to_vec();
    let loads = documents.iter().map(|&document| problem.documents[document as usize].load);
    let load = loads.reduce(|a, b| a + b).unwrap_or_default();
    Share { first_rank, cp_size, load, seconds, documents }
}

/// Refinement ends if even freely divisible documents would save less than this part of the time.
const CLOSE: f64 = 1.0 / 512.0;
/// Most target times that are tried for a micro-batch.
const TIMES: usize = 12;

/// The documents of one group.
#[derive(Clone, Debug)]
pub(super) struct Share {
    pub(super) first_rank: u32,
    pub(super) cp_size: u32,
    pub(super) load: Load,
    pub(super) seconds: f64,
    /// Indices in [`Problem::documents`], ascending.
    pub(super) documents: Vec<u32>,
}

/// The groups of a micro-batch, covering all ranks in order, and the seconds of the slowest.
#[derive(Clone, Debug)]
pub(super) struct Shares {
    pub(super) groups: Vec<Share>,
    pub(super) seconds: f64,
}

impl Shares {
    /// Groups of these documents (costliest first) that take about as little time as possible, less than `seconds`.
    /// `None` if none were found.
    ///
    /// Binary search between a lower bound on the time and a time that was reached: with less time, documents need more
    /// ranks.
    ///
    /// # Complexity
    /// About twelve times O(documents * log groups) for each size of the groups.
    pub(super) fn of(problem: &Problem, documents: &[u32], seconds: f64) -> Option<Self> {
        let mut least = Self::least(problem, documents);
        let (mut found, mut most) = (None, seconds);
        // The lower bound itself is reached if the longest document decides.
        let mut next = least * (1.0 + CLOSE / 2.0);
        for _ in 0..TIMES {
            if next >= most {
                break;
            }
            match Self::within(problem, documents, next) {
                Some(shares) => {
                    most = shares.seconds;
                    found = Some(shares);
                }
                None => least = next,
            }
            if most - least <= CLOSE * most {
                break;
            }
            next = if most.is_finite() { (least + most) / 2.0 } else { 2.0 * least };
        }
        found
    }

    /// A lower bound on the time of any groups of these documents.
    pub(super) fn least(problem: &Problem, documents: &[u32]) -> f64 {
        let constant = problem.cost.micro_batch_seconds;
        let load = |document: u32| &problem.documents[document as usize].load;
        // On its smallest group, a document takes the least time summed over ranks.
        let together = documents.iter().map(|&document| {
            let size = problem.smallest(load(document));
            (problem.cost.seconds(load(document), size) - constant) * size as f64
        });
        let slowest = documents.iter().map(|&document| problem.least_seconds(load(document), 1, problem.largest_group));
        slowest.fold(constant + together.sum::<f64>() / problem.world_size as f64, f64::max)
    }

    /// All documents, costliest first.
    pub(super) fn documents(&self) -> Vec<u32> {
        let mut documents: Vec<u32> = self.groups.iter().flat_map(|group| group.documents.iter().copied()).collect();
        documents.sort_unstable();
        documents
    }

    /// Groups that take at most `seconds`. Each document joins the first group with time and room for it, or opens a
    /// new one with as few ranks as possible. `None` if this needs more ranks than there are.
    fn within(problem: &Problem, documents: &[u32], seconds: f64) -> Option<Self> {
        let mut groups: Vec<Share> = Vec::new();
        let mut open = FirstFit::new(problem, seconds);
        let mut ranks = 0;
        for &document in documents {
            let load = problem.documents[document as usize].load;
            let with = |at: usize| {
                let (load, cp_size) = (groups[at].load + load, groups[at].cp_size as usize);
                let takes = problem.cost.seconds(&load, cp_size);
                (problem.fits(&load, cp_size) && takes <= seconds).then_some((at, load, takes))
            };
            if let Some((at, load, takes)) = open.first(&load, with) {
                (groups[at].load, groups[at].seconds) = (load, takes);
                groups[at].documents.push(document);
                open.set(at, &load);
                continue;
            }
            let size = problem.smallest_in_time(&load, 1, problem.largest_group, seconds)?;
            ranks += size;
            if ranks > problem.world_size {
                return None;
            }
            let takes = problem.cost.seconds(&load, size);
            open.open(&load, size);
            groups.push(Share { first_rank: 0, cp_size: size as u32, load, seconds: takes, documents: vec![document] });
        }
        Self::placed(problem, groups).filter(|shares| shares.seconds <= seconds)
    }

    /// Places groups on ranks, largest first; empty groups take the ranks that are left.
    fn placed(problem: &Problem, mut groups: Vec<Share>) -> Option<Self> {
        groups.sort_by_key(|group| std::cmp::Reverse(group.cp_size));
        let mut free = FreeRanks::new(problem.world_size, problem.node());
        for group in &mut groups {
            group.first_rank = free.take(group.cp_size as usize)? as u32;
            group.seconds = problem.cost.at(group.first_rank, &group.load, group.cp_size as usize);
        }
        let most = problem.largest_group;
        let empty = |(first, size): (usize, usize)| Share {
            first_rank: first as u32,
            cp_size: size as u32,
            load: Load::default(),
            seconds: problem.cost.micro_batch_seconds,
            documents: Vec::new(),
        };
        groups.extend(free.cut(problem.group_sizes, problem.only(), most, most).into_iter().map(empty));
        groups.sort_unstable_by_key(|group| group.first_rank);
        let seconds = groups.iter().map(|group| group.seconds).fold(0.0, f64::max);
        Some(Self { groups, seconds })
    }
}
