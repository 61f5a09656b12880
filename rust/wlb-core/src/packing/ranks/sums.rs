//! Sums of ranks: what counts where they wait for each other once a step.

use crate::ladder::Ladder;

use super::level::{Exchange, Search, Size};
use super::shares::Shares;

/// Partners of the heaviest rank that are tried, from the lightest on.
const PARTNERS: usize = 3;
/// An exchange brings at least this part of what is wished: with less, many would be needed.
const LEAST: f64 = 0.05;

/// What two ranks exchange.
enum Swap {
    /// A micro-batch for another: places in what the ranks hold.
    MicroBatches(usize, usize),
    /// Documents between two of their micro-batches.
    Documents(Exchange),
}

/// Makes the sums of ranks equal, as far as exchanges of micro-batches and of documents do.
///
/// The heaviest rank gives to one of the lightest what comes nearest to half their difference, until all are within
/// `close` of the lightest, nothing is found, or the steps are used up.
///
/// # Arguments
/// * `ranks` - the micro-batches of each rank.
pub(super) fn level(shares: &mut Shares, ranks: &mut [Vec<usize>], close: f64, search: &mut Search) {
    let mut costs = shares.costs();
    let sum = |held: &[usize], costs: &[f64]| held.iter().map(|&j| costs[j]).sum::<f64>();
    let mut sums: Vec<f64> = ranks.iter().map(|held| sum(held, &costs)).collect();
    let mut by_sum = Ladder::new(sums.iter().copied());
    loop {
        let (heavy, light) = (by_sum.heaviest(), by_sum.lightest());
        if sums[heavy] - sums[light] <= close || search.steps == 0 {
            return;
        }
        let partners: Vec<usize> = by_sum.ascending().take(PARTNERS).filter(|&rank| rank != heavy).collect();
        let found = [Size::One, Size::Two].into_iter().find_map(|size| {
            partners.iter().find_map(|&light| {
                let aim = (sums[heavy] - sums[light]) / 2.0;
                let swap = best(shares, &costs, [&ranks[heavy], &ranks[light]], size, [aim, close / 2.0], search)?;
                Some((light, swap))
            })
        });
        let Some((light, swap)) = found else { return };
        match swap {
            Swap::MicroBatches(given, taken) => {
                let (a, b) = (ranks[heavy][given], ranks[light][taken]);
                (ranks[heavy][given], ranks[light][taken]) = (b, a);
            }
            Swap::Documents(exchange) => {
                exchange.apply(shares);
                [exchange.from, exchange.to].into_iter().for_each(|j| costs[j] = shares.cost(j));
            }
        }
        for rank in [heavy, light] {
            sums[rank] = sum(&ranks[rank], &costs);
            by_sum.set(rank, sums[rank]);
        }
    }
}

/// What moves a cost as near to `aim` as any exchange of two ranks does; the first that is within `enough` of it.
fn best(
    shares: &Shares,
    costs: &[f64],
    [heavy, light]: [&[usize]; 2],
    size: Size,
    [aim, enough]: [f64; 2],
    search: &mut Search,
) -> Option<Swap> {
    let (mut found, mut error) = (None, aim * (1.0 - LEAST));
    if !search.keeps_counts {
        search.steps = search.steps.saturating_sub(heavy.len() * light.len());
        for (given, &a) in heavy.iter().enumerate() {
            for (taken, &b) in light.iter().enumerate() {
                let off = (costs[a] - costs[b] - aim).abs();
                if off < error {
                    (found, error) = (Some(Swap::MicroBatches(given, taken)), off);
                }
            }
        }
    }
    for pair in heavy.iter().flat_map(|&from| light.iter().map(move |&to| [from, to])) {
        if error <= enough || search.steps == 0 {
            break;
        }
        if let Some(exchange) = search.find(shares, pair, size, aim, error) {
            (found, error) = (Some(Swap::Documents(exchange)), exchange.error);
        }
    }
    found
}
