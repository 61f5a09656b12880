//! Plans for data-parallel ranks: made for where they wait for each other, and for what has to stay together.

mod arrange;
mod items;
mod level;
mod options;
mod plan;
mod rounds;
mod shares;
mod sums;

pub(crate) use arrange::arrange;
pub use options::RankOptions;
pub use plan::pack_for_ranks;
