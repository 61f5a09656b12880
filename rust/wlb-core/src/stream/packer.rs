//! The state of a packer: waiting documents, and the cost model, which may change between steps.

use crate::cost::CostModel;
use crate::error::{Error, Result};

use super::changed::Changed;
use super::config::PackerConfig;
use super::costs::CostRows;
use super::metrics::Metrics;
use super::queue::{OutlierQueue, Waiting};
use super::step_cost::Arrived;

/// Packs a stream of global batches (WLB-LLM, Algorithm 1 with multi-level outlier queues).
///
/// # Example
/// ```
/// use wlb_core::stream::{Oversize, Packer, PackerConfig, Release, StepShape, StreamMethod};
/// use wlb_core::{CostModel, Lengths, Mask};
///
/// let mut packer = Packer::new(PackerConfig {
///     num_micro_batches: 2,
///     max_tokens: 1000,
///     max_document_tokens: 1000,
///     oversize: Oversize::Error,
///     // Documents of at least 800 tokens wait until there are two of them.
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
    /// The first cost model, if [`Packer::set_cost_model`] has replaced it.
    pub(super) first_cost_model: Option<CostModel>,
    pub(super) iteration: u64,
    /// The id of the next document without one, above every id seen; `None` if int64 has no further id.
    pub(super) next_id: Option<i64>,
    pub(super) queue: OutlierQueue,
    /// Documents that did not fit into their step, in the order in which they were tried; they come first in the next
    /// step.
    pub(super) carried: Vec<Waiting>,
    /// Costs of waiting pieces, if documents bring their costs.
    pub(super) rows: CostRows,
    /// Mean cost of recent documents, for the bound on the work of a step.
    pub(super) arrived: Arrived,
    pub(super) metrics: Metrics,
    /// Facts about documents that have waited since before the rules changed, if any.
    pub(super) changed: Option<Changed>,
}

impl Packer {
    /// An empty packer.
    ///
    /// # Errors
    /// The errors of [`PackerConfig::check`].
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
            changed: None,
        })
    }

    /// Configuration of the stream.
    pub fn config(&self) -> &PackerConfig {
        &self.config
    }

    /// Number of steps so far, by push, drain and flush.
    pub fn iteration(&self) -> u64 {
        self.iteration
    }

    /// Number of pieces that wait.
    pub fn pending(&self) -> usize {
        self.queue.len() + self.carried.len()
    }

    /// Number of tokens that wait; O(pending).
    pub fn pending_tokens(&self) -> i64 {
        self.carried_tokens() + self.queue.tokens()
    }

    /// Tokens of the carried documents, which go first in the next step; O(carried).
    pub fn carried_tokens(&self) -> i64 {
        self.carried.iter().map(|waiting| i64::from(waiting.piece.length)).sum()
    }

    /// Iterations since its turn that the oldest waiting document has waited; 0 if none waits. O(pending).
    pub fn oldest_wait(&self) -> u64 {
        let waiting = self.queue.levels().iter().flatten().chain(&self.carried);
        waiting.map(|waiting| self.iteration.saturating_sub(waiting.turn)).max().unwrap_or(0)
    }

    /// The queue of waiting documents.
    pub fn queue(&self) -> &OutlierQueue {
        &self.queue
    }

    /// Documents that did not fit; they come first in the next step.
    pub fn carried(&self) -> &[Waiting] {
        &self.carried
    }

    /// Balance, delay and memory so far.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Uses another cost model from the next push on.
    ///
    /// Waiting documents get new costs: a packer keeps their lengths, not their costs. Thresholds are lengths and the
    /// delay price is a share of a step, so they keep their meaning. But a price or thresholds that were tuned for a
    /// mean delay were tuned under the old costs, and may now give another delay.
    ///
    /// A state holds both cost models: make the packer that loads it with the first one, and it continues with the
    /// present one. Setting the present cost model again changes nothing.
    ///
    /// # Errors
    /// [`crate::Error::Number`] if sums of costs could overflow, [`crate::Error::Combination`] if documents bring their
    /// costs; the packer is then unchanged.
    ///
    /// # Example
    /// ```
    /// # use wlb_core::stream::{Oversize, Packer, PackerConfig, Release, StepShape, StreamMethod};
    /// # use wlb_core::{CostModel, Lengths, Mask};
    /// # let mut packer = Packer::new(PackerConfig {
    /// #     num_micro_batches: 2, max_tokens: 100, max_document_tokens: 100, oversize: Oversize::Error,
    /// #     outlier_thresholds: vec![], release: Release::Fifo, delay_price: None, max_delay: None,
    /// #     method: StreamMethod::VarLength, limits: None, shape: StepShape::default(),
    /// #     cost_model: Some(CostModel::analytic(0.0, 1.0, Mask::Causal)?),
    /// # })?;
    /// let lengths = Lengths::new("lengths", &[40, 20, 20])?;
    /// assert_eq!(packer.push(&lengths, None)?.tokens, [40, 40]);
    /// // Now attention costs, too, and the long document is the heavier half.
    /// packer.set_cost_model(CostModel::analytic(1.0, 1.0, Mask::Causal)?)?;
    /// assert_eq!(packer.push(&lengths, None)?.costs, [40.0 * 41.0 / 2.0 + 40.0, 20.0 * 21.0 + 40.0]);
    /// # Ok::<(), wlb_core::Error>(())
    /// ```
    pub fn set_cost_model(&mut self, cost_model: CostModel) -> Result<()> {
        let Some(before) = &self.config.cost_model else {
            let requirement = "cannot be set: documents of this packer bring their costs; push other costs";
            return Err(Error::Combination { argument: "cost_model", requirement });
        };
        if *before == cost_model {
            return Ok(());
        }
        let config = PackerConfig { cost_model: Some(cost_model), ..self.config.clone() };
        config.check()?;
        if self.first_cost_model.is_none() {
            self.first_cost_model.clone_from(&self.config.cost_model);
        }
        self.forget_costs();
        self.config = config;
        Ok(())
    }

    /// Forgets sums of costs: after a change of cost model they would be in another unit.
    pub(super) fn forget_costs(&mut self) {
        self.metrics.forget_work();
        self.arrived = Arrived::default();
    }

    /// The configuration that the packer was made with.
    pub fn first_config(&self) -> PackerConfig {
        let cost_model = self.first_cost_model.as_ref().or(self.config.cost_model.as_ref()).cloned();
        PackerConfig { cost_model, ..self.config.clone() }
    }

    /// A hash of everything that must not change on resume, under the present cost model
    /// ([`PackerConfig::fingerprint`]).
    pub fn fingerprint(&self) -> String {
        self.config.fingerprint()
    }
}
