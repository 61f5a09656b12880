//! Levels the sums of ranks, which are the step if ranks wait for each other once a step.

use std::collections::BTreeSet;

use crate::balance::{Bins, Exchange, Leveller, Rules, Size, Teams, exchange};

/// Number of partners of the heaviest rank that are tried, from the lightest on.
const PARTNERS: usize = 3;
/// Least part of the aim that an exchange must move; with less, too many exchanges would be needed.
const LEAST: f64 = 0.05;

/// An exchange between two ranks.
enum Swap {
    /// A micro-batch for another, as indices in the ranks' lists.
    MicroBatches(usize, usize),
    /// Documents between a micro-batch of one rank and a micro-batch of the other.
    Documents(Exchange),
}

/// Levels the sums of ranks by exchanges of micro-batches and of documents.
///
/// The heaviest rank exchanges with one of the lightest, so that the moved cost is nearest to half their difference.
/// This ends when all ranks are within `close` of the lightest, nothing is found, or the steps are used up.
///
/// # Arguments
/// * `ranks` - the micro-batches of each rank.
/// * `in_classes` - whether ranks keep their number of micro-batches of each class.
pub(super) fn level(bins: &mut Bins, ranks: &mut [Vec<usize>], close: f64, in_classes: bool, search: &mut Leveller) {
    let costs = bins.costs();
    let sums = ranks.iter().map(|held| sum(held, &costs)).collect();
    let rules = Rules { sizes: &[Size::One, Size::Two], sets_aside: false, ..Rules::new(close, PARTNERS) };
    let count = ranks.len();
    exchange(&mut Sums { bins, ranks, costs, sums, close, in_classes, search }, count, &rules);
}

/// Ranks as teams.
struct Sums<'a, 'b> {
    bins: &'a mut Bins<'b>,
    /// The micro-batches of each rank.
    ranks: &'a mut [Vec<usize>],
    /// Cost of each micro-batch.
    costs: Vec<f64>,
    /// Sum of each rank.
    sums: Vec<f64>,
    close: f64,
    /// Whether ranks keep their number of micro-batches of each class.
    in_classes: bool,
    search: &'a mut Leveller,
}

impl Teams for Sums<'_, '_> {
    type Exchange = Swap;

    fn load(&self, rank: usize) -> f64 {
        self.sums[rank]
    }

    fn is_spent(&self) -> bool {
        self.search.steps == 0
    }

    fn best(&mut self, [heavy, light]: [usize; 2], size: Size, _: Option<f64>) -> Option<(f64, Swap)> {
        let aim = (self.sums[heavy] - self.sums[light]) / 2.0;
        let held = [&self.ranks[heavy][..], &self.ranks[light]];
        let aims = [aim, self.close / 2.0];
        let (error, swap) = best(self.bins, &self.costs, held, size, aims, self.in_classes, self.search)?;
        Some((self.sums[light] + aim + error, swap))
    }

    fn apply(&mut self, [heavy, light]: [usize; 2], swap: Swap) {
        match swap {
            Swap::MicroBatches(given, taken) => {
                let (a, b) = (self.ranks[heavy][given], self.ranks[light][taken]);
                (self.ranks[heavy][given], self.ranks[light][taken]) = (b, a);
            }
            Swap::Documents(exchange) => {
                exchange.apply(self.bins);
                [exchange.from, exchange.to].into_iter().for_each(|j| self.costs[j] = self.bins.cost(j));
            }
        }
        [heavy, light].into_iter().for_each(|rank| self.sums[rank] = sum(&self.ranks[rank], &self.costs));
    }
}

fn sum(held: &[usize], costs: &[f64]) -> f64 {
    held.iter().map(|&j| costs[j]).sum()
}

