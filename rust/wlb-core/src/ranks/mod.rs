//! Plans for data-parallel ranks that wait for each other once a step or in every round; some documents may stay
//! together.

mod arrange;
mod division;
mod groups;
mod options;
mod plan;
mod rounds;
mod share_out;
mod sums;

pub(crate) use arrange::arrange;
pub(crate) use division::Division;
pub use options::RankOptions;
pub use plan::pack_for_ranks;
pub(crate) use rounds::{heaviest_together, rows_to_ranks};
pub(crate) use share_out::{Shared, share_out};
