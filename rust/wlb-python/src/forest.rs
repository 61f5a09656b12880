//! `wlb.PrefixForest`, `wlb.pack_forest` and its plan, `wlb.shard_forest`.

use std::sync::Arc;

use numpy::{PyArray1, PyArrayDyn, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyIterator};
use wlb_core::forest::{self as core, ForestOptions};
use wlb_core::packing::Padding;
use wlb_core::sharding::Segment;
use wlb_core::{CostModel, Lengths};

use crate::arguments;
use crate::convert::{int64_array, integer, integers, is_plain};
use crate::cost::read_costs;
use crate::error::raise;
use crate::gil::run;
use crate::packing::{cu_seqlens, item, ranks};
use crate::plain::{Array, Pickle, Tuple, hashed_by, pickled_as_json, pickled_as_part};

/// Token ids of samples, which are only compared. They are read in place while the GIL is held: most of them are never
/// read, and a copy would take longer than all other work.
pub(crate) enum Tokens<'py> {
    Narrow(Bound<'py, PyArrayDyn<i32>>),
    Wide(Bound<'py, PyArrayDyn<i64>>),
}

fn tokens<'py>(object: &Bound<'py, PyAny>) -> PyResult<Tokens<'py>> {
    if let Ok(array) = object.cast_exact::<PyArrayDyn<i32>>()
        && array.ndim() == 1
        && is_plain(array)
    {
        return Ok(Tokens::Narrow(array.clone()));
    }
    int64_array("tokens", object).map(Tokens::Wide)
}

/// `with_tokens!(tokens, |slice| work)` runs `work` on tokens of either width. `work` must terminate and stay in bounds
/// even if another thread of numpy writes to the array meanwhile.
macro_rules! with_tokens {
    ($tokens:ident, |$slice:ident| $work:expr) => {
        // SAFETY: the GIL is held and no Python code runs meanwhile; `as_slice` checks that memory is aligned and
        // contiguous.
        match &$tokens {
            Tokens::Narrow(array) => {
                let $slice = unsafe { array.as_slice() }?;
                $work
            }
            Tokens::Wide(array) => {
                let $slice = unsafe { array.as_slice() }?;
                $work
            }
        }
    };
}

/// One number for all prompts, or one for each.
pub(crate) enum PerPrompt {
    All(i64),
    Each(Vec<i64>),
}

fn samples_per_prompt(object: &Bound<'_, PyAny>) -> PyResult<PerPrompt> {
    let argument = "samples_per_prompt";
    if object.is_instance_of::<PyInt>() {
        integer(argument, object).map(PerPrompt::All)
    } else {
        integers(argument, object).map(PerPrompt::Each)
    }
}

/// The tokens that samples share: plain data that can be printed, compared, pickled and sent.
///
/// A node is a run of tokens. A sample is the path from a root to the end of its node; the node may have children.
/// Samples share tokens only from their beginning on, so a shared token has the same position and the same earlier
/// tokens in all of them. Every array is a fresh copy.
///
/// Examples:
///     >>> import wlb
///     >>> forest = wlb.PrefixForest.from_prompts([100], 3, [30, 20, 10])
///     >>> forest
///     PrefixForest(samples=3, nodes=4, unique_tokens=160, raw_tokens=360)
#[pyclass(frozen, eq, hash, module = "wlb")]
#[derive(Clone, PartialEq)]
pub(crate) struct PrefixForest(pub(crate) Arc<core::PrefixForest>);

hashed_by!(PrefixForest: |forest| forest.0.digest());
pickled_as_json!(PrefixForest(core::PrefixForest));

