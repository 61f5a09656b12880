//! A global batch that is trained whole in one step, in as few micro-batches as hold it.
//!
//! Fine-tuning and reinforcement learning have no stream to hold documents back in, and no given number of
//! micro-batches: memory decides it, and data-parallel ranks must agree on it.

use super::options::{Leftover, Method, PackOptions};
use super::pack::pack;
use super::plan::Packing;
use super::pricing::Pricing;
use crate::error::{Error, Result, check_range, saturating_i64};
use crate::lengths::Lengths;
use crate::limits::{MAX_MICRO_BATCHES, MAX_TOKENS};

/// [`pack`] into as many micro-batches as leave nothing over.
///
/// # Arguments
/// * `multiple_of` - the number of micro-batches is a multiple of it: that of the data-parallel ranks.
/// * `options` - its `num_micro_batches` and `leftover` count for nothing; its `global_batches` must be 1.
///
/// # Returns
/// What [`pack`] gives for that number; it leaves documents over with `multiple_of` fewer, or they are more tokens than
/// these may hold. Without documents, `multiple_of` empty micro-batches.
///
/// # Errors
/// As [`pack`]; [`Error::OutOfRange`] also where more than [`MAX_MICRO_BATCHES`] would be needed.
///
/// # Complexity
/// O(log n) times that of [`pack`]; once where as many do as the tokens need, and the documents longer than half of
/// `max_tokens`.
///
/// # Example
/// ```
/// use wlb_core::{CostModel, Leftover, Lengths, Mask, Method, PackOptions, pack_whole};
///
/// let lengths = Lengths::new("lengths", &[700, 600, 300, 200, 100])?;
/// let cost = CostModel::analytic(1.0, 100.0, Mask::Causal)?;
/// let (method, leftover) = (Method::VarLength, Leftover::Error);
/// let options = PackOptions { num_micro_batches: 1, max_tokens: 1000, method, global_batches: 1, leftover };
/// // Two micro-batches hold the 1,900 tokens: one for each of two data-parallel ranks, and four ranks have four.
/// assert_eq!(pack_whole(&lengths, 2, &options, &cost)?.num_micro_batches(), 2);
/// assert_eq!(pack_whole(&lengths, 4, &options, &cost)?.num_micro_batches(), 4);
/// # Ok::<(), wlb_core::Error>(())
/// ```
pub fn pack_whole<'a>(
    lengths: &Lengths,
    multiple_of: usize,
    options: &PackOptions,
    costs: impl Into<Pricing<'a>>,
) -> Result<Packing> {
    let costs = costs.into();
    check_range("multiple_of", saturating_i64(multiple_of), 1, MAX_MICRO_BATCHES as i64)?;
    check_range("max_tokens", i64::from(options.max_tokens), 1, MAX_TOKENS)?;
    if options.global_batches != 1 {
        let requirement = "other than 1 need num_micro_batches";
        return Err(Error::Combination { argument: "global_batches", requirement });
    }
    let pack_into = |multiples: usize| {
        // Too many are refused by `pack`.
        let num_micro_batches = multiples.saturating_mul(multiple_of);
        let leftover = Leftover::Return;
        pack(lengths, &PackOptions { num_micro_batches, leftover, ..options.clone() }, costs)
    };
    let held = options.max_tokens as u64 * multiple_of as u64;
    let mut least = (lengths.total() as u64).div_ceil(held).max(1) as usize;
    if !matches!(options.method, Method::Original | Method::FixedLength) {
        // No two of these fit together, and they are not cut.
        let apart = lengths.iter().filter(|&&length| length > options.max_tokens / 2).count();
        least = least.max(apart.div_ceil(multiple_of));
    }

    if let Pricing::Given(given) = costs {
        let needed =
            given.limits().iter().enumerate().filter_map(|(column, limit)| Some(given.sums()[column] / (*limit)?));
        // A rounded sum may be too much.
        let micro_batches = needed.fold(0.0, f64::max) * (1.0 - 1e-9);
        least = least.max((micro_batches / multiple_of as f64).ceil() as usize);
    }

    // `too_few` multiples leave something over. Steps double, so that a bound far too low costs few attempts.
    let (mut too_few, mut step) = (least - 1, 1);
    let (mut enough, mut best) = loop {
        let multiples = too_few + step;
        let packing = pack_into(multiples)?;
        if packing.leftover.is_empty() {
            break (multiples, packing);
        }
        // The last step is as long as there is room for.
        step = (2 * step).min((MAX_MICRO_BATCHES / multiple_of).saturating_sub(multiples)).max(1);
        too_few = multiples;
    };
    while enough - too_few > 1 {
        let middle = too_few + (enough - too_few) / 2;
        let packing = pack_into(middle)?;
        if packing.leftover.is_empty() { (enough, best) = (middle, packing) } else { too_few = middle }
    }
    Ok(best)
}
