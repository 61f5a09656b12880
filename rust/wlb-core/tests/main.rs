//! The core's tests: one program, so that they are compiled and linked once. A file for each room, by its name.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

mod common;
mod golden;

mod admission;
mod changed;
mod columns;
mod cost;
mod cost_stream;
mod dynamic_cp;
mod execution;
mod few_documents;
mod fit;
mod forest;
mod kernel;
mod micro_batch_order;
mod modules;
mod packer;
mod packing;
mod pipeline;
mod ranks;
mod semantics;
mod sharding;
mod state;
mod step_cost;
