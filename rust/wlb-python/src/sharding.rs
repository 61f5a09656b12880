//! `wlb.shard`, `wlb.Shard` and `wlb.RankShard`.

use std::ops::Range;
use std::sync::Arc;

use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use wlb_core::Lengths;
use wlb_core::cost::Mask;
use wlb_core::sharding::kernel::KernelModel as Model;
use wlb_core::sharding::{self as core, ShardOptions, Strategy};

use crate::arguments;
use crate::convert::{choice, size};
use crate::cost::mask;
use crate::error::{raise, refuse};
use crate::gil::run;
use crate::kernel::KernelModel;
use crate::plain::{Array, Pickle, hashed_by, pickled_as_part};
use crate::results::declaration;

/// Shards one micro-batch over the ranks of a context-parallel group, without padding.
///
/// Any lengths, any total, any ``cp_size``: ranks differ by at most one token, and a document of 1 token is as
/// legal as a rank without any.
///
/// Args:
///     lengths: int[n], tokens of the documents, in packed order.
///     cp_size: ranks of the group.
///     strategy: "auto" lays every document on as few ranks as leave none with more than ``max_imbalance`` times
///         the mean pairs (where nothing does, as evenly as it can): few keys to fetch, long segments.
///         "per_document" cuts every document into ``2 * cp_size`` chunks and gives rank ``i`` chunks ``i`` and ``2
///         * cp_size - 1 - i``: equal work. "per_sequence" does that with the packed sequence: fewer, longer
///         segments, unequal work. "hybrid" cuts documents of ``hybrid_threshold`` tokens or more per document and
///         keeps shorter ones whole on one rank. "adaptive" is whichever of these ``kernel_model`` predicts to be
///         fastest: the least latency of the slowest rank, forward and backward; of equals "per_sequence" before
///         "per_document", "auto" and "hybrid". The result's ``strategy`` and ``hybrid_threshold`` tell which.
///         "contiguous" gives rank ``i`` the ``i``-th of ``cp_size`` runs of the packed sequence, for layers that
///         mix neighbouring tokens: attention is uneven under it, see ``wlb.torch.recut``.
///     causal: mask; decides pairs and key ranges, not who gets which token.
///     hybrid_threshold: tokens; with "hybrid" only.
///     max_imbalance: with "auto", and with "adaptive" where it tries that: pairs of the rank with the most over
///         the mean, at least 1; default 1.01.
///     kernel_model: for "adaptive", and for "hybrid" without a threshold, which then gets the best one. It
///         searches all distinct lengths (of more than 64, only some: see docs/semantics.md) and decides from
///         lengths only.
///     cp_seconds_per_key: beside a ``kernel_model``: time that a rank takes for each key that it fetches
///         (``Shard.keys_moved``), in one layer, as the model's latencies are: with its value, forward and
///         backward, all that is sent for it either way, less what computation hides; at most 1e-3. The slowest
///         rank is then that with the most attention and fetching together. 0: free. Give a price where ranks
///         fetch just what they need, as ``wlb.torch``'s transport "fetch" does; others send more than that.
///
/// Returns:
///     Shard. The same input gives the same shards on every rank.
///
/// Raises:
///     WlbError: a length or size out of range, more than 2**31 - 1 tokens in all, an option that does not go with
///         the strategy or is missing, a kernel model of another mask, a price that is no time.
///
/// O(n (log n + cp_size)); with a kernel model, O(n cp_size) for each threshold tried. WLB-LLM, section 5.
///
/// Examples:
///     >>> import wlb
///     >>> s = wlb.shard([8, 4], cp_size=2, strategy="per_document")
///     >>> s.pairs_per_rank
///     array([23, 23])
///     >>> s.rank(0).token_indices
///     array([ 0,  1,  6,  7,  8, 11], dtype=int32)
#[pyfunction]
#[pyo3(signature = (
    lengths, *, cp_size, strategy = "auto", causal = true, hybrid_threshold = None, max_imbalance = None,
    kernel_model = None, cp_seconds_per_key = 0.0
))]
#[allow(clippy::too_many_arguments, reason = "keywords in Python")]
pub(crate) fn shard(
    py: Python<'_>,
    #[pyo3(from_py_with = arguments::lengths)] lengths: Lengths,
    #[pyo3(from_py_with = arguments::cp_size)] cp_size: usize,
    strategy: &str,
    #[pyo3(from_py_with = arguments::causal)] causal: bool,
    #[pyo3(from_py_with = arguments::optional::hybrid_threshold)] hybrid_threshold: Option<i64>,
    #[pyo3(from_py_with = arguments::optional::max_imbalance)] max_imbalance: Option<f64>,
    kernel_model: Option<&KernelModel>,
    #[pyo3(from_py_with = arguments::cp_seconds_per_key)] cp_seconds_per_key: f64,
) -> PyResult<Shard> {
    let strategy = choice(strategy)?;
    if max_imbalance.is_some() && !matches!(strategy, Strategy::Auto | Strategy::Adaptive) {
        let problem = "is of strategy=\"auto\", or \"adaptive\", which tries it; the others have no choice of ranks";
        return Err(refuse("max_imbalance", None, None, problem));
    }
    let max_imbalance = max_imbalance.unwrap_or(ShardOptions::MAX_IMBALANCE);
    let options = ShardOptions { cp_size, strategy, mask: mask(causal), hybrid_threshold, max_imbalance };
    Shard::cut(py, &lengths, &options, kernel_model.map(|model| &model.0), cp_seconds_per_key)
}

