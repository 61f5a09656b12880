//! Rounds: the micro-batches that all ranks run at the same time.
//!
//! If ranks wait for each other in every micro-batch, a step takes the sum over rounds of the heaviest micro-batch. So
//! the micro-batches of one round should be equal, while rounds may differ: a document that costs more than the mean
//! micro-batch makes a heavy round, and the next costly documents go into the same round.

use crate::balance::Item;

/// Target cost of the micro-batches of each round, heaviest round first.
///
/// A round's target is the mean of what remains over the micro-batches that remain, or the costliest document if it
/// costs more.
pub(super) fn targets(items: &[Item], dp_size: usize, rounds: usize) -> Vec<f64> {
    let mut left: f64 = items.iter().map(|item| item.cost).sum();
    let target = |round: usize| {
        let mean = left.max(0.0) / ((rounds - round) * dp_size) as f64;
        let target = items.get(round * dp_size).map_or(mean, |item| mean.max(item.cost));
        left -= target * dp_size as f64;
        target
    };
    (0..rounds).map(target).collect()
}

/// Micro-batches in rounds, heaviest round first: `rounds[i]` has one micro-batch for each rank.
pub(crate) type Rounds = Vec<Vec<usize>>;

/// The cheapest rounds that these micro-batches can form: each takes the heaviest that remain.
///
/// # Arguments
/// * `classes` - if not empty, a class for each micro-batch: a round has one class, and each class whole rounds.
pub(crate) fn heaviest_together(costs: &[f64], classes: &[u32], dp_size: usize) -> Rounds {
    let mut order: Vec<usize> = (0..costs.len()).collect();
    sort(&mut order, costs, classes);
    heaviest_first(order.chunks(dp_size).map(<[usize]>::to_vec).collect(), costs, classes)
}

/// The cheapest rounds if every rank keeps its micro-batches: each takes the heaviest that remains of every rank.
///
/// # Arguments
/// * `classes` - if not empty, a class for each micro-batch: a round has one class, and each class as many
///   micro-batches on every rank.
pub(super) fn of_ranks(ranks: &[Vec<usize>], costs: &[f64], classes: &[u32]) -> Rounds {
    let mut ranks = ranks.to_vec();
    ranks.iter_mut().for_each(|held| sort(held, costs, classes));
    let rounds = ranks.first().map_or(0, Vec::len);
    let rows = (0..rounds).map(|round| ranks.iter().map(|held| held[round]).collect()).collect();
    heaviest_first(rows, costs, classes)
}

/// Sorts micro-batches by class, and inside a class heaviest first.
fn sort(micro_batches: &mut [usize], costs: &[f64], classes: &[u32]) {
    micro_batches.sort_by(|&a, &b| costs[b].total_cmp(&costs[a]));
    if !classes.is_empty() {
        micro_batches.sort_by_key(|&j| classes[j]);
    }
}

/// Rounds of several classes, heaviest round first.
fn heaviest_first(mut rows: Rounds, costs: &[f64], classes: &[u32]) -> Rounds {
    if !classes.is_empty() {
        let heaviest = |row: &[usize]| row.iter().map(|&j| costs[j]).fold(0.0, f64::max);
        rows.sort_by(|a, b| heaviest(b).total_cmp(&heaviest(a)));
    }
    rows
}

/// Deals the micro-batches of each round to ranks, such that the sums of ranks are level: the heaviest goes to the rank
/// with the least sum so far. Rounds with the largest differences come first.
pub(super) fn deal(rounds: &mut Rounds, costs: &[f64], dp_size: usize) {
    let spread = |round: &[usize]| {
        let most = round.iter().map(|&j| costs[j]).fold(0.0, f64::max);
        most - round.iter().map(|&j| costs[j]).fold(f64::INFINITY, f64::min)
    };
    let mut order: Vec<usize> = (0..rounds.len()).collect();
    order.sort_by(|&a, &b| spread(&rounds[b]).total_cmp(&spread(&rounds[a])));
    let mut sums = vec![0.0; dp_size];
    for round in order {
        let mut heaviest_first = rounds[round].clone();
        heaviest_first.sort_by(|&a, &b| costs[b].total_cmp(&costs[a]));
        let mut ranks: Vec<usize> = (0..dp_size).collect();
        ranks.sort_by(|&a, &b| f64::total_cmp(&sums[a], &sums[b]));
        for (rank, micro_batch) in ranks.into_iter().zip(heaviest_first) {
            sums[rank] += costs[micro_batch];
            rounds[round][rank] = micro_batch;
        }
    }
}

/// Deals rounds ([`deal`]) and lists the micro-batches of each rank, round by round.
pub(crate) fn rows_to_ranks(rounds: &mut Rounds, costs: &[f64], dp_size: usize) -> Vec<Vec<usize>> {
    deal(rounds, costs, dp_size);
    (0..dp_size).map(|rank| rounds.iter().map(|round| round[rank]).collect()).collect()
}
