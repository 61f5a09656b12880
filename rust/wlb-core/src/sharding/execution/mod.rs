//! Execution plans: the kernel calls of each rank in one attention layer, the rows of tensors that each call takes, and
//! the rows that ranks send to each other.
//!
//! Everything is derived from two things. [`Paths`] say which tokens of the packed sequence a query can see, and at
//! which positions: a document is a path of one [`Piece`]; a node of a prefix tree has the pieces of its ancestors
//! before its own. [`Run`]s say which tokens a rank holds. A query at position `p` sees the keys of its path from
//! `p - left` to `p + right` ([`Reach`]).
//!
//! Flash kernels align masks bottom-right: they take the last query to stand at the last key. A span whose queries end
//! elsewhere has its window moved by that *shift*; where no mask cuts it, the shift does not matter. Spans with one
//! window are one call.

mod calls;
mod heads;
mod intervals;
mod keys;
mod layout;
mod moves;
mod paths;
mod ring;
mod sums;
mod trunks;

pub use calls::{Call, Indices, Rows};
pub use heads::HeadsPlan;
pub use keys::{KeysPlan, Transport};
pub use layout::Layout;
pub use moves::MovesPlan;
pub use paths::{Paths, Piece, Reach, Run};
pub use ring::RingPlan;
pub use sums::Sum;
