//! The machine that Dynamic-CP plans for, and what a plan may do.

use crate::pipeline::{PipelineOptions, Schedule};

use super::cost::Communication;

/// The machine, and what a plan may do.
#[derive(Clone, Debug, PartialEq)]
pub struct DynamicCpOptions {
    /// Ranks of one pipeline stage, DP times CP: those that groups are made of.
    pub world_size: usize,
    /// Pipeline stages, PP.
    pub num_stages: usize,
    /// Parts of the model on each of them; above 1, the pipeline is interleaved.
    pub num_virtual_stages: usize,
    /// Most tokens of a rank in one micro-batch: a memory bound.
    pub max_tokens_per_rank: i32,
    /// Largest group; `world_size` if not given. Rounded down to a power of two.
    pub max_cp_size: Option<usize>,
    /// Micro-batches of the step; swept if not given.
    pub num_micro_batches: Option<usize>,
    /// The sweep tries no fewer: for schedules that need so many.
    pub min_micro_batches: Option<usize>,
    /// Where the sweep ends; 4 times where it begins if not given.
    pub max_micro_batches: Option<usize>,
    /// What larger groups cost.
    pub communication: Communication,
    /// Latency between pipeline stages.
    pub p2p_seconds: f64,
    /// What every micro-batch takes through the whole model, whatever is in it.
    pub micro_batch_seconds: f64,
}

impl DynamicCpOptions {
    /// The pipeline that runs that many micro-batches.
    pub(super) fn pipeline(&self, num_micro_batches: usize) -> PipelineOptions {
        let &Self { num_stages, num_virtual_stages, .. } = self;
        let schedule = if num_virtual_stages > 1 { Schedule::Interleaved } else { Schedule::OneForwardOneBackward };
        PipelineOptions { schedule, num_stages, num_virtual_stages, num_micro_batches }
    }
}
