//! Packs a stream of global batches, holding outliers back until they can be balanced.

use crate::cost::CostModel;
use crate::error::Result;

use super::config::PackerConfig;
use super::cost_rows::CostRows;
use super::metrics::Metrics;
use super::outlier_queue::{OutlierQueue, Waiting};
use super::step_cost::Arrived;

/// Packs a stream of global batches (WLB-LLM, Algorithm 1 with multi-level outlier queues).
///
/// # Example
/// ```
/// use wlb_core::packing::stream::{Oversize, Packer, PackerConfig, Release, StepShape, StreamMethod};
/// use wlb_core::{CostModel, Lengths, Mask};
///
/// let mut packer = Packer::new(PackerConfig {
///     num_micro_batches: 2,
///     max_tokens: 1000,
///     max_document_tokens: 1000,
///     oversize: Oversize::Error,
///     // Documents of 800 tokens and more wait until there are two of them.
///     outlier_thresholds: vec![800],
///     release: Release::Fifo,
///     delay_price: None,
///     max_delay: None,
///     method: StreamMethod::VarLength,
///     cost_model: Some(CostModel::analytic(1.0, 100.0, Mask::Causal)?),
///     limits: None,
///     shape: StepShape::default(),
/// })?;
/// let first = packer.push(&Lengths::new("lengths", &[900, 300, 200, 100])?, None)?;
/// assert_eq!((first.tokens.as_slice(), packer.pending_tokens()), (&[300, 300][..], 900));
/// let second = packer.push(&Lengths::new("lengths", &[850, 100, 100])?, None)?;
/// assert_eq!((second.tokens.as_slice(), packer.pending()), (&[1000, 950][..], 0));
/// # Ok::<(), wlb_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Packer {
    pub(super) config: PackerConfig,
    /// The cost model that the packer was made with, if [`Packer::set_cost_model`] gave it another.
    pub(super) first_cost_model: Option<CostModel>,
    pub(super) iteration: u64,
    /// The id that the next document gets when the caller gives none; above every id seen.
    /// `None` when int64 has no further one.
    pub(super) next_id: Option<i64>,
    pub(super) queue: OutlierQueue,
    /// What did not fit in its iteration, in the order it was tried; goes first in the next.
    pub(super) carried: Vec<Waiting>,
    /// What pieces that wait cost, where documents bring their costs.
    pub(super) rows: CostRows,
    /// What documents cost in the mean, where that bounds the work of a step.
    pub(super) arrived: Arrived,
    pub(super) metrics: Metrics,
}

impl Packer {
    /// An empty packer.
    ///
    /// # Errors
    /// As [`PackerConfig::check`].
    pub fn new(config: PackerConfig) -> Result<Self> {
        config.check()?;
        let queue = OutlierQueue::of(&config);
        let rows = CostRows::new(config.limits.as_ref().map_or(0, Vec::len));
        Ok(Self {
            config,
            first_cost_model: None,
            iteration: 0,
            next_id: Some(0),
            queue,
            carried: Vec::new(),
            rows,
            arrived: Arrived::default(),
            metrics: Metrics::default(),
        })
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

    /// Iterations that the oldest of what is pending has waited since its turn; 0 if nothing has. O(pending).
    pub fn oldest_wait(&self) -> u64 {
        let waiting = self.queue.levels().iter().flatten().chain(&self.carried);
        waiting.map(|waiting| self.iteration.saturating_sub(waiting.turn)).max().unwrap_or(0)
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
}
