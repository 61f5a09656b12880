//! `wlb._core`: numpy in, plans out. Conversion only; every decision is made in `wlb-core`.
//!
//! Packings, shards and other objects that functions take as arguments stay objects of the core; their arrays are
//! copied to numpy when they are read. Results that are only read (bounds, metrics, tuning, simulated
//! pipelines) become dataclasses of `wlb._results`: see [`results`].

use pyo3::prelude::*;

mod arguments;
mod convert;
mod cost;
mod dynamic_cp;
mod dynamic_cp_plan;
mod error;
mod execution;
mod forest;
mod gil;
mod kernel;
mod packer;
mod packing;
mod pipeline;
mod plain;
mod results;
mod round;
mod sharding;
mod tune;

/// The engine of wlb. Private: import its names from `wlb`.
///
/// It needs the GIL, so a free-threaded Python turns the GIL on again, with a warning. Shared data are guarded by locks
/// that are held only together with the GIL; that keeps forked processes safe.
///
/// Its constants are the core's choices and limits, for Python code that checks them early or lists them.
#[pymodule(gil_used = true)]
mod _core {
    use pyo3::prelude::*;
    use pyo3::types::{PyDict, PyTuple};
    use wlb_core::packing::{Leftover, Method, Sync, Together};
    use wlb_core::ranks::{self, StepSamples};
    use wlb_core::sharding::kernel::Generation;
    use wlb_core::tune::MAX_MEAN_DELAY;
    use wlb_core::{cost, dynamic_cp, limits, pipeline, sharding, stream};

    #[pymodule_export]
    use super::error::{BacklogWarning, StateError, WlbError};
    #[pymodule_export]
    use super::{
        cost::{CostModel, pairs, pass_weights},
        dynamic_cp::{Exchange, plan_dynamic_cp},
        dynamic_cp_plan::{CpGroup, DynamicCpPlan, DynamicMicroBatch},
        execution::{forest_edges, keys_plan, moves_plan, ring_plan},
        forest::PrefixForest,
        kernel::KernelModel,
        packer::Packer,
        packing::{MicroBatch, Packing, batch_offsets, most_tokens, pack, padded_tokens, split_documents},
        pipeline::{order_micro_batches, simulate_pipeline, simulate_steps},
        results::{hand_down, result},
        round::plan_round,
        sharding::{RankShard, Shard, shard},
        tune::tune,
    };

    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "its name in Python")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
    // Benchmarks refuse a debug build.
    #[pymodule_export]
    const BUILD_PROFILE: &str = if cfg!(debug_assertions) { "debug" } else { "release" };

    #[pymodule_init]
    fn constants(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::error::annotate_class(module.py())?;
        module.add("MAX_TOKENS", limits::MAX_TOKENS)?;
        module.add("MAX_MICRO_BATCHES", limits::MAX_MICRO_BATCHES)?;
        module.add("MAX_CP_SIZE", limits::MAX_CP_SIZE)?;
        module.add("MAX_WORLD_SIZE", limits::MAX_WORLD_SIZE)?;
        module.add("MAX_STAGES", limits::MAX_STAGES)?;
        module.add("MAX_MEAN_DELAY", MAX_MEAN_DELAY)?;
        module.add("MAX_DELAY", stream::Release::Adaptive.default_max_delay())?;
        module.add("DELAY_PRICE", stream::Release::Adaptive.default_price())?;
        module.add("IMBALANCE_RESOLUTION", stream::IMBALANCE_RESOLUTION)?;
        let peaks = PyDict::new(module.py());
        for name in Generation::NAMES {
            peaks.set_item(name, name.parse::<Generation>().map_err(super::error::raise)?.peak_flops())?;
        }
        module.add("PEAK_FLOPS", peaks)?;
        let choices = [
            ("GENERATIONS", Generation::NAMES),
            ("GROUP_SIZES", dynamic_cp::GroupSizes::NAMES),
            ("LEFTOVER", Leftover::NAMES),
            ("METHODS", Method::NAMES),
            ("ON_BACKLOG", stream::OnBacklog::NAMES),
            ("OVERSIZE", stream::Oversize::NAMES),
            ("PASSES", cost::Passes::NAMES),
            ("RELEASES", stream::Release::NAMES),
            ("ROUND_ORDERS", ranks::Order::NAMES),
            ("ROUND_OVERSIZE", ranks::Oversize::NAMES),
            ("ROUND_TOGETHER", ranks::RoundTogether::NAMES),
            ("SCHEDULES", pipeline::Schedule::NAMES),
            ("STEP_SAMPLES", StepSamples::NAMES),
            ("STRATEGIES", sharding::Strategy::NAMES),
            ("STREAM_METHODS", stream::StreamMethod::NAMES),
            ("SYNCS", Sync::NAMES),
            ("TOGETHER", Together::NAMES),
            ("UNITS", cost::Unit::NAMES),
        ];
        choices.into_iter().try_for_each(|(name, words)| module.add(name, PyTuple::new(module.py(), words)?))
    }
}
