//! `wlb.shard`, `wlb.Shard` and `wlb.RankShard`.

use std::ops::Range;
use std::sync::Arc;

use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use wlb_core::cost::Mask;
use wlb_core::sharding::kernel::KernelModel as Model;
use wlb_core::sharding::{self as core, Segment, ShardOptions, Strategy};

use crate::arguments;
use crate::convert::{choice, size};
use crate::cost::mask;
use crate::error::{raise, refuse};
use crate::forest::{Batch, PrefixForest, refuse_for_forests};
use crate::gil::run;
use crate::kernel::KernelModel;
use crate::packing::{MicroBatch, cu_seqlens};
use crate::plain::{Array, Pickle, hashed_by, pickled_as_part};
use crate::results::declaration;

/// Shards one micro-batch over the ranks of a context-parallel group, without padding.
///
/// Any lengths and any ``cp_size`` are allowed, also a document of 1 token and a rank without tokens. Ranks differ by
/// at most one token.
///
/// Args:
///     lengths: int[n], tokens of the documents, in packed order; or a ``MicroBatch`` of a plan; or a ``PrefixForest``,
///         with all its samples. The nodes of a forest lie depth-first, the longest of siblings first, and are cut as
///         documents are.
///     cp_size: number of ranks of the group.
///     strategy: "auto": every document on as few ranks as possible, while no rank has more than ``max_imbalance``
///         times the mean pairs (if that is impossible, as evenly as possible): few keys to fetch, long segments.
///         "per_document": every document in ``2 * cp_size`` chunks; rank ``i`` gets chunks ``i`` and ``2 * cp_size - 1
///         - i``: equal work. "per_sequence": the packed sequence in such chunks: fewer and longer segments, unequal
///         work. "hybrid": documents of at least ``hybrid_threshold`` tokens per document, shorter ones whole on one
///         rank. "adaptive": the one of these four that ``kernel_model`` predicts to be fastest, by the latency of the
///         slowest rank, forward and backward; equally fast ones in the order "per_sequence", "per_document", "auto",
///         "hybrid". The result's ``strategy`` and ``hybrid_threshold`` say which it is. "contiguous": rank ``i`` gets
///         the ``i``-th of ``cp_size`` runs of the packed sequence, for layers that mix neighbouring tokens; attention
///         is uneven under it, see ``wlb.torch.recut``.
///     causal: whether queries see only keys before them; it decides pairs and key ranges, not the rank of a token.
///     hybrid_threshold: tokens; with "hybrid" only.
///     max_imbalance: with "auto", and with "adaptive" when it tries "auto": most pairs of a rank over the mean, at
///         least 1; default 1.01.
///     kernel_model: for "adaptive", and for "hybrid" without a threshold, which then gets the best threshold. All
///         distinct lengths are tried as thresholds (of more than 64 only some, see docs/semantics.md).
///     cp_seconds_per_key: with a ``kernel_model``: seconds that a rank takes for each key that it fetches
///         (``Shard.keys_moved``), in one layer, forward and backward: for the key, its value and their gradients, less
///         what computation hides; at most 1e-3. The slowest rank is then the one with the longest attention and
///         fetching together. 0: free. Give it only if ranks fetch just the keys that they need, as with
///         ``wlb.torch``'s transport "fetch"; other transports send more.
///
/// A forest takes ``strategy="auto"`` and ``max_imbalance`` only. Several least lengths of cut nodes are tried; shorter
/// nodes stay whole on one rank.
///
/// Returns:
///     Shard. The same input gives the same shards on every rank.
///
/// Raises:
///     WlbError: a length or size out of range; more than 2**31 - 1 tokens in all; an option that the strategy does not
///         take, or one that it lacks; a kernel model of another mask; a ``cp_seconds_per_key`` out of range.
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
///     >>> s = wlb.shard(wlb.PrefixForest.from_prompts([8], 2, [4, 4]), cp_size=2)
///     >>> s.tokens_per_rank, s.pairs_per_rank
///     (array([8, 8]), array([60, 60]))
#[pyfunction]
#[pyo3(signature = (
    lengths, *, cp_size, strategy = "auto", causal = true, hybrid_threshold = None, max_imbalance = None,
    kernel_model = None, cp_seconds_per_key = 0.0
))]
#[allow(clippy::too_many_arguments, reason = "keywords in Python")]
pub(crate) fn shard(
    py: Python<'_>,
    #[pyo3(from_py_with = micro_batch)] lengths: Batch,
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
        let problem = "is only for strategy=\"auto\", and for \"adaptive\", which tries \"auto\"";
        return Err(refuse("max_imbalance", None, None, problem));
    }
    if matches!(lengths, Batch::Forest(_)) {
        refuse_for_forests(&[
            ("strategy", strategy != Strategy::Auto, "is for documents: a forest takes \"auto\""),
            ("causal", !causal, "is for documents: samples of a forest can share tokens under a causal mask only"),
            ("hybrid_threshold", hybrid_threshold.is_some(), "is for documents: a forest takes strategy=\"auto\""),
            ("kernel_model", kernel_model.is_some(), "is for documents: a forest takes strategy=\"auto\""),
            ("cp_seconds_per_key", cp_seconds_per_key != 0.0, "is for documents: a forest takes strategy=\"auto\""),
        ])?;
    }
    let max_imbalance = max_imbalance.unwrap_or(ShardOptions::MAX_IMBALANCE);
    let options = ShardOptions { cp_size, strategy, mask: mask(causal), hybrid_threshold, max_imbalance };
    Shard::cut(py, &lengths, options, kernel_model.map(|model| &model.0), cp_seconds_per_key)
}

