//! The balancing kernel: bins are filled by a rule, then items are exchanged until the bins are level.
//!
//! Micro-batches are bins of documents, ranks are bins of groups. Plans for ranks, of several columns and of forests
//! differ in what they balance, not in how.

mod bins;
mod bundles;
mod exchange;
mod fill;
mod items;
mod open_bins;
mod rounds;
mod shortest;

pub(crate) use bins::Bins;
pub(crate) use bundles::{Exchange, Leveller};
pub(crate) use exchange::{Rules, Size, Teams, exchange};
pub(crate) use fill::Rule;
pub(crate) use items::{Item, Limits, documents, in_order, sort};
pub(crate) use rounds::{WORTH_A_ROUND, fewest, more};
