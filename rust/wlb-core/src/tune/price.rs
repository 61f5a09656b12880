//! Tunes the price of delay of the adaptive rule.

use crate::error::{Error, Result};
use crate::stream::Release;

use super::held_out;
use super::options::TuneOptions;
use super::sample::Sample;
use super::trials::Trials;
use super::tuned::{Tuned, TunedPoint};

/// Highest and lowest price of the first, coarse search. Above the highest hardly anything waits; below the lowest
/// every document waits that could help.
const COARSE: (f64, f64) = (8.0, 0.001);
/// Ratio of neighbouring coarse prices.
const COARSE_STEP: f64 = 1.5;
/// Prices tried between the lowest that keeps the delay limit and the next lower one; each halves the gap.
const BISECTIONS: u32 = 6;

/// Tries geometrically spaced prices and the default first, then prices near the one at which the delay passes the
/// limit. One price is so high that no document waits that finds room, so there is always an answer. The best of many
/// prices on the same steps is merely the luckiest, so each half of the documents ([`halves`](super::halves)) judges
/// the prices found on the other. The prices that lose the least time on both halves (by the worse of their two ranks)
/// and the default are then judged on other orders of all documents ([`reordered`](super::reordered)). If a half has
/// less than [`FEWEST_BATCHES`](super::FEWEST_BATCHES) global batches, the prices that lose the least time on all
/// documents are judged, on the other orders alone.
///
/// # Complexity
/// One run of the packer over the sample for each of about 32 prices, another for each price within the limit, and
/// three for each price that is judged (nine or more).
pub(super) fn tune_price(sample: Sample<'_>, options: &TuneOptions, keep_going: &dyn Fn() -> bool) -> Result<Tuned> {
    if sample.costs.is_some_and(|costs| costs.columns > 1) {
        let requirement = "have several columns, and release=\"adaptive\" weighs one: tune thresholds for \
                           release=\"fifo\", or pass one column, the sum of those that take time";
        return Err(Error::Combination { argument: "costs", requirement });
    }
    let mut search = Trials::new(sample, options, keep_going)?;
    let micro_batches = search.config.num_micro_batches as f64;
    // An imbalance is at most `N`, and a waiting token costs the price divided by the tokens of a global batch.
    search.try_price(micro_batches * micro_batches * f64::from(search.config.max_document_tokens))?;
    let (highest, lowest) = COARSE;
    for price in std::iter::successors(Some(highest), |price| Some(price / COARSE_STEP)).take_while(|&p| p > lowest) {
        search.try_price(price)?;
    }
    if let Some(price) = Release::Adaptive.default_price() {
        search.try_price(price)?;
    }
    for _ in 0..BISECTIONS {
        let Some((kept, broken)) = search.crossing() else { break };
        search.try_price((kept * broken).sqrt())?;
    }
    let (judged, best) = held_out::choose(&search, sample)?;
    for point in &mut search.points {
        point.held_out =
            judged.iter().find(|judged| judged.delay_price == point.delay_price).and_then(|judged| judged.held_out);
    }
    Ok(Tuned { best, pareto: search.pareto(), judged, evaluated: search.points.len() })
}

impl Trials<'_> {
    fn try_price(&mut self, price: f64) -> Result<()> {
        // Finer prices hardly change plans, and rounded ones are easy to write.
        self.evaluate(Vec::new(), Some((price * 1e5).round() / 1e5))
    }

    /// The lowest price that keeps the delay limit, and the next lower price tried.
    fn crossing(&self) -> Option<(f64, f64)> {
        let kept = |point: &&TunedPoint| point.delay_mean <= self.max_mean_delay;
        let price = |point: &TunedPoint| point.delay_price;
        let last = self.points.iter().filter(kept).filter_map(price).min_by(f64::total_cmp)?;
        let first = self.points.iter().filter_map(price).filter(|&price| price < last).max_by(f64::total_cmp)?;
        Some((last, first))
    }
}