/// Documents, a micro-batch of a plan, or a forest.
fn micro_batch(object: &Bound<'_, PyAny>) -> PyResult<Batch> {
    match object.cast::<MicroBatch>() {
        Ok(micro_batch) => micro_batch.get().batch(),
        Err(_) => Batch::read(object),
    }
}

/// A micro-batch cut for the ranks of a context-parallel group.
///
/// In the shard of a forest, nodes stand in the place of documents: ``lengths`` are theirs. A token's place in the
/// packed sequence is its packed index.
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
        batch: &Batch,
        options: ShardOptions,
        kernel: Option<&Model>,
        cp_seconds_per_key: f64,
    ) -> PyResult<Self> {
        let size = match batch {
            Batch::Documents(lengths) => lengths.len().saturating_mul(options.cp_size),
            Batch::Forest(forest) => forest.num_nodes(),
        };
        let cut = || match batch {
            Batch::Documents(lengths) => {
                let options = options.resolve(lengths, kernel, cp_seconds_per_key)?;
                Ok(Self { plan: Arc::new(core::shard(lengths, &options)?), options })
            }
            Batch::Forest(forest) => {
                let plan = core::shard_forest(forest, options.cp_size, options.max_imbalance)?;
                Ok(Self { plan: Arc::new(plan), options })
            }
        };
        run(py, size, cut).map_err(raise)
    }

    /// Refuses figures that only shards of documents have.
    fn of_documents(&self, argument: &str) -> PyResult<()> {
        match self.plan.forest {
            Some(_) => Err(refuse(argument, None, None, "is a figure of documents, and this is the shard of a forest")),
            None => Ok(()),
        }
    }

    fn ranks(&self) -> Range<usize> {
        0..self.plan.cp_size()
    }
}

/// Equal if every token is in the same place, whatever strategy was asked for.
impl PartialEq for Shard {
    fn eq(&self, other: &Self) -> bool {
        self.plan == other.plan
    }
}

// Only from lengths and the number of ranks: there is a look-up for each layer and micro-batch, so it must be quick.
hashed_by!(Shard: |shard| (&shard.plan.lengths, shard.plan.cp_size()));