#[pymethods]
impl PrefixForest {
    /// The forest of samples with these tokens.
    ///
    /// Args:
    ///     tokens: int[R], tokens of all samples, one sample after the other; int32 and int64 arrays are read in place.
    ///         For an Arrow list array: its ``values``.
    ///     offsets: int[n + 1], index of each sample's first token, and at the end ``R``. For an Arrow list array: its
    ///         ``offsets``.
    ///     groups: int[n]: only samples with the same number can share (the completions of one prompt).
    ///     key: int[n]: another number with the same effect, for other inputs of the model: an image's hash, an
    ///         adapter.
    ///
    /// Returns:
    ///     PrefixForest: nodes depth-first, siblings by their first sample.
    ///
    /// Raises:
    ///     WlbError: offsets that do not fit the tokens, a sample without tokens, ``groups`` or ``key`` of another
    ///         length.
    ///
    /// O(R + n log n) in the worst case: shared tokens are compared once or twice, and the rest of a sample is not
    /// read. No copy.
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> forest = wlb.PrefixForest.from_tokens([7, 8, 1, 7, 8, 2, 2, 7, 8], [0, 3, 7, 9])
    ///     >>> forest.parents, forest.lengths, forest.ends
    ///     (array([-1,  0,  0], dtype=int32), array([2, 1, 2], dtype=int32), array([1, 2, 0], dtype=int32))
    #[staticmethod]
    #[pyo3(signature = (tokens, offsets, groups = None, key = None))]
    fn from_tokens(
        #[pyo3(from_py_with = tokens)] tokens: Tokens<'_>,
        #[pyo3(from_py_with = arguments::offsets)] offsets: Vec<i64>,
        #[pyo3(from_py_with = arguments::optional::groups)] groups: Option<Vec<i64>>,
        #[pyo3(from_py_with = arguments::optional::key)] key: Option<Vec<i64>>,
    ) -> PyResult<Self> {
        let (groups, key) = (groups.unwrap_or_default(), key.unwrap_or_default());
        let found = with_tokens!(tokens, |slice| core::PrefixForest::from_tokens(slice, &offsets, &groups, &key));
        found.map(Self::from).map_err(raise)
    }

    /// The forest of prompts and the completions that were sampled for each; tokens are not needed.
    ///
    /// Args:
    ///     prompt_lengths: int[p], tokens of each prompt.
    ///     samples_per_prompt: completions of each prompt, one number or int[p]; at least 1.
    ///     completion_lengths: int[n], tokens of each completion, those of the first prompt first. A completion may
    ///         have 0
    ///         tokens: the sample is then its prompt.
    ///
    /// Raises:
    ///     WlbError: a length out of range, or numbers that do not fit together.
    ///
    /// O(n log n).
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> forest = wlb.PrefixForest.from_prompts([100, 50], [2, 1], [30, 20, 10])
    ///     >>> forest.parents, forest.lengths
    ///     (array([-1,  0,  0, -1], dtype=int32), array([100,  30,  20,  60], dtype=int32))
    #[staticmethod]
    #[pyo3(signature = (prompt_lengths, samples_per_prompt, completion_lengths))]
    fn from_prompts(
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::prompt_lengths)] prompt_lengths: Lengths,
        #[pyo3(from_py_with = samples_per_prompt)] samples_per_prompt: PerPrompt,
        #[pyo3(from_py_with = arguments::completion_lengths)] completion_lengths: Vec<i64>,
    ) -> PyResult<Self> {
        let each = match samples_per_prompt {
            PerPrompt::All(samples) => vec![samples; prompt_lengths.len()],
            PerPrompt::Each(each) => each,
        };
        let make = || core::PrefixForest::from_prompts(&prompt_lengths, &each, &completion_lengths);
        run(py, completion_lengths.len(), make).map(Self::from).map_err(raise)
    }

    /// A forest from its nodes.
    ///
    /// Args:
    ///     parents: int[m], the node that each node continues, in any order; -1 for a root.
    ///     lengths: int[m], tokens of each node.
    ///     ends: int[n], for each sample the node of its last token.
    ///
    /// Raises:
    ///     WlbError: a parent or end that is no node, parents in a circle, or a node under which no sample ends.
    ///
    /// O(m log m).
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> wlb.PrefixForest.from_parents([-1, 0, 0], [100, 30, 20], [1, 2]).sample_lengths
    ///     array([130, 120], dtype=int32)
    #[staticmethod]
    #[pyo3(signature = (parents, lengths, ends))]
    fn from_parents(
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::parents)] parents: Vec<i64>,
        #[pyo3(from_py_with = arguments::lengths)] lengths: Lengths,
        #[pyo3(from_py_with = arguments::ends)] ends: Vec<i64>,
    ) -> PyResult<Self> {
        let make = || core::PrefixForest::from_parents(&parents, &lengths, &ends);
        run(py, parents.len(), make).map(Self::from).map_err(raise)
    }

    /// Checks that tokens fit the forest: samples have its lengths, and agree where they share a node.
    ///
    /// Args:
    ///     tokens, offsets: as for ``from_tokens``.
    ///
    /// Raises:
    ///     WlbError: another number of samples, a sample of another length, or the first token in which two samples
    ///         differ that should share it; the message names both samples and the token.
    ///
    /// O(R).
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> forest = wlb.PrefixForest.from_prompts([2], 2, [1, 1])
    ///     >>> forest.check_tokens([7, 8, 1, 7, 8, 2], [0, 3, 6])  # or an error that names the token
    #[pyo3(signature = (tokens, offsets))]
    fn check_tokens(
        &self,
        #[pyo3(from_py_with = tokens)] tokens: Tokens<'_>,
        #[pyo3(from_py_with = arguments::offsets)] offsets: Vec<i64>,
    ) -> PyResult<()> {
        with_tokens!(tokens, |slice| self.0.check_tokens(slice, &offsets)).map_err(raise)
    }

    /// Number of samples, ``n``.
    #[getter]
    fn num_samples(&self) -> usize {
        self.0.num_samples()
    }

    /// Number of nodes, ``m``.
    #[getter]
    fn num_nodes(&self) -> usize {
        self.0.num_nodes()
    }

    /// Tokens of all nodes: what is computed if one micro-batch holds all samples.
    #[getter]
    fn unique_tokens(&self) -> i64 {
        self.0.unique_tokens()
    }

    /// Tokens of all samples: what is computed without sharing.
    #[getter]
    fn raw_tokens(&self) -> i64 {
        self.0.raw_tokens()
    }

    /// int32[m]: the node that each node continues; -1 for a root.
    #[getter]
    fn parents(&self) -> Array<&[i32]> {
        Array(self.0.parents())
    }

    /// int32[m]: tokens of each node.
    #[getter]
    fn lengths(&self) -> Array<&[i32]> {
        Array(self.0.lengths())
    }

    /// int32[m]: tokens before each node on its path, which is the position of its first token.
    #[getter]
    fn starts(&self) -> Array<&[i32]> {
        Array(self.0.starts())
    }

    /// int32[n]: for each sample the node of its last token.
    #[getter]
    fn ends(&self) -> Array<&[i32]> {
        Array(self.0.ends())
    }

    /// int32[n]: tokens of each sample.
    #[getter]
    fn sample_lengths(&self) -> Array<Vec<i32>> {
        Array(self.0.sample_lengths())
    }

    /// Hex hash of the forest: equal on two ranks if and only if their forests are. O(m + n).
    fn digest(&self, py: Python<'_>) -> String {
        run(py, self.0.num_nodes(), || self.0.digest())
    }

    fn __repr__(&self) -> String {
        format!(
            "PrefixForest(samples={}, nodes={}, unique_tokens={}, raw_tokens={})",
            self.0.num_samples(),
            self.0.num_nodes(),
            self.0.unique_tokens(),
            self.0.raw_tokens(),
        )
    }
}

