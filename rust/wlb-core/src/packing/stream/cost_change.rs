//! A packer goes on under another cost model.

use crate::cost::CostModel;
use crate::error::{Error, Result};

use super::config::PackerConfig;
use super::packer::Packer;
use super::step_cost::Arrived;

impl Packer {
    /// Packs by other costs from the next push on.
    ///
    /// Documents that wait are priced anew then: a packer keeps their lengths, not their costs. Thresholds are lengths
    /// and the delay price is a share of a step, so both go on to mean what they meant; but what was tuned to a delay
    /// was tuned under the costs before, and may now give another one.
    ///
    /// A state holds both cost models: the packer that loads it is made with the first one, and goes on with the present
    /// one. The present cost model again is no change.
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