/// A micro-batch cut for the ranks of a context-parallel group.
///
/// Every array is a fresh copy that the caller may keep or change.
///
/// Examples:
///     >>> import wlb
///     >>> s = wlb.shard([8, 4], cp_size=2, strategy="per_document")
///     >>> s
///     Shard(strategy="per_document", cp_size=2, documents=2, tokens=12)
///     >>> s.tokens_per_rank
///     array([6, 6])
///     >>> s.keys_moved
///     array([6, 3])
#[pyclass(frozen, eq, hash, module = "wlb")]
#[derive(Clone)]
pub(crate) struct Shard {
    pub(crate) plan: Arc<core::Shard>,
    options: ShardOptions,
}

impl Shard {
    fn cut(
        py: Python<'_>,
        lengths: &Lengths,
        options: &ShardOptions,
        kernel: Option<&Model>,
        cp_seconds_per_key: f64,
    ) -> PyResult<Self> {
        let cut = || {
            let options = options.resolve(lengths, kernel, cp_seconds_per_key)?;
            Ok(Self { plan: Arc::new(core::shard(lengths, &options)?), options })
        };
        run(py, lengths.len().saturating_mul(options.cp_size), cut).map_err(raise)
    }

    fn ranks(&self) -> Range<usize> {
        0..self.plan.cp_size()
    }
}

/// Equal where every token lies in the same place, whatever was asked for.
impl PartialEq for Shard {
    fn eq(&self, other: &Self) -> bool {
        self.plan == other.plan
    }
}

// Of the lengths and the number of ranks: a lookup, once a layer and micro-batch, shall not read the whole plan.
hashed_by!(Shard: |shard| (&shard.plan.lengths, shard.plan.cp_size()));

#[pymethods]
impl Shard {
    /// How it was cut: "auto", "per_sequence", "per_document", "hybrid" or "contiguous".
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
    fn lengths(&self) -> Array<&[i32]> {
        Array(&self.plan.lengths)
    }

    /// int64[cp_size]: tokens of each rank.
    #[getter]
    fn tokens_per_rank(&self) -> Array<Vec<i64>> {
        Array(self.ranks().map(|rank| self.plan.tokens(rank)).collect())
    }

    /// int64[cp_size]: exact (query, key) pairs of each rank.
    // At most 2^62: the pairs of one document of 2^31 tokens.
    #[getter]
    fn pairs_per_rank(&self) -> Array<Vec<i64>> {
        Array(self.ranks().map(|rank| self.plan.pairs(rank) as i64).collect())
    }

    /// int64[cp_size]: keys that each rank has to fetch, because its queries see them and other ranks hold them. A
    /// rank fetches as many values. Without a window; O(segments).
    #[getter]
    fn keys_moved(&self) -> Array<Vec<i64>> {
        Array(self.ranks().map(|rank| self.plan.keys_moved(rank)).collect())
    }

    /// int64[cp_size]: keys of each rank that an all-gather has to bring, because a query on another rank sees
    /// them. As many values come with them. Ranks send as many as the rank with most keys. Without a window;
    /// O(segments).
    #[getter]
    fn keys_gathered(&self) -> Array<Vec<i64>> {
        Array(self.plan.keys_gathered())
    }

    /// int64[cp_size]: all tokens of a rank that needs two calls of attention, because of some of its documents, an
    /// eighth of its tokens or more, it has all keys that it sees, and of others not; else 0. Without a window;
    /// O(segments).
    #[getter]
    fn tokens_split(&self) -> Array<Vec<i64>> {
        Array(self.ranks().map(|rank| self.plan.tokens_split(rank)).collect())
    }

