//! What enters a packer, and everything that can be wrong with it.

use crate::error::{Error, Result, check_range};
use crate::lengths::Lengths;
use crate::limits::MAX_ITERATION;
use crate::packing::split::check_cuts;

use super::config::{Oversize, Release};
use super::cost_rows::CostTable;
use super::outlier_queue::Waiting;
use super::packer::Packer;

/// Iterations that a document comes before its turn, at most.
pub(in crate::packing) const MAX_EARLY: i64 = 1024;

/// What enters a packer in one iteration.
#[derive(Clone, Copy, Debug)]
pub struct Push<'a> {
    /// Tokens of the new documents.
    pub lengths: &'a Lengths,
    /// Their names, unique among these and the pending ones; by default a running number.
    pub ids: Option<&'a [i64]>,
    /// Where each begins inside the document of its id, for a caller that cuts documents itself and lets their pieces
    /// enter over several iterations; only with `ids`. By default all are whole documents.
    pub starts: Option<&'a [i32]>,
    /// More leaves than the release rule lets go, if that is fewer tokens than these and more is there: for a step that
    /// must not be nearly empty and has nothing further to read. 0: as the rule says.
    pub min_step_tokens: i64,
    /// By how many iterations each comes before its turn in the order of the stream, for a caller that knows what
    /// comes; only under [`Release::Adaptive`]. Until its turn a document is not late: training it moves it, and
    /// waiting does not.
    pub early: Option<&'a [i64]>,
    /// What each costs in every column, where documents bring their costs, and only there. A document that is cut
    /// shares them among its pieces by their tokens; one that is truncated has the share of what is kept.
    pub costs: Option<CostTable<'a>>,
}

impl<'a> Push<'a> {
    /// Whole documents, named by a running number.
    pub fn new(lengths: &'a Lengths) -> Self {
        Self { lengths, ids: None, starts: None, min_step_tokens: 0, early: None, costs: None }
    }
}

impl Packer {
    /// Everything that can be wrong with a push, before anything changes. Gives the first default id and the next.
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
                let requirement = "have a meaning only with ids, which say whose pieces they are";
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
        // Default ids stay above every id seen, so that they never need this check.
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
            let requirement = "has a meaning only with release=\"adaptive\": queues do not ask when a document comes";
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

    /// Checks that no token stands twice in a push, nor belongs to a document that waits. Without `starts` an id is all
    /// of its document.
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
            // Of those of its document that begin before it ends, the last ends last: they do not overlap.
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
}
