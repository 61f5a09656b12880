//! The methods of packing one global batch, one file each.

pub(crate) mod bins;
pub(crate) mod columns;
mod columns_exchange;
pub(crate) mod counts;
mod documents;
mod exchange;
mod first_fit;
pub(crate) mod fixed_length;
pub(crate) mod original;
pub(crate) mod refined;
mod steepest;
mod tournament;
pub(crate) mod var_length;