    /// int64[cp_size]: keys that each rank picks, of its own and of those that arrive: for every segment of a document
    /// of which the rank has not all keys, all keys that the segment sees. Without a window; O(segments).
    #[getter]
    fn keys_picked(&self) -> Array<Vec<i64>> {
        Array(self.ranks().map(|rank| self.plan.keys_picked(rank)).collect())
    }

    /// int32[num_tokens]: with ``rank_major`` the ranks' tokens concatenated, ``rank_major[restore_indices]`` is the
    /// packed sequence. O(tokens).
    #[getter]
    fn restore_indices(&self) -> Array<Vec<i32>> {
        Array(self.plan.restore_indices())
    }
}

#[pymethods]
impl Shard {
    /// What one rank holds and computes.
    ///
    /// Raises:
    ///     WlbError: no such rank; or its segments' keys are more than int32 ``cu_seqlens_k`` can count.
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> r = wlb.shard([8, 4], cp_size=2, strategy="per_document").rank(0)
    ///     >>> r.token_indices
    ///     array([ 0,  1,  6,  7,  8, 11], dtype=int32)
    ///     >>> r.position_ids
    ///     array([0, 1, 6, 7, 0, 3], dtype=int32)
    ///     >>> r.cu_seqlens_q
    ///     array([0, 2, 4, 5, 6], dtype=int32)
    ///     >>> r.cu_seqlens_k
    ///     array([ 0,  2, 10, 11, 15], dtype=int32)
    ///     >>> r.k_starts
    ///     array([0, 0, 8, 8], dtype=int32)
    fn rank(&self, rank: &Bound<'_, PyAny>) -> PyResult<RankShard> {
        let rank = size("rank", rank, 0, self.plan.cp_size() as i64 - 1)?;
        let held = self.plan.rank(rank).map_err(raise)?;
        Ok(RankShard { shard: self.clone(), rank, held })
    }

    /// Hex hash of which token lies where: equal on two ranks iff their shards are equal.
    fn digest(&self, py: Python<'_>) -> String {
        run(py, self.plan.lengths.len().saturating_mul(self.plan.cp_size()), || self.plan.digest())
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
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Pickle<'py, Bound<'py, PyTuple>>> {
        let Self { plan, options } = slf.get();
        let lengths = PyArray1::from_slice(slf.py(), &plan.lengths);
        let strategy = options.strategy.as_str();
        let (threshold, max_imbalance) = (options.hybrid_threshold, options.max_imbalance);
        let arguments = (lengths, options.cp_size, strategy, slf.get().causal(), threshold, max_imbalance);
        Ok((slf.get_type().getattr("_of")?, arguments.into_pyobject(slf.py())?))
    }
}

#[pymethods]
impl Shard {
    #[staticmethod]
    #[pyo3(signature = (lengths, cp_size, strategy, causal, hybrid_threshold, max_imbalance))]
    fn _of(
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::lengths)] lengths: Lengths,
        cp_size: usize,
        strategy: &str,
        #[pyo3(from_py_with = arguments::causal)] causal: bool,
        hybrid_threshold: Option<i64>,
        max_imbalance: f64,
    ) -> PyResult<Self> {
        let strategy = choice(strategy)?;
        let options = ShardOptions { cp_size, strategy, mask: mask(causal), hybrid_threshold, max_imbalance };
        Self::cut(py, &lengths, &options, None, 0.0)
    }
}

/// What one rank of a context-parallel group holds and computes, ready for a varlen attention kernel.
///
/// Rows have an order of their own: first come the documents of which the rank has all keys that it sees, then the
/// others (``docs/semantics.md``). A segment is a contiguous run of one document; segment ``i``'s queries are
/// ``cu_seqlens_q[i]:cu_seqlens_q[i + 1]`` of the rank's tokens, and its keys are
/// ``packed[k_starts[i] : k_starts[i] + cu_seqlens_k[i + 1] - cu_seqlens_k[i]]``. Under a causal mask these are its
/// document up to the segment's end, so that a kernel's bottom-right causal alignment is right.
///
/// Examples:
///     >>> import wlb
///     >>> r = wlb.shard([8, 4], cp_size=2, strategy="per_document").rank(0)
///     >>> r.position_ids
///     array([0, 1, 6, 7, 0, 3], dtype=int32)
///     >>> r.cu_seqlens_q
///     array([0, 2, 4, 5, 6], dtype=int32)
///     >>> r.k_starts
///     array([0, 0, 8, 8], dtype=int32)
#[pyclass(frozen, eq, hash, module = "wlb")]
#[derive(PartialEq)]
pub(crate) struct RankShard {
    shard: Shard,
    rank: usize,
    held: core::RankShard,
}

