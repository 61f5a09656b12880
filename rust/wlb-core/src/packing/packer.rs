//! Packs a stream of global batches, holding outliers back until they can be balanced.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::cost::CostModel;
use crate::error::{Error, Result, check_range, named_choices};
use crate::interrupt::{Meter, check};
use crate::lengths::Lengths;
use crate::limits::{MAX_ITERATION, MAX_TOKENS};
use crate::longest_first::longest_first_of;

use super::adaptive;
use super::fuller::fuller;
use super::metrics::Metrics;
use super::outlier_queue::{OutlierQueue, Release, Waiting};
use super::placement::Placement;
use super::plan::{Packing, Piece};
use super::refined::refine;
use super::stream::{check_cuts, split};
use super::var_length::Bins;
use super::{Method, check_micro_batches};

named_choices! {
    /// What happens to a document longer than `max_document_tokens`.
    #[derive(Default)]
    Oversize, "oversize" {
        /// An error that names it.
        #[default]
        Error = "error",
        /// It is cut into pieces, each a document of its own for attention.
        Split = "split",
        /// Its first tokens are kept.
        Truncate = "truncate",
    }
}

named_choices! {
    /// How what leaves is placed.
    #[derive(Default)]
    StreamMethod, "method" {
        /// As the release rule places it: longest first, where the cost is least.
        #[default]
        VarLength = "var_length",
        /// From there on as [`Method::Refined`]: the same documents, made better where tokens run out.
        Refined = "refined",
    }
}

impl StreamMethod {
    /// The default stands in no state and no fingerprint: older ones know no choice.
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// How a stream is packed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackerConfig {
    /// Micro-batches of one global batch (`pp_size * dp_size` in the paper). May change on resume.
    pub num_micro_batches: usize,
    /// Most tokens of one micro-batch (`S_max`).
    pub max_tokens: i32,
    /// Longest document, at most `max_tokens`: the context window.
    pub max_document_tokens: i32,
    /// What happens to longer ones.
    pub oversize: Oversize,
    /// Where the levels of the queue begin, ascending; documents below the first never wait. None under
    /// [`Release::Adaptive`], where whatever waits waits in one level.
    pub outlier_thresholds: Vec<i32>,
    /// Which waiting documents join a batch.
    pub release: Release,
    /// What waiting costs ([`super::adaptive`]): given under [`Release::Adaptive`], and only there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delay_price: Option<f64>,
    /// Iterations after which a waiting document joins whatever its level holds.
    pub max_delay: Option<u64>,
    /// How what leaves is placed.
    #[serde(default, skip_serializing_if = "StreamMethod::is_default")]
    pub method: StreamMethod,
    /// What documents cost.
    pub cost_model: CostModel,
}

