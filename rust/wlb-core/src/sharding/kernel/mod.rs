//! Time of an attention kernel for the segments of a rank (section 5.2 of WLB-LLM).
//!
//! A kernel computes whole tiles of queries, so a segment costs the pairs that it would have if its queries filled the
//! last tile. How fast these are computed depends on how many queries share a load of keys and on how many keys there
//! are to hide the prologue behind: that is a table over both, measured or assumed, forward and backward apart.

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
