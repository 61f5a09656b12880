//! Plans for data-parallel ranks that wait for each other once a step or in every round; some documents may stay
//! together. Rounds of reinforcement learning are divided into optimizer steps first.

mod apart;
mod arrange;
mod classes;
mod division;
mod groups;
mod options;
mod plan;
mod round;
mod rounds;
mod share_out;
mod steps;
mod sums;

pub(crate) use arrange::arrange;
pub(crate) use division::Division;
pub use options::RankOptions;
pub use plan::pack_for_ranks;
pub use round::{Order, Oversize, RoundOptions, RoundPlan, RoundTogether, plan_round};
pub(crate) use rounds::{heaviest_together, rows_to_ranks};
pub(crate) use share_out::{Effort, Shared, share_out};
pub use steps::{StepSamples, Steps};
