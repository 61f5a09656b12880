//! A packer goes on under another cost model.

use crate::cost::CostModel;
use crate::error::{Error, Result};

use super::config::PackerConfig;
use super::cost_history::{CostHistory, fingerprint, hash};
use super::packer::Packer;

impl Packer {
    /// Packs by other costs from the next push on.
    ///
    /// Documents that wait are priced anew then: a packer keeps their lengths, not their costs. Thresholds are lengths
    /// and the delay price is a share of a step, so both go on to mean what they meant; but what was tuned to a delay
    /// was tuned under the costs before, and may now give another one.
    ///
    /// The change is part of the state and of the fingerprint. The present cost model again is no change.
    ///
    /// # Errors
    /// [`crate::Error::Number`] where sums of costs could overflow, [`crate::Error::Combination`] where documents bring
    /// their costs; the packer is then unchanged.
    ///
    /// # Example
    /// ```
    /// # use wlb_core::packing::stream::{Oversize, Packer, PackerConfig, Release, StepShape, StreamMethod};
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
        let Some(first) = self.first_config().cost_model else {
            let requirement = "has no meaning for this packer, whose documents bring their costs: push other costs";
            return Err(Error::Combination { argument: "cost_model", requirement });
        };
        if self.config.cost_model.as_ref() == Some(&cost_model) {
            return Ok(());
        }
        let config = PackerConfig { cost_model: Some(cost_model), ..self.config.clone() };
        config.check()?;
        let (changes, before) = match &self.cost_history {
            None => (0, ""),
            Some(history) => (history.changes, history.digest.as_str()),
        };
        let digest = hash(&(before, self.iteration, &config.cost_model));
        self.cost_history = Some(CostHistory { first, changes: changes + 1, since: self.iteration, digest });
        self.goes_on_at_other_costs(&config);
        self.config = config;
        Ok(())
    }

    /// What was counted of costs is of costs that are no more.
    pub(super) fn goes_on_at_other_costs(&mut self, config: &PackerConfig) {
        self.metrics.forget_costs();
        let waiting_costs = |config: &PackerConfig| -> f64 {
            let Some(model) = &config.cost_model else { return 0.0 };
            let waiting = self.queue.levels().iter().flatten().chain(&self.carried);
            waiting.map(|waiting| model.cost(waiting.piece.length)).sum()
        };
        let (before, now) = (waiting_costs(&self.config), waiting_costs(config));
        self.arrived.reprice(before, now);
    }

    /// The cost models that the packer has had; none if only one.
    pub fn cost_history(&self) -> Option<&CostHistory> {
        self.cost_history.as_ref()
    }

    /// A hash of everything that must not change on resume: the configuration but for the number of micro-batches, and
    /// the changes of the cost model.
    pub fn fingerprint(&self) -> String {
        fingerprint(&self.config, self.cost_history.as_ref())
    }

    /// How the stream was packed at first.
    pub(super) fn first_config(&self) -> PackerConfig {
        let mut config = self.config.clone();
        if let Some(history) = &self.cost_history {
            config.cost_model = Some(history.first.clone());
        }
        config
    }
}