impl PackerConfig {
    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Entry`] or [`Error::Number`] naming the first field that makes no sense.
    pub fn check(&self) -> Result<()> {
        check_micro_batches(self.num_micro_batches)?;
        check_range("max_tokens", i64::from(self.max_tokens), 1, MAX_TOKENS)?;
        check_range("max_document_tokens", i64::from(self.max_document_tokens), 1, i64::from(self.max_tokens))?;
        let mut previous = 0;
        for (index, &threshold) in self.outlier_thresholds.iter().enumerate() {
            let requirement = if threshold <= previous {
                "thresholds are at least 1 and ascend"
            } else if threshold > self.max_document_tokens {
                "is above max_document_tokens: no document would ever wait there"
            } else {
                previous = threshold;
                continue;
            };
            let (argument, value) = ("outlier_thresholds", f64::from(threshold));
            return Err(Error::Entry { argument, index, value, requirement });
        }
        self.check_release()?;
        if let Some(delay) = self.max_delay {
            check_range("max_delay", i64::try_from(delay).unwrap_or(i64::MAX), 0, MAX_ITERATION as i64)?;
        }
        self.cost_model.check()?;
        // Then no sum of costs can overflow, however long documents wait.
        let value = self.cost_model.cost(self.max_document_tokens) * MAX_ITERATION as f64;
        if !value.is_finite() {
            let requirement = "the longest document's cost is so high that sums of costs would overflow";
            return Err(Error::Number { argument: "cost_model", value, requirement });
        }
        Ok(())
    }

    fn check_release(&self) -> Result<()> {
        let wrong = |argument, requirement| Err(Error::Combination { argument, requirement });
        match (self.release, self.delay_price) {
            (Release::Fifo, None) => Ok(()),
            (Release::Fifo, Some(_)) => wrong("delay_price", "has a meaning only with release=\"adaptive\""),
            (Release::Adaptive, _) if !self.outlier_thresholds.is_empty() => {
                wrong("outlier_thresholds", "have no meaning with release=\"adaptive\", which finds what has to wait")
            }
            (Release::Adaptive, None) => wrong("delay_price", "is needed with release=\"adaptive\""),
            (Release::Adaptive, Some(price)) if price.is_finite() && price >= 0.0 => Ok(()),
            (Release::Adaptive, Some(value)) => Err(Error::Number {
                argument: "delay_price",
                value,
                requirement: "must be a finite number, 0 or above",
            }),
        }
    }

    /// An empty queue for what waits.
    pub(super) fn queue(&self) -> OutlierQueue {
        match self.release {
            Release::Fifo => OutlierQueue::new(&self.outlier_thresholds),
            // Any document may wait.
            Release::Adaptive => OutlierQueue::new(&[1]),
        }
    }

    /// Tokens of one global batch that is full to the last token: `N * max_tokens`.
    pub(super) fn capacity(&self) -> i64 {
        self.num_micro_batches as i64 * i64::from(self.max_tokens)
    }

    /// A hash of everything that must not change on resume: all but the number of micro-batches.
    pub fn fingerprint(&self) -> String {
        let comparable = Self { num_micro_batches: 0, ..self.clone() };
        blake3::hash(&serde_json::to_vec(&comparable).unwrap_or_default()).to_hex().to_string()
    }
}

/// What enters a packer in one iteration.
#[derive(Clone, Copy, Debug)]
pub struct Push<'a> {
    /// Tokens of the new documents.
    pub lengths: &'a Lengths,
    /// Their names, unique among these and the pending ones; by default a running number.
    pub ids: Option<&'a [i64]>,
    /// Where each begins inside the document of its id, for a caller that cuts documents itself and lets their pieces enter
    /// over several iterations; only with `ids`. By default all are whole documents.
    pub starts: Option<&'a [i32]>,
    /// More leaves than the release rule lets go, if that is fewer tokens than these and more is there: for a step that
    /// must not be nearly empty and has nothing further to read. 0: as the rule says.
    pub min_step_tokens: i64,
}

impl<'a> Push<'a> {
    /// Whole documents, named by a running number.
    pub fn new(lengths: &'a Lengths) -> Self {
        Self { lengths, ids: None, starts: None, min_step_tokens: 0 }
    }
}

/// Packs a stream of global batches (WLB-LLM, Algorithm 1 with multi-level outlier queues).
#[derive(Clone, Debug, PartialEq)]
pub struct Packer {
    pub(super) config: PackerConfig,
    pub(super) iteration: u64,
    /// The id that the next document gets when the caller gives none; above every id seen.
    /// `None` when int64 has no further one.
    pub(super) next_id: Option<i64>,
    pub(super) queue: OutlierQueue,
    /// What did not fit in its iteration, in the order it was tried; goes first in the next.
    pub(super) carried: Vec<Waiting>,
    pub(super) metrics: Metrics,
}

impl Packer {
    /// An empty packer.
    ///
    /// # Errors
    /// As [`PackerConfig::check`].
    pub fn new(config: PackerConfig) -> Result<Self> {
        config.check()?;
        let queue = config.queue();
        Ok(Self { config, iteration: 0, next_id: Some(0), queue, carried: Vec::new(), metrics: Metrics::default() })
    }

    /// How the stream is packed.
    pub fn config(&self) -> &PackerConfig {
        &self.config
    }

    /// Global batches packed so far.
    pub fn iteration(&self) -> u64 {
        self.iteration
    }

    /// Pieces that were pushed and not yet emitted.
    pub fn pending(&self) -> usize {
        self.queue.len() + self.carried.len()
    }

    /// Tokens that were pushed and not yet emitted; O(pending).
    pub fn pending_tokens(&self) -> i64 {
        self.carried_tokens() + self.queue.tokens()
    }

    /// Tokens that did not fit in their iteration and go first in the next; O(carried).
    pub fn carried_tokens(&self) -> i64 {
        self.carried.iter().map(|waiting| i64::from(waiting.piece.length)).sum()
    }

    /// Iterations that the oldest of what is pending has waited; 0 if nothing is. O(pending).
    pub fn oldest_wait(&self) -> u64 {
        let waiting = self.queue.levels().iter().flatten().chain(&self.carried);
        waiting.map(|waiting| self.iteration - waiting.arrived).max().unwrap_or(0)
    }

    /// The outliers that wait.
    pub fn queue(&self) -> &OutlierQueue {
        &self.queue
    }

    /// What did not fit and goes first in the next iteration.
    pub fn carried(&self) -> &[Waiting] {
        &self.carried
    }

    /// Balance, delay and memory so far.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Packs one global batch of whole documents ([`Packer::push_pieces`] with the defaults).
    ///
    /// # Errors
    /// As [`Packer::push_pieces`].
    pub fn push(&mut self, lengths: &Lengths, ids: Option<&[i64]>) -> Result<Packing> {
        self.push_pieces(&Push { ids, ..Push::new(lengths) })
    }

    /// Packs one global batch: the new documents, what was carried over, and the outliers whose time has come.
    ///
    /// Documents that are no outliers and fit are emitted in the iteration they arrived in. The packing's
    /// `assignment` follows `lengths`; its `leftover` is what is now carried over.
    ///
    /// # Errors
    /// [`Error::TooLong`] under [`Oversize::Error`], [`Error::Number`] for a split into too many pieces,
    /// [`Error::Mismatch`], [`Error::Combination`], [`Error::Entry`], [`Error::OutOfRange`], [`Error::DuplicateId`]; the
    /// packer is then unchanged.
    ///
    /// Interrupted ([`crate::interruptible`]), the packer is half changed: push to a copy.
    ///
    /// # Complexity
    /// As [`super::pack`], for the documents new, carried over and released, or a few times that under
    /// [`Release::Adaptive`]; with `ids`, O(p log p) more for `p` new and
    /// pending documents.
    pub fn push_pieces(&mut self, push: &Push<'_>) -> Result<Packing> {
        let (first_id, next_id) = self.check_push(push)?;
        let Push { lengths, ids, starts, min_step_tokens } = *push;
        let arrived = self.iteration;

        let mut batch = Batch::starting_with(std::mem::take(&mut self.carried));
        let mut new = Vec::with_capacity(lengths.len());
        // Which pushed document each new piece is, in listing order; none for a part of one that was cut.
        let mut new_documents = Vec::with_capacity(lengths.len());
        let mut queued_documents = vec![VecDeque::new(); self.queue.levels().len()];
        let mut meter = Meter::default();
        for (index, &length) in lengths.iter().enumerate() {
            meter.spend(4);
            let id = ids.map_or_else(|| first_id + index as i64, |ids| ids[index]);
            let start = starts.map_or(0, |starts| starts[index]);
            let limit = self.config.max_document_tokens;
            let cut = length > limit && self.config.oversize == Oversize::Split;
            let document = (!cut).then_some(index);
            let kept = if cut { length } else { length.min(limit) };
            for piece in split(Piece { id, start, length: kept }, limit) {
                let waiting = Waiting { piece, arrived };
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
                self.queue.release(self.config.num_micro_batches, arrived, self.config.max_delay, &mut batch.pieces);
                let leaving = batch.pieces.iter().chain(&new).map(|waiting| i64::from(waiting.piece.length)).sum();
                self.queue.release_oldest(min_step_tokens.saturating_sub(leaving), &mut batch.pieces);
            }
            // Those that do not leave come back.
            Release::Adaptive => self.queue.release_all(&mut batch.pieces),
        }
        batch.released = batch.pieces.len() - batch.carried;

        let mut listed: Vec<(usize, usize)> = Vec::with_capacity(lengths.len());
        for (at, waiting) in batch.pieces.iter().enumerate() {
            // A level is first in, first out, and so are its pieces of this push.
            if waiting.arrived == arrived
                && let Some(level) = self.queue.level(waiting.piece.length)
                && let Some(Some(document)) = queued_documents[level].pop_front()
            {
                listed.push((document, at));
            }
        }
        let first_new = batch.pieces.len();
        listed.extend(new_documents.into_iter().zip(first_new..).filter_map(|(document, at)| Some((document?, at))));
        batch.pieces.append(&mut new);

        let mut packing = self.pack(batch, Occasion::Push { min_step_tokens });
        let by_listing = std::mem::replace(&mut packing.assignment, vec![-1; lengths.len()]);
        for (document, at) in listed {
            packing.assignment[document] = by_listing[at];
        }
        Ok(packing)
    }

    /// One global batch of what waits, at the end of a stream: as much of it as fits, outliers too. Empty if nothing waits.
    ///
    /// # Complexity
    /// As [`super::pack`], for all that waits.
    pub fn drain(&mut self) -> Packing {
        let mut batch = Batch::starting_with(std::mem::take(&mut self.carried));
        self.queue.release_all(&mut batch.pieces);
        batch.released = batch.pieces.len() - batch.carried;
        let mut packing = self.pack(batch, Occasion::Drain);
        packing.assignment.clear();
        packing
    }

    /// Empties everything at the end of the stream, in as many global batches as it takes.
    pub fn flush(&mut self) -> Vec<Packing> {
        std::iter::from_fn(|| (self.pending() > 0).then(|| self.drain())).collect()
    }

    /// What is carried over goes first, so that nothing is carried for ever: the first of it meets empty micro-batches. Then
    /// what is due by `max_delay`, so that it is not crowded out.
    fn pack(&mut self, batch: Batch, occasion: Occasion) -> Packing {
        let Batch { pieces, carried, released } = batch;
        let config = &self.config;
        let due = |index: usize| {
            let waited = self.iteration - pieces[index].arrived;
            config.max_delay.is_some_and(|delay| waited >= delay)
        };
        let first_new = carried + released;
        let of_length = |index: usize| (index, pieces[index].piece.length);
        let overdue = longest_first_of((carried..first_new).filter(|&index| due(index)).map(of_length));
        let urgent: Vec<usize> = (0..carried).chain(overdue.map(|(_, index)| index)).collect();
        let others = || {
            let others = (carried..pieces.len()).filter(|&index| index >= first_new || !due(index));
            longest_first_of(others.map(of_length)).map(|(_, index)| index)
        };
        let adaptive = config.release == Release::Adaptive && occasion != Occasion::Drain;
        let mut placement = if adaptive {
            adaptive::place(&pieces, &urgent, self.iteration, config)
        } else {
            algorithm_1(&pieces, urgent.iter().copied().chain(others()), config)
        };
        if let Occasion::Push { min_step_tokens } = occasion
            && placement.tokens.iter().sum::<i64>() < min_step_tokens
            && placement.assignment.contains(&-1)
        {
            let order: Vec<usize> = urgent.iter().copied().chain(others()).collect();
            placement = fuller(placement, &pieces, &order, min_step_tokens, config);
            if adaptive {
                // Only what had to leave is carried over; all others wait in the queue.
                let mut is_urgent = vec![false; pieces.len()];
                urgent.iter().for_each(|&index| is_urgent[index] = true);
                placement.leftover.retain(|&index| is_urgent[index]);
            }
        }

        check();
        let (method, placement) = match config.method {
            StreamMethod::VarLength => (Method::VarLength, placement),
            StreamMethod::Refined => {
                let lengths: Vec<i32> = pieces.iter().map(|waiting| waiting.piece.length).collect();
                let costs = config.cost_model.costs(&lengths);
                (Method::Refined, refine(placement, &lengths, &costs, config.max_tokens))
            }
        };

        self.carried = placement.leftover.iter().map(|&index| pieces[index]).collect();
        let assignment = &placement.assignment;
        let emitted = pieces.iter().zip(assignment).filter(|&(_, &micro_batch)| micro_batch >= 0);
        let delays: Vec<(i32, u64)> =
            emitted.map(|(waiting, _)| (waiting.piece.length, self.iteration - waiting.arrived)).collect();
        let piece = |index: usize| pieces[index].piece;
        if adaptive {
            let mut waits: Vec<bool> = assignment.iter().map(|&micro_batch| micro_batch < 0).collect();
            placement.leftover.iter().for_each(|&index| waits[index] = false);
            let held = pieces.iter().zip(waits).filter(|&(_, waits)| waits);
            held.for_each(|(&waiting, _)| self.queue.push(0, waiting));
        }
        let packing = placement.into_packing(Some(method), config.max_tokens, &config.cost_model, piece);
        self.iteration += 1;
        let backlog = self.pending_tokens();
        self.metrics.record(&packing, occasion == Occasion::Drain, delays.into_iter(), backlog);
        packing
    }

    /// Everything that can be wrong with a push, before anything changes. Gives the first default id and the next.
    fn check_push(&self, push: &Push<'_>) -> Result<(i64, Option<i64>)> {
        let Push { lengths, ids, starts, min_step_tokens } = *push;
        let config = &self.config;
        let limit = config.max_document_tokens;
        if config.oversize == Oversize::Error
            && let Some(index) = lengths.iter().position(|&length| length > limit)
        {
            return Err(Error::TooLong {
                argument: "lengths",
                index,
                value: i64::from(lengths[index]),
                limit_name: "max_document_tokens",
                limit: i64::from(limit),
                hint: "; oversize=\"split\" or \"truncate\" accepts it",
            });
        }
        if config.oversize == Oversize::Split {
            check_cuts(lengths, limit)?;
        }
        check_range("iteration", self.iteration as i64, 0, MAX_ITERATION as i64 - 1)?;
        check_range("min_step_tokens", min_step_tokens, 0, i64::MAX)?;
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

    /// Checks that no token stands twice in a push, nor belongs to a document that waits. Without `starts` an id is all of
    /// its document.
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

/// Algorithm 1's placement, in the given order.
fn algorithm_1(pieces: &[Waiting], order: impl Iterator<Item = usize>, config: &PackerConfig) -> Placement {
    let mut bins = Bins::new(pieces.len(), config.num_micro_batches, config.max_tokens);
    for index in order {
        let length = pieces[index].piece.length;
        bins.place(index, length, config.cost_model.cost(length));
    }
    bins.placement
}

/// Why an iteration is made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Occasion {
    /// Documents came, or may come yet.
    Push { min_step_tokens: i64 },
    /// None will come: nothing waits for company.
    Drain,
}

/// The documents of one iteration in listing order: carried over, released, new.
struct Batch {
    pieces: Vec<Waiting>,
    carried: usize,
    released: usize,
}

impl Batch {
    fn starting_with(carried: Vec<Waiting>) -> Self {
        Self { carried: carried.len(), released: 0, pieces: carried }
    }
}
