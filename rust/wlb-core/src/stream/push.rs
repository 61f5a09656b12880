//! A global batch enters the stream, and the micro-batches of one step leave it.
//!
//! The whole batch is checked before anything changes.

use std::collections::VecDeque;

use crate::error::{Error, Result, check_range};
use crate::lengths::Lengths;
use crate::limits::MAX_ITERATION;
use crate::packing::piece::Piece;
use crate::packing::plan::Packing;
use crate::packing::split::{check_cuts, split};

use super::config::{Oversize, Release};
use super::costs::CostTable;
use super::packer::Packer;
use super::queue::Waiting;
use super::step::{Batch, Occasion};

/// Marks a piece that is not a whole document of this push: a part of a cut one, or of an earlier push.
const NO_DOCUMENT: u32 = u32::MAX;

/// Most iterations by which a document may come before its turn.
pub const MAX_EARLY: i64 = 1024;

/// Input of a packer in one iteration.
#[derive(Clone, Copy, Debug)]
pub struct Push<'a> {
    /// Tokens of the new documents.
    pub lengths: &'a Lengths,
    /// Ids of the documents, unique among these and the waiting ones; by default a running number.
    pub ids: Option<&'a [i64]>,
    /// Position of each piece's first token inside its document, for a caller that cuts documents itself; only with
    /// `ids`. By default all are whole documents.
    pub starts: Option<&'a [i32]>,
    /// Least tokens of the step: if the release rule lets fewer go and more wait, further documents leave. For a step
    /// that must not be nearly empty when there is nothing further to read. 0: only the release rule decides.
    pub min_step_tokens: i64,
    /// Iterations by which each document comes before its turn in the order of the stream, for a caller that reads
    /// ahead; only under [`Release::Adaptive`]. A document is not late before its turn: training it early moves it,
    /// waiting does not.
    pub early: Option<&'a [i64]>,
    /// Costs of each document in every column; given if and only if documents bring their costs. Pieces of a cut
    /// document share its costs by their tokens; a truncated document has the share of the tokens that are kept.
    pub costs: Option<CostTable<'a>>,
}

impl<'a> Push<'a> {
    /// Whole documents with running numbers as ids.
    pub fn new(lengths: &'a Lengths) -> Self {
        Self { lengths, ids: None, starts: None, min_step_tokens: 0, early: None, costs: None }
    }
}

impl Packer {
    /// Checks the whole push before anything changes. Returns the first default id, and the one after the last.
    pub(super) fn check_push(&self, push: &Push<'_>) -> Result<(i64, Option<i64>)> {
        let Push { lengths, ids, starts, min_step_tokens, early, costs } = *push;
        let config = &self.config;
        let limit = config.max_document_tokens;
        if config.oversize == Oversize::Error
            && let Some(index) = lengths.iter().position(|&length| length > limit)
        {
            let of_sizes = config.shape.padding.as_ref().filter(|_| limit == config.max_tokens);
            return Err(Error::TooLong {
                argument: "lengths",
                index,
                value: i64::from(lengths[index]),
                given: match of_sizes {
                    Some(padding) => format!("{limit} tokens, {} within max_tokens", padding.largest()),
                    None => format!("max_document_tokens = {limit}"),
                },
                limit: i64::from(limit),
                hint: "; oversize=\"split\" or \"truncate\" accepts it",
            });
        }
        if config.oversize == Oversize::Split {
            check_cuts(lengths, limit)?;
        }
        self.check_costs(lengths, costs, |length| length.min(limit))?;
        check_range("iteration", self.iteration as i64, 0, MAX_ITERATION as i64 - 1)?;
        check_range("min_step_tokens", min_step_tokens, 0, i64::MAX)?;
        self.check_early(lengths, early)?;
        let exhausted =
            Error::Combination { argument: "ids", requirement: "int64 has no further running number; pass ids" };
        let Some(ids) = ids else {
            if starts.is_some() {
                let requirement = "need ids, which name the documents of the pieces";
                return Err(Error::Combination { argument: "starts", requirement });
            }
            if lengths.is_empty() {
                return Ok((0, self.next_id));
            }
            let first = self.next_id.ok_or_else(|| exhausted.clone())?;
            let last = first.checked_add(lengths.len() as i64 - 1).ok_or(exhausted)?;
            return Ok((first, last.checked_add(1)));
        };
        let expected = lengths.len();
        for (argument, found) in [("ids", Some(ids.len())), ("starts", starts.map(<[i32]>::len))] {
            if let Some(found) = found.filter(|&found| found != expected) {
                return Err(Error::Mismatch { argument, found, other: "lengths", expected });
            }
        }
        for (index, (&start, &length)) in starts.into_iter().flatten().zip(lengths.iter()).enumerate() {
            if start < 0 || start.checked_add(length).is_none() {
                let requirement = "a piece begins at 0 or later and ends within 2147483647 tokens";
                return Err(Error::Entry { argument: "starts", index, value: f64::from(start), requirement });
            }
        }
        self.check_unique(lengths, ids, starts)?;
        // Default ids are above every id seen, so that they never need this check.
        let above = ids
            .iter()
            .max()
            .map_or(self.next_id, |&max| self.next_id.and_then(|next| max.checked_add(1).map(|above| above.max(next))));
        Ok((0, above))
    }

