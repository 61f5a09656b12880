//! When everything runs: micro-batches through the stages of a pipeline.
//!
//! A schedule is plain data: for every pipeline rank, the order of its [`Op`]s ([`order`]). [`Pipeline`] makes a
//! program of any such order, once; then, for any costs, it gives the makespan (for planners, in nanoseconds an op) or
//! a whole [`Timeline`].

pub mod dynamic_cp;
pub mod order;
pub mod pipeline;
pub mod placement;
mod timeline;
mod times;

pub use order::{Kind, Layout, Op};
pub use pipeline::{Buffers, Pipeline};
pub use placement::order_micro_batches;
pub use timeline::{Record, StepTotals, Summary, Timeline};
pub use times::{Detail, Times};

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
        /// The same with several stages a rank (Narayanan et al. 2021, section 2.2).
        Interleaved = "interleaved_1f1b",
        /// 1F1B with weight gradients put off to where 1F1B idles; no more memory (Qi et al. 2023, section 2.1).
        ZbH1 = "zb_h1",
        /// The same with a longer warm-up: no bubble where the passes cost the same, about twice the memory (ibid.).
        ZbH2 = "zb_h2",
        /// ZB-H1 with several stages a rank, as torch has it.
        InterleavedZeroBubble = "interleaved_zero_bubble",
        /// Two stages a rank, down the ranks and back up; the memory of 1F1B (Qi et al. 2024, ZB-V).
        ZbV = "zbv",
    }
}
