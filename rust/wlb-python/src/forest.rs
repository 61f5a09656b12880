//! `wlb.PrefixForest`, `wlb.pack_forest` and its plan.

use std::sync::Arc;

use numpy::{PyArray1, PyArrayDyn, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyIterator};
use wlb_core::forest::{self as core, ForestOptions};
use wlb_core::packing::Padding;
use wlb_core::{CostModel, Lengths};

use crate::arguments;
use crate::convert::{integer, integers};
use crate::cost::read_costs;
use crate::error::raise;
use crate::gil::run;
use crate::packing::{item, ranks};
use crate::plain::{Array, Pickle, Tuple, hashed_by, pickled_as_json, pickled_as_part};

/// Tokens of samples: their numbers, which are only compared.
pub(crate) enum Tokens {
    /// As most vocabularies have them: half of the memory.
    Narrow(Vec<i32>),
    Wide(Vec<i64>),
}

impl Tokens {
    fn len(&self) -> usize {
        match self {
            Self::Narrow(tokens) => tokens.len(),
            Self::Wide(tokens) => tokens.len(),
        }
    }
}

/// Any integers. Copied, so that they can be compared without the GIL.
fn tokens(object: &Bound<'_, PyAny>) -> PyResult<Tokens> {
    if let Ok(array) = object.cast_exact::<PyArrayDyn<i32>>()
        && array.ndim() == 1
        && array.is_c_contiguous()
        // SAFETY: no Python runs meanwhile, and the GIL is held. That the memory is aligned and contiguous is checked.
        && let Ok(values) = unsafe { array.as_slice() }
    {
        return Ok(Tokens::Narrow(values.to_vec()));
    }
    if let Ok(array) = object.cast_exact::<PyArrayDyn<i64>>()
        && array.ndim() == 1
        && array.is_c_contiguous()
        // SAFETY: as above.
        && let Ok(values) = unsafe { array.as_slice() }
    {
        // No branch a value: what does not fit is looked for afterwards.
        let mut lost = 0;
        let narrow = values.iter().map(|&value| {
            lost |= value ^ i64::from(value as i32);
            value as i32
        });
        let narrow: Vec<i32> = narrow.collect();
        return Ok(if lost == 0 { Tokens::Narrow(narrow) } else { Tokens::Wide(values.to_vec()) });
    }
    integers("tokens", object).map(Tokens::Wide)
}

/// A number for all prompts, or one for each.
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

