//! Judges prices on documents and orders on which they were not found.
//!
//! On a few tens of steps, the lost time of one price varies more from order to order than neighbouring prices differ,
//! and the best of thirty prices on the same steps is merely the luckiest. So each half of the sample judges the prices
//! found on the other, and other orders of all documents make the choice: a half has too few steps to show a mean delay
//! or a rare worst step.

use crate::error::Result;
use crate::stream::Release;

use super::reading::Reading;
use super::sample::Sample;
use super::trials::Trials;
use super::tuned::{HeldOut, TunedPoint};

/// Number of other orders of all documents that judge.
pub const ORDERS: u64 = 3;
/// Least global batches of each half: fewer steps say nothing about a price.
pub const FEWEST_BATCHES: i64 = 12;
/// Number of prices that are judged besides the default: the best ones where prices are found.
const JUDGED: usize = 8;
/// Lost time that another price must save over the default in every order: 1 % of a run. A smaller gain is not worth
/// the risk of a worst step that three orders are too few to show.
const MARGIN: f64 = 0.01;

/// A judged price.
struct Judged {
    point: TunedPoint,
    /// Lost time in each of the other orders, then on each half.
    lost_times: Vec<f64>,
    /// Worst step on the sample, in the other orders, and on each half.
    worst: Vec<f64>,
    held_out: HeldOut,
}

/// A price with its figures on the halves.
struct Found<'a> {
    point: &'a TunedPoint,
    /// Lost time and worst step on each half.
    halves: Vec<(f64, f64)>,
}

impl Found<'_> {
    /// Lost time on each half; on all documents if there are no halves.
    fn lost_times(&self) -> Vec<f64> {
        if self.halves.is_empty() {
            vec![self.point.lost_time]
        } else {
            self.halves.iter().map(|half| half.0).collect()
        }
    }
}

/// The documents on which prices are found and judged.
struct Parts {
    /// Each half finds prices, and judges the prices found on the other. Empty if documents are few: then all documents
    /// find.
    halves: Vec<Reading>,
    /// All documents in other orders.
    orders: Vec<Reading>,
}

/// Two halves of the documents, as indices in their order: documents whose hash (splitmix64 of the index) is even, and
/// odd.
pub fn halves(documents: usize) -> (Vec<usize>, Vec<usize>) {
    (0..documents).partition(|&index| hashed(index as u64).is_multiple_of(2))
}

/// All documents in another order, as indices: sorted by a hash (splitmix64 of `order * 2^32 + index`, which differs
/// for any two indices).
///
/// # Arguments
/// * `documents` - number of documents, below 2^32.
/// * `order` - number of the order, from 1 on.
pub fn reordered(documents: usize, order: u64) -> Vec<usize> {
    let mut indices: Vec<usize> = (0..documents).collect();
    indices.sort_by_cached_key(|&index| hashed((order << 32) + index as u64));
    indices
}

