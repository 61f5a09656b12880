//! When everything runs: micro-batches through the stages of a pipeline.
//!
//! A schedule is plain data: for every pipeline rank, the order of its [`Op`]s ([`PipelineOptions::orders`]).
//! [`Pipeline`] makes a program of any such order, once; then, for any costs, it gives the makespan (for planners, in
//! nanoseconds an op) or a whole [`Timeline`]. [`order_micro_batches`] searches the order of micro-batches that is done
//! first.

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
