//! Options for packing one global batch.

use serde::{Deserialize, Serialize};

use crate::error::{Result, check_range, named_choices, saturating_i64};
use crate::limits::MAX_MICRO_BATCHES;

use super::over_mean::over_mean;

named_choices! {
    /// Method of packing one global batch.
    #[derive(Default)]
    Method, "method" {
        /// Arrival order, cut every `max_tokens` tokens (Plain-4D).
        Original = "original",
        /// Longest first, to the micro-batch with room that has the least attention work (Fixed-4D).
        FixedLength = "fixed_length",
        /// Longest first, to the micro-batch with the least cost (WLB-LLM, Algorithm 1).
        #[default]
        VarLength = "var_length",
        /// Algorithm 1's plan, better balanced where token limits bind.
        Refined = "refined",
    }
}

named_choices! {
    /// Treatment of documents that do not fit.
    #[derive(Default)]
    Leftover, "leftover" {
        /// Raise [`crate::Error::LeftOver`], which says how to make room for them.
        #[default]
        Error = "error",
        /// List them in [`crate::Packing::leftover`].
        Return = "return",
    }
}

named_choices! {
    /// Where data-parallel ranks wait for each other.
    #[derive(Default)]
    Sync, "sync" {
        /// Once a step, for the reduction of gradients: DDP, ZeRO 1 and 2, Megatron.
        #[default]
        Step = "step",
        /// In every micro-batch, for the parameters: FSDP, ZeRO 3.
        MicroBatch = "micro_batch",
    }
}

named_choices! {
    /// Where the documents of one group stay together.
    #[derive(Default)]
    Together, "together" {
        /// On one rank: the samples of one prompt, whose rewards are compared.
        #[default]
        Rank = "rank",
        /// In one micro-batch: examples whose loss needs several documents at once (DPO, reward models).
        MicroBatch = "micro_batch",
    }
}

/// The data-parallel ranks that a plan was made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ranks {
    /// Number of data-parallel ranks.
    pub dp_size: usize,
    /// Where the ranks wait for each other.
    pub sync: Sync,
}

impl Ranks {
    /// Time of a step: the heaviest rank, or the sum of the heaviest micro-batch of each round.
    ///
    /// # Arguments
    /// * `costs` - of the micro-batches, rank by rank and each rank's in schedule order.
    pub fn step_cost(self, costs: &[f64]) -> f64 {
        let rounds = costs.len() / self.dp_size;
        let of_round = |round: usize| costs.iter().skip(round).step_by(rounds).copied();
        match self.sync {
            Sync::Step => costs.chunks(rounds).map(|rank| rank.iter().sum()).fold(0.0, f64::max),
            Sync::MicroBatch => (0..rounds).map(|round| of_round(round).fold(0.0, f64::max)).sum(),
        }
    }

    /// Time of a step over the time if all ranks were equal.
    pub(crate) fn imbalance(self, costs: &[f64]) -> f64 {
        over_mean(self.step_cost(costs), self.dp_size, costs.iter().sum())
    }
}

/// Options for packing one global batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackOptions {
    /// Micro-batches of one global batch.
    pub num_micro_batches: usize,
    /// Most tokens of one micro-batch (`S_max`), as memory allows.
    pub max_tokens: i32,
    /// Method of packing.
    pub method: Method,
    /// Global batches that are packed together; only [`Method::FixedLength`] allows more than 1.
    pub global_batches: usize,
    /// Treatment of documents that do not fit.
    pub leftover: Leftover,
}

/// Checks the number of micro-batches of a global batch.
pub(crate) fn check_micro_batches(num_micro_batches: usize) -> Result<()> {
    check_range("num_micro_batches", saturating_i64(num_micro_batches), 1, MAX_MICRO_BATCHES as i64)
}