hashed_by!(RankShard: |shard| (&shard.shard, shard.rank));

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
        self.held.num_tokens
    }

    /// Segments of the rank, ``s``.
    #[getter]
    fn num_segments(&self) -> usize {
        self.held.k_starts.len()
    }

    /// int32[T_r]: where each token stands in the packed sequence, row by row.
    #[getter]
    fn token_indices(&self) -> Array<Vec<i32>> {
        Array(self.held.token_indices())
    }

    /// int32[T_r]: where each token stands in its document; the positions that RoPE needs.
    #[getter]
    fn position_ids(&self) -> Array<Vec<i32>> {
        Array(self.held.position_ids())
    }

    /// int32[s + 1]: where the queries of each segment begin among the rank's tokens.
    #[getter]
    fn cu_seqlens_q(&self) -> Array<&[i32]> {
        Array(&self.held.cu_seqlens_q)
    }

    /// int32[s + 1]: where the keys of each segment begin, when the keys of all segments are copied one after the
    /// other.
    #[getter]
    fn cu_seqlens_k(&self) -> Array<&[i32]> {
        Array(&self.held.cu_seqlens_k)
    }

    /// Tokens of the longest segment; 0 without segments.
    #[getter]
    fn max_seqlen_q(&self) -> i32 {
        self.held.max_seqlen_q
    }

    /// Most keys of a segment; 0 without segments.
    #[getter]
    fn max_seqlen_k(&self) -> i32 {
        self.held.max_seqlen_k
    }

    /// int32[s]: where the keys of each segment begin in the packed sequence.
    #[getter]
    fn k_starts(&self) -> Array<&[i32]> {
        Array(&self.held.k_starts)
    }

    /// int32[s]: the document that each segment is part of.
    #[getter]
    fn documents(&self) -> Array<Vec<i32>> {
        Array(self.held.segments.iter().map(|segment| segment.document as i32).collect())
    }

    /// Exact (query, key) pairs of the rank.
    #[getter]
    fn pairs(&self) -> u64 {
        self.shard.plan.pairs(self.rank)
    }
}

#[pymethods]
impl Shard {
    /// Figures of the shard, for a log or a notebook.
    ///
    /// Returns:
    ///     dict: strategy, cp_size, documents, tokens, imbalance (pairs of the busiest rank over the mean), keys_moved
    ///         (most of a rank).
    ///
    /// Complexity:
    ///     O(documents * cp_size).
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> wlb.shard([64, 64], cp_size=2).summary()["tokens"]
    ///     128
    fn summary<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        declaration(slf.py(), "wlb._shown.summary")?.call1((slf,))
    }

    /// Ranks as a table: a row for each.
    ///
    /// Returns:
    ///     pandas.DataFrame: rank, tokens, pairs, keys_moved.
    ///
    /// Raises:
    ///     WlbError: pandas is not installed.
    ///
    /// Complexity:
    ///     O(documents * cp_size).
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> wlb.shard([64, 64], cp_size=2).to_pandas()["tokens"].tolist()  # doctest: +SKIP
    ///     [64, 64]
    fn to_pandas<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        declaration(slf.py(), "wlb._shown.to_pandas")?.call1((slf,))
    }

    fn _repr_html_<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        declaration(slf.py(), "wlb._shown.html")?.call1((slf,))
    }
}

#[pymethods]
impl RankShard {
    fn __repr__(&self) -> String {
        let (rank, tokens, segments) = (self.rank, self.num_tokens(), self.num_segments());
        format!("RankShard(rank={rank}, tokens={tokens}, segments={segments}, pairs={})", self.pairs())
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Pickle<'py, (usize,)>> {
        pickled_as_part(py, self.shard.clone(), "rank", (self.rank,))
    }
}

// Here and not where the other methods are: a kernel model knows nothing of shards, but "adaptive" sharding asks one.
#[pymethods]
impl KernelModel {
    /// Latency of each rank's attention call: the sum of its segments, and a constant for the launch.
    ///
    /// Args:
    ///     shard: of the same mask.
    ///     passes: "forward", "backward" or "forward_backward" (their sum).
    ///
    /// Returns:
    ///     float64[cp_size], seconds; 0 for a rank without tokens.
    ///
    /// Raises:
    ///     WlbError: a shard of another mask.
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> kernel = wlb.KernelModel.analytic("h100", num_heads=32, head_dim=128)
    ///     >>> kernel.rank_seconds(wlb.shard([4096], cp_size=2, strategy="per_document")).shape
    ///     (2,)
    #[pyo3(signature = (shard, *, passes = "forward_backward"))]
    fn rank_seconds(&self, shard: &Shard, passes: &str) -> PyResult<Array<Vec<f64>>> {
        self.0.rank_seconds(&shard.plan, choice(passes)?).map(Array).map_err(raise)
    }
}
