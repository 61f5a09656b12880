//! Dynamic context parallelism: every micro-batch divides the ranks into groups as its documents need.
//!
//! A fixed context-parallel size shards short documents as thinly as the longest one, and a document that is more than
//! a fair share of a micro-batch makes everybody wait. Here a document gets as many ranks as it takes to finish with
//! the others, and short ones share few.
//!
//! | part | what |
//! | --- | --- |
//! | `options` | the machine |
//! | `check` | what can be wrong with it |
//! | `counts` | which numbers of micro-batches to try |
//! | `cost` | seconds of a group: its documents' cost over its ranks, and the exchange that attention does not hide |
//! | `demand` | how much work documents are where exchange makes it more |
//! | `shape` | how much work each micro-batch should get: less where the pipeline fills and drains |
//! | `relaxed` | from there to the best, if short documents could be divided at will |
//! | `solver` | documents to groups, for one number of micro-batches |
//! | `simulate` | seconds of the step |
//! | `bound` | what no plan can beat |
//! | `sweep` | tries numbers of micro-batches and block sizes, and keeps what the simulation finds fastest |
//! | `plan` | what comes of it |

mod block;
mod bound;
mod check;
mod cost;
mod counts;
mod demand;
mod draft;
mod halving;
mod options;
mod plan;
mod problem;
mod ranks;
mod relaxed;
mod shape;
mod simulate;
mod solver;
mod sweep;

pub use cost::{Communication, Costs, Node};
pub use options::{DynamicCpOptions, GroupSizes};
pub use plan::{DynamicCpPlan, Group};
pub use sweep::plan_dynamic_cp;
