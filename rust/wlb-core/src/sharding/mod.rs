//! Sharding: divides the tokens of a micro-batch among context-parallel ranks (section 5 of WLB-LLM).
//!
//! Every strategy fills the same [`Shard`]: for each rank, segments in packed order. The rows of a rank have another
//! order, [`Shard::rows`]; the arrays for its attention kernel follow from them ([`Shard::rank`]). [`kernel`] predicts
//! the time of this kernel, and [`ShardOptions::resolve`] chooses the strategy by this prediction, from lengths alone.

mod adaptive;
mod auto;
mod builder;
mod cut;
pub mod execution;
mod hybrid;
pub mod kernel;
mod options;
mod per_document;
mod per_sequence;
mod rank_shard;
mod resolve;
mod shard;

pub(crate) use builder::Ranks;
pub use cut::shard;
pub(crate) use hybrid::{deal, fill_room};
pub use options::{ShardOptions, Strategy};
pub(crate) use per_document::{Cursor, cut_document};
pub use rank_shard::RankShard;
pub use shard::{Segment, Shard};
