//! A stream of global batches: which documents wait for others of their size, and which leave together.
//!
//! | file | what |
//! | --- | --- |
//! | `config` | how a stream is packed, and what its steps have to keep for ranks and kernels |
//! | `packer` | what a [`Packer`] holds, and its cost model, which may change between steps |
//! | `push` | a global batch enters |
//! | `costs`, `brought_costs` | what its documents cost, where they bring their costs |
//! | `queue`, `release_fifo` | where outliers wait, and when they leave it |
//! | `release_adaptive`, `level` | how many of the longest documents wait, and where the others go |
//! | `step`, `fuller` | one packing, made of the documents that leave |
//! | `step_cost` | how much work a step may have |
//! | `bounds` | how much may enter, so that what waits stays bounded, and how early |
//! | `changed`, `promises` | what is still promised to what waits when the rules change |
//! | `metrics` | balance, delay and memory so far |
//! | `state` | a packer saved and loaded |

mod bounds;
mod brought_costs;
mod changed;
mod config;
mod costs;
mod fuller;
mod level;
mod metrics;
mod packer;
mod promises;
mod push;
mod queue;
mod release_adaptive;
mod release_fifo;
mod state;
mod step;
mod step_cost;

pub use bounds::{Bounds, OnBacklog};
pub use config::{Oversize, PackerConfig, Release, StepShape, StreamMethod};
pub use costs::CostTable;
pub use metrics::{IMBALANCE_RESOLUTION, Metrics};
pub use packer::Packer;
pub use push::{MAX_EARLY, Push};
pub use queue::{OutlierQueue, Waiting};
