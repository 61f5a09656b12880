//! Exchanges samples between micro-batches so that the heavier ones become lighter.

use crate::balance::{self, Rules, Size, exchange};

use super::bins::{Bins, Run};
use super::leaves::Load;

/// Number of partners that are tried, from the lightest on.
const PARTNERS: usize = 4;

/// Teams that wait for one another: ranks with all their micro-batches, or single micro-batches.
pub(super) struct Teams {
    pub(super) bins: Vec<Vec<usize>>,
    /// Target cost of each team.
    pub(super) targets: Vec<f64>,
}

/// Kinds of runs that may move from one micro-batch to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Parts {
    /// All samples of a tree in a micro-batch together.
    Whole,
    /// Also parts of them: the load that both parts share is then computed twice.
    Any,
}

/// Options of exchanging samples.
pub(super) struct Search {
    pub(super) parts: Parts,
    /// Difference in cost at which teams count as level.
    pub(super) close: f64,
    /// Weight of cost that is computed twice, relative to cost that the heaviest team loses.
    pub(super) price: f64,
    /// Number of exchanges that may still be tried.
    pub(super) steps: usize,
}

impl Teams {
    fn load(&self, bins: &Bins, team: usize) -> f64 {
        self.bins[team].iter().map(|&bin| bins.loads[bin].cost).sum::<f64>() - self.targets[team]
    }
}

/// Runs that two micro-batches exchange.
struct Exchange {
    given: Run,
    taken: Option<Run>,
    to: usize,
}

/// The teams of a forest's micro-batches.
struct Levelled<'a, 'b> {
    bins: &'a mut Bins<'b>,
    teams: &'a Teams,
    loads: Vec<f64>,
    search: &'a mut Search,
}

impl balance::Teams for Levelled<'_, '_> {
    type Exchange = Exchange;

    fn load(&self, team: usize) -> f64 {
        self.loads[team]
    }

    fn is_spent(&self) -> bool {
        self.search.steps == 0
    }

    fn best(&mut self, pair: [usize; 2], _: Size, least: Option<f64>) -> Option<(f64, Exchange)> {
        let loads = pair.map(|team| self.loads[team]);
        if loads[0] - loads[1] <= self.search.close {
            return None;
        }
        let least = least.unwrap_or(loads[0] - self.search.close / 2.0);
        self.search.best(self.bins, pair.map(|team| &self.teams.bins[team][..]), loads, least)
    }

    fn apply(&mut self, pair: [usize; 2], Exchange { given, taken, to }: Exchange) {
        let there = self.bins.take(&given);
        let back = taken.map(|run| self.bins.take(&run)).unwrap_or_default();
        self.bins.put(to, &there);
        self.bins.put(given.bin, &back);
        pair.into_iter().for_each(|team| self.loads[team] = self.teams.load(self.bins, team));
    }
}

impl Search {
    /// Lowers the heaviest team, then the next one that can be lowered, until all are within `close` of the lightest,
    /// no exchange is left, or the steps are used up.
    pub(super) fn level(&mut self, bins: &mut Bins, teams: &Teams) {
        let loads: Vec<f64> = (0..teams.bins.len()).map(|team| teams.load(bins, team)).collect();
        // A partner that takes half of the difference is as good as any other.
        let rules = Rules { enough: self.close, ..Rules::new(self.close, PARTNERS) };
        exchange(&mut Levelled { bins, teams, loads, search: self }, teams.bins.len(), &rules);
    }

