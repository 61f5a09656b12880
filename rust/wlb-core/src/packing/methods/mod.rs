//! The methods of packing one global batch, one file each.

pub(crate) mod bins;
pub(crate) mod columns;
mod columns_exchange;
pub(crate) mod counts;
pub(crate) mod fixed_length;
pub(crate) mod original;
pub(crate) mod refined;
pub(crate) mod var_length;
