//! Choices about cutting that a kernel model makes.

use crate::error::{Error, Result};
use crate::lengths::Lengths;

use super::adaptive;
use super::kernel::KernelModel;
use super::options::{ShardOptions, Strategy, check_size, wrong};

/// A larger value is surely mistyped. Half a billion keys at this price take 2^63 ticks, the largest sum.
const MAX_SECONDS_PER_KEY: f64 = 1e-3;

impl ShardOptions {
    /// Options with the choices of a kernel model filled in. [`Strategy::Adaptive`] becomes the strategy whose slowest
    /// rank is predicted to finish first in a training step; [`Strategy::Hybrid`] without a threshold gets the best
    /// threshold. The time of a rank is its attention plus `cp_seconds_per_key` for each key that it fetches
    /// ([`Shard::keys_moved`](super::Shard::keys_moved)).
    ///
    /// Equally fast strategies are preferred in this order: per sequence, per document, auto, hybrid with the highest
    /// threshold. Candidates for the threshold are all distinct lengths, longest first, and one above the longest. Of
    /// more than 64 candidates only some are tried: from number 64 on every second, from number 128 on every third, and
    /// so on.
    ///
    /// # Arguments
    /// * `lengths` - documents of the micro-batch, in packed order.
    /// * `kernel` - the kernel model; given if and only if it decides something.
    /// * `cp_seconds_per_key` - seconds to fetch a key and its value in one layer, forward and backward, as far as
    ///   computation does not hide them; from 0 to 1e-3, rounded to 2^-44 s. Other than 0 only with a kernel model.
    ///
    /// # Returns
    /// Options for [`shard`](crate::shard()).
    ///
    /// # Errors
    /// [`crate::Error::Combination`] when a kernel model is missing, decides nothing, or has another mask;
    /// [`crate::Error::Number`] for `cp_seconds_per_key`; and the errors of [`shard`](crate::shard()).
    ///
    /// # Complexity
    /// O(n (log n + cp_size)), and O(n cp_size) for each candidate that is not abandoned early: at most 64 candidates,
    /// and about 44 more for each doubling of the number of distinct lengths.
    ///
    /// # Example
    /// ```
    /// use wlb_core::sharding::kernel::{Generation, KernelModel};
    /// use wlb_core::{Lengths, Mask, ShardOptions, Strategy};
    ///
    /// let kernel = KernelModel::analytic(Generation::H100, 32, 8, 128, Mask::Causal)?;
    /// let (strategy, mask) = (Strategy::Adaptive, Mask::Causal);
    /// let (hybrid_threshold, max_imbalance) = (None, 1.01);
    /// let options = ShardOptions { cp_size: 4, strategy, mask, hybrid_threshold, max_imbalance };
    /// // A single document is even in any case, so the preferred strategy wins.
    /// let resolved = options.resolve(&Lengths::new("lengths", &[65536])?, Some(&kernel), 0.0)?;
    /// assert_eq!(resolved.strategy, Strategy::PerSequence);
    /// # Ok::<(), wlb_core::Error>(())
    /// ```
    pub fn resolve(&self, lengths: &Lengths, kernel: Option<&KernelModel>, cp_seconds_per_key: f64) -> Result<Self> {
        if !(0.0..=MAX_SECONDS_PER_KEY).contains(&cp_seconds_per_key) {
            let (argument, value, requirement) =
                ("cp_seconds_per_key", cp_seconds_per_key, "must be from 0 to 1e-3 seconds");
            return Err(Error::Number { argument, value, requirement });
        }
        let needs_kernel = match self.strategy {
            Strategy::Adaptive => true,
            Strategy::Hybrid => self.hybrid_threshold.is_none(),
            Strategy::Auto | Strategy::PerSequence | Strategy::PerDocument | Strategy::Contiguous => false,
        };
        let kernel = match kernel {
            Some(kernel) if needs_kernel => kernel,
            Some(_) => {
                let requirement = "is only for strategy=\"adaptive\", and for \"hybrid\" without a threshold";
                return wrong("kernel_model", requirement);
            }
            None if cp_seconds_per_key > 0.0 && !needs_kernel => {
                let requirement = "needs a kernel_model, with strategy=\"adaptive\" or \"hybrid\": it is added to the \
                                   latencies of the model";
                return wrong("cp_seconds_per_key", requirement);
            }
            None => return Ok(self.clone()),
        };
        kernel.check_mask("kernel_model", self.mask)?;
        check_size(lengths, self.cp_size)?;
        if self.hybrid_threshold.is_some() {
            return wrong("hybrid_threshold", "has no meaning with strategy=\"adaptive\", which chooses it");
        }
        let choice = adaptive::choose(lengths, self, kernel, cp_seconds_per_key);
        Ok(Self { strategy: choice.strategy, hybrid_threshold: choice.hybrid_threshold, ..self.clone() })
    }
}
