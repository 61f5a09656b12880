//! Bounds on waiting documents, and the limit on new documents (admission) under which the bounds hold.
//!
//! Documents can arrive faster than they can be trained, however much memory there is: a document of 0.6 `max_tokens`
//! fills 0.6 of a micro-batch and leaves the rest empty, so full global batches of such documents pile up. A packer
//! does not refuse documents; its caller asks first how many it may bring ([`Packer::admits`]), and then the waiting
//! documents stay within [`Packer::bounds`]. The proof stands in `docs/semantics.md`.

use std::collections::VecDeque;

use crate::error::{Error, Result, check_range, named_choices};
use crate::ladder::Ladder;
use crate::lengths::Lengths;
use crate::longest_first::longest_first_of;
use crate::packing::piece::Piece;
use crate::packing::split::{cuts, split};

use super::config::{Oversize, PackerConfig, Release};
use super::costs::{CostTable, share};
use super::packer::Packer;
use super::push::MAX_EARLY;
use super::queue::Waiting;

/// Iterations of lead for each mean micro-batch that a document costs beyond the first.
///
/// A document that costs as much as `c` mean micro-batches fits evenly only into a step with `c` times the usual work:
/// `c - 1` global batches have to be gathered for it, by holding other long documents. Found on real lengths: with
/// twice `c - 1`, documents are trained before their turn as often as after it.
const LEAD: f64 = 2.0;

/// Full global batches (`N * max_tokens`) that may wait under [`Release::Adaptive`]. Two give the rule enough choice.
/// More make balance worse: documents that wait longer are forced out by `max_delay`, balanced or not.
const ADAPTIVE_BACKLOG: i64 = 2;

named_choices! {
    /// Reaction to a push after which more documents wait than the packer's [`Bounds`] allow.
    #[derive(Default)]
    OnBacklog, "on_backlog" {
        /// Warn the caller once.
        #[default]
        Warn = "warn",
        /// Refuse the push.
        Error = "error",
    }
}

/// Bounds that a packer keeps from now on, if no push brings more than the packer [`Packer::admits`].
///
/// Two things loosen the bounds: a change of configuration while documents waited, and a push that brought more than
/// was admitted. They hold until these documents have left: after at most [`Bounds::settles`] steps the bounds are
/// those of an empty packer again. Until then no bound ever rises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Most tokens that ever wait after a push. If the number of documents is limited, each document counts for at
    /// least its share of a full micro-batch.
    pub tokens: i64,
    /// Most iterations that a document waits while documents come; draining the rest at the end of the stream adds at
    /// most [`Bounds::drain`]. `None` without a limit: in queues without `max_delay` an outlier waits for others of its
    /// length, however rare they are.
    pub delay: Option<u64>,
    /// Most iterations that draining the waiting documents takes.
    pub drain: u64,
    /// Most steps until all these bounds are those of an empty packer; 0 if they are already.
    pub settles: u64,
}

impl Bounds {
    /// Bounds of an empty packer.
    pub(super) fn steady(config: &PackerConfig) -> Self {
        let tokens = Self::steady_tokens(config);
        let placed_within = placed_within(Self::steady_load(config), config.capacity());
        let delay = match config.release {
            Release::Adaptive => config.max_delay,
            Release::Fifo => Self::queue_delay(config).map(|delay| delay.saturating_add(placed_within)),
        };
        Self { tokens, delay, drain: placed_within + 1, settles: 0 }
    }

    fn steady_tokens(config: &PackerConfig) -> i64 {
        let capacity = config.capacity();
        match config.release {
            Release::Adaptive => ADAPTIVE_BACKLOG * capacity,
            Release::Fifo => {
                let ends = config.outlier_thresholds.iter().skip(1).map(|&next| next - 1);
                let longest = ends.chain([config.max_document_tokens]).map(|longest| config.size(longest));
                // A level with one document more is released.
                let kept = config.company() as i64 - 1;
                let queued = config.outlier_thresholds.iter().zip(longest);
                let queued = queued.fold(0_i64, |sum, (_, longest)| sum.saturating_add(kept.saturating_mul(longest)));
                queued.saturating_add(capacity)
            }
        }
    }

    /// Most load of a column with a limit that ever waits, in tokens: a step that is full of the column has `capacity`
    /// of them.
    fn steady_column(config: &PackerConfig) -> i64 {
        let levels = config.outlier_thresholds.len() as i64;
        let full = (config.company() as i64 - 1).saturating_mul(levels);
        full.saturating_add(config.num_micro_batches as i64).saturating_mul(i64::from(config.max_tokens))
    }

