//! Plans that give the GPUs of a long-context training run equal work.
//!
//! `lengths in -> plan out`: the crate is deterministic arithmetic on slices. It does no I/O, starts no
//! threads, reads no clock and draws no random number, so that every rank of a job, given the same
//! lengths, computes the same plan byte for byte.
//!
//! | question | module | WLB-LLM (OSDI'25) |
//! | --- | --- | --- |
//! | what does a document cost? | [`cost`] | section 2.1, 3.1 |
//! | which documents go together in a micro-batch? | [`packing`] | sections 3.2, 4 |
//! | which data-parallel rank trains which documents? | [`ranks`] | |
//! | which samples share their first tokens? | [`forest`] | |
//! | which documents wait for others of their size? | [`stream`] | section 4.3, Algorithm 1 |
//! | which documents should wait? | [`tune`] | section 4.3 |
//! | which tokens go to which context-parallel rank? | [`sharding`] | section 5 |
//! | when does each stage of the pipeline compute what? | [`pipeline`] | section 2.2 |
//! | how many ranks does each document get? | [`dynamic_cp`] | |
//! | what may a caller ask for at most? | [`limits`] | |
//!
//! ```
//! use wlb_core::{CostModel, Leftover, Lengths, Mask, Method, PackOptions, pack};
//!
//! let lengths = Lengths::new("lengths", &[900, 100, 500, 400, 100])?;
//! let cost = CostModel::analytic(1.0, 100.0, Mask::Causal)?;
//! let (method, leftover) = (Method::VarLength, Leftover::Error);
//! let options = PackOptions { num_micro_batches: 2, max_tokens: 1500, method, global_batches: 1, leftover };
//! let packing = pack(&lengths, &options, &cost)?;
//! assert_eq!(packing.tokens, [900, 1100]);
//! # Ok::<(), wlb_core::Error>(())
//! ```
#![forbid(unsafe_code)]

mod balance;
pub mod cost;
mod costliest_first;
mod digest;
pub mod dynamic_cp;
pub mod error;
pub mod forest;
mod ladder;
pub mod lengths;
pub mod limits;
mod longest_first;
pub mod packing;
pub mod pipeline;
pub mod profile;
pub mod ranks;
pub mod sharding;
pub mod stream;
pub mod tune;

pub use cost::{CostModel, Mask};
pub use error::{Error, Result};
pub use lengths::Lengths;
pub use packing::{Leftover, Method, PackOptions, Packing, pack, pack_whole};
pub use pipeline::{Pipeline, Schedule};
pub use sharding::{Shard, ShardOptions, Strategy, shard};