impl From<core::PrefixForest> for PrefixForest {
    fn from(forest: core::PrefixForest) -> Self {
        Self(Arc::new(forest))
    }
}

/// Packs the samples of a forest into micro-batches, each of which computes a shared token once.
///
/// A node of ``n`` tokens at depth ``p`` costs ``c(p + n) - c(p)``, where ``c`` is the cost model without constants.
/// That is exact for causal pairs, windows and chunks; for measured tables it is the definition. The constant of a
/// document counts once for each sample, that of a micro-batch once for each micro-batch. If a tree is cut between two
/// micro-batches, both compute the tokens that the parts share. A tree is cut where that costs less than the imbalance
/// that it removes, or where ``max_tokens`` requires it.
///
/// Args:
///     forest: the samples.
///     num_micro_batches: micro-batches of all ranks. None: as few as were found to hold the samples; with ``dp_size``,
///         up to two more on each rank if each makes the step 1 % shorter.
///     max_tokens: most unique tokens of a micro-batch, as memory allows.
///     cost_model: cost of tokens; it must be of causal attention.
///     dp_size: data-parallel ranks to make the plan for; ``plan.deal(dp_size)`` gives each rank its micro-batches, and
///         the plan lists them rank by rank. None: single micro-batches are made equal.
///     sync: where these ranks wait for each other, "step" (the default) or "micro_batch", as for ``pack``.
///     groups: int[n], with ``dp_size``: samples with the same number stay on one rank.
///     equal_documents: with ``dp_size``, all ranks get equally many samples (they differ by at most one). Groups whose
///         sizes do not allow that are refused.
///     max_documents: most samples of a micro-batch.
///     multiple_of_tokens: each of the ``cp_size`` ranks that share a micro-batch gets a multiple of this number of
///         tokens (MXFP8 needs 32, HybridEP 128): micro-batches are padded to a multiple of ``multiple_of_tokens *
///         cp_size``, which ``shard`` divides equally. ``max_tokens`` counts the padding.
///     cp_size: context-parallel ranks that share a micro-batch; it matters to ``multiple_of_tokens`` alone.
///
/// Returns:
///     ForestPlan. The same input gives the same plan, byte for byte, on every rank and machine. If nothing is
///     shared, it is the plan of ``pack``, with the same digest.
///
/// Raises:
///     WlbError: a sample over ``max_tokens``, a cost model with ``causal=False``, ``groups`` of another length, an
///         option that needs ``dp_size`` without it, or samples that do not fit into the micro-batches.
///
/// O(n log n), O(micro-batches) for each tree or part of one, and a bounded number of exchanges. Releases the GIL from
/// 1,024 samples on.
///
/// Examples:
///     >>> import wlb
///     >>> forest = wlb.PrefixForest.from_prompts([100, 100], 2, [30, 20, 40, 10])
///     >>> cost = wlb.CostModel(attention=1.0, linear=1000.0)
///     >>> plan = wlb.pack_forest(forest, num_micro_batches=2, max_tokens=200, cost_model=cost)
///     >>> [batch.sample_ids.tolist() for batch in plan.micro_batches]
///     [[2, 3], [0, 1]]
///     >>> plan.unique_tokens, forest.raw_tokens
///     (300, 500)
#[pyfunction]
#[pyo3(signature = (
    forest, *, num_micro_batches, max_tokens, cost_model, dp_size = None, sync = None, groups = None,
    equal_documents = false, max_documents = None, multiple_of_tokens = 1, cp_size = 1
))]
#[allow(clippy::too_many_arguments, reason = "keywords in Python")]
pub(crate) fn pack_forest(
    py: Python<'_>,
    forest: PyRef<'_, PrefixForest>,
    #[pyo3(from_py_with = arguments::optional::num_micro_batches)] num_micro_batches: Option<usize>,
    #[pyo3(from_py_with = arguments::max_tokens)] max_tokens: i32,
    #[pyo3(from_py_with = read_costs)] cost_model: CostModel,
    #[pyo3(from_py_with = arguments::optional::dp_size)] dp_size: Option<i64>,
    sync: Option<&str>,
    #[pyo3(from_py_with = arguments::optional::groups)] groups: Option<Vec<i64>>,
    #[pyo3(from_py_with = arguments::equal_documents)] equal_documents: bool,
    #[pyo3(from_py_with = arguments::optional::max_documents)] max_documents: Option<usize>,
    #[pyo3(from_py_with = arguments::multiple_of_tokens)] multiple_of_tokens: i32,
    #[pyo3(from_py_with = arguments::cp_size)] cp_size: usize,
) -> PyResult<ForestPlan> {
    let padding = Padding::new(multiple_of_tokens, cp_size, &[]).map_err(raise)?;
    let most = padding.most(max_tokens).map_err(raise)?;
    let options = ForestOptions {
        num_micro_batches,
        max_tokens: most,
        ranks: ranks(dp_size, sync)?,
        groups: groups.unwrap_or_default(),
        equal_documents,
        max_documents,
    };
    let forest = forest.0.clone();
    let plan = run(py, forest.num_samples(), || core::pack_forest(&forest, &options, &cost_model));
    plan.map(|plan| core::ForestPlan { padding: (!padding.is_none()).then(|| padding.clone()), ..plan })
        .map(ForestPlan::from)
        .map_err(|error| raise(padding.explained(error, max_tokens)))
}

