//! Prices judged on documents and orders that they were not found on.
//!
//! On a few tens of steps the lost time of a price varies from order to order by more than neighbouring prices differ,
//! and the best of thirty prices on the same steps is the luckiest. So each half of the sample judges what the other
//! finds, and other orders of all documents choose: a half has too few steps to show a mean delay or a rare worst step.

use crate::error::Result;
use crate::stream::Release;

use super::reading::Reading;
use super::sample::Sample;
use super::trials::Trials;
use super::tuned::{HeldOut, TunedPoint};

/// Other orders of all documents that judge.
pub const ORDERS: u64 = 3;
/// Global batches that each half has at least: fewer steps say nothing of a price.
pub const FEWEST_BATCHES: i64 = 12;
/// Prices judged, the best where prices are found; and the default.
const JUDGED: usize = 8;
/// Lost time that another price has to save over the default's in every order: 1 % of a run. Less is not worth a worst
/// step that three orders are too few to show.
const MARGIN: f64 = 0.01;

/// A judged price.
struct Judged {
    point: TunedPoint,
    /// In each of the other orders, and on each half.
    lost_times: Vec<f64>,
    /// Worst steps of the same, and of the sample.
    worst: Vec<f64>,
    held_out: HeldOut,
}

/// A price where prices are found.
struct Found<'a> {
    point: &'a TunedPoint,
    /// Lost time and worst step on each half.
    halves: Vec<(f64, f64)>,
}

impl Found<'_> {
    /// On each half; on all documents where there are no halves.
    fn lost_times(&self) -> Vec<f64> {
        if self.halves.is_empty() {
            vec![self.point.lost_time]
        } else {
            self.halves.iter().map(|half| half.0).collect()
        }
    }
}

/// Documents on which prices are found, and documents on which they are judged.
struct Parts {
    /// Each half finds, and judges what the other finds; none of few documents, where the whole sample finds.
    halves: Vec<Reading>,
    /// All documents.
    orders: Vec<Reading>,
}

/// Two halves of the documents, by their indices, each in their order: those whose hash (splitmix64 of where they
/// stand) is even, and odd.
pub fn halves(documents: usize) -> (Vec<usize>, Vec<usize>) {
    (0..documents).partition(|&index| hashed(index as u64).is_multiple_of(2))
}

/// Documents in another order, by their indices: by a hash of where they stand (splitmix64 of `order * 2^32 + index`,
/// which gives no two indices the same).
///
/// # Arguments
/// * `documents` - how many there are, less than 2^32.
/// * `order` - which one, from 1 on.
pub fn reordered(documents: usize, order: u64) -> Vec<usize> {
    let mut indices: Vec<usize> = (0..documents).collect();
    indices.sort_by_cached_key(|&index| hashed((order << 32) + index as u64));
    indices
}

/// splitmix64 (Steele, Lea, Flood 2014): integers only, so the same everywhere.
fn hashed(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

impl Parts {
    /// Parts of the whole sample.
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

    /// A price on each half.
    fn found<'a>(&self, search: &Trials<'_>, point: &'a TunedPoint) -> Result<Found<'a>> {
        let on = |half: &Reading| {
            let run = search.run(half, Vec::new(), point.delay_price)?;
            Ok((run.lost_time, run.packer.metrics().imbalance_worst()))
        };
        Ok(Found { point, halves: self.halves.iter().map(on).collect::<Result<_>>()? })
    }

    /// Prices by the worse of their ranks where prices are found, by lost time.
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

/// The judged prices, the default's first, and the chosen one.
///
/// Judged are the default and, of the prices that keep the delay limit on the sample, those that are among the best on
/// each half, as many as it takes until one keeps the limit on the other orders, too. The choice is
///
/// 1. the default, where it keeps the limit and no other that does is better in *every* order by at least [`MARGIN`]
///    and no worse on either half, with a worst step that is no worse, there and on the sample;
/// 2. else the least mean lost time of the orders within the limit, of those with such a worst step if there are any;
/// 3. where none keeps the limit on the other orders, the least delay there; where none does on the sample, the least
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
