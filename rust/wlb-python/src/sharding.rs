//! `wlb.shard`.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use numpy::PyArray1;
use pyo3::prelude::*;
use wlb_core::cost::Mask;
use wlb_core::limits::MAX_CP_SIZE;
use wlb_core::sharding::{self as core, RankLayout, Remainder, ShardOptions};

use crate::convert::{array, integer, read_lengths, size};
use crate::cost::mask;
use crate::error::raise;
use crate::kernel::KernelModel;
use crate::run::run;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Shard>()?;
    module.add_class::<RankShard>()?;
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
    let asked_for = ShardOptions {
        cp_size: size("cp_size", cp_size, 1, MAX_CP_SIZE as i64)?,
        strategy: strategy.parse().map_err(raise)?,
        mask: mask(causal),
        remainder: remainder.parse().map_err(raise)?,
        hybrid_threshold: hybrid_threshold.map(|threshold| integer("hybrid_threshold", threshold)).transpose()?,
    };
    let lengths = read_lengths("lengths", lengths)?;
    let kernel = kernel_model.map(|model| &model.0);
    let cut = || {
        let options = asked_for.resolve(&lengths, kernel)?;
        Ok((core::shard(&lengths, &options)?, options))
    };
    let (plan, options) = run(py, lengths.len().saturating_mul(asked_for.cp_size), cut)?.map_err(raise)?;
    Ok(Shard { plan: Arc::new(plan), options })
}

/// A micro-batch cut for the ranks of a context-parallel group.
///
/// Every array is a fresh copy that the caller may keep or change.
#[pyclass(frozen, module = "wlb", name = "Shard")]
pub(crate) struct Shard {
    pub(crate) plan: Arc<core::Shard>,
    options: ShardOptions,
}

#[pymethods]
impl Shard {
    /// How it was cut: "per_sequence", "per_document" or "hybrid".
    #[getter]
    fn strategy(&self) -> &'static str {
        self.plan.strategy.as_str()
    }

    /// With "hybrid", the tokens from which on documents were cut, given or chosen; else None.
    #[getter]
    fn hybrid_threshold(&self) -> Option<i64> {
        self.options.hybrid_threshold
    }

    /// Ranks of the group; also ``len()``.
    #[getter]
    fn cp_size(&self) -> usize {
        self.plan.cp_size()
    }

    /// Whether queries attend only to keys before them.
    #[getter]
    fn causal(&self) -> bool {
        self.plan.mask == Mask::Causal
    }

    /// Tokens of the micro-batch.
    #[getter]
    fn num_tokens(&self) -> i32 {
        self.plan.num_tokens()
    }

    /// int32[n]: tokens of each document.
    #[getter]
    fn lengths<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.plan.lengths)
    }

    /// int64[cp_size]: tokens of each rank.
    #[getter]
    fn tokens_per_rank<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        array(py, (0..self.plan.cp_size()).map(|rank| self.plan.tokens(rank)).collect())
    }

    /// int64[cp_size]: exact (query, key) pairs of each rank.
    #[getter]
    fn pairs_per_rank<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        // At most 2^62: the pairs of one document of 2^31 tokens.
        array(py, (0..self.plan.cp_size()).map(|rank| self.plan.pairs(rank) as i64).collect())
    }

    /// int32[num_tokens]: with ``rank_major`` the ranks' tokens concatenated, ``rank_major[restore_indices]`` is the packed
    /// sequence. O(tokens).
    #[getter]
    fn restore_indices<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        array(py, self.plan.restore_indices())
    }

    /// What one rank holds and computes.
    ///
    /// Raises:
    ///     WlbError: no such rank; or its segments' keys are more than int32 ``cu_seqlens_k`` can count.
    fn rank(&self, rank: &Bound<'_, PyAny>) -> PyResult<RankShard> {
        let rank = size("rank", rank, 0, self.plan.cp_size() as i64 - 1)?;
        let layout = self.plan.layout(rank).map_err(raise)?;
        Ok(RankShard { plan: Arc::clone(&self.plan), options: self.options.clone(), rank, layout })
    }

    /// Hex hash of which token lies where: equal on two ranks iff their shards are equal.
    fn digest(&self) -> String {
        self.plan.digest()
    }

    fn __len__(&self) -> usize {
        self.plan.cp_size()
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Self>().is_ok_and(|other| other.get().plan == self.plan)
    }

    /// Of the lengths and the number of ranks: a lookup, once a layer and micro-batch, shall not read the whole plan.
    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.plan.lengths, self.plan.cp_size()).hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        format!(
            "Shard(strategy={:?}, cp_size={}, documents={}, tokens={})",
            self.strategy(),
            self.cp_size(),
            self.plan.lengths.len(),
            self.num_tokens()
        )
    }

    /// A pickle holds the lengths: the same shard is computed again from them.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, ShardArguments<'py>)> {
        let py = slf.py();
        Ok((slf.get_type().getattr("_of")?, arguments(py, &slf.get().plan, &slf.get().options)))
    }

    #[staticmethod]
    fn _of(
        py: Python<'_>,
        lengths: &Bound<'_, PyAny>,
        cp_size: &Bound<'_, PyAny>,
        strategy: &str,
        causal: bool,
        remainder: &str,
        hybrid_threshold: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        shard(py, lengths, cp_size, strategy, causal, remainder, hybrid_threshold, None)
    }
}