/// The micro-batches of a forest: plain data that can be printed, compared, pickled and sent.
///
/// Every array is a fresh copy that the caller may keep or change.
#[pyclass(frozen, eq, hash, sequence, module = "wlb")]
#[derive(Clone, PartialEq)]
pub(crate) struct ForestPlan(Arc<core::ForestPlan>);

hashed_by!(ForestPlan: |plan| (&plan.0.unique_tokens, plan.0.max_tokens));
pickled_as_json!(ForestPlan(core::ForestPlan));

#[pymethods]
impl ForestPlan {
    /// The forest whose samples were packed.
    #[getter]
    fn forest(&self) -> PrefixForest {
        PrefixForest(Arc::new(self.0.forest.clone()))
    }

    /// Number of micro-batches, ``M``; also ``len()``.
    #[getter]
    fn num_micro_batches(&self) -> usize {
        self.0.num_micro_batches()
    }

    /// Most unique tokens that a micro-batch was allowed.
    #[getter]
    fn max_tokens(&self) -> i32 {
        self.0.max_tokens
    }

    /// The micro-batches, a tuple of ``ForestMicroBatch``.
    #[getter]
    fn micro_batches(&self) -> Tuple<ForestMicroBatch> {
        Tuple((0..self.0.num_micro_batches()).map(|index| self.micro_batch(index)).collect())
    }

