//! What the property tests share.

pub(crate) mod check;
pub(crate) mod naive;
pub(crate) mod strategies;
