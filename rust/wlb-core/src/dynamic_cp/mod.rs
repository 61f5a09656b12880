//! Dynamic context parallelism: every micro-batch divides the ranks into groups as its documents need.
//!
//! A fixed context-parallel size shards short documents as thinly as the longest one, and a document that is more than
//! a fair share of a micro-batch makes everybody wait. Here a document gets as many ranks as it takes to finish with
//! the others, and short ones share few.
//!
//! | part | what |
//! | --- | --- |
//! | `options` | the machine, and what a plan may do |
//! | `check` | what can be wrong with it |
//! | `problem` | documents and the sizes that their groups may have |
//! | `cost` | seconds of a group: its documents' cost over its ranks, and the exchange that attention does not hide |
//! | `counts` | which numbers of micro-batches to try |
//! | `targets` | what each micro-batch should take: less where the pipeline fills and drains |
//! | `ranks` | ranks of a micro-batch that no group has yet, node by node |
//! | `block` | blocks of ranks by how full they are (`by_room`) |
//! | `solver` | documents to blocks of ranks, and blocks to groups, for one number of micro-batches |
//! | `refine` | a plan made faster |
//! | `one_size` | of few documents, plans in groups of one size |
//! | `few` | of few documents, everything at once |
//! | `search` | which numbers of micro-batches and sizes of blocks are tried, and the best solution |
//! | `simulate` | seconds of a step, and tokens that a rank has under way |
//! | `bound` | what no plan can beat |
//! | `plan` | what comes of it |
//! | `step` | from what is asked for to the plan |

mod block;
mod bound;
mod by_room;
mod check;
mod cost;
mod counts;
mod few;
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

pub use cost::{Communication, Costs, Node};
pub use options::{DynamicCpOptions, GroupSizes};
pub use plan::{DynamicCpPlan, Group};
pub use simulate::step_seconds;
pub use step::plan_dynamic_cp;
