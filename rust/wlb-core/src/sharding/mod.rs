//! Sharding: the tokens of a micro-batch on each context-parallel rank (section 5 of WLB-LLM).
//!
//! Every strategy fills the same [`Shard`]: for each rank, segments in packed order. Its rows have the order of
//! [`Shard::rows`]. What a rank feeds its attention kernel follows from them alone ([`Shard::rank`]). How long that
//! takes is predicted in [`kernel`]; by that, and from lengths only, [`ShardOptions::resolve`] chooses between the
//! strategies.

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