    /// Unique tokens of all micro-batches: tokens of the forest's nodes, counted once for each micro-batch that
    /// computes them.
    #[getter]
    fn unique_tokens(&self) -> i64 {
        self.0.total_unique_tokens()
    }

    /// Tokens of all samples: what is computed without sharing.
    #[getter]
    fn raw_tokens(&self) -> i64 {
        self.0.forest.raw_tokens()
    }

    /// float64[M]: cost of each micro-batch, in the cost model's unit.
    #[getter]
    fn costs(&self) -> Array<&[f64]> {
        Array(&self.0.costs)
    }

    /// Time of the step: the heaviest rank under "step"; the sum of the heaviest micro-batch of each round under
    /// "micro_batch"; the heaviest micro-batch without ranks.
    #[getter]
    fn step_cost(&self) -> f64 {
        self.0.step_cost()
    }

    /// ``step_cost`` over the step cost if all computed work were spread evenly.
    #[getter]
    fn imbalance(&self) -> f64 {
        self.0.imbalance()
    }

    /// Lower bound on ``step_cost`` for any plan of these samples into as many micro-batches: the largest of an equal
    /// share of all nodes (with what ``max_tokens`` and ``max_documents`` force to be computed twice), the heaviest
    /// sample, and the heaviest group.
    #[getter]
    fn lower_bound(&self) -> f64 {
        self.0.lower_bound
    }

    /// Data-parallel ranks that the plan was made for; None if it can be dealt to any number.
    #[getter]
    fn dp_size(&self) -> Option<usize> {
        self.0.ranks.map(|ranks| ranks.dp_size)
    }

    /// Where these ranks wait for each other, "step" or "micro_batch"; None without ranks.
    #[getter]
    fn sync(&self) -> Option<&'static str> {
        self.0.ranks.map(|ranks| ranks.sync.as_str())
    }

    /// Hex hash of the place of every token: equal on two ranks if and only if their plans are. If nothing is shared it
    /// is the digest of the plan of ``pack``. O(samples and nodes).
    fn digest(&self, py: Python<'_>) -> String {
        run(py, self.0.samples.len(), || self.0.digest())
    }

    /// Deals the micro-batches to data-parallel ranks: equal counts, balanced costs, in schedule order.
    ///
    /// Returns:
    ///     int64[dp_size, M / dp_size]: micro-batch indices of each rank. A plan that was made for ranks keeps its
    ///     order.
    ///
    /// Raises:
    ///     WlbError: ``dp_size`` does not divide the number of micro-batches, or is not the one that the plan was made
    ///         for.
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> forest = wlb.PrefixForest.from_prompts([100, 100], 2, [30, 20, 40, 10])
    ///     >>> cost = wlb.CostModel(attention=1.0, linear=1000.0)
    ///     >>> wlb.pack_forest(forest, num_micro_batches=2, max_tokens=200, cost_model=cost).deal(2)
    ///     array([[0],
    ///            [1]])
    #[pyo3(signature = (dp_size))]
    fn deal<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = arguments::dp_size)] dp_size: i64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let total = self.0.num_micro_batches();
        let ranks = usize::try_from(dp_size)
            .map_err(|_| raise(wlb_core::Error::Indivisible { argument: "dp_size", value: dp_size, total }))?;
        let dealt = self.0.deal(ranks).map_err(raise)?;
        let dealt = PyArray1::from_vec(py, dealt.into_iter().map(|micro_batch| micro_batch as i64).collect());
        Ok(dealt.reshape([ranks, total / ranks])?.into_any())
    }

    fn __len__(&self) -> usize {
        self.0.num_micro_batches()
    }

    fn __getitem__(&self, index: isize) -> PyResult<ForestMicroBatch> {
        item(index, self.0.num_micro_batches(), "micro-batch").map(|index| self.micro_batch(index))
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        self.micro_batches().into_pyobject(py)?.try_iter()
    }

    fn __repr__(&self) -> String {
        format!(
            "ForestPlan(num_micro_batches={}, samples={}, unique_tokens={}, raw_tokens={}, imbalance={:.4})",
            self.0.num_micro_batches(),
            self.0.samples.len(),
            self.0.total_unique_tokens(),
            self.0.forest.raw_tokens(),
            self.0.imbalance(),
        )
    }
}

