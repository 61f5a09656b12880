//! Prefix forests: samples that share their first tokens compute these once.
//!
//! A [`PrefixForest`] says which tokens are shared; [`pack_forest`] gives its samples to micro-batches and
//! ranks, and [`shard_forest`] the tokens of a micro-batch to context-parallel ranks.

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