#[pymethods]
impl Shard {
    /// Strategy of the shard: "auto", "per_sequence", "per_document", "hybrid" or "contiguous".
    #[getter]
    fn strategy(&self) -> &'static str {
        self.plan.strategy.as_str()
    }

    /// With "hybrid", the least tokens of a document that is cut, given or chosen; else None.
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

    /// The forest, with its nodes in memory order; None if documents were cut.
    #[getter]
    fn forest(&self) -> Option<PrefixForest> {
        self.plan.forest.clone().map(PrefixForest)
    }

    /// Tokens of the micro-batch; of a forest each shared token once.
    #[getter]
    fn num_tokens(&self) -> i32 {
        self.plan.num_tokens()
    }

    /// int32[n]: tokens of each document; of a forest, of each node.
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
    // At most 2^62, for one document of 2^31 tokens, so int64 is enough.
    #[getter]
    fn pairs_per_rank(&self) -> Array<Vec<i64>> {
        Array(self.ranks().map(|rank| self.plan.pairs(rank) as i64).collect())
    }

    /// int64[cp_size]: keys that each rank has to fetch, because its queries see them and other ranks hold them. A rank
    /// fetches equally many values. Counted without a window; O(segments).
    #[getter]
    fn keys_moved(&self) -> Array<Vec<i64>> {
        Array(self.ranks().map(|rank| self.plan.keys_moved(rank)).collect())
    }

    /// int64[cp_size]: keys of each rank that an all-gather has to send, because a query on another rank sees them.
    /// Equally many values go with them. Every rank sends as many keys as the rank with the most. Counted without a
    /// window; O(segments).
    #[getter]
    fn keys_gathered(&self) -> Array<Vec<i64>> {
        Array(self.plan.keys_gathered())
    }

    /// int64[cp_size]: tokens of each rank that attends in two calls, else 0. A rank attends in two calls if it lacks
    /// keys for some of its documents, and the documents for which it has all keys are at least an eighth of its
    /// tokens: these attend while keys arrive. Counted without a window; O(segments).
    ///
    /// Raises:
    ///     WlbError: the shard is of a forest.
    #[getter]
    fn tokens_split(&self) -> PyResult<Array<Vec<i64>>> {
        self.of_documents("tokens_split")?;
        Ok(Array(self.ranks().map(|rank| self.plan.tokens_split(rank)).collect()))
    }

    /// int64[cp_size]: keys (own and fetched ones) that each rank copies for the call that needs keys of other ranks:
    /// for every segment of a document of which the rank lacks keys, all keys that the segment sees. Counted without a
    /// window; O(segments).
    ///
    /// Raises:
    ///     WlbError: the shard is of a forest.
    #[getter]
    fn keys_picked(&self) -> PyResult<Array<Vec<i64>>> {
        self.of_documents("keys_picked")?;
        Ok(Array(self.ranks().map(|rank| self.plan.keys_picked(rank)).collect()))
    }

    /// int32[num_tokens]: ``rank_major[restore_indices]`` is the packed sequence, where ``rank_major`` has the ranks'
    /// tokens one rank after the other. O(tokens).
    #[getter]
    fn restore_indices(&self) -> Array<Vec<i32>> {
        Array(self.plan.restore_indices())
    }
}

#[pymethods]
impl Shard {
    /// The tokens of one rank and the arrays for its attention kernel.
    ///
    /// Raises:
    ///     WlbError: no such rank, or more keys of its segments than int32 ``cu_seqlens_k`` can count.
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

    /// Hex hash of the place of every token: equal on two ranks if and only if their shards are.
    fn digest(&self, py: Python<'_>) -> String {
        run(py, self.plan.lengths.len().saturating_mul(self.plan.cp_size()), || self.plan.digest())
    }

    fn __len__(&self) -> usize {
        self.plan.cp_size()
    }

    fn __repr__(&self) -> String {
        format!(
            "Shard(strategy={:?}, cp_size={}, {}={}, tokens={})",
            self.strategy(),
            self.cp_size(),
            if self.plan.forest.is_some() { "nodes" } else { "documents" },
            self.plan.lengths.len(),
            self.num_tokens()
        )
    }

    /// A pickle holds the lengths or the forest, and the options, from which the same shard is computed again.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Pickle<'py, Bound<'py, PyTuple>>> {
        let Self { plan, options } = slf.get();
        let lengths = match slf.get().forest() {
            Some(forest) => Bound::new(slf.py(), forest)?.into_any(),
            None => PyArray1::from_slice(slf.py(), &plan.lengths).into_any(),
        };
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
        #[pyo3(from_py_with = Batch::read)] lengths: Batch,
        cp_size: usize,
        strategy: &str,
        #[pyo3(from_py_with = arguments::causal)] causal: bool,
        hybrid_threshold: Option<i64>,
        max_imbalance: f64,
    ) -> PyResult<Self> {
        let strategy = choice(strategy)?;
        let options = ShardOptions { cp_size, strategy, mask: mask(causal), hybrid_threshold, max_imbalance };
        Self::cut(py, &lengths, options, None, 0.0)
    }
}

/// The tokens of one rank of a context-parallel group, and the arrays for its varlen attention kernel.
///
/// Rows have an order of their own: first the documents of which the rank has all keys that it sees, then the others
/// (``docs/semantics.md``). A segment is a contiguous run of one document. The queries of segment ``i`` are
/// ``cu_seqlens_q[i]:cu_seqlens_q[i + 1]`` of the rank's tokens, and its keys are ``packed[k_starts[i] : k_starts[i] +
/// cu_seqlens_k[i + 1] - cu_seqlens_k[i]]``. Under a causal mask these are its document up to the segment's end, which
/// is what a kernel with bottom-right causal alignment expects.
///
/// In a forest a segment is a run of one node, and rows are in packed order. The keys of segment ``i`` are those of the
/// nodes above, then its own, in the intervals ``j`` with ``cu_intervals[i] <= j < cu_intervals[i + 1]``; interval
/// ``j`` is ``packed[key_starts[j]:key_ends[j]]``. (Segments of documents have one interval each.) The last query sees
/// all of these keys, and each query before it one less.
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