impl From<core::ForestPlan> for ForestPlan {
    fn from(plan: core::ForestPlan) -> Self {
        Self(Arc::new(plan))
    }
}

impl ForestPlan {
    fn micro_batch(&self, index: usize) -> ForestMicroBatch {
        ForestMicroBatch { plan: self.clone(), index }
    }
}

/// The samples of one micro-batch of a forest.
#[pyclass(frozen, eq, hash, module = "wlb")]
pub(crate) struct ForestMicroBatch {
    plan: ForestPlan,
    index: usize,
}

impl ForestMicroBatch {
    fn samples(&self) -> &[u32] {
        self.plan.0.micro_batch(self.index)
    }
}

/// Equal if they have the same samples of equal forests at the same cost.
impl PartialEq for ForestMicroBatch {
    fn eq(&self, other: &Self) -> bool {
        self.samples() == other.samples() && self.cost() == other.cost() && self.plan.0.forest == other.plan.0.forest
    }
}

hashed_by!(ForestMicroBatch: |batch| (batch.samples(), batch.unique_tokens()));

#[pymethods]
impl ForestMicroBatch {
    /// int64[k]: the samples, ascending.
    #[getter]
    fn sample_ids(&self) -> Array<Vec<i64>> {
        Array(self.samples().iter().map(|&sample| i64::from(sample)).collect())
    }

    /// int64[m]: nodes of these samples in the plan's forest, in memory order: depth-first, the longest of siblings
    /// first, so that it follows its parent.
    #[getter]
    fn nodes(&self) -> Array<Vec<i64>> {
        let nodes = self.plan.0.forest.nodes_of(self.samples());
        Array(nodes.into_iter().map(i64::from).collect())
    }

    /// The forest of these samples alone; its nodes are in the order of ``nodes``, its samples in that of
    /// ``sample_ids``.
    #[getter]
    fn forest(&self) -> PrefixForest {
        let forest = &self.plan.0.forest;
        PrefixForest::from(forest.of_samples(self.samples(), &forest.nodes_of(self.samples())))
    }

    /// Tokens of the nodes: what the micro-batch computes.
    #[getter]
    fn unique_tokens(&self) -> i64 {
        self.plan.0.unique_tokens[self.index]
    }

    /// Tokens of the samples.
    #[getter]
    fn raw_tokens(&self) -> i64 {
        self.plan.0.raw_tokens(self.index)
    }

    /// Unique tokens including the padding of ``multiple_of_tokens``.
    #[getter]
    fn padded_tokens(&self) -> i64 {
        self.plan.0.padded_tokens(self.index)
    }

    /// Cost of the micro-batch, in the cost model's unit.
    #[getter]
    fn cost(&self) -> f64 {
        self.plan.0.costs[self.index]
    }

    fn __len__(&self) -> usize {
        self.samples().len()
    }

    /// A pickle holds the whole plan. To send several micro-batches of one plan, send the plan.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Pickle<'py, (usize,)>> {
        pickled_as_part(py, self.plan.clone(), "__getitem__", (self.index,))
    }

    fn __repr__(&self) -> String {
        format!(
            "ForestMicroBatch(samples={}, unique_tokens={}, raw_tokens={}, cost={})",
            self.samples().len(),
            self.unique_tokens(),
            self.raw_tokens(),
            self.cost()
        )
    }
}

/// Cuts a micro-batch of a forest for the ranks of a context-parallel group, without padding.
///
/// Long nodes are cut like documents, into ``2 * cp_size`` chunks, two for each rank with equal pairs; tokens left over
/// go to ranks in turn. Short nodes stay whole on one rank. Several least lengths of cut nodes are tried. Of those with
/// all ranks within 1 % of the mean pairs, the one that moves the fewest keys is chosen; if there is none, the most
/// even one.
///
/// Args:
///     micro_batch: a micro-batch of a ``ForestPlan``; or a ``PrefixForest``, for all of its samples.
///     cp_size: number of ranks of the group.
///
/// Returns:
///     ForestShard. Ranks differ by at most one token. The same input gives the same shard on every rank.
///
/// Raises:
///     WlbError: ``cp_size`` out of range, or more than 2^31 - 1 unique tokens.
///
/// O(m (log m + cp_size)) for ``m`` nodes, for each of at most 66 attempts.
///
/// Examples:
///     >>> import wlb
///     >>> shard = wlb.shard_forest(wlb.PrefixForest.from_prompts([8], 2, [4, 4]), cp_size=2)
///     >>> shard.tokens_per_rank, shard.pairs_per_rank
///     (array([8, 8]), array([60, 60]))
#[pyfunction]
#[pyo3(signature = (micro_batch, *, cp_size))]
pub(crate) fn shard_forest(
    py: Python<'_>,
    micro_batch: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = arguments::cp_size)] cp_size: usize,
) -> PyResult<ForestShard> {
    let forest = if let Ok(batch) = micro_batch.cast::<ForestMicroBatch>() {
        batch.get().forest().0
    } else if let Ok(forest) = micro_batch.cast::<PrefixForest>() {
        forest.get().0.clone()
    } else {
        let kind = micro_batch.get_type().qualname()?;
        return Err(PyTypeError::new_err(format!("'{kind}' object is no ForestMicroBatch and no PrefixForest")));
    };
    let nodes = forest.num_nodes();
    run(py, nodes, || core::shard_forest(&forest, cp_size)).map(|shard| ForestShard(Arc::new(shard))).map_err(raise)
}

