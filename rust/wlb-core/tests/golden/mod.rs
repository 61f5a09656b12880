//! The golden files: inputs, and what the naive oracles make of them. `tests/golden/*.json` of the repository holds the
//! engine here and, through its bindings, Python (`tests/core/test_golden.py`), so that an oracle is written once.
//!
//! A case is a line. To add one, write its inputs on a line of its own and run
//!
//! ```text
//! WLB_GOLDEN=write cargo test --package wlb-core --test core golden::
//! ```
//!
//! which fills in what the oracle answers, and writes anew what a change of the specification changed. Without the
//! variable a file that is not what the oracle writes is an error.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

mod columns;
mod cost;
mod dynamic_cp;
mod file;
mod kernel;
mod packer;
mod packing;
mod pipeline;
mod sharding;