/// splitmix64 (Steele, Lea, Flood 2014): only integer operations, so equal on every machine.
fn hashed(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

impl Parts {
    /// The halves and orders of the whole sample.
    fn of(search: &Trials<'_>, sample: Sample<'_>) -> Result<Self> {
        let documents = sample.lengths.len();
        let read =
            |indices: &[usize]| sample.reordered(indices, |part| Reading::new(part, &search.config, search.max_early));
        let orders = (1..=ORDERS).map(|order| read(&reordered(documents, order))).collect::<Result<_>>()?;
        let (first, second) = halves(documents);
        let enough = FEWEST_BATCHES.saturating_mul(search.config.tokens_per_batch());
        let is_enough =
            |half: &[usize]| half.iter().map(|&index| i64::from(sample.lengths[index])).sum::<i64>() >= enough;
        let halves =
            if is_enough(&first) && is_enough(&second) { vec![read(&first)?, read(&second)?] } else { Vec::new() };
        Ok(Self { halves, orders })
    }

    /// Runs a price on each half.
    fn found<'a>(&self, search: &Trials<'_>, point: &'a TunedPoint) -> Result<Found<'a>> {
        let on = |half: &Reading| {
            let run = search.run(half, Vec::new(), point.delay_price)?;
            Ok((run.lost_time, run.packer.metrics().imbalance_worst()))
        };
        Ok(Found { point, halves: self.halves.iter().map(on).collect::<Result<_>>()? })
    }

    /// Sorts prices by lost time: by the worse of their two ranks on the halves.
    fn ranked<'a>(&self, search: &Trials<'_>, points: Vec<&'a TunedPoint>) -> Result<Vec<Found<'a>>> {
        let found = points.into_iter().map(|point| self.found(search, point)).collect::<Result<Vec<_>>>()?;
        let lost_times: Vec<Vec<f64>> = found.iter().map(Found::lost_times).collect();
        let rank = |lost: &Vec<f64>| {
            let before = |place: usize| lost_times.iter().filter(|other| other[place] < lost[place]).count();
            (0..lost.len()).map(before).max()
        };
        let mut ranked: Vec<_> = lost_times.iter().map(rank).zip(found).collect();
        ranked.sort_by_key(|&(rank, _)| rank);
        Ok(ranked.into_iter().map(|(_, found)| found).collect())
    }
}

/// The judged prices, the default first, and the chosen one.
///
/// The default is judged, and the best prices on both halves that keep the delay limit on the sample: at least
/// [`JUDGED`], and more until one of the judged keeps the limit on the other orders, too. Then the choice is
///
/// 1. the default, if it keeps the limit. Another price that keeps it must be better in *every* order by at least
///    [`MARGIN`], no worse on either half, and have no worse a worst step there, in the orders and on the sample;
/// 2. if the default does not keep the limit: of the prices that do, the least mean lost time over the orders, among
///    those with no worse a worst step than the default's if there are any;
/// 3. if no price keeps the limit on the other orders: the least delay there; if none keeps it on the sample: the least
///    delay on the sample.
pub(super) fn choose(search: &Trials<'_>, sample: Sample<'_>) -> Result<(Vec<TunedPoint>, TunedPoint)> {
    let parts = Parts::of(search, sample)?;
    let limit = search.max_mean_delay;
    let default_price = Release::Adaptive.default_price();
    let within = |point: &&TunedPoint| point.delay_mean <= limit && point.delay_price != default_price;
    let candidates = parts.ranked(search, search.points.iter().filter(within).collect())?;
    let mut judged = Vec::new();
    for point in search.points.iter().filter(|point| point.delay_price == default_price) {
        judged.push(judge(search, &parts, &parts.found(search, point)?)?);
    }
    let defaults = judged.len();
    let keeps = |judged: &Judged| judged.point.delay_mean <= limit && judged.held_out.delay_mean <= limit;
    for found in &candidates {
        if judged.len() - defaults >= JUDGED && judged.iter().any(keeps) {
            break;
        }
        judged.push(judge(search, &parts, found)?);
    }
    let default = judged.iter().find(|judged| judged.point.delay_price == default_price);
    let steady = |judged: &Judged| {
        default.is_none_or(|default| judged.worst.iter().zip(&default.worst).all(|(worst, default)| worst <= default))
    };
    let least = |of: &dyn Fn(&Judged) -> bool, figure: &dyn Fn(&Judged) -> f64| {
        judged.iter().filter(|judged| of(judged)).min_by(|a, b| figure(a).total_cmp(&figure(b)))
    };
    let lost_time = |judged: &Judged| judged.held_out.lost_time;
    let best = match default.filter(|default| keeps(default)) {
        Some(default) => {
            let better = |judged: &Judged| {
                let mut pairs = judged.lost_times.iter().zip(&default.lost_times).enumerate();
                let every = pairs.all(|(place, (&lost, &default))| {
                    lost <= default - if place < ORDERS as usize { MARGIN } else { 0.0 }
                });
                keeps(judged) && steady(judged) && every
            };
            least(&better, &lost_time).or(Some(default))
        }
        None => least(&|judged| keeps(judged) && steady(judged), &lost_time).or_else(|| least(&keeps, &lost_time)),
    };
    let on_sample = |judged: &Judged| judged.point.delay_mean <= limit;
    let best = best.or_else(|| least(&on_sample, &|judged| judged.held_out.delay_mean));
    let best = match best {
        Some(judged) => judged.point.clone(),
        None => search.best(|_| true).unwrap_or(&search.points[0]).clone(),
    };
    Ok((judged.into_iter().map(|judged| judged.point).collect(), best))
}

fn judge(search: &Trials<'_>, parts: &Parts, found: &Found<'_>) -> Result<Judged> {
    let point = found.point;
    let mut held_out = HeldOut { lost_time: 0.0, imbalance_worst: 1.0, delay_mean: 0.0 };
    let (mut lost_times, mut worst) = (Vec::new(), vec![point.imbalance_worst]);
    for order in &parts.orders {
        let run = search.run(order, Vec::new(), point.delay_price)?;
        let metrics = run.packer.metrics();
        lost_times.push(run.lost_time);
        held_out.imbalance_worst = held_out.imbalance_worst.max(metrics.imbalance_worst());
        held_out.delay_mean += (metrics.delay_mean() + metrics.early_mean()) / parts.orders.len() as f64;
    }
    held_out.lost_time = lost_times.iter().sum::<f64>() / parts.orders.len() as f64;
    worst.push(held_out.imbalance_worst);
    for &(lost_time, worst_step) in &found.halves {
        lost_times.push(lost_time);
        worst.push(worst_step);
    }
    Ok(Judged { point: TunedPoint { held_out: Some(held_out), ..point.clone() }, lost_times, worst, held_out })
}