/// The tokens of a forest on each rank: plain data.
///
/// Nodes lie in memory depth-first, the longest of siblings first. A token's index there is called its packed index.
#[pyclass(frozen, eq, hash, module = "wlb")]
#[derive(Clone, PartialEq)]
pub(crate) struct ForestShard(pub(crate) Arc<core::ForestShard>);

hashed_by!(ForestShard: |shard| shard.0.digest());

#[pymethods]
impl ForestShard {
    /// The forest, with its nodes in memory order.
    #[getter]
    fn forest(&self) -> PrefixForest {
        PrefixForest(Arc::new(self.0.forest.clone()))
    }

    /// Ranks of the group.
    #[getter]
    fn cp_size(&self) -> usize {
        self.0.cp_size()
    }

    /// Unique tokens of all ranks.
    #[getter]
    fn num_tokens(&self) -> i32 {
        self.0.num_tokens()
    }

    /// int64[cp_size]: tokens of each rank.
    #[getter]
    fn tokens_per_rank(&self) -> Array<Vec<i64>> {
        Array((0..self.0.cp_size()).map(|rank| self.0.tokens(rank)).collect())
    }

    /// int64[cp_size]: (query, key) pairs of each rank.
    #[getter]
    fn pairs_per_rank(&self) -> Array<Vec<i64>> {
        Array((0..self.0.cp_size()).map(|rank| self.0.pairs(rank) as i64).collect())
    }

    /// int64[cp_size]: keys that each rank's queries see and other ranks hold, each counted once.
    #[getter]
    fn keys_moved(&self) -> Array<Vec<i64>> {
        Array((0..self.0.cp_size()).map(|rank| self.0.keys_moved(rank)).collect())
    }

    /// int32[num_tokens]: ``rank_major[restore_indices] == packed``, where ``rank_major`` has the ranks' tokens one
    /// rank after the other.
    #[getter]
    fn restore_indices(&self) -> Array<Vec<i32>> {
        let mut restore = vec![0; self.0.num_tokens() as usize];
        let mut place = 0;
        for segment in self.0.ranks.iter().flatten() {
            for at in self.0.packed_start(segment)..self.0.packed_start(segment) + segment.length {
                restore[at as usize] = place;
                place += 1;
            }
        }
        Array(restore)
    }

    /// The arrays of one rank.
    ///
    /// Raises:
    ///     WlbError: a rank that does not exist.
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> forest = wlb.PrefixForest.from_prompts([8], 2, [4, 4])
    ///     >>> wlb.shard_forest(forest, cp_size=2).rank(0).token_indices
    ///     array([ 0,  1,  6,  7,  8,  9, 10, 11], dtype=int32)
    #[pyo3(signature = (rank))]
    fn rank(&self, rank: isize) -> PyResult<ForestRankShard> {
        let last = self.0.cp_size() - 1;
        match usize::try_from(rank) {
            Ok(rank) if rank <= last => Ok(ForestRankShard { shard: self.clone(), rank }),
            _ => {
                let (argument, value) = ("rank", rank as i64);
                Err(raise(wlb_core::Error::OutOfRange { argument, value, minimum: 0, maximum: last as i64 }))
            }
        }
    }

    /// Hex hash of the place of every token: equal on two ranks if and only if their shards are. O(segments).
    fn digest(&self) -> String {
        self.0.digest()
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Pickle<'py, (PrefixForest, usize)>> {
        let make = py.get_type::<Self>().getattr("_of_forest")?;
        Ok((make, (self.forest(), self.0.cp_size())))
    }

