//! `wlb.Shard` and `wlb.RankShard`.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use numpy::PyArray1;
use pyo3::prelude::*;
use wlb_core::Lengths;
use wlb_core::cost::Mask;
use wlb_core::sharding::RankLayout;
use wlb_core::sharding::kernel::KernelModel as Model;
use wlb_core::sharding::{self as core, ShardOptions};

use crate::convert::{Pickled, array, as_call, read_lengths, size};
use crate::cost::mask;
use crate::error::raise;
use crate::run::run;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Shard>()?;
    module.add_class::<RankShard>()
}

/// A micro-batch cut for the ranks of a context-parallel group.
///
/// Every array is a fresh copy that the caller may keep or change.
#[pyclass(frozen, eq, hash, module = "wlb")]
#[derive(Clone)]
pub(crate) struct Shard {
    pub(crate) plan: Arc<core::Shard>,
    options: ShardOptions,
}

impl Shard {
    /// The micro-batch cut so, where no kernel model is needed to decide.
    pub(crate) fn cut(
        py: Python<'_>,
        lengths: &Lengths,
        options: &ShardOptions,
        kernel: Option<&Model>,
    ) -> PyResult<Self> {
        let cut = || {
            let options = options.resolve(lengths, kernel)?;
            Ok(Self { plan: Arc::new(core::shard(lengths, &options)?), options })
        };
        run(py, lengths.len().saturating_mul(options.cp_size), cut)?.map_err(raise)
    }
}

/// Equal where every token lies in the same place, whatever was asked for.
impl PartialEq for Shard {
    fn eq(&self, other: &Self) -> bool {
        self.plan == other.plan
    }
}

/// Of the lengths and the number of ranks: a lookup, once a layer and micro-batch, shall not read the whole plan.
impl Hash for Shard {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.plan.lengths, self.plan.cp_size()).hash(state);
    }
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
        Ok(RankShard { shard: self.clone(), rank, layout })
    }

    /// Hex hash of which token lies where: equal on two ranks iff their shards are equal.
    fn digest(&self) -> String {
        self.plan.digest()
    }

    fn __len__(&self) -> usize {
        self.plan.cp_size()
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
    #[allow(clippy::type_complexity, reason = "what pickle wants")]
    fn __reduce__<'py>(
        slf: &Bound<'py, Self>,
    ) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyArray1<i32>>, usize, &'static str, bool, &'static str, Option<i64>))>
    {
        let Self { plan, options } = slf.get();
        let lengths = PyArray1::from_slice(slf.py(), &plan.lengths);
        let (strategy, remainder) = (options.strategy.as_str(), options.remainder.as_str());
        let arguments = (lengths, options.cp_size, strategy, slf.get().causal(), remainder, options.hybrid_threshold);
        Ok((slf.get_type().getattr("_of")?, arguments))
    }

    #[staticmethod]
    fn _of(
        lengths: &Bound<'_, PyAny>,
        cp_size: usize,
        strategy: &str,
        causal: bool,
        remainder: &str,
        hybrid_threshold: Option<i64>,
    ) -> PyResult<Self> {
        let (strategy, remainder) = (strategy.parse().map_err(raise)?, remainder.parse().map_err(raise)?);
        let options = ShardOptions { cp_size, strategy, mask: mask(causal), remainder, hybrid_threshold };
        Self::cut(lengths.py(), &read_lengths("lengths", lengths)?, &options, None)
    }
}

/// What one rank of a context-parallel group holds and computes, ready for a varlen attention kernel.
///
/// Tokens stand in packed order. A segment is a contiguous run of one document; segment ``i``'s queries are
/// ``cu_seqlens_q[i]:cu_seqlens_q[i + 1]`` of the rank's tokens, and its keys are
/// ``packed[k_starts[i] : k_starts[i] + cu_seqlens_k[i + 1] - cu_seqlens_k[i]]``. Under a causal mask these are its document up
/// to the segment's end, so that a kernel's bottom-right causal alignment is right.
#[pyclass(frozen, eq, hash, module = "wlb")]
#[derive(PartialEq)]
pub(crate) struct RankShard {
    shard: Shard,
    rank: usize,
    layout: RankLayout,
}

impl Hash for RankShard {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.shard, self.rank).hash(state);
    }
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
        self.shard.plan.cp_size()
    }

    /// Whether queries attend only to keys before them.
    #[getter]
    fn causal(&self) -> bool {
        self.shard.causal()
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
        Ok(array(py, self.shard.plan.token_indices(self.rank).map_err(raise)?))
    }

    /// int32[T_r]: where each token stands in its document; the positions that RoPE needs.
    #[getter]
    fn position_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        Ok(array(py, self.shard.plan.position_ids(self.rank).map_err(raise)?))
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
        let segments = self.shard.plan.segments(self.rank).map_err(raise)?;
        Ok(array(py, segments.iter().map(|segment| segment.document as i32).collect()))
    }

    /// Exact (query, key) pairs of the rank.
    #[getter]
    fn pairs(&self) -> u64 {
        self.shard.plan.pairs(self.rank)
    }

    fn __repr__(&self) -> String {
        let (rank, tokens, segments) = (self.rank, self.num_tokens(), self.num_segments());
        format!("RankShard(rank={rank}, tokens={tokens}, segments={segments}, pairs={})", self.pairs())
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Pickled<'py, (usize,)>> {
        as_call(py, self.shard.clone(), "rank", (self.rank,))
    }
}
