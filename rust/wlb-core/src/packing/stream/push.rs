//! A global batch enters the stream, and the packing of one step leaves it.

use std::collections::VecDeque;

use crate::error::Result;
use crate::lengths::Lengths;
use crate::packing::piece::Piece;
use crate::packing::plan::Packing;
use crate::packing::split::split;

use super::arrivals::Push;
use super::config::{Oversize, Release};
use super::iteration::{Batch, Occasion};
use super::outlier_queue::Waiting;
use super::packer::Packer;

/// In place of the index of a pushed document: a part of one that was cut, or of an earlier push.
const NO_DOCUMENT: u32 = u32::MAX;

impl Packer {
    /// Packs one global batch of whole documents ([`Packer::push_pieces`] with the defaults).
    ///
    /// # Errors
    /// As [`Packer::push_pieces`].
    pub fn push(&mut self, lengths: &Lengths, ids: Option<&[i64]>) -> Result<Packing> {
        self.push_pieces(&Push { ids, ..Push::new(lengths) })
    }

    /// Packs one global batch: the new documents, what was carried over, and the outliers whose time has come.
    ///
    /// Documents that are no outliers and fit are emitted in the iteration they arrived in.
    ///
    /// # Arguments
    /// * `push` - the new documents.
    ///
    /// # Returns
    /// The micro-batches of this step. Its `assignment` follows `push.lengths`: -1 for a document that waits, or was
    /// cut. Its `leftover` is what is now carried over.
    ///
    /// # Errors
    /// [`crate::Error::TooLong`] under [`Oversize::Error`], [`crate::Error::Number`] for a split into too many pieces,
    /// [`crate::Error::Mismatch`], [`crate::Error::Combination`], [`crate::Error::Entry`],
    /// [`crate::Error::OutOfRange`], [`crate::Error::DuplicateId`], and [`crate::Error::Cell`] for costs; the packer is
    /// then unchanged.
    ///
    /// # Complexity
    /// As [`pack`](crate::pack()), for the documents new, carried over and released, or a few times that under
    /// [`Release::Adaptive`]; with `ids`, O(p log p) more for `p` new and
    /// pending documents.
    pub fn push_pieces(&mut self, push: &Push<'_>) -> Result<Packing> {
        let (first_id, next_id) = self.check_push(push)?;
        let Push { lengths, ids, starts, min_step_tokens, early, costs } = *push;
        let arrived = self.iteration;

        let mut batch = Batch::starting_with(std::mem::take(&mut self.carried));
        // Room for those that come before them in the listing.
        let mut new = Vec::with_capacity(batch.carried + self.queue.len() + lengths.len());
        // Which pushed document each new piece is, in listing order; none for a part of one that was cut.
        let mut new_documents: Vec<u32> = Vec::with_capacity(lengths.len());
        let mut queued_documents = vec![VecDeque::new(); self.queue.levels().len()];
        for (index, &length) in lengths.iter().enumerate() {
            let id = ids.map_or_else(|| first_id + index as i64, |ids| ids[index]);
            let start = starts.map_or(0, |starts| starts[index]);
            let limit = self.config.max_document_tokens;
            let cut = length > limit && self.config.oversize == Oversize::Split;
            let document = if cut { NO_DOCUMENT } else { index as u32 };
            let kept = if cut { length } else { length.min(limit) };
            for piece in split(Piece { id, start, length: kept }, limit) {
                let row = costs.map_or(0, |costs| self.rows.push(costs.shared(index, piece.length, length)));
                let turn = arrived + early.map_or(0, |early| early[index] as u64);
                let waiting = Waiting { piece, arrived, turn, row };
                match self.queue.level(piece.length) {
                    Some(level) => {
                        self.queue.push(level, waiting);
                        queued_documents[level].push_back(document);
                    }
                    None => {
                        new.push(waiting);
                        new_documents.push(document);
                    }
                }
            }
        }
        self.next_id = next_id;
        match self.config.release {
            Release::Fifo => {
                self.queue.release(self.config.company(), arrived, self.config.max_delay, &mut batch.pieces);
                if min_step_tokens > 0 {
                    let leaving = batch.pieces.iter().chain(&new).map(|waiting| i64::from(waiting.piece.length)).sum();
                    self.queue.release_oldest(min_step_tokens.saturating_sub(leaving), &mut batch.pieces);
                }
            }
            // Those that do not leave come back.
            Release::Adaptive => self.queue.release_all(&mut batch.pieces),
        }
        batch.released = batch.pieces.len() - batch.carried;

        // Which pushed document each piece of the batch is.
        let mut listed = vec![NO_DOCUMENT; batch.pieces.len()];
        for (document, waiting) in listed.iter_mut().zip(&batch.pieces) {
            // A level is first in, first out, and so are its pieces of this push.
            if waiting.arrived == arrived
                && let Some(level) = self.queue.level(waiting.piece.length)
                && let Some(queued) = queued_documents[level].pop_front()
            {
                *document = queued;
            }
        }
        listed.append(&mut new_documents);
        new.splice(0..0, batch.pieces.drain(..));
        batch.pieces = new;

        let mut packing = self.pack(batch, Occasion::Push { min_step_tokens });
        let by_listing = std::mem::replace(&mut packing.assignment, vec![-1; lengths.len()]);
        for (document, micro_batch) in listed.into_iter().zip(by_listing) {
            if document != NO_DOCUMENT {
                packing.assignment[document as usize] = micro_batch;
            }
        }
        Ok(packing)
    }
}
