//! Prefix forests: samples that share their first tokens compute them once.
//!
//! A [`PrefixForest`] says which tokens are shared. [`pack_forest`] packs its samples into micro-batches for ranks, and
//! [`shard_forest`] divides the tokens of a micro-batch among context-parallel ranks.

mod bins;
mod bound;
mod cuts;
mod few;
mod fill;
mod layout;
mod leaves;
mod level;
mod pack;
mod plan;
mod shard;
mod tokens;
mod tree;

pub use pack::{ForestOptions, pack_forest};
pub use plan::ForestPlan;
pub use shard::{ForestShard, Interval, shard_forest};
pub use tree::PrefixForest;
