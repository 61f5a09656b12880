//! What activations take: tokens that a rank has under way.

use crate::error::Result;
use crate::pipeline::Pipeline;

use super::options::DynamicCpOptions;

/// Whether so many micro-batches may have more under way than memory was planned for: where an interleaved pipeline has
/// them in larger rounds than of one for each stage. What somebody asks for is taken as it is.
pub(super) fn limits_rounds(options: &DynamicCpOptions, num_micro_batches: usize) -> bool {
    let num_stages = options.num_stages;
    let whole = num_micro_batches <= num_stages || num_micro_batches.is_multiple_of(num_stages);
    options.is_interleaved() && !whole && options.num_micro_batches.is_none()
}

/// Whether no rank has more tokens under way than rounds of `num_stages` full micro-batches may have, which memory was
/// planned for.
///
/// An interleaved pipeline holds a round for each of its virtual stages but one, and what 1F1B holds twice. So larger
/// rounds hold more micro-batches, unless these are small enough.
///
/// # Arguments
/// * `fullest` - gives the tokens of each micro-batch on its fullest rank, as they run; asked where it matters.
pub(super) fn fits<I: Iterator<Item = i64>>(
    options: &DynamicCpOptions,
    pipeline: &Pipeline,
    num_micro_batches: usize,
    fullest: impl FnOnce() -> I,
) -> Result<bool> {
    if !limits_rounds(options, num_micro_batches) {
        return Ok(true);
    }
    let &DynamicCpOptions { num_stages, num_virtual_stages, max_tokens_per_rank, .. } = options;
    let passes = (num_virtual_stages + 1) * num_stages - 1;
    let most = passes as f64 * f64::from(max_tokens_per_rank) / num_virtual_stages as f64;
    Ok(under_way(pipeline, fullest())? <= most)
}

/// The most tokens that a rank has under way, each micro-batch as its `fullest`.
pub(super) fn under_way(pipeline: &Pipeline, fullest: impl Iterator<Item = i64>) -> Result<f64> {
    let tokens: Vec<f64> = fullest.map(|tokens| tokens as f64).collect();
    Ok(pipeline.peak_activation(Some(&tokens))?.into_iter().fold(0.0, f64::max))
}