    /// Greatest [`Packer::pending_load`] of a packer that starts empty and never gets more than it admits.
    pub(super) fn steady_load(config: &PackerConfig) -> i64 {
        let limited = limited(config).count() as i64;
        let columns = if limited > 0 { Self::steady_column(config).saturating_mul(limited) } else { 0 };
        Self::steady_tokens(config).saturating_add(columns)
    }

    /// Most iterations until a document is tried for the first time; `None` without a limit.
    pub(super) fn queue_delay(config: &PackerConfig) -> Option<u64> {
        let has_queue = config.release == Release::Adaptive || !config.outlier_thresholds.is_empty();
        if has_queue { config.max_delay } else { Some(0) }
    }
}

/// Most further iterations of waiting for a document that goes after documents of less than this load: two steps in a
/// row place at least `capacity` of it.
pub(super) fn placed_within(load: i64, capacity: i64) -> u64 {
    2 * (load / capacity) as u64 + 1
}

/// The columns with a limit, each with its limit.
fn limited(config: &PackerConfig) -> impl Iterator<Item = (usize, f64)> {
    config.limits.iter().flatten().enumerate().filter_map(|(column, limit)| Some((column, (*limit)?)))
}

impl Packer {
    /// Most waiting tokens and longest wait from now on, if no push brings more than the packer [`Packer::admits`].
    ///
    /// # Complexity
    /// O(pending).
    pub fn bounds(&self) -> Bounds {
        let config = &self.config;
        let steady = Bounds::steady(config);
        let (size, load, capacity) = (self.pending_size(), self.pending_load(), config.capacity());
        let column = |(column, limit)| self.column(column, limit, self.waiting()) > Bounds::steady_column(config) + 1;
        let is_above = size > steady.tokens || limited(config).any(column);
        let mut bounds = steady;
        if is_above {
            bounds.tokens = steady.tokens.max(size);
            bounds.drain = steady.drain.max(placed_within(load, capacity) + 1);
            bounds.settles = match (config.release, config.max_delay) {
                // Above the bounds, more than a step holds is carried over or released. So no new document enters, and
                // two steps in a row place at least as much as one step holds.
                (Release::Fifo, _) => {
                    let least = if limited(config).next().is_some() {
                        steady.tokens.min(Bounds::steady_column(config))
                    } else {
                        steady.tokens
                    };
                    2 * (load.saturating_sub(least) as u64).div_ceil(capacity as u64)
                }
                // After `delay` iterations all waiting documents are due.
                (Release::Adaptive, Some(delay)) => {
                    delay.saturating_add(placed_within(load, capacity)).saturating_add(1)
                }
                // Each step places at least one document.
                (Release::Adaptive, None) => self.pending() as u64,
            };
        }
        if let Some(changed) = self.changed {
            bounds.delay = steady.delay.map(|delay| delay.max(changed.delay));
            bounds.settles = bounds.settles.max(changed.until.saturating_sub(self.iteration));
        }
        bounds
    }

    /// An error if more documents wait than the bounds of an empty packer allow, else `None`. The caller warns, or
    /// undoes the push; an empty push cannot be the cause.
    pub fn backlog(&self) -> Option<Error> {
        let (pending_tokens, bound) = (self.pending_size(), Bounds::steady_tokens(&self.config));
        (pending_tokens > bound).then_some(Error::Backlog { pending_tokens, bound })
    }

    /// Whether more tokens than these bounds would wait if these documents waited, too; O(pending + documents).
    pub fn may_exceed(&self, lengths: &[i32]) -> bool {
        !lengths.is_empty()
            && self.pending_size().saturating_add(self.size_of_new(lengths)) > Bounds::steady_tokens(&self.config)
    }

    /// Waiting tokens as [`Bounds::tokens`] counts them, O(pending): if the number of documents is limited, each counts
    /// for at least its share of a full micro-batch.
    pub fn pending_size(&self) -> i64 {
        self.size_of(self.waiting())
    }

    /// All waiting pieces.
    pub(super) fn waiting(&self) -> impl Iterator<Item = &Waiting> + Clone {
        self.queue.levels().iter().flatten().chain(&self.carried)
    }

    /// How much of a step's capacity all waiting documents take, in tokens: [`Packer::pending_size`], plus, for each
    /// column with a limit, `max_tokens` times the share of the limit that they take.
    pub(super) fn pending_load(&self) -> i64 {
        self.load_of(self.waiting())
    }

