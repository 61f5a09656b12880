//! Cuts lists of documents: into pieces of a limited length, and into global batches.

use crate::error::{Error, Result, check_range};
use crate::lengths::Lengths;
use crate::limits::{MAX_CUTS, MAX_TOKENS};

use super::piece::Piece;

/// Cuts documents into pieces of at most `max_document_tokens`; a piece's id is its document's index.
///
/// # Arguments
/// * `lengths` - documents in arrival order.
/// * `max_document_tokens` - tokens of every piece of a document but the last, which has the rest.
///
/// # Returns
/// The pieces of all documents, in order.
///
/// # Errors
/// [`crate::Error::OutOfRange`] for `max_document_tokens`; [`crate::Error::Number`] if there are more than [`MAX_CUTS`]
/// cuts.
///
/// # Complexity
/// O(pieces).
///
/// # Example
/// ```
/// use wlb_core::Lengths;
/// use wlb_core::packing::{Piece, split_documents};
///
/// let pieces = split_documents(&Lengths::new("lengths", &[250, 80])?, 100)?;
/// let lengths: Vec<i32> = pieces.iter().map(|piece| piece.length).collect();
/// assert_eq!(lengths, [100, 100, 50, 80]);
/// assert_eq!(pieces[2], Piece { id: 0, start: 200, length: 50 });
/// # Ok::<(), wlb_core::Error>(())
/// ```
pub fn split_documents(lengths: &Lengths, max_document_tokens: i64) -> Result<Vec<Piece>> {
    check_range("max_document_tokens", max_document_tokens, 1, MAX_TOKENS)?;
    check_cuts(lengths, max_document_tokens as i32)?;
    let mut pieces = Vec::with_capacity(lengths.len());
    for (index, &length) in lengths.iter().enumerate() {
        pieces.extend(split(Piece { id: index as i64, start: 0, length }, max_document_tokens as i32));
    }
    Ok(pieces)
}

/// Number of cuts after which no piece is longer than `limit`.
pub(crate) fn cuts(lengths: &[i32], limit: i32) -> i64 {
    lengths.iter().filter(|&&length| length > limit).map(|&length| i64::from((length - 1) / limit)).sum()
}

/// Checks that there are at most [`MAX_CUTS`] cuts at `limit`.
pub(crate) fn check_cuts(lengths: &[i32], limit: i32) -> Result<()> {
    if cuts(lengths, limit) <= MAX_CUTS {
        return Ok(());
    }
    let requirement = "would take more than 2^23 cuts for these documents";
    Err(Error::Number { argument: "max_document_tokens", value: f64::from(limit), requirement })
}

/// The parts of one document: `limit` tokens each, and the rest in the last one.
pub(crate) fn split(document: Piece, limit: i32) -> impl Iterator<Item = Piece> {
    let mut rest = document;
    std::iter::from_fn(move || {
        let length = rest.length.min(limit);
        let piece = Piece { length, ..rest };
        rest = Piece { start: rest.start + length, length: rest.length - length, ..rest };
        (length > 0).then_some(piece)
    })
}

/// Cuts a stream into global batches of whole documents: each takes as many as fit in `tokens_per_batch`, at least one.
///
/// Batch `i` is `lengths[offsets[i]..offsets[i + 1]]`. Without documents there is no batch.
///
/// # Arguments
/// * `lengths` - documents in arrival order.
/// * `tokens_per_batch` - most tokens of a batch; a longer document is a batch by itself.
///
/// # Returns
/// Index of each batch's first document, and at the end the number of documents.
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