type ShardArguments<'py> = (Bound<'py, PyArray1<i32>>, usize, &'static str, bool, &'static str, Option<i64>);

fn arguments<'py>(py: Python<'py>, plan: &core::Shard, options: &ShardOptions) -> ShardArguments<'py> {
    (
        PyArray1::from_slice(py, &plan.lengths),
        options.cp_size,
        options.strategy.as_str(),
        options.mask == Mask::Causal,
        Remainder::as_str(options.remainder),
        options.hybrid_threshold,
    )
}

/// What one rank of a context-parallel group holds and computes, ready for a varlen attention kernel.
///
/// Tokens stand in packed order. A segment is a contiguous run of one document; segment ``i``'s queries are
/// ``cu_seqlens_q[i]:cu_seqlens_q[i + 1]`` of the rank's tokens, and its keys are
/// ``packed[k_starts[i] : k_starts[i] + cu_seqlens_k[i + 1] - cu_seqlens_k[i]]``. Under a causal mask these are its document up
/// to the segment's end, so that a kernel's bottom-right causal alignment is right.
#[pyclass(frozen, module = "wlb", name = "RankShard")]
pub(crate) struct RankShard {
    plan: Arc<core::Shard>,
    options: ShardOptions,
    rank: usize,
    layout: RankLayout,
}

#[pymethods]
impl RankShard {
    /// The rank, from 0.
    #[getter]
    fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks of the group.
    #[getter]
    fn cp_size(&self) -> usize {
        self.plan.cp_size()
    }

    /// Whether queries attend only to keys before them.
    #[getter]
    fn causal(&self) -> bool {
        self.plan.mask == Mask::Causal
    }

    /// Tokens of the rank, ``T_r``.
    #[getter]
    fn num_tokens(&self) -> usize {
        self.layout.num_tokens
    }

    /// Segments of the rank, ``s``.
    #[getter]
    fn num_segments(&self) -> usize {
        self.layout.k_starts.len()
    }

    /// int32[T_r]: where each token stands in the packed sequence; ascending.
    #[getter]
    fn token_indices<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        Ok(array(py, self.plan.token_indices(self.rank).map_err(raise)?))
    }

    /// int32[T_r]: where each token stands in its document; the positions that RoPE needs.
    #[getter]
    fn position_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        Ok(array(py, self.plan.position_ids(self.rank).map_err(raise)?))
    }

    /// int32[s + 1]: where the queries of each segment begin among the rank's tokens.
    #[getter]
    fn cu_seqlens_q<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.layout.cu_seqlens_q)
    }

    /// int32[s + 1]: where the keys of each segment begin, when the keys of all segments are copied one after the other.
    #[getter]
    fn cu_seqlens_k<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.layout.cu_seqlens_k)
    }

    /// Tokens of the longest segment; 0 without segments.
    #[getter]
    fn max_seqlen_q(&self) -> i32 {
        self.layout.max_seqlen_q
    }

    /// Most keys of a segment; 0 without segments.
    #[getter]
    fn max_seqlen_k(&self) -> i32 {
        self.layout.max_seqlen_k
    }

    /// int32[s]: where the keys of each segment begin in the packed sequence.
    #[getter]
    fn k_starts<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.layout.k_starts)
    }

    /// int32[s]: the document that each segment is part of.
    #[getter]
    fn documents<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let segments = self.plan.segments(self.rank).map_err(raise)?;
        Ok(array(py, segments.iter().map(|segment| segment.document as i32).collect()))
    }

    /// Exact (query, key) pairs of the rank.
    #[getter]
    fn pairs(&self) -> u64 {
        self.plan.pairs(self.rank)
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Self>().is_ok_and(|other| other.get().rank == self.rank && other.get().plan == self.plan)
    }

    fn __hash__(&self) -> u64 {
        self.rank as u64 ^ self.pairs()
    }

    fn __repr__(&self) -> String {
        let (rank, tokens, segments) = (self.rank, self.num_tokens(), self.num_segments());
        format!("RankShard(rank={rank}, tokens={tokens}, segments={segments}, pairs={})", self.pairs())
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (ShardArguments<'py>, usize))> {
        let this = slf.get();
        Ok((slf.get_type().getattr("_of")?, (arguments(slf.py(), &this.plan, &this.options), this.rank)))
    }

    #[staticmethod]
    #[allow(clippy::type_complexity, reason = "the arguments of `shard`, as a pickle holds them")]
    fn _of<'py>(
        py: Python<'py>,
        arguments: (Bound<'py, PyAny>, Bound<'py, PyAny>, String, bool, String, Option<Bound<'py, PyAny>>),
        rank: &Bound<'py, PyAny>,
    ) -> PyResult<Self> {
        let (lengths, cp_size, strategy, causal, remainder, threshold) = &arguments;
        shard(py, lengths, cp_size, strategy, *causal, remainder, threshold.as_ref(), None)?.rank(rank)
    }
}
