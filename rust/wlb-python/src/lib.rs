//! `wlb._core`: numpy in, plans out. Conversion only; every decision is made in `wlb-core`.
//!
//! Packings, shards and what makes them stay objects of the core, because other functions of it take them: their arrays are
//! copied to numpy when somebody asks for them. What is only read (Dynamic-CP plans, bounds, metrics, tuning, simulated
//! pipelines) crosses as numbers and arrays into dataclasses of `wlb._results`: see [`results`].

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use wlb_core::cost::{Passes, Unit};
use wlb_core::dynamic_cp::GroupSizes;
use wlb_core::limits::{MAX_CP_SIZE, MAX_MICRO_BATCHES, MAX_STAGES, MAX_TOKENS, MAX_WORLD_SIZE};
use wlb_core::packing::stream::{IMBALANCE_RESOLUTION, OnBacklog, Oversize, Release, StreamMethod};
use wlb_core::packing::tune::MAX_MEAN_DELAY;
use wlb_core::packing::{Leftover, Method, Sync};
use wlb_core::pipeline::Schedule;
use wlb_core::sharding::kernel::Generation;
use wlb_core::sharding::{Remainder, Strategy};

mod arguments;
mod convert;
mod cost;
mod dynamic_cp;
mod error;
mod kernel;
mod packer;
mod packing;
mod pipeline;
mod plain;
mod profile;
mod results;
mod run;
mod sharding;
mod tune;

/// The engine of wlb. Private: import its names from `wlb`.
///
/// It needs the GIL, so that a free-threaded Python takes it back, with a warning: what is shared is guarded by locks that are held
/// only with the GIL, which a process that forks relies on.
#[pymodule(gil_used = true)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    // A benchmark refuses a debug build.
    module.add("BUILD_PROFILE", if cfg!(debug_assertions) { "debug" } else { "release" })?;
    facts(module)?;
    error::register(module)?;
    results::register(module)?;
    profile::register(module)?;
    cost::register(module)?;
    packing::register(module)?;
    packer::register(module)?;
    tune::register(module)?;
    kernel::register(module)?;
    sharding::register(module)?;
    pipeline::register(module)?;
    dynamic_cp::register(module)
}

/// What is decided in the core: for those that check before they ask it, offer the same choices, or count as it does.
fn facts(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("MAX_TOKENS", MAX_TOKENS)?;
    module.add("MAX_MICRO_BATCHES", MAX_MICRO_BATCHES)?;
    module.add("MAX_CP_SIZE", MAX_CP_SIZE)?;
    module.add("MAX_WORLD_SIZE", MAX_WORLD_SIZE)?;
    module.add("MAX_STAGES", MAX_STAGES)?;
    module.add("MAX_MEAN_DELAY", MAX_MEAN_DELAY)?;
    module.add("DELAY_PRICE", Release::Adaptive.default_price())?;
    module.add("IMBALANCE_RESOLUTION", IMBALANCE_RESOLUTION)?;
    let choices = [
        ("GENERATIONS", Generation::NAMES),
        ("GROUP_SIZES", GroupSizes::NAMES),
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
        ("SYNCS", Sync::NAMES),
        ("UNITS", Unit::NAMES),
    ];
    choices.into_iter().try_for_each(|(name, words)| module.add(name, PyTuple::new(module.py(), words)?))
}
