//! `wlb._core`: numpy in, plans out. Conversion only; every decision is made in `wlb-core`.

use pyo3::prelude::*;

mod convert;
mod cost;
mod dynamic_cp;
mod error;
mod kernel;
mod packer;
mod packing;
mod profile;
mod run;
mod schedule;
mod sharding;

/// The engine of wlb. Private: import its names from `wlb`.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    // A benchmark refuses a debug build.
    module.add("BUILD_PROFILE", if cfg!(debug_assertions) { "debug" } else { "release" })?;
    // Limits that Python checks before it calls, or packs within.
    module.add("MAX_TOKENS", wlb_core::lengths::MAX_TOKENS)?;
    module.add("MAX_MICRO_BATCHES", wlb_core::packing::MAX_MICRO_BATCHES)?;
    module.add("MAX_CP_SIZE", wlb_core::sharding::MAX_CP_SIZE)?;
    error::register(module)?;
    profile::register(module)?;
    cost::register(module)?;
    packing::register(module)?;
    packer::register(module)?;
    sharding::register(module)?;
    kernel::register(module)?;
    schedule::register(module)?;
    dynamic_cp::register(module)
}
