//! Prefix forests: samples that share their first tokens compute them once.
//!
//! A [`PrefixForest`] says which tokens are shared. [`pack_forest`](crate::ranks::pack_forest) packs its samples into
//! micro-batches, and [`shard_forest`](crate::sharding::shard_forest) divides the tokens of a micro-batch among
//! context-parallel ranks.

mod tokens;
mod tree;

pub use tree::PrefixForest;
