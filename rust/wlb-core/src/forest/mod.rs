//! Prefix forests: samples that share their first tokens compute these once.
//!
//! A [`PrefixForest`] says which tokens are shared; [`pack_forest`] gives its samples to micro-batches and ranks.

mod bins;
mod bound;
mod cuts;
mod fill;
mod leaves;
mod level;
mod pack;
mod plan;
mod tokens;
mod tree;

pub use pack::{ForestOptions, pack_forest};
pub use plan::ForestPlan;
pub use tree::PrefixForest;
