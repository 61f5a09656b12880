//! Dynamic context parallelism: every micro-batch divides the ranks into groups as its documents need.
//!
//! With a fixed context-parallel size, short documents are cut as thinly as the longest one, and all ranks wait for a
//! document that is more than a fair share of a micro-batch. Here a long document gets as many ranks as it needs to
//! finish with the others, and short documents share few ranks.
//!
//! | part | contents |
//! | --- | --- |
//! | `options` | the machine, and the limits of a plan |
//! | `check` | checks of the arguments |
//! | `problem` | documents and allowed sizes of groups |
//! | `cost` | seconds of a group: its documents' cost over its ranks, and the exchange that attention does not hide |
//! | `counts` | numbers of micro-batches to try |
//! | `targets` | target seconds of each micro-batch: less where the pipeline fills and drains |
//! | `ranks` | ranks of a micro-batch without a group, node by node |
//! | `block` | blocks of ranks by load (`by_room`: by load and room) |
//! | `solver` | documents to blocks of ranks, and blocks to groups, for one number of micro-batches |
//! | `refine` | improves a plan (`first_fit`: the first group that can take a document) |
//! | `one_size` | plans for few documents, in groups of one size |
//! | `few` | search for few documents over all choices at once |
//! | `search` | which numbers of micro-batches and sizes of blocks are tried, and the best solution |
//! | `simulate` | seconds of a step, and tokens that a rank has under way |
//! | `bound` | lower bounds on the step |
//! | `plan` | the plan |
//! | `step` | from arguments to the plan |

mod block;
mod bound;
mod by_room;
mod check;
mod cost;
mod counts;
mod few;
mod first_fit;
mod one_size;
mod options;
mod plan;
mod problem;
mod ranks;
mod refine;
mod search;
mod simulate;
mod solver;
mod step;
mod targets;

pub use cost::{Costs, Exchange, Node};
pub use options::{DynamicCpOptions, GroupSizes};
pub use plan::{DynamicCpPlan, Group};
pub use simulate::step_seconds;
pub use step::plan_dynamic_cp;
