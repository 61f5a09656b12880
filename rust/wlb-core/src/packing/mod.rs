//! Which documents go together in a micro-batch.
//!
//! [`pack`] takes one global batch (or several together) and gives a [`Packing`], [`pack_whole`] one that leaves
//! nothing over, [`pack_for_ranks`] one for data-parallel ranks; a [`stream::Packer`] takes a stream of global batches,
//! holds outliers back, and gives one [`Packing`] a step; [`tune`] finds on a sample of lengths what such a packer
//! should hold back.

mod assignment;
mod certificate;
mod columns;
mod cuts;
mod deal;
mod global_batches;
mod methods;
mod options;
mod over_mean;
mod pack;
mod pack_whole;
mod padding;
mod piece;
mod placement;
mod plan;
mod pricing;
mod ranks;
mod split;
pub mod stream;
mod takers;
pub mod tune;

pub use certificate::Certificate;
pub use columns::Columns;
pub(crate) use deal::deal;
pub use global_batches::batch_offsets;
pub use options::{Leftover, Method, PackOptions, Ranks, Sync};
pub use pack::pack;
pub use pack_whole::pack_whole;
pub use padding::Padding;
pub use piece::Piece;
pub use plan::Packing;
pub use pricing::Pricing;
pub use ranks::{RankOptions, pack_for_ranks};
pub use split::split_documents;
