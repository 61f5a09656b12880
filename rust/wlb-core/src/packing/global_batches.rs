//! From a long list of documents to global batches.

use crate::error::{Result, check_range};
use crate::lengths::Lengths;

/// Cuts a stream into global batches of whole documents: as many as fit in `tokens_per_batch`, at least one each.
///
/// Batch `i` is `lengths[offsets[i]..offsets[i + 1]]`; no documents, no batch.
///
/// # Arguments
/// * `lengths` - documents in arrival order.
/// * `tokens_per_batch` - most tokens of a batch; a longer document is a batch by itself.
///
/// # Returns
/// Where each batch begins among the documents; one entry more, their number.
///
/// # Errors
/// [`crate::Error::OutOfRange`] for `tokens_per_batch`.
///
/// # Complexity
/// O(n).
///
/// # Example
/// ```
/// use wlb_core::Lengths;
/// use wlb_core::packing::batch_offsets;
///
/// assert_eq!(batch_offsets(&Lengths::new("lengths", &[60, 40, 50, 70])?, 100)?, [0, 2, 3, 4]);
/// # Ok::<(), wlb_core::Error>(())
/// ```
pub fn batch_offsets(lengths: &Lengths, tokens_per_batch: i64) -> Result<Vec<usize>> {
    check_range("tokens_per_batch", tokens_per_batch, 1, i64::MAX)?;
    let mut offsets = vec![0];
    let mut tokens = 0_i64;
    for (index, &length) in lengths.iter().enumerate() {
        let length = i64::from(length);
        if index > 0 && tokens + length > tokens_per_batch {
            offsets.push(index);
            tokens = 0;
        }
        tokens += length;
    }
    if !lengths.is_empty() {
        offsets.push(lengths.len());
    }
    Ok(offsets)
}
