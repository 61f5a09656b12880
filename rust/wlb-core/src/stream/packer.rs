//! Contents of a packer: waiting documents, and the cost model, which may change between steps.

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
    /// Documents that did not fit in their iteration, in the order in which they were tried; they come first in the
    /// next one.
    pub(super) carried: Vec<Waiting>,
    /// Costs of waiting pieces, if documents bring their costs.
    pub(super) rows: CostRows,
    /// Mean cost of documents, which bounds the work of a step.
    pub(super) arrived: Arrived,
    pub(super) metrics: Metrics,
    /// Documents that wait since before the rules changed, if any do.
    pub(super) changed: Option<Changed>,
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
            changed: None,
        })
    }

    /// Configuration of the stream.
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

    /// Documents that did not fit; they come first in the next iteration.
    pub fn carried(&self) -> &[Waiting] {
        &self.carried
    }

    /// Balance, delay and memory so far.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Packs by other costs from the next push on.
    ///
    /// Documents that wait are priced anew then: a packer keeps their lengths, not their costs. Thresholds are lengths
    /// and the delay price is a share of a step, so both go on to mean what they meant; but what was tuned to a delay
    /// was tuned under the costs before, and may now give another one.
    ///
    /// A state holds both cost models: the packer that loads it is made with the first one and continues with the
    /// present one. To set the present cost model again changes nothing.
    ///
    /// # Errors
    /// [`crate::Error::Number`] where sums of costs could overflow, [`crate::Error::Combination`] where documents bring
    /// their costs; the packer is then unchanged.
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
    /// // Attention costs as well: now the long document is the heavier half.
    /// packer.set_cost_model(CostModel::analytic(1.0, 1.0, Mask::Causal)?)?;
    /// assert_eq!(packer.push(&lengths, None)?.costs, [40.0 * 41.0 / 2.0 + 40.0, 20.0 * 21.0 + 40.0]);
    /// # Ok::<(), wlb_core::Error>(())
    /// ```
    pub fn set_cost_model(&mut self, cost_model: CostModel) -> Result<()> {
        let Some(before) = &self.config.cost_model else {
            let requirement = "has no meaning for this packer, whose documents bring their costs: push other costs";
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

    /// Forgets sums of costs: after a change of cost model they are in other units.
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