    fn check_early(&self, lengths: &[i32], early: Option<&[i64]>) -> Result<()> {
        let Some(early) = early else { return Ok(()) };
        let argument = "early";
        if self.config.release != Release::Adaptive {
            let requirement = "is only for release=\"adaptive\": queues ignore the turn of a document";
            return Err(Error::Combination { argument, requirement });
        }
        if early.len() != lengths.len() {
            return Err(Error::Mismatch { argument, found: early.len(), other: "lengths", expected: lengths.len() });
        }
        if let Some(index) = early.iter().position(|early| !(0..=MAX_EARLY).contains(early)) {
            let requirement = "a document comes from 0 to 1024 iterations before its turn";
            return Err(Error::Entry { argument, index, value: early[index] as f64, requirement });
        }
        Ok(())
    }

    /// Checks that no token appears twice in a push or belongs to a waiting document. Without `starts`, an id stands
    /// for its whole document.
    fn check_unique(&self, lengths: &[i32], ids: &[i64], starts: Option<&[i32]>) -> Result<()> {
        let span = |index: usize| match starts {
            Some(starts) => (starts[index], starts[index] + lengths[index]),
            None => (0, i32::MAX),
        };
        let mut sorted: Vec<(i64, (i32, i32), usize)> =
            ids.iter().zip(0..).map(|(&id, index)| (id, span(index), index)).collect();
        sorted.sort_unstable();
        let argument = "ids";
        let overlaps = |pair: &&[(i64, (i32, i32), usize)]| pair[0].0 == pair[1].0 && pair[0].1.1 > pair[1].1.0;
        let twice = sorted.windows(2).filter(overlaps).map(|pair| pair[1]).min_by_key(|&(.., index)| index);
        if let Some((value, _, index)) = twice {
            return Err(Error::DuplicateId { argument, index, value, clash: "stands twice in this push" });
        }
        let waiting = self.queue.levels().iter().flatten().chain(&self.carried);
        let clashes = waiting.filter_map(|Waiting { piece, .. }| {
            // Spans of one document do not overlap, so the last one that begins before the piece ends also ends last.
            let before =
                sorted.partition_point(|&(id, (start, _), _)| (id, start) < (piece.id, piece.start + piece.length));
            let &(id, (_, end), index) = sorted[..before].last()?;
            (id == piece.id && end > piece.start).then_some((index, id))
        });
        match clashes.min() {
            None => Ok(()),
            Some((index, value)) => {
                Err(Error::DuplicateId { argument, index, value, clash: "belongs to a document that still waits" })
            }
        }
    }

    /// Packs one global batch of whole documents ([`Packer::push_pieces`] with the defaults).
    ///
    /// # Errors
    /// The errors of [`Packer::push_pieces`].
    pub fn push(&mut self, lengths: &Lengths, ids: Option<&[i64]>) -> Result<Packing> {
        self.push_pieces(&Push { ids, ..Push::new(lengths) })
    }

    /// Packs one global batch: the new documents, the documents carried over, and the waiting documents that are
    /// released.
    ///
    /// Under queues, documents that are no outliers and fit are trained in the step in which they arrive.
    ///
    /// # Arguments
    /// * `push` - the new documents.
    ///
    /// # Returns
    /// The micro-batches of this step. Its `assignment` follows `push.lengths`: -1 for a document that waits or was
    /// cut. Its `leftover` is now carried over.
    ///
    /// # Errors
    /// [`crate::Error::TooLong`] under [`Oversize::Error`], [`crate::Error::Number`] for a split into too many pieces,
    /// [`crate::Error::Mismatch`], [`crate::Error::Combination`], [`crate::Error::Entry`],
    /// [`crate::Error::OutOfRange`], [`crate::Error::DuplicateId`], and [`crate::Error::Cell`] for costs; the packer is
    /// then unchanged.
    ///
    /// # Complexity
    /// The time of [`pack`](crate::pack()) for the new, carried and released documents, or a few times that under
    /// [`Release::Adaptive`]; with `ids`, O(p log p) more for `p` new and waiting documents.
    pub fn push_pieces(&mut self, push: &Push<'_>) -> Result<Packing> {
        let (first_id, next_id) = self.check_push(push)?;
        let Push { lengths, ids, starts, min_step_tokens, early, costs } = *push;
        let arrived = self.iteration;

        let mut batch = Batch::starting_with(std::mem::take(&mut self.carried));
        // Room also for the documents that come before them in the list.
        let mut new = Vec::with_capacity(batch.carried + self.queue.len() + lengths.len());
        // Index of the pushed document of each new piece; `NO_DOCUMENT` for a part of one that was cut.
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
            // Documents that do not leave return to the queue.
            Release::Adaptive => self.queue.release_all(&mut batch.pieces),
        }
        batch.released = batch.pieces.len() - batch.carried;

        // Index of the pushed document of each piece of the batch.
        let mut listed = vec![NO_DOCUMENT; batch.pieces.len()];
        for (document, waiting) in listed.iter_mut().zip(&batch.pieces) {
            // A level is first in, first out, and so are its pieces from this push.
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
