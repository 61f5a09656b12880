//! Time of an attention kernel for the segments of a rank (section 5.2 of WLB-LLM).
//!
//! A kernel computes whole tiles of queries, so a segment costs as many pairs as if its queries filled the last tile.
//! The rate depends on the number of queries that share a load of keys, and on the number of keys, behind which the
//! prologue is hidden. So there is a table over both numbers, measured or assumed, for each of forward and backward.

mod analytic;
mod axis;
mod check;
mod clock;
mod description;
mod model;

pub use analytic::Generation;
pub(crate) use check::{ascending, check_count, check_seconds, wrong};
pub(super) use clock::{Clock, whole_ticks};
pub use description::{KernelDescription, PassTable};
pub use model::KernelModel;
