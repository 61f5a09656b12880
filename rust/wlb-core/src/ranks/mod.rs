//! Plans for data-parallel ranks that wait for each other once a step or in every round; some documents may stay
//! together, and some may share tokens. Rounds of reinforcement learning are divided into optimizer steps first.

mod apart;
mod arrange;
mod classes;
mod division;
mod forest;
mod groups;
mod options;
mod plan;
mod round;
mod rounds;
mod share_out;
mod steps;
mod sums;

pub(crate) use arrange::arrange;
pub use forest::{ForestOptions, pack_forest};
pub use options::RankOptions;
pub use plan::pack_for_ranks;
pub use round::{Order, Oversize, RoundOptions, RoundPlan, RoundTogether, plan_round};
pub use steps::{StepSamples, Steps};
