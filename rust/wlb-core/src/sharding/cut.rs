//! Cuts one micro-batch by the strategy of the options.

use crate::error::{Result, check_range};
use crate::lengths::Lengths;
use crate::limits::MAX_TOKENS;

use super::builder::Builder;
use super::options::{ShardOptions, Strategy, check_imbalance, check_size, wrong};
use super::shard::Shard;
use super::{auto, hybrid, per_document, per_sequence};

/// Cuts one micro-batch for the ranks of a context-parallel group, without padding.
///
/// Ranks differ by at most one token, whatever the lengths.
///
/// # Arguments
/// * `lengths` - documents of the micro-batch, in packed order.
/// * `options` - how to cut; choices of a kernel model must be filled in ([`ShardOptions::resolve`]).
///
/// # Returns
/// The segments of every rank.
///
/// # Errors
/// [`crate::Error::OutOfRange`] for `cp_size` and `hybrid_threshold`, [`crate::Error::Number`] for `max_imbalance`,
/// [`crate::Error::TotalTooLong`] when the tokens exceed int32, [`crate::Error::Combination`] for an option that the
/// strategy does not take.
/// # Complexity
/// O(n (log n + cp_size)) for `n` documents; [`Strategy::Auto`] O(n cp_size log cp_size) for each of at most 65
/// attempts.
///
/// # Example
/// ```
/// use wlb_core::{Lengths, Mask, ShardOptions, Strategy, shard};
///
/// let (strategy, mask) = (Strategy::PerDocument, Mask::Causal);
/// let options = ShardOptions { cp_size: 2, strategy, mask, hybrid_threshold: None, max_imbalance: 1.01 };
/// let shard = shard(&Lengths::new("lengths", &[8, 4])?, &options)?;
/// // Each document in four chunks: the first and the last for one rank, the two in the middle for the other.
/// assert_eq!(shard.rank(0)?.token_indices(), [0, 1, 6, 7, 8, 11]);
/// assert_eq!((shard.pairs(0), shard.pairs(1)), (23, 23));
/// # Ok::<(), wlb_core::Error>(())
/// ```
pub fn shard(lengths: &Lengths, options: &ShardOptions) -> Result<Shard> {
    let ShardOptions { cp_size, strategy, mask, hybrid_threshold, max_imbalance } = *options;
    check_size(lengths, cp_size)?;
    if strategy == Strategy::Adaptive {
        return wrong("kernel_model", "strategy=\"adaptive\" needs one");
    }
    if hybrid_threshold.is_some() != (strategy == Strategy::Hybrid) {
        return wrong("hybrid_threshold", "strategy=\"hybrid\" needs it or a kernel_model, and no other takes it");
    }
    check_imbalance(max_imbalance)?;
    let mut builder = match strategy {
        Strategy::Auto => Builder::empty(lengths, cp_size),
        _ => Builder::new(lengths, cp_size),
    };
    match strategy {
        Strategy::Auto => auto::cut(&mut builder, lengths, mask, max_imbalance),
        Strategy::PerSequence => per_sequence::cut(&mut builder, lengths),
        Strategy::Contiguous => per_sequence::cut_contiguous(&mut builder, lengths),
        Strategy::PerDocument => per_document::cut(&mut builder, lengths),
        // `Adaptive` without a choice was refused above.
        Strategy::Hybrid | Strategy::Adaptive => {
            let threshold = hybrid_threshold.unwrap_or(1);
            check_range("hybrid_threshold", threshold, 1, MAX_TOKENS + 1)?;
            hybrid::cut(&mut builder, lengths, threshold);
        }
    }
    Ok(builder.finish(strategy, mask))
}
