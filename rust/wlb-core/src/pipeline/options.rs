//! Description of a pipeline: schedule, stages, micro-batches.

use crate::error::named_choices;

named_choices! {
    /// In which order a pipeline rank runs its forwards and backwards.
    #[derive(Default)]
    Schedule, "schedule" {
        /// All forwards, then all backwards (Huang et al. 2019).
        GPipe = "gpipe",
        /// One forward, one backward in turn, once the pipeline is full (Narayanan et al. 2019; PipeDream-Flush).
        #[default]
        OneForwardOneBackward = "1f1b",
        /// 1F1B with several stages a rank (Narayanan et al. 2021, section 2.2).
        Interleaved = "interleaved_1f1b",
        /// 1F1B with weight gradients put off to where 1F1B idles; no more memory (Qi et al. 2023, section 2.1).
        ZbH1 = "zb_h1",
        /// ZB-H1 with a longer warm-up: no bubble if the passes cost the same, about twice the memory (ibid.).
        ZbH2 = "zb_h2",
        /// ZB-H1 with several stages a rank, as torch has it.
        InterleavedZeroBubble = "interleaved_zero_bubble",
        /// Two stages a rank, down the ranks and back up; the memory of 1F1B (Qi et al. 2024, ZB-V).
        ZbV = "zbv",
        /// Placement of `zbv`, with a forward and a backward of opposite ways next to each other, so that one can hide
        /// the exchange of the other; weight gradients are delayed at both ends only (DeepSeek-AI 2024, DualPipe, cut
        /// in half).
        DualPipeV = "dualpipev",
    }
}

impl Schedule {
    /// Whether ranks hold several stages.
    pub(super) fn interleaves(self) -> bool {
        matches!(self, Self::Interleaved | Self::InterleavedZeroBubble)
    }

    /// Whether ranks hold two stages, one on the way down and one on the way back up.
    pub fn is_v_shaped(self) -> bool {
        matches!(self, Self::ZbV | Self::DualPipeV)
    }
}

/// One pipeline and the micro-batches of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PipelineOptions {
    /// In which order.
    pub schedule: Schedule,
    /// Pipeline ranks `p`.
    pub num_stages: usize,
    /// Stages on each rank, `v`: the model is cut into `p * v`.
    pub num_virtual_stages: usize,
    /// Micro-batches of a step, `m`.
    pub num_micro_batches: usize,
}

impl PipelineOptions {
    /// Stages of the whole model.
    pub fn total_stages(&self) -> usize {
        self.num_stages * self.num_virtual_stages
    }
}
