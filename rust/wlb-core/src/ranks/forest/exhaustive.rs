//! Few samples: tries all partitions, depth-first, and stops where no improvement is possible.

use super::bins::{Bins, Limits};
use super::leaves::{Leaves, Load};

/// Most samples for which partitions are tried.
const FEW: usize = 16;
/// Most placements that are tried: about a millisecond.
const STEPS: usize = 1 << 15;

/// How the costs of micro-batches, listed team by team, make the cost of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// A team is a rank: the step is the heaviest sum.
    HeaviestSum,
    /// A team is a round: the step is the sum of the heaviest micro-batches of all rounds.
    SumOfHeaviest,
}

/// The shortest step found that is shorter than `most`, as micro-batches of `teams` teams; `None` if none was found.
///
/// No micro-batch is empty if there are enough samples.
///
/// # Complexity
/// A bounded number of placements. All partitions of 7 samples into 4 micro-batches are tried.
pub(super) fn shorter<'a>(
    leaves: &'a Leaves,
    limits: Limits,
    [teams, of_team]: [usize; 2],
    step: Step,
    most: f64,
) -> Option<Bins<'a>> {
    let bins = teams * of_team;
    if leaves.len() > FEW || bins > FEW {
        return None;
    }
    let spare = bins.saturating_sub(leaves.len());
    let mut search = Search { leaves, limits, of_team, step, spare, most, steps: STEPS, best: None };
    search.place(0, &mut vec![Held::default(); bins], &mut Vec::with_capacity(leaves.len()));
    let mut found = Bins::new(leaves, limits, bins);
    for (leaf, bin) in search.best?.into_iter().enumerate() {
        found.put(bin, &[leaf as u32]);
    }
    Some(found)
}

/// Load of a micro-batch so far.
#[derive(Clone, Copy, Default)]
struct Held {
    load: Load,
    samples: usize,
    last: u32,
}

struct Search<'a> {
    leaves: &'a Leaves,
    limits: Limits,
    of_team: usize,
    step: Step,
    /// Number of micro-batches that may stay empty.
    spare: usize,
    most: f64,
    steps: usize,
    /// The micro-batch of each sample in the best partition so far.
    best: Option<Vec<usize>>,
}

impl Search<'_> {
    /// Places the samples from `leaf` on. Each comes after the earlier samples of its micro-batch in the order of
    /// leaves.
    fn place(&mut self, leaf: usize, held: &mut [Held], placed: &mut Vec<usize>) {
        if leaf == self.leaves.len() {
            self.most = self.least(held);
            self.best = Some(placed.clone());
            return;
        }
        let empty = held.iter().filter(|held| held.samples == 0).count();
        let must_open = self.leaves.len() - leaf <= empty.saturating_sub(self.spare);
        let mut new_team = true;
        for bin in 0..held.len() {
            let before = held[bin];
            if before.samples == 0 {
                // All empty micro-batches of a team are alike, and so are all empty teams: only the first is tried.
                let team = &held[bin / self.of_team * self.of_team..][..self.of_team];
                let is_new = team.iter().all(|held| held.samples == 0);
                let is_next = bin % self.of_team == 0 || held[bin - 1].samples > 0;
                if !is_next || (is_new && !std::mem::replace(&mut new_team, false)) {
                    continue;
                }
            } else if must_open {
                continue;
            }
            if self.steps == 0 {
                return;
            }
            self.steps -= 1;
            let last = (before.samples > 0).then_some(before.last);
            let load = before.load + self.leaves.added(last, leaf as u32);
            let samples = before.samples + 1;
            if load.tokens > self.limits.tokens || samples > self.limits.documents {
                continue;
            }
            held[bin] = Held { load, samples, last: leaf as u32 };
            if self.least(held) < self.most {
                placed.push(bin);
                self.place(leaf + 1, held, placed);
                placed.pop();
            }
            held[bin] = before;
        }
    }

    /// A lower bound on the step, whatever samples follow, since samples only add cost.
    fn least(&self, held: &[Held]) -> f64 {
        let teams = held.chunks(self.of_team);
        let cost = |held: &Held| held.load.cost;
        match self.step {
            Step::HeaviestSum => teams.map(|team| team.iter().map(cost).sum()).fold(0.0, f64::max),
            Step::SumOfHeaviest => teams.map(|team| team.iter().map(cost).fold(0.0, f64::max)).sum(),
        }
    }
}