    #[staticmethod]
    fn _of_forest(forest: PyRef<'_, PrefixForest>, cp_size: usize) -> PyResult<Self> {
        core::shard_forest(&forest.0, cp_size).map(|shard| Self(Arc::new(shard))).map_err(raise)
    }

    fn __repr__(&self) -> String {
        let pairs: Vec<u64> = (0..self.0.cp_size()).map(|rank| self.0.pairs(rank)).collect();
        let sum = pairs.iter().sum::<u64>().max(1) as f64;
        let most = pairs.iter().copied().max().unwrap_or(0) as f64;
        format!(
            "ForestShard(cp_size={}, nodes={}, tokens={}, imbalance={:.4})",
            self.0.cp_size(),
            self.0.forest.num_nodes(),
            self.0.num_tokens(),
            most * self.0.cp_size() as f64 / sum,
        )
    }
}

/// The tokens of one rank of a forest: runs of tokens (segments), each inside one node, and the keys that each sees.
///
/// Segment ``i`` has the queries ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1] - 1`` of the rank. Its keys are in the
/// intervals ``j`` with ``cu_intervals[i] <= j < cu_intervals[i + 1]``, one interval after the other; interval ``j``
/// has the packed indices ``key_starts[j]`` to ``key_ends[j] - 1``. The last query sees all of these keys, and each
/// query before it one less (a causal mask aligned at the end).
#[pyclass(frozen, module = "wlb")]
pub(crate) struct ForestRankShard {
    shard: ForestShard,
    rank: usize,
}

impl ForestRankShard {
    fn written(&self, first: impl Fn(&core::ForestShard, &Segment) -> i32) -> Array<Vec<i32>> {
        let shard = &self.shard.0;
        let of = |segment: &Segment| {
            let first = first(shard, segment);
            first..first + segment.length
        };
        Array(shard.ranks[self.rank].iter().flat_map(of).collect())
    }

    fn each<T: numpy::Element>(&self, number: impl Fn(&core::ForestShard, &Segment) -> T) -> Array<Vec<T>> {
        let shard = &self.shard.0;
        Array(shard.ranks[self.rank].iter().map(|segment| number(shard, segment)).collect())
    }

    fn intervals(&self) -> impl Iterator<Item = Vec<core::Interval>> + '_ {
        self.shard.0.ranks[self.rank].iter().map(|segment| self.shard.0.intervals(segment))
    }
}

#[pymethods]
impl ForestRankShard {
    /// int32[t]: packed index of each of the rank's tokens, ascending.
    #[getter]
    fn token_indices(&self) -> Array<Vec<i32>> {
        self.written(|shard, segment| shard.packed_start(segment))
    }

    /// int32[t]: position of each token: the number of tokens before it on its path.
    #[getter]
    fn position_ids(&self) -> Array<Vec<i32>> {
        self.written(|shard, segment| shard.position(segment))
    }

    /// int32[s]: node of each segment, as an index into the shard's forest.
    #[getter]
    fn nodes(&self) -> Array<Vec<i32>> {
        self.each(|_, segment| segment.document as i32)
    }

    /// int32[s]: offset of each segment's first token in its node.
    #[getter]
    fn starts(&self) -> Array<Vec<i32>> {
        self.each(|_, segment| segment.start)
    }

    /// int32[s + 1]: index of each segment's first token among the rank's tokens, and at the end their number.
    #[getter]
    fn cu_seqlens_q(&self) -> Array<Vec<i32>> {
        Array(cu_seqlens(self.shard.0.ranks[self.rank].iter().map(|segment| segment.length)))
    }

    /// int64[s + 1]: index of each segment's first key if the keys of all segments are copied one after the other, and
    /// at the end their number.
    #[getter]
    fn cu_seqlens_k(&self) -> Array<Vec<i64>> {
        let shard = &self.shard.0;
        let mut sum = 0;
        let keys = shard.ranks[self.rank].iter().map(|segment| {
            sum += i64::from(shard.position(segment) + segment.length);
            sum
        });
        Array(std::iter::once(0).chain(keys).collect())
    }

    /// int32[s + 1]: index of each segment's first interval, and at the end the number of intervals ``k``.
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

    fn __repr__(&self) -> String {
        let shard = &self.shard.0;
        format!("ForestRankShard(segments={}, tokens={})", shard.ranks[self.rank].len(), shard.tokens(self.rank))
    }
}
