//! Packs a stream of global batches: which documents wait for others of their size, and which leave together.
//!
//! | part | what |
//! | --- | --- |
//! | `config` | how a stream is packed |
//! | `packer` | what a [`Packer`] holds |
//! | `arrivals`, `push` | a global batch enters |
//! | `brought_costs`, `cost_rows` | what its documents cost, where they bring their costs |
//! | `outlier_queue` | where documents wait that are too long to be balanced |
//! | `release_fifo`, `release_adaptive`, `level` | which of them leave, and where these go |
//! | `iteration`, `fuller` | one packing, made of what leaves |
//! | `drain` | the end of the stream |
//! | `lead` | how early a document should come, where it is known before its turn |
//! | `admission` | how much may enter, so that what waits stays bounded |
//! | `step_cost` | how much work a step may have |
//! | `cost_change` | the packer goes on under another cost model |
//! | `shape` | for which ranks and in which shapes steps are made |
//! | `metrics` | what waiting did to balance, delay and memory |
//! | `state` | a packer saved and loaded |

mod admission;
mod arrivals;
mod brought_costs;
mod config;
mod cost_change;
mod cost_rows;
mod drain;
mod fuller;
mod iteration;
mod lead;
mod level;
mod metrics;
mod outlier_queue;
mod packer;
mod push;
mod release_adaptive;
mod release_fifo;
mod shape;
mod state;
mod step_cost;

pub use admission::{Bounds, OnBacklog};
pub(super) use arrivals::MAX_EARLY;
pub use arrivals::Push;
pub use config::{Oversize, PackerConfig, Release, StreamMethod};
pub use cost_rows::CostTable;
pub use metrics::{IMBALANCE_RESOLUTION, Metrics};
pub use outlier_queue::{OutlierQueue, Waiting};
pub use packer::Packer;
pub use shape::StepShape;
