//! The ways to pack one global batch: one file each.

pub(super) mod bins;
pub(super) mod columns;
mod columns_exchange;
pub(super) mod counts;
mod documents;
mod exchange;
mod first_fit;
pub(super) mod fixed_length;
pub(super) mod original;
pub(super) mod refined;
mod steepest;
mod tournament;
pub(super) mod var_length;