/// Which tokens samples share: plain data that can be printed, compared, pickled and sent.
///
/// Nodes are runs of tokens; a sample is the path from a root to the end of its node, and the node may have children.
/// Samples share tokens only from their beginning on, so that a shared token has the same position and sees the same
/// tokens before it in all of them. Every array is a fresh copy.
///
/// Example:
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
    /// The forest of samples whose tokens are here.
    ///
    /// Args:
    ///     tokens: int[R], of all samples, one behind the other; int32 and int64 arrays are read fastest. Of an Arrow
    ///         list array: its ``values``.
    ///     offsets: int[n + 1], where each sample begins, then ``R``. Of an Arrow list array: its ``offsets``.
    ///     groups: int[n]: only samples with the same number can share (one prompt's rollouts).
    ///     key: int[n], likewise, for what else a model reads beside tokens and positions: an image's hash, an adapter.
    ///
    /// Returns:
    ///     PrefixForest: nodes depth-first, siblings by their first sample.
    ///
    /// Raises:
    ///     WlbError: offsets that do not fit the tokens, a sample without tokens, another number of groups or keys.
    ///
    /// O(R + n log n): each token is compared once, or twice. Releases the GIL from 1,024 tokens on.
    ///
    /// Example:
    ///     >>> import wlb
    ///     >>> forest = wlb.PrefixForest.from_tokens([7, 8, 1, 7, 8, 2, 2, 7, 8], [0, 3, 7, 9])
    ///     >>> forest.parents, forest.lengths, forest.ends
    ///     (array([-1,  0,  0], dtype=int32), array([2, 1, 2], dtype=int32), array([1, 2, 0], dtype=int32))
    #[staticmethod]
    #[pyo3(signature = (tokens, offsets, groups = None, key = None))]
    fn from_tokens(
        py: Python<'_>,
        #[pyo3(from_py_with = tokens)] tokens: Tokens,
        #[pyo3(from_py_with = arguments::offsets)] offsets: Vec<i64>,
        #[pyo3(from_py_with = arguments::optional::groups)] groups: Option<Vec<i64>>,
        #[pyo3(from_py_with = arguments::optional::key)] key: Option<Vec<i64>>,
    ) -> PyResult<Self> {
        let (groups, key) = (groups.unwrap_or_default(), key.unwrap_or_default());
        let found = run(py, tokens.len(), || match &tokens {
            Tokens::Narrow(tokens) => core::PrefixForest::from_tokens(tokens, &offsets, &groups, &key),
            Tokens::Wide(tokens) => core::PrefixForest::from_tokens(tokens, &offsets, &groups, &key),
        });
        found.map(Self::from).map_err(raise)
    }

    /// A forest whose structure is known: each prompt, and the completions that were sampled for it. No tokens are read.
    ///
    /// Args:
    ///     prompt_lengths: int[p], tokens of each prompt.
    ///     samples_per_prompt: completions of each prompt, one number or int[p]; at least 1.
    ///     completion_lengths: int[n], tokens of each completion, those of the first prompt first. 0 is legal: such a
    ///         sample is its prompt.
    ///
    /// Raises:
    ///     WlbError: a length out of range, numbers that do not fit.
    ///
    /// O(n log n).
    ///
    /// Example:
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
    ///     parents: int[m], node that each node continues, in any order; -1 for a root.
    ///     lengths: int[m], tokens of each node.
    ///     ends: int[n], node of each sample's last token.
    ///
    /// Raises:
    ///     WlbError: a parent or end that is no node, parents in a circle, a node under which no sample ends.
    ///
    /// O(m log m).
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

    /// Checks that tokens are what the forest says: samples of its lengths, equal where they share a node.
    ///
    /// Args:
    ///     tokens, offsets: as for :meth:`from_tokens`.
    ///
    /// Raises:
    ///     WlbError: another number of samples, a sample of another length, or the first token in which a sample differs
    ///         from the one that it shares it with: which samples, and at which token.
    ///
    /// O(R).
    #[pyo3(signature = (tokens, offsets))]
    fn check_tokens(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = tokens)] tokens: Tokens,
        #[pyo3(from_py_with = arguments::offsets)] offsets: Vec<i64>,
    ) -> PyResult<()> {
        let check = || match &tokens {
            Tokens::Narrow(tokens) => self.0.check_tokens(tokens, &offsets),
            Tokens::Wide(tokens) => self.0.check_tokens(tokens, &offsets),
        };
        run(py, tokens.len(), check).map_err(raise)
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

    /// Tokens of all nodes: what is computed, where one micro-batch holds all.
    #[getter]
    fn unique_tokens(&self) -> i64 {
        self.0.unique_tokens()
    }

    /// Tokens of all samples: what is computed without sharing.
    #[getter]
    fn raw_tokens(&self) -> i64 {
        self.0.raw_tokens()
    }

    /// int32[m]: node that each node continues, -1 for a root.
    #[getter]
    fn parents(&self) -> Array<&[i32]> {
        Array(self.0.parents())
    }

    /// int32[m]: tokens of each node.
    #[getter]
    fn lengths(&self) -> Array<&[i32]> {
        Array(self.0.lengths())
    }

    /// int32[m]: tokens before each node on its path; the position of its first token.
    #[getter]
    fn starts(&self) -> Array<&[i32]> {
        Array(self.0.starts())
    }

    /// int32[n]: node of each sample's last token.
    #[getter]
    fn ends(&self) -> Array<&[i32]> {
        Array(self.0.ends())
    }

    /// int32[n]: tokens of each sample.
    #[getter]
    fn sample_lengths(&self) -> Array<Vec<i32>> {
        Array(self.0.sample_lengths())
    }

    /// Hex hash of the forest: equal on two ranks iff their forests are. O(m + n).
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

/// Packs the samples of a forest into micro-batches, in each of which a shared token is computed once.
///
/// A node of ``n`` tokens at depth ``p`` costs ``c(p + n) - c(p)``, where ``c`` is the cost model without its constants:
/// exact for causal pairs, windows and chunks, and for measured tables the definition. The constant of a document counts
/// once a sample, that of a micro-batch once. Where a tree is cut between micro-batches, its trunk is computed in both:
/// it is cut where that costs less than the imbalance that it saves, or where ``max_tokens`` asks for it.
///
/// Args:
///     forest: the samples.
///     num_micro_batches: micro-batches of all ranks. None: as few as were found to hold the samples, and with
///         ``dp_size`` up to two more of each rank where each makes the step 1 % shorter.
///     max_tokens: most unique tokens of a micro-batch; a memory bound.
///     cost_model: what tokens cost; one of causal attention.
///     dp_size: data-parallel ranks that the plan is made for; ``plan.deal(dp_size)`` gives every rank's micro-batches,
///         which stand rank by rank in the plan. None: micro-batches are made equal.
///     sync: where these ranks wait for each other, "step" (the default) or "micro_batch", as for :func:`pack`.
///     groups: int[n], with ``dp_size``: samples with the same number stay on one rank.
///     equal_documents: with ``dp_size``, every rank has as many samples; they differ by one where ``dp_size`` does not
///         divide them. Groups whose sizes cannot be dealt so are refused.
///     max_documents: most samples of a micro-batch.
///     multiple_of_tokens: micro-batches run padded up to a multiple of so many tokens, and ``max_tokens`` counts the
///         padding.
///
/// Returns:
///     ForestPlan. The same input gives the same plan, byte for byte, on every rank and machine. Where nothing is shared
///     it is the plan of :func:`pack`, with the same digest.
///
/// Raises:
///     WlbError: a sample over ``max_tokens``, a cost model with ``causal=False``, groups of another number, what needs
///         ``dp_size`` without it, samples that do not fit into the micro-batches.
///
/// O(n log n), O(micro-batches) for each tree or part of one, and a bounded number of exchanges. Releases the GIL from
/// 1,024 samples on.
///
/// Example:
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
    equal_documents = false, max_documents = None, multiple_of_tokens = 1
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
) -> PyResult<ForestPlan> {
    let padding = Padding::new(multiple_of_tokens, &[]).map_err(raise)?;
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
    /// The forest whose samples these are.
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

    /// The micro-batches, a tuple of :class:`ForestMicroBatch`.
    #[getter]
    fn micro_batches(&self) -> Tuple<ForestMicroBatch> {
        Tuple((0..self.0.num_micro_batches()).map(|index| self.micro_batch(index)).collect())
    }

    /// Unique tokens of all micro-batches: those of the forest, and those that are computed in several.
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

    /// Time of the step where ranks meet: the heaviest rank under "step", the heaviest micro-batch of each round, in all,
    /// under "micro_batch", the heaviest micro-batch without ranks.
    #[getter]
    fn step_cost(&self) -> f64 {
        self.0.step_cost()
    }

    /// ``step_cost`` over what it is if all that is computed were equal on those that wait for one another.
    #[getter]
    fn imbalance(&self) -> f64 {
        self.0.imbalance()
    }

    /// No plan of these samples into as many micro-batches has a smaller ``step_cost``: an equal share of all nodes, and
    /// of what ``max_tokens`` and ``max_documents`` force to be computed twice; the heaviest sample; the heaviest group.
    #[getter]
    fn lower_bound(&self) -> f64 {
        self.0.lower_bound
    }

    /// Data-parallel ranks that it was made for; None where it may be dealt to any.
    #[getter]
    fn dp_size(&self) -> Option<usize> {
        self.0.ranks.map(|ranks| ranks.dp_size)
    }

    /// Where these ranks wait for each other, "step" or "micro_batch"; None without ranks.
    #[getter]
    fn sync(&self) -> Option<&'static str> {
        self.0.ranks.map(|ranks| ranks.sync.as_str())
    }

    /// Hex hash of where every token goes: equal on two ranks iff their plans are. Where nothing is shared it is that of
    /// :func:`pack`'s plan. O(samples and nodes).
    fn digest(&self, py: Python<'_>) -> String {
        run(py, self.0.samples.len(), || self.0.digest())
    }

    /// Deals the micro-batches to data-parallel ranks: equal counts, balanced costs, in schedule order.
    ///
    /// Returns:
    ///     int64[dp_size, M / dp_size]: micro-batch indices of each rank. A plan that was made for ranks is dealt as it
    ///     was made.
    ///
    /// Raises:
    ///     WlbError: ``dp_size`` does not divide the number of micro-batches, or is not what the plan was made for.
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

/// Equal where the same samples of equal forests cost the same.
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

    /// int64[m]: nodes of the plan's forest that these samples have, in the order in which they lie in memory:
    /// depth-first, of siblings the longest first, so that it continues its parent.
    #[getter]
    fn nodes(&self) -> Array<Vec<i64>> {
        let nodes = self.plan.0.forest.nodes_of(self.samples());
        Array(nodes.into_iter().map(i64::from).collect())
    }

    /// The forest of these samples alone: its nodes are :attr:`nodes`, its samples :attr:`sample_ids`, in their orders.
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

    /// Unique tokens when it runs, padded as ``multiple_of_tokens`` asks.
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

    /// A pickle holds the whole plan: to send several micro-batches of one, send that.
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
