//! `wlb.shard`.

use pyo3::prelude::*;
use wlb_core::limits::MAX_CP_SIZE;
use wlb_core::sharding::ShardOptions;

use crate::convert::{integer, read_lengths, size};
use crate::cost::mask;
use crate::error::raise;
use crate::kernel::KernelModel;
use crate::shard::Shard;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(shard, module)?)
}

/// Shards one micro-batch over the ranks of a context-parallel group, without padding.
///
/// Any lengths, any total, any ``cp_size``: ranks differ by at most one token, and a document of 1 token is as legal
/// as a rank without any.
///
/// Args:
///     lengths: int[n], tokens of the documents, in packed order.
///     cp_size: ranks of the group.
///     strategy: "per_document" cuts every document into ``2 * cp_size`` chunks and gives rank ``i`` chunks ``i`` and
///         ``2 * cp_size - 1 - i``: equal work on all ranks. "per_sequence" does that with the packed sequence: fewer,
///         longer segments, unequal work. "hybrid" cuts documents of ``hybrid_threshold`` tokens or more per document
///         and keeps shorter ones whole on one rank. "adaptive" is whichever of these ``kernel_model`` predicts to be fastest:
///         the least latency of the slowest rank, forward and backward; of equals the one named first here, "per_sequence" before
///         all. The result's ``strategy`` and ``hybrid_threshold`` tell which.
///     causal: mask; decides pairs and key ranges, not who gets which token.
///     remainder: with "per_document", where a document's ``length % (2 * cp_size)`` left-over tokens go: "chunk" lengthens
///         chunks by one; "token" deals them one by one, as the paper's text has it (for comparison).
///     hybrid_threshold: tokens; with "hybrid" only.
///     kernel_model: for "adaptive", and for "hybrid" without a threshold, which then gets the best one. It searches all
///         distinct lengths (of more than 64, only some: see docs/semantics.md) and decides from lengths only.
///
/// Returns:
///     Shard. The same input gives the same shards on every rank.
///
/// Raises:
///     WlbError: a length or size out of range, more than 2**31 - 1 tokens in all, an option that does not go with the
///         strategy or is missing, a kernel model of another mask.
///
/// O(n (log n + cp_size)); with a kernel model, O(n cp_size) for each threshold tried. WLB-LLM, section 5.
#[pyfunction]
#[pyo3(signature = (lengths, *, cp_size, strategy = "per_document", causal = true, remainder = "chunk", hybrid_threshold = None, kernel_model = None))]
#[allow(clippy::too_many_arguments, reason = "all but the first are keywords in Python")]
fn shard(
    py: Python<'_>,
    lengths: &Bound<'_, PyAny>,
    cp_size: &Bound<'_, PyAny>,
    strategy: &str,
    causal: bool,
    remainder: &str,
    hybrid_threshold: Option<&Bound<'_, PyAny>>,
    kernel_model: Option<&KernelModel>,
) -> PyResult<Shard> {
    let options = ShardOptions {
        cp_size: size("cp_size", cp_size, 1, MAX_CP_SIZE as i64)?,
        strategy: strategy.parse().map_err(raise)?,
        mask: mask(causal),
        remainder: remainder.parse().map_err(raise)?,
        hybrid_threshold: hybrid_threshold.map(|threshold| integer("hybrid_threshold", threshold)).transpose()?,
    };
    Shard::cut(py, &read_lengths("lengths", lengths)?, &options, kernel_model.map(|model| &model.0))
}
