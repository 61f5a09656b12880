//! Plans for a forest of samples, such that a micro-batch has each token that its samples share once.

mod bins;
mod bound;
mod cuts;
mod exhaustive;
mod fill;
mod leaves;
mod level;
mod pack;

pub use pack::{ForestOptions, pack_forest};
