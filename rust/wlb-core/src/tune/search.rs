//! The two searches as one function.

use super::options::TuneOptions;
use super::sample::Sample;
use super::tuned::Tuned;
use super::{price, thresholds};
use crate::error::Result;

/// Runs the packer over the sample under many choices of thresholds, or with
/// [`Release::Adaptive`](crate::stream::Release::Adaptive) at many prices of delay. The search is deterministic.
///
/// # Arguments
/// * `sample` - documents in the order in which they would come, with their costs if the packer has no cost model.
/// * `options` - the packer, the mean delay that is accepted, and whether thresholds or a price are tuned.
/// * `keep_going` - called before each run of the packer; false ends the search.
///
/// # Returns
/// Thresholds: those with the least mean imbalance within the delay limit. A price: the one that loses the least time
/// on other orders of the documents, within the delay limit there and on the sample. It is the default, unless another
/// price is better by 0.01 in every order and no worse on either half, with no worse a worst step there and on the
/// sample. If the default exceeds the delay limit, the bound on the worst step holds if any price keeps it. If nothing
/// keeps the limit, the choice with the least delay. Besides, the choices that no other beats on the sample.
///
/// # Errors
/// The errors of [`PackerConfig::check`](crate::stream::PackerConfig::check);
/// [`Error::OutOfRange`](crate::Error::OutOfRange) for `num_queues` (0 to 4) and `tokens_per_batch`,
/// [`Error::Number`](crate::Error::Number) for `max_mean_delay`, and [`Error::Combination`](crate::Error::Combination)
/// for a sample without documents or without costs, documents that come early for thresholds, or several columns of
/// costs for a price; [`Error::Interrupted`](crate::Error::Interrupted) if `keep_going` said no;
/// [`Error::Cell`](crate::Error::Cell) and [`Error::Column`](crate::Error::Column) for costs.
///
/// # Example
/// ```
/// use wlb_core::stream::{Oversize, PackerConfig, Release, StepShape, StreamMethod};
/// use wlb_core::tune::{TuneOptions, tune};
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
/// let options = TuneOptions { packer, num_queues: None, max_mean_delay: 1.0, max_early: 0 };
/// let tuned = tune(&Lengths::new("lengths", &sample)?, &options, &|| true)?;
/// assert!(tuned.best.delay_mean <= 1.0 && tuned.best.delay_price.is_some());
/// # Ok::<(), wlb_core::Error>(())
/// ```
pub fn tune<'a>(sample: impl Into<Sample<'a>>, options: &TuneOptions, keep_going: &dyn Fn() -> bool) -> Result<Tuned> {
    match options.num_queues {
        Some(num_queues) => thresholds::tune_thresholds(sample.into(), num_queues, options, keep_going),
        None => price::tune_price(sample.into(), options, keep_going),
    }
}
