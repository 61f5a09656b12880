//! A stream of global batches: documents that wait for others of their size, and documents that leave together.
//!
//! | file | contents |
//! | --- | --- |
//! | `config` | the options of a stream, and what ranks and kernels need of its steps |
//! | `packer` | the state of a [`Packer`]; its cost model may change between steps |
//! | `push` | a global batch enters |
//! | `costs`, `brought_costs` | costs that documents bring |
//! | `queue`, `release_fifo` | queues where outliers wait, and their release |
//! | `release_adaptive`, `level` | the adaptive rule: how many of the longest documents wait, and where the others go |
//! | `step`, `fill_up` | packs the documents that leave |
//! | `step_cost` | the bound on the work of a step |
//! | `filling` | which upcoming documents enter in a step |
//! | `bounds` | how many documents may enter so that the backlog stays bounded, and how early |
//! | `changed`, `promises` | the bounds after a change of rules |
//! | `metrics` | balance, delay and memory so far |
//! | `state` | saves and loads a packer |

mod bounds;
mod brought_costs;
mod changed;
mod config;
mod costs;
mod fill_up;
mod filling;
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
pub use filling::{Offered, Turns, Upcoming};
pub use metrics::{IMBALANCE_RESOLUTION, Metrics};
pub use packer::Packer;
pub use push::{MAX_EARLY, Push};
pub use queue::{OutlierQueue, Waiting};
