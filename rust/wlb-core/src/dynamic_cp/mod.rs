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
//! | `problem` | documents and the sizes that their groups may have |
//! | `ranks` | ranks of a micro-batch that no group has yet, node by node |
//! | `solver` | documents to blocks of ranks, for one number of micro-batches (`block`, `by_room`) |
//! | `halving` | blocks to groups (`draft`) |
//! | `tighten` | the groups of one micro-batch, in the shortest time that its ranks allow |
//! | `refine` | a plan made faster by these, and, of few documents, by moving them |
//! | `simulate` | seconds of the step |
//! | `memory` | tokens that a rank has under way |
//! | `bound` | what no plan can beat |
//! | `search` | a solution for one number of micro-batches and size of blocks, and the fastest of all so far |
//! | `one_size` | of few documents, plans in groups of one size, longest first, timed by the clock |
//! | `sweep` | which of these are tried |
//! | `step` | the plan |
//! | `plan` | what comes of it |

mod block;
mod bound;
mod by_room;
mod check;
mod cost;
mod counts;
mod demand;
mod draft;
mod halving;
mod memory;
mod one_size;
mod options;
mod plan;
mod problem;
mod ranks;
mod refine;
mod relaxed;
mod search;
mod shape;
mod simulate;
mod solver;
mod step;
mod sweep;
mod tighten;

pub use cost::{Communication, Costs, Node};
pub use options::{DynamicCpOptions, GroupSizes};
pub use plan::{DynamicCpPlan, Group};
pub use simulate::step_seconds;
pub use step::plan_dynamic_cp;
