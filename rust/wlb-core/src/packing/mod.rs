//! Packing: the documents of each micro-batch.
//!
//! [`pack`] packs one global batch, or several together, into a [`Packing`]; [`pack_whole`] chooses the number of
//! micro-batches so that nothing is left over. [`split_documents`] and [`batch_offsets`] cut a list of documents before
//! packing.

mod assignment;
pub(crate) mod certificate;
mod columns;
mod deal;
pub(crate) mod methods;
pub(crate) mod options;
mod over_mean;
pub(crate) mod pack;
pub(crate) mod padding;
pub(crate) mod piece;
pub(crate) mod placement;
pub(crate) mod plan;
pub(crate) mod pricing;
pub(crate) mod split;

pub use certificate::Certificate;
pub use columns::Columns;
pub(crate) use deal::{deal, light_ends};
pub use options::{Leftover, Method, PackOptions, Ranks, Sync, Together};
pub use pack::{pack, pack_whole};
pub use padding::Padding;
pub use piece::Piece;
pub use plan::Packing;
pub use pricing::Pricing;
pub use split::{batch_offsets, split_documents};
