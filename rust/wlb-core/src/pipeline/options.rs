//! Description of a pipeline: schedule, stages, micro-batches.

use crate::error::named_choices;

named_choices! {
    /// Order in which a pipeline rank runs its forward and backward passes.
    #[derive(Default)]
    Schedule, "schedule" {
        /// All forwards, then all backwards (Huang et al. 2019).
        GPipe = "gpipe",
        /// One forward, one backward in turn, once the pipeline is full (Narayanan et al. 2019; PipeDream-Flush).
        #[default]
        OneForwardOneBackward = "1f1b",
        /// 1F1B with several stages a rank (Narayanan et al. 2021, section 2.2).
        Interleaved = "interleaved_1f1b",
        /// 1F1B whose weight gradients are delayed to the idle times of 1F1B; no more memory (Qi et al. 2023, section
        /// 2.1).
        ZbH1 = "zb_h1",
        /// ZB-H1 with a longer warm-up: no bubble if all passes cost the same, about twice the memory (ibid.).
        ZbH2 = "zb_h2",
        /// ZB-H1 with several stages a rank, as torch implements it.
        InterleavedZeroBubble = "interleaved_zero_bubble",
        /// Two stages a rank, down the ranks and back up; the memory of 1F1B (Qi et al. 2024, ZB-V).
        ZbV = "zbv",
        /// Places stages like `zbv` and runs a forward next to a backward of the opposite direction, so that one can
        /// hide the communication of the other; weight gradients are delayed only at both ends (DeepSeek-AI 2024,
        /// DualPipe, cut in half).
        DualPipeV = "dualpipev",
    }
}

impl Schedule {
    /// Whether each rank may hold several stages, taken in rounds.
    pub(super) fn interleaves(self) -> bool {
        matches!(self, Self::Interleaved | Self::InterleavedZeroBubble)
    }

    /// Whether each rank holds two stages, one on the way down the ranks and one on the way back up.
    pub fn is_v_shaped(self) -> bool {
        matches!(self, Self::ZbV | Self::DualPipeV)
    }
}

/// A pipeline and the micro-batches of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PipelineOptions {
    /// Order of passes.
    pub schedule: Schedule,
    /// Pipeline ranks `p`.
    pub num_stages: usize,
    /// Stages on each rank, `v`: the model has `p * v` stages.
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