impl RankShard {
    fn intervals(&self) -> impl Iterator<Item = Vec<core::Interval>> + '_ {
        self.held.segments.iter().map(|segment: &Segment| self.shard.plan.intervals(segment))
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

    /// The forest, with its nodes in memory order; None if documents were cut.
    #[getter]
    fn forest(&self) -> Option<PrefixForest> {
        self.shard.forest()
    }

    /// Tokens of the rank, ``T_r``.
    #[getter]
    fn num_tokens(&self) -> usize {
        self.held.num_tokens
    }

    /// Number of segments of the rank, ``s``.
    #[getter]
    fn num_segments(&self) -> usize {
        self.held.k_starts.len()
    }

    /// int32[T_r]: index of each token in the packed sequence, in the order of rows.
    #[getter]
    fn token_indices(&self) -> Array<Vec<i32>> {
        Array(self.held.token_indices())
    }

    /// int32[T_r]: position of each token in its document, as RoPE needs it; in a forest, on its path.
    #[getter]
    fn position_ids(&self) -> Array<Vec<i32>> {
        Array(self.held.position_ids())
    }

    /// int32[s + 1]: index of each segment's first query among the rank's tokens, and at the end their number.
    #[getter]
    fn cu_seqlens_q(&self) -> Array<&[i32]> {
        Array(&self.held.cu_seqlens_q)
    }

    /// int32[s + 1]: index of each segment's first key if the keys of all segments are copied one after the other, and
    /// at the end their number.
    ///
    /// Raises:
    ///     WlbError: the keys of a forest are more than int32 can count.
    #[getter]
    fn cu_seqlens_k(&self) -> PyResult<Array<Vec<i32>>> {
        let argument = "cu_seqlens_k";
        let narrow =
            |&keys: &i64| i32::try_from(keys).map_err(|_| wlb_core::Error::TotalTooLong { argument, total: keys });
        self.held.cu_seqlens_k.iter().map(narrow).collect::<Result<_, _>>().map(Array).map_err(raise)
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

    /// int32[s]: index of each segment's first key in the packed sequence.
    ///
    /// Raises:
    ///     WlbError: the shard is of a forest, whose segments have several intervals of keys: take ``key_starts``.
    #[getter]
    fn k_starts(&self) -> PyResult<Array<&[i32]>> {
        self.shard.of_documents("k_starts")?;
        Ok(Array(&self.held.k_starts))
    }

    /// int32[s + 1]: index of each segment's first interval of keys, and at the end the number of intervals ``k``.
    #[getter]
    fn cu_intervals(&self) -> Array<Vec<i32>> {
        Array(cu_seqlens(self.intervals().map(|intervals| intervals.len() as i32)))
    }

    /// int32[k]: packed index of the first key of each interval.
    #[getter]
    fn key_starts(&self) -> Array<Vec<i32>> {
        Array(self.intervals().flatten().map(|interval| interval.0).collect())
    }

    /// int32[k]: packed index after the last key of each interval.
    #[getter]
    fn key_ends(&self) -> Array<Vec<i32>> {
        Array(self.intervals().flatten().map(|interval| interval.1).collect())
    }

    /// int32[s]: index of each segment's document in the micro-batch; in a forest, of its node.
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
    ///     dict: strategy, cp_size, documents (of a forest: nodes), tokens, imbalance (pairs of the rank with the most
    ///         over the mean), keys_moved (of the rank with the most).
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

    /// Ranks as a table, one row for each.
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

// In this file because a kernel model knows nothing of shards, whereas "adaptive" sharding needs a kernel model.
#[pymethods]
impl KernelModel {
    /// Latency of each rank's attention call: the sum of its segments plus a constant for the launch.
    ///
    /// Args:
    ///     shard: a shard with the model's mask.
    ///     passes: "forward", "backward" or "forward_backward" (their sum).
    ///
    /// Returns:
    ///     float64[cp_size], seconds; 0 for a rank without tokens.
    ///
    /// Raises:
    ///     WlbError: a shard with another mask.
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