/// The exchange of two ranks that moves a cost closest to `aim`, and by how much it misses `aim`; the first exchange
/// found that is within `enough` of it.
fn best(
    bins: &Bins,
    costs: &[f64],
    [heavy, light]: [&[usize]; 2],
    size: Size,
    [aim, enough]: [f64; 2],
    in_classes: bool,
    search: &mut Leveller,
) -> Option<(f64, Swap)> {
    let (mut found, mut error) = (None, aim * (1.0 - LEAST));
    if !search.keeps_counts {
        search.steps = search.steps.saturating_sub(heavy.len() * light.len());
        let class = |j: usize| if in_classes { bins.classes[j] } else { 0 };
        let classes: BTreeSet<u32> = heavy.iter().map(|&j| class(j)).collect();
        for one in classes {
            let places = |held: &[usize]| (0..held.len()).filter(|&at| class(held[at]) == one).collect::<Vec<usize>>();
            let (gives, takes) = (places(heavy), places(light));
            let of = |held: &[usize], at: &[usize]| at.iter().map(|&at| costs[held[at]]).collect::<Vec<f64>>();
            if let Some((given, taken, off)) = nearest(&of(heavy, &gives), &of(light, &takes), aim, error) {
                (found, error) = (Some(Swap::MicroBatches(gives[given], takes[taken])), off);
            }
        }
    }
    for pair in heavy.iter().flat_map(|&from| light.iter().map(move |&to| [from, to])) {
        if error <= enough || search.steps == 0 {
            break;
        }
        if let Some(exchange) = search.find(bins, pair, size, aim, error) {
            (found, error) = (Some(Swap::Documents(exchange)), exchange.error);
        }
    }
    Some(error).zip(found)
}

/// The pair of costs, one of each rank, whose difference is closest to `aim` and closer than `error` (the first such
/// pair), and its distance.
///
/// # Complexity
/// O(n log n); more only if costs differ so little that their differences round to the same number.
fn nearest(heavy: &[f64], light: &[f64], aim: f64, error: f64) -> Option<(usize, usize, f64)> {
    // If costs are equal, only the first is tried. Adding zero turns -0.0 into 0.0.
    let mut offers: Vec<(f64, usize)> = light.iter().zip(0..).map(|(&cost, taken)| (cost + 0.0, taken)).collect();
    offers.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    offers.dedup_by_key(|&mut (cost, _)| cost);
    let (mut found, mut error) = (None, error);
    for (given, &cost) in heavy.iter().enumerate() {
        // Taking more moves less, also after rounding: the nearest offers are on both sides of the place where this
        // passes `aim`.
        let moved = |&(taken, _): &(f64, usize)| cost - taken - aim;
        let (more, less) = offers.split_at(offers.partition_point(|offer| moved(offer) > 0.0));
        let off =
            more.last().into_iter().chain(less.first()).map(|offer| moved(offer).abs()).fold(f64::INFINITY, f64::min);
        if off < error {
            let alike = |offer: &&(f64, usize)| moved(offer).abs() == off;
            let nearest = more.iter().rev().take_while(alike).chain(less.iter().take_while(alike));
            (found, error) = (nearest.map(|&(_, taken)| (given, taken, off)).min_by_key(|&(_, taken, _)| taken), off);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::nearest;

    /// Few distinct numbers, so that many are equal; some so small beside others that differences round.
    fn costs() -> impl Strategy<Value = Vec<f64>> {
        let cost =
            prop_oneof![(0..12).prop_map(f64::from), (0..9).prop_map(|k| f64::from(k) * 1e-17), 0.0..12.0, Just(-0.0)];
        proptest::collection::vec(cost, 1..12)
    }

    proptest! {
        #[test]
        fn the_nearest_pair_is_the_one_that_looking_at_all_finds(
            heavy in costs(), light in costs(), aim in prop_oneof![0.0..6.0, (0..6).prop_map(f64::from)], part in 0.1..1.5,
        ) {
            let below = aim * part;
            let (mut found, mut error) = (None, below);
            for (given, &a) in heavy.iter().enumerate() {
                for (taken, &b) in light.iter().enumerate() {
                    let off = f64::abs(a - b - aim);
                    if off < error {
                        (found, error) = (Some((given, taken, off)), off);
                    }
                }
            }
            prop_assert_eq!(nearest(&heavy, &light, aim, below), found);
        }
    }
}
