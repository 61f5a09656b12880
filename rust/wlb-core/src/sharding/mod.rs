//! Sharding: divides the tokens of a micro-batch among context-parallel ranks (section 5 of WLB-LLM).
//!
//! Every strategy, and [`shard_forest`], fills the same [`Shard`]: for each rank, segments in packed order. The rows of
//! a rank have another order, [`Shard::rows`]; the arrays for its attention kernel follow from them ([`Shard::rank`]).
//! [`kernel`] predicts the time of this kernel, and [`ShardOptions::resolve`] chooses the strategy by this prediction,
//! from lengths alone.

mod adaptive;
mod auto;
mod builder;
mod cut;
mod edges;
pub mod execution;
mod forest;
mod hybrid;
pub mod kernel;
mod options;
mod per_document;
mod per_sequence;
mod rank_shard;
mod resolve;
mod shard;

pub use cut::shard;
pub use edges::Edges;
pub use forest::{Interval, shard_forest};
pub use options::{ShardOptions, Strategy};
pub use rank_shard::RankShard;
pub use shard::{Segment, Shard};
