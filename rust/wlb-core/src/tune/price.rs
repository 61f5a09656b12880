//! The price of delay of the adaptive release.

use crate::error::{Error, Result};
use crate::stream::Release;

use super::held_out;
use super::options::TuneOptions;
use super::sample::Sample;
use super::trials::Trials;
use super::tuned::{Tuned, TunedPoint};

/// Highest and lowest price of the first, coarse search. Above it hardly anything waits; below, everything that could
/// help.
const COARSE: (f64, f64) = (8.0, 0.001);
/// Ratio of neighbouring coarse prices.
const COARSE_STEP: f64 = 1.5;
/// Prices tried between the last that keeps the delay limit and the first that does not; each halves the way.
const BISECTIONS: u32 = 6;

/// Runs the packer with [`Release::Adaptive`](crate::stream::Release::Adaptive) over the sample at many prices
/// of delay.
///
/// First geometrically spaced ones and the default, then some where the delay passes the limit. Deterministic. A price
/// at which nothing waits that finds room is always among them, so that there is always an answer. The best of so many
/// on the same steps is the luckiest, so each half of the documents ([`halves`](super::halves)) judges what the other
/// finds: those that lose the least time on both, by the worse of their two ranks, are judged on both, and on other
/// orders of all documents ([`reordered`](super::reordered)), with the default beside them. Where a half has less than
/// twelve global batches ([`FEWEST_BATCHES`](super::FEWEST_BATCHES)), those that lose the least time on all documents
/// are judged on the other orders alone.
///
/// # Arguments
/// * `sample` - documents in the order in which they would come, with their costs where the packer has no cost model.
/// * `options` - the packer, and the mean delay that is accepted.
/// * `keep_going` - asked before each run of the packer; false ends the search.
///
/// # Returns
/// The price that loses the least time on the other orders, within the delay limit there and on the sample: the default
/// unless another is better by 0.01 in every order and no worse on either half, with a worst step that is no worse
/// there and on the sample. Where the default waits too long, the bound on the worst step holds if any price keeps it.
/// The least delay, if no price keeps the limit. And the choices that no other beats on the sample.
///
/// # Errors
/// As [`tune_outlier_thresholds`](super::tune_outlier_thresholds); [`Error::Combination`] for several columns of costs.
///
/// # Complexity
/// One run of the packer over the sample per price, about 32, another for those within the limit, and three for each
/// that is judged: nine, or more.
///
/// # Example
/// ```
/// use wlb_core::stream::{Oversize, PackerConfig, Release, StepShape, StreamMethod};
/// use wlb_core::tune::{TuneOptions, tune_delay_price};
/// use wlb_core::{CostModel, Lengths, Mask};
///
/// let packer = PackerConfig {
///     num_micro_batches: 2,
///     max_tokens: 1200,
///     max_document_tokens: 1000,
///     oversize: Oversize::Error,
///     outlier_thresholds: Vec::new(),
///     release: Release::Adaptive,
///     delay_price: None,
///     max_delay: Some(8),
///     method: StreamMethod::VarLength,
///     cost_model: Some(CostModel::analytic(1.0, 100.0, Mask::Causal)?),
///     limits: None,
///     shape: StepShape::default(),
/// };
/// let sample: Vec<i64> = (0..40).map(|i| [1000, 300, 200, 100][i % 4]).collect();
/// let options = TuneOptions { packer, max_mean_delay: 1.0, max_early: 0 };
/// let tuned = tune_delay_price(&Lengths::new("lengths", &sample)?, &options, &|| true)?;
/// assert!(tuned.best.delay_mean <= 1.0 && tuned.best.delay_price.is_some());
/// # Ok::<(), wlb_core::Error>(())
/// ```
pub fn tune_delay_price<'a>(
    sample: impl Into<Sample<'a>>,
    options: &TuneOptions,
    keep_going: &dyn Fn() -> bool,
) -> Result<Tuned> {
    let sample = sample.into();
    if sample.costs.is_some_and(|costs| costs.columns > 1) {
        let requirement = "have several columns, and release=\"adaptive\" weighs one: tune thresholds for \
                           release=\"fifo\", or pass one column, the sum of those that take time";
        return Err(Error::Combination { argument: "costs", requirement });
    }
    let mut search = Trials::new(sample, options, keep_going)?;
    let micro_batches = search.config.num_micro_batches as f64;
    // An imbalance is at most `N`, and a token that waits costs the price over the tokens of a global batch.
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
        // Finer prices give hardly other plans, and nobody wants to write them.
        self.evaluate(Vec::new(), Some((price * 1e5).round() / 1e5))
    }

    /// The lowest price that keeps the delay limit, and the next one below.
    fn crossing(&self) -> Option<(f64, f64)> {
        let kept = |point: &&TunedPoint| point.delay_mean <= self.max_mean_delay;
        let price = |point: &TunedPoint| point.delay_price;
        let last = self.points.iter().filter(kept).filter_map(price).min_by(f64::total_cmp)?;
        let first = self.points.iter().filter_map(price).filter(|&price| price < last).max_by(f64::total_cmp)?;
        Some((last, first))
    }
}
