//! `wlb._core`: numpy in, plans out. Conversion only; every decision is made in `wlb-core`.
//!
//! Plans (packings, shards, Dynamic-CP plans) and what makes them stay objects of the core, because plans are made in every
//! step: their arrays are copied to numpy when somebody asks for them. What is read once (bounds, metrics, tuning, simulated
//! pipelines) crosses as numbers and arrays into dataclasses of `wlb._results`: see [`results`].

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use wlb_core::cost::Passes;
use wlb_core::packing::admission::OnBacklog;
use wlb_core::packing::outlier_queue::Release;
use wlb_core::packing::packer::{Oversize, StreamMethod};
use wlb_core::packing::{Leftover, MAX_MICRO_BATCHES, Method};
use wlb_core::schedule::Schedule;
use wlb_core::schedule::order::MAX_STAGES;
use wlb_core::sharding::kernel::Generation;
use wlb_core::sharding::{MAX_CP_SIZE, Remainder, Strategy};

mod convert;
mod cost;
mod dynamic_cp;
mod error;
mod kernel;
mod packer;
mod packing;
mod pipeline;
mod results;
mod run;
mod shard;
mod sharding;
mod tune;

/// The engine of wlb. Private: import its names from `wlb`.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    // A benchmark refuses a debug build.
    module.add("BUILD_PROFILE", if cfg!(debug_assertions) { "debug" } else { "release" })?;
    limits_and_choices(module)?;
    error::register(module)?;
    results::register(module)?;
    cost::register(module)?;
    packing::register(module)?;
    packer::register(module)?;
    tune::register(module)?;
    shard::register(module)?;
    kernel::register(module)?;
    sharding::register(module)?;
    pipeline::register(module)?;
    dynamic_cp::register(module)
}

/// What the core takes, for those that check before they ask it.
fn limits_and_choices(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("MAX_TOKENS", wlb_core::lengths::MAX_TOKENS)?;
    module.add("MAX_MICRO_BATCHES", MAX_MICRO_BATCHES)?;
    module.add("MAX_RANKS", MAX_CP_SIZE)?;
    module.add("MAX_STAGES", MAX_STAGES)?;
    let choices = [
        ("GENERATIONS", Generation::NAMES),
        ("LEFTOVER", Leftover::NAMES),
        ("METHODS", Method::NAMES),
        ("ON_BACKLOG", OnBacklog::NAMES),
        ("OVERSIZE", Oversize::NAMES),
        ("PASSES", Passes::NAMES),
        ("RELEASES", Release::NAMES),
        ("REMAINDERS", Remainder::NAMES),
        ("SCHEDULES", Schedule::NAMES),
        ("STRATEGIES", Strategy::NAMES),
        ("STREAM_METHODS", StreamMethod::NAMES),
    ];
    choices.into_iter().try_for_each(|(name, words)| module.add(name, PyTuple::new(module.py(), words)?))
}
