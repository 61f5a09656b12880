//! Few samples, every partition: depth-first, and no further where nothing better can come.

use super::bins::{Bins, Limits};
use super::leaves::{Leaves, Load};

/// Most samples that are few.
const FEW: usize = 16;
/// Placements that are looked at: about a millisecond.
const STEPS: usize = 1 << 15;

/// How the costs of micro-batches make a step, which stand team by team, as many in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// A team is a rank: the step is the heaviest sum.
    HeaviestSum,
    /// A team is a round: the step is the sum of the heaviest micro-batches.
    SumOfHeaviest,
}

/// Micro-batches of `teams` teams whose step is shorter than `most`, the shortest that were found; none if none was.
///
/// No micro-batch is without samples if there are samples enough.
///
/// # Complexity
/// A bounded number of placements. All partitions of 7 samples into 4 micro-batches are seen.
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
    /// Micro-batches that may stay empty.
    spare: usize,
    most: f64,
    steps: usize,
    /// The micro-batch of each sample.
    best: Option<Vec<usize>>,
}

impl Search<'_> {
    /// Places the samples from one on, each behind those of its micro-batch, which stand before it among the leaves.
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
                // Of empty micro-batches of a team, and of empty teams, one is as good as another.
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

    /// Lower bound on the step, whatever samples follow: samples only add.
    fn least(&self, held: &[Held]) -> f64 {
        let teams = held.chunks(self.of_team);
        let cost = |held: &Held| held.load.cost;
        match self.step {
            Step::HeaviestSum => teams.map(|team| team.iter().map(cost).sum()).fold(0.0, f64::max),
            Step::SumOfHeaviest => teams.map(|team| team.iter().map(cost).fold(0.0, f64::max)).sum(),
        }
    }
}
