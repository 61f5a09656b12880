//! What the property tests share.

pub(crate) mod auto;
pub(crate) mod check;
pub(crate) mod columns;
pub(crate) mod dynamic_cp;
pub(crate) mod forge;
pub(crate) mod kernel;
pub(crate) mod naive;
pub(crate) mod pipeline;
pub(crate) mod ranks;
pub(crate) mod strategies;
pub(crate) mod stream;
