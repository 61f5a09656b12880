//! Execution plans: the kernel calls of each rank in one attention layer, the rows of tensors that each call takes, and
//! the rows that ranks send to each other.
//!
//! Plans are derived from two inputs. [`Paths`] say which tokens of the packed sequence a query can see, and at which
//! positions: a document is a path of one [`Piece`]; a node of a prefix tree has the pieces of its ancestors before its
//! own. [`Run`]s say which tokens a rank holds. A query at position `p` sees the keys of its path from `p - left` to `p
//! + right` ([`Reach`]).
//!
//! Flash kernels align masks bottom-right: they take the last query to be at the position of the last key. If the
//! queries of a span end elsewhere, its window is moved by that distance, the *shift*; without a mask the shift does
//! not matter. All spans with the same window form one call.

mod buckets;
mod calls;
mod forest;
mod heads;
mod intervals;
mod keys;
mod layout;
mod moves;
mod paths;
mod ring;
mod shared_prefixes;
mod sums;

pub use buckets::{Buckets, LEVELS};
pub use calls::{Call, Indices, Rows};
pub use heads::HeadsPlan;
pub use keys::{KeysPlan, Transport};
pub use layout::Layout;
pub use moves::MovesPlan;
pub use paths::{Paths, Piece, Reach, Run};
pub use ring::RingPlan;
pub use sums::Sum;