    /// [`Packer::pending_load`] of some waiting documents.
    pub(super) fn load_of<'a>(&self, all: impl IntoIterator<Item = &'a Waiting> + Clone) -> i64 {
        limited(&self.config).fold(self.size_of(all.clone()), |sum, (column, limit)| {
            sum.saturating_add(self.column(column, limit, all.clone()))
        })
    }

    /// Load of some waiting documents in one column.
    fn column<'a>(&self, column: usize, limit: f64, all: impl IntoIterator<Item = &'a Waiting>) -> i64 {
        let sum: f64 = all.into_iter().map(|waiting| self.costs(waiting)[column]).sum();
        (sum / limit * f64::from(self.config.max_tokens)).ceil() as i64
    }

    /// Documents that go first in the next step, or leave their queue then because it holds enough documents.
    fn entering(&self) -> impl Iterator<Item = &Waiting> {
        let company = match self.config.release {
            Release::Adaptive => usize::MAX,
            Release::Fifo => self.config.company(),
        };
        let together = move |level: &VecDeque<Waiting>| level.len() - level.len() % company;
        let released = self.queue.levels().iter().flat_map(move |level| level.iter().take(together(level)));
        self.carried.iter().chain(released)
    }

    /// Tokens that the next push may bring, each document counted as in [`Packer::pending_size`]; O(pending).
    pub fn room(&self) -> i64 {
        let room = match self.config.release {
            Release::Adaptive if !self.leaves_when_due() => 0,
            Release::Adaptive => Bounds::steady_tokens(&self.config) - self.pending_size(),
            // Other documents in the levels are bounded by the levels.
            Release::Fifo => self.config.capacity() - self.size_of(self.entering()),
        };
        room.max(0)
    }

    /// Size of new documents as [`Packer::room`] counts it, before they are cut.
    pub fn size_of_new(&self, lengths: &[i32]) -> i64 {
        match self.config.shape.max_documents {
            None => lengths.iter().map(|&length| i64::from(length)).sum(),
            Some(_) => lengths.iter().map(|&length| self.config.size_cut(length)).sum(),
        }
    }

    /// Pieces that these documents become when they are pushed; O(documents).
    pub fn pieces_of_new(&self, lengths: &[i32]) -> usize {
        let added = match self.config.oversize {
            Oversize::Split => cuts(lengths, self.config.max_document_tokens),
            Oversize::Error | Oversize::Truncate => 0,
        };
        lengths.len().saturating_add(added as usize)
    }

    /// Whether, under [`Release::Adaptive`], every waiting document will leave when it is due, if each push fits into a
    /// step by itself. For this, no document may be carried over, and documents that are due together must fit into a
    /// step; with `max_delay` 0, nothing may wait. A change of configuration or too large a push may make it false.
    fn leaves_when_due(&self) -> bool {
        let Some(delay) = self.config.max_delay else { return true };
        if delay == 0 {
            return self.pending() == 0;
        }
        let due = |waiting: &Waiting| waiting.arrived.saturating_add(delay).max(self.iteration);
        // A level is in order of arrival, so documents that are due together are neighbours.
        let mut levels = self.queue.levels().iter();
        self.carried.is_empty()
            && levels.all(|level| {
                let waiting: Vec<&Waiting> = level.iter().collect();
                let mut together = waiting.chunk_by(|before, after| due(before) == due(after));
                together.all(|group| fit_alone(group.iter().map(|waiting| waiting.piece), &self.config))
            })
    }

    fn size_of<'a>(&self, all: impl IntoIterator<Item = &'a Waiting>) -> i64 {
        all.into_iter().map(|waiting| self.config.size(waiting.piece.length)).sum()
    }

    /// How many of these documents, from the first on, the next push may bring so that [`Packer::bounds`] hold.
    ///
    /// Together they may have at most [`Packer::room`] tokens, and in each column with a limit at most what a step
    /// holds beside the documents carried over. Under [`Release::Adaptive`] they must also fit into the micro-batches
    /// of one step by themselves, longest first where the tokens are fewest: then all of them find room in the step in
    /// which `max_delay` makes them leave. If no document waits, at least one is admitted.
    ///
    /// # Arguments
    /// * `costs` - costs of these documents, as a push takes them; needed only if a column has a limit.
    ///
    /// # Errors
    /// The errors of a push about costs. [`Error::Entry`] for a first document that this packer never admits, because
    /// its pieces are more than a step holds: without the error, the caller would wait for ever.
    ///
    /// # Complexity
    /// O(n + pending); if not all of them fit, also a sort and log(n) placements.
    pub fn admits(&self, lengths: &Lengths, costs: Option<CostTable<'_>>) -> Result<usize> {
        let limit = self.config.max_document_tokens;
        let counted = |length: i32| match self.config.oversize {
            Oversize::Truncate => length.min(limit),
            Oversize::Error | Oversize::Split => length,
        };
        let mut room = self.room();
        let within = lengths.iter().take_while(|&&length| {
            room -= self.config.size_cut(counted(length));
            room >= 0
        });
        let mut admitted = within.count();
        let limited = self.config.limits.iter().flatten().any(Option::is_some);
        if limited || costs.is_some() {
            self.check_costs(lengths, costs, |length| length.min(limit))?;
        }
        if let Some(costs) = costs
            && limited
        {
            admitted = admitted.min(self.within_limits(lengths, costs, counted));
        }
        if self.config.release == Release::Adaptive {
            let fit = |count: usize| {
                let documents =
                    lengths[..count].iter().map(|&length| Piece { id: 0, start: 0, length: counted(length) });
                fit_alone(documents.flat_map(|document| split(document, limit)), &self.config)
            };
            if !fit(admitted) {
                // Under this rule fewer documents never make a micro-batch longer. So if a number of documents fits,
                // every lower one does.
                let (mut fits, mut too_many) = (0, admitted);
                while too_many - fits > 1 {
                    let middle = fits.midpoint(too_many);
                    if fit(middle) { fits = middle } else { too_many = middle }
                }
                admitted = fits;
            }
        }
        if let (0, Some(&first)) = (admitted, lengths.first()) {
            if self.pending() == 0 {
                let requirement = "has more pieces than a step holds, and would never be admitted: cut it with \
                                   split_documents, and let its pieces enter step by step (ids, starts)";
                let (argument, value) = ("lengths", f64::from(first));
                return Err(Error::Entry { argument, index: 0, value, requirement });
            }
            if first > limit && self.config.oversize == Oversize::Split {
                let costs = costs.map(|costs| costs.prefix(1));
                Self::new(self.config.clone())?.admits(&Lengths::new("lengths", &[i64::from(first)])?, costs)?;
            }
        }
        Ok(admitted)
    }

    /// How many documents, from the first on, stay within the limited columns of a step, beside the documents carried
    /// over; `counted` gives the tokens of a document that enter.
    fn within_limits(&self, lengths: &[i32], costs: CostTable<'_>, counted: impl Fn(i32) -> i32) -> usize {
        let micro_batches = self.config.num_micro_batches as f64;
        let mut admitted = lengths.len();
        for (column, limit) in limited(&self.config) {
            let carried: f64 = self.entering().map(|waiting| self.costs(waiting)[column]).sum();
            let mut room = micro_batches * limit - carried;
            let within = lengths.iter().enumerate().take_while(|&(index, &length)| {
                room -= costs.row(index)[column] * share(counted(length), length);
                room >= 0.0
            });
            admitted = admitted.min(within.count());
        }
        admitted
    }

    /// Iterations by which each of these documents should come before its turn, for [`Push::early`](super::Push).
    ///
    /// # Arguments
    /// * `lengths` - the next documents in order, as many global batches as are known. Their mean gives the cost of a
    ///   mean micro-batch.
    /// * `tokens_per_batch` - tokens of a global batch.
    /// * `most` - most iterations of lead.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for `tokens_per_batch` or `most`; [`Error::Combination`] if documents bring their costs.
    ///
    /// # Complexity
    /// O(n).
    pub fn leads(&self, lengths: &Lengths, tokens_per_batch: i64, most: i64) -> Result<Vec<i64>> {
        check_range("tokens_per_batch", tokens_per_batch, 1, i64::MAX)?;
        check_range("most", most, 0, MAX_EARLY)?;
        let Some(model) = &self.config.cost_model else {
            let requirement = "is missing: documents come early only with a cost model, not if they bring their costs";
            return Err(Error::Combination { argument: "cost_model", requirement });
        };
        let costs: Vec<f64> =
            lengths.iter().map(|&length| model.cost(length.min(self.config.max_document_tokens))).collect();
        let tokens: i64 = lengths.iter().map(|&length| i64::from(length)).sum();
        let batches = tokens as f64 / tokens_per_batch as f64;
        let mean = costs.iter().sum::<f64>() / (batches * self.config.num_micro_batches as f64);
        let lead = |cost: f64| {
            // Not above 0 (it may be NaN) if all costs are 0.
            let iterations = LEAD * (cost / mean - 1.0);
            if iterations > 0.0 { (iterations as i64).min(most) } else { 0 }
        };
        Ok(costs.into_iter().map(lead).collect())
    }
}

/// Whether pieces fit into the micro-batches of one step, longest first where the tokens are fewest.
fn fit_alone(pieces: impl Iterator<Item = Piece>, config: &PackerConfig) -> bool {
    let mut tokens = vec![0_i64; config.num_micro_batches];
    let mut by_tokens = Ladder::new(tokens.iter().map(|_| 0.0));
    for (length, _) in longest_first_of(pieces.map(|piece| piece.length).enumerate()) {
        let fewest = by_tokens.lightest();
        tokens[fewest] += config.size(length);
        if tokens[fewest] > i64::from(config.max_tokens) {
            return false;
        }
        by_tokens.set(fewest, tokens[fewest] as f64);
    }
    true
}
