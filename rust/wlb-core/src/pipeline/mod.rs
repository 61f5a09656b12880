//! Micro-batches through the stages of a pipeline: which op runs when.
//!
//! A schedule is plain data: for every pipeline rank, the order of its [`Op`]s ([`PipelineOptions::orders`]).
//! [`Pipeline`] turns such orders into a program once. Under any costs, it then gives the makespan (nanoseconds for
//! each op, for planners) or a whole [`Timeline`]. [`order_micro_batches`] searches for the order of micro-batches that
//! finishes first.

mod makespan;
mod micro_batch_order;
mod op;
mod options;
mod orders;
mod program;
mod simulate;
mod timeline;
mod times;

pub use makespan::Buffers;
pub use micro_batch_order::order_micro_batches;
pub use op::{Kind, Op};
pub use options::{PipelineOptions, Schedule};
pub use program::Pipeline;
pub use timeline::{Record, StepTotals, Summary, Timeline};
pub use times::{Detail, Times};
