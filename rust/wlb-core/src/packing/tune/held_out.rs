//! Prices judged on orders of the sample that they were not found on.
//!
//! On a few tens of steps the lost time of a price varies from order to order by more than neighbouring prices differ,
//! and the best of thirty prices on one order is the luckiest. So the sample finds candidates, and other orders choose.

use crate::error::Result;
use crate::packing::stream::Release;

use super::reading::Reading;
use super::sample::Sample;
use super::search::Search;
use super::tuned::{HeldOut, TunedPoint};

/// Orders that judge.
pub const ORDERS: u64 = 3;
/// Prices judged, those with the least lost time on the sample; and the default.
const JUDGED: usize = 8;
/// Lost time that another price has to save over the default's in every order: 1 % of a run. Less is not worth a worst
/// step that three orders are too few to show.
const MARGIN: f64 = 0.01;

/// A judged price, by order.
struct Judged {
    point: TunedPoint,
    lost_times: Vec<f64>,
    held_out: HeldOut,
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

/// The judged prices, the default's first, and the chosen one.
///
/// Judged are the default and, of the prices that keep the delay limit on the sample, those with the least lost time
/// there, as many as it takes until one keeps the limit on the other orders, too. The choice is
///
/// 1. the default, where it keeps the limit and no other that does is better in *every* order by at least [`MARGIN`],
///    with a worst step that is no worse;
/// 2. else the least mean lost time within the limit, of those with such a worst step if there are any;
/// 3. where none keeps the limit on the other orders, the least delay there; where none does on the sample, the least
///    delay on the sample.
pub(super) fn choose(search: &Search, sample: Sample<'_>) -> Result<(Vec<TunedPoint>, TunedPoint)> {
    let orders = (1..=ORDERS)
        .map(|order| {
            let order = reordered(sample.lengths.len(), order);
            sample.reordered(&order, |other| Reading::new(other, &search.config, search.max_early))
        })
        .collect::<Result<Vec<Reading>>>()?;
    let limit = search.max_mean_delay;
    let default_price = Release::Adaptive.default_price();
    let mut candidates: Vec<&TunedPoint> =
        search.points.iter().filter(|point| point.delay_mean <= limit && point.delay_price != default_price).collect();
    candidates.sort_by(|a, b| a.lost_time.total_cmp(&b.lost_time));
    let mut judged = Vec::new();
    for point in search.points.iter().filter(|point| point.delay_price == default_price) {
        judged.push(judge(search, &orders, point)?);
    }
    let defaults = judged.len();
    let keeps = |judged: &Judged| judged.point.delay_mean <= limit && judged.held_out.delay_mean <= limit;
    for point in candidates {
        if judged.len() - defaults >= JUDGED && judged.iter().any(keeps) {
            break;
        }
        judged.push(judge(search, &orders, point)?);
    }
    let default = judged.iter().find(|judged| judged.point.delay_price == default_price);
    let steady = |judged: &Judged| {
        default.is_none_or(|default| judged.held_out.imbalance_worst <= default.held_out.imbalance_worst)
    };
    let least = |of: &dyn Fn(&Judged) -> bool, figure: &dyn Fn(&Judged) -> f64| {
        judged.iter().filter(|judged| of(judged)).min_by(|a, b| figure(a).total_cmp(&figure(b)))
    };
    let lost_time = |judged: &Judged| judged.held_out.lost_time;
    let best = match default.filter(|default| keeps(default)) {
        Some(default) => {
            let better = |judged: &Judged| {
                let every =
                    judged.lost_times.iter().zip(&default.lost_times).all(|(&lost, &default)| lost <= default - MARGIN);
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

fn judge(search: &Search, orders: &[Reading], point: &TunedPoint) -> Result<Judged> {
    let mut held_out = HeldOut { lost_time: 0.0, imbalance_worst: 1.0, delay_mean: 0.0 };
    let mut lost_times = Vec::with_capacity(orders.len());
    for order in orders {
        let run = order.through(search.packer(Vec::new(), point.delay_price)?)?;
        let metrics = run.packer.metrics();
        lost_times.push(run.lost_time);
        held_out.imbalance_worst = held_out.imbalance_worst.max(metrics.imbalance_worst());
        held_out.delay_mean += (metrics.delay_mean() + metrics.early_mean()) / orders.len() as f64;
    }
    held_out.lost_time = lost_times.iter().sum::<f64>() / orders.len() as f64;
    Ok(Judged { point: TunedPoint { held_out: Some(held_out), ..point.clone() }, lost_times, held_out })
}