    /// The exchange that leaves the heavier of two teams with the least load, and that load, if it is below `most`.
    fn best(
        &mut self,
        bins: &Bins,
        held: [&[usize]; 2],
        [heavy, light]: [f64; 2],
        most: f64,
    ) -> Option<(f64, Exchange)> {
        let (mut found, mut least) = (None, most);
        let parted = self.parts == Parts::Any;
        let (mut gives, mut takes, mut backs) = (Vec::new(), Vec::new(), Vec::new());
        for &from in held[0] {
            bins.runs(from, parted, &mut gives);
            for &to in held[1] {
                bins.runs(to, false, &mut takes);
                // The two runs are of different trees, so that neither changes the load that the other adds.
                backs.clear();
                backs.extend(takes.iter().map(|run| bins.gain(from, run)));
                self.steps = self.steps.saturating_sub(takes.len() + gives.len() / 8);
                for given in &gives {
                    // The lighter team gains at least what the heavier loses, unless it shares some of it already.
                    let gain = bins.gain(to, given);
                    let nothing = (None, Load::default());
                    for (taken, back) in
                        std::iter::once(nothing).chain(takes.iter().map(Some).zip(backs.iter().copied()))
                    {
                        let documents = given.documents as i64 - taken.map_or(0, |run| run.documents as i64);
                        let empties = documents as usize == bins.contents[from].len();
                        if empties || taken.is_some_and(|run| same_tree(bins, given, run)) {
                            continue;
                        }
                        let loss = taken.map_or_else(Load::default, |run| run.loss);
                        let after = [heavy - given.loss.cost + back.cost, light + gain.cost - loss.cost];
                        let more = after[0] + after[1] - heavy - light;
                        let score = after[0].max(after[1]) + self.price * more.max(0.0);
                        if score < least
                            && bins.has_room(to, gain.tokens - loss.tokens, documents)
                            && bins.has_room(from, back.tokens - given.loss.tokens, -documents)
                        {
                            least = score;
                            found = Some(Exchange { given: *given, taken: taken.copied(), to });
                        }
                    }
                }
            }
            if self.steps == 0 {
                break;
            }
        }
        Some(least).zip(found)
    }
}

fn same_tree(bins: &Bins, a: &Run, b: &Run) -> bool {
    a.tree(bins) == b.tree(bins)
}

/// Reunites parted trees: a run goes to the rest of its tree wherever no team becomes heavier than the heaviest is now.
pub(super) fn reunite(bins: &mut Bins, teams: &Teams) {
    let mut team_of = vec![0; bins.contents.len()];
    teams.bins.iter().enumerate().for_each(|(team, held)| held.iter().for_each(|&bin| team_of[bin] = team));
    let mut loads: Vec<f64> = (0..teams.bins.len()).map(|team| teams.load(bins, team)).collect();
    let most = loads.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut homes: Vec<(u32, usize)> = Vec::new();
    let mut runs = Vec::new();
    for held in &teams.bins {
        for &bin in held {
            bins.runs(bin, false, &mut runs);
            homes.extend(runs.iter().map(|run| (run.tree(bins), bin)));
        }
    }
    homes.sort_unstable();
    for homes in homes.chunk_by(|a, b| a.0 == b.0).filter(|homes| homes.len() > 1) {
        for &(tree, from) in homes {
            bins.runs(from, false, &mut runs);
            let Some(run) = runs.iter().copied().find(|run| run.tree(bins) == tree) else { continue };
            if bins.contents[from].len() == run.documents {
                continue;
            }
            let may = |to: usize| {
                let gain = bins.gain(to, &run);
                let stays = team_of[to] == team_of[from] || loads[team_of[to]] + gain.cost <= most;
                let holds = bins.contents[to].iter().any(|&leaf| bins.leaves.trees[leaf as usize] == tree);
                holds && stays && gain.tokens < run.loss.tokens && bins.has_room(to, gain.tokens, run.documents as i64)
            };
            let home = homes.iter().map(|&(_, to)| to).filter(|&to| to != from && may(to));
            if let Some(to) = home.min_by_key(|&to| (bins.gain(to, &run).tokens, to)) {
                bins.hand_over(&run, to);
                [team_of[from], team_of[to]].into_iter().for_each(|team| loads[team] = teams.load(bins, team));
            }
        }
    }
}
