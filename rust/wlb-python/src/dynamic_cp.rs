//! `wlb.plan_dynamic_cp`.

use std::ops::Range;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyIterator, PyRange};
use wlb_core::Lengths;
use wlb_core::dynamic_cp::{self as core, Communication, Costs, DynamicCpOptions};
use wlb_core::packing::Pricing;

use crate::arguments;
use crate::convert::size;
use crate::cost::{CostModel, document_costs, pricing};
use crate::error::{raise, refuse};
use crate::packing::{cu_seqlens, item};
use crate::plain::{Array, Pickle, Table, Tuple, hashed_by, pickled_as_json, pickled_as_part, properties};
use crate::run::run;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<DynamicCpPlan>()?;
    module.add_class::<DynamicMicroBatch>()?;
    module.add_class::<CpGroup>()?;
    module.add_function(wrap_pyfunction!(plan_dynamic_cp, module)?)
}

/// Plans one step with dynamic context parallelism: every micro-batch divides the ranks into groups as its documents need.
///
/// A long document gets as many ranks as it takes to finish with the others, short ones share few. Groups are aligned
/// powers of two inside any ``world_size``, so that all of them can be built once. All ranks have the same number of
/// micro-batches.
///
/// A micro-batch of documents with ``T`` tokens in all takes a group of ``c`` ranks
/// ``micro_batch_seconds + cost / c + max(0, exchange - cp_overlap * attention_cost / c)`` through the whole model, forward and
/// backward, with ``exchange = (c - 1) * cp_seconds_per_exchange + T * (c - 1) / c * cp_seconds_per_token``. Each rank holds at
/// most ``ceil(T / c)`` tokens of it (documents are sharded "per_document").
///
/// Args:
///     lengths: int[n], tokens of the documents of the step.
///     world_size: ranks of one pipeline stage, DP times CP: those that groups are made of. Any number.
///     num_stages: pipeline stages, PP.
///     max_tokens_per_rank: most tokens of a rank in a micro-batch; a memory bound. An interleaved pipeline also has no more under way than in
///         rounds of ``num_stages`` such micro-batches, unless ``num_micro_batches`` is given.
///     cost_model: what documents cost on one rank, in seconds for the whole model. Or ``costs``.
///     costs: float64[n], what each document costs on one rank, in seconds for the whole model, in the place of ``cost_model``: for
///         documents whose work their length does not tell. The ranks of a group share all of it; memory goes by tokens as ever.
///     attention_costs: float64[n], the part of each of ``costs`` that is attention, behind which the exchange hides: wanted beside
///         ``costs`` where exchange has a price and ``cp_overlap`` is above 0.
///     num_virtual_stages: parts of the model on each stage; above 1 the pipeline is interleaved.
///     max_cp_size: largest group, ``world_size`` if None; rounded down to a power of two.
///     num_micro_batches: micro-batches of the step; None sweeps them.
///     min_micro_batches: the sweep tries no fewer. For schedules that need so many: torch's 1F1B one for each stage, its DualPipeV
///         two.
///     max_micro_batches: where the sweep ends. It begins with ``num_stages``, or as many as memory forces or are wanted, and ends by default at 4
///         times that; if the documents do not fit by then, later. With ``micro_batch_seconds``, it begins with what memory forces.
///     cp_seconds_per_token: time to exchange the keys and values of a token, and their gradients, over all layers.
///     cp_seconds_per_exchange: latency of handing keys and values on to the next rank, over all layers and passes.
///     cp_overlap: part of the attention, from 0 to 1, that can hide the exchange.
///     p2p_seconds: latency between pipeline stages.
///     micro_batch_seconds: what every micro-batch takes through the whole model, whatever is in it.
///     ids: int64[n], names of the documents in the plan; their indices if None.
///
/// Returns:
///     DynamicCpPlan. The same input gives the same plan, byte for byte, on every rank and machine.
///
/// Raises:
///     WlbError: an argument out of range; a document that does not fit on the largest group; too few micro-batches for the documents;
///         several columns of costs, whose barriers a group's ranks would have to share alike.
///
/// O(n log world_size) for each number of micro-batches tried, about ten (several times as many attempts where exchange costs), and
/// O(num_stages * micro-batches * world_size) for the simulation of the best; in a world that is no power of two, up to
/// O(n * micro-batches * log world_size) for each number, and O(n * micro-batches * world_size) where memory binds. Releases the GIL from
/// 1,024 documents on.
#[pyfunction]
#[pyo3(signature = (
    lengths, *, world_size, num_stages, max_tokens_per_rank, cost_model = None, costs = None, attention_costs = None,
    num_virtual_stages = 1, max_cp_size = None,
    num_micro_batches = None, min_micro_batches = None, max_micro_batches = None, cp_seconds_per_token = 0.0,
    cp_seconds_per_exchange = 0.0, cp_overlap = 1.0, p2p_seconds = 0.0, micro_batch_seconds = 0.0, ids = None,
))]
#[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
fn plan_dynamic_cp(
    py: Python<'_>,
    #[pyo3(from_py_with = arguments::lengths)] lengths: Lengths,
    #[pyo3(from_py_with = arguments::world_size)] world_size: usize,
    #[pyo3(from_py_with = arguments::num_stages)] num_stages: usize,
    #[pyo3(from_py_with = arguments::max_tokens_per_rank)] max_tokens_per_rank: i32,
    cost_model: Option<&CostModel>,
    #[pyo3(from_py_with = arguments::optional::costs)] costs: Option<arguments::Table>,
    #[pyo3(from_py_with = arguments::optional::attention_costs)] attention_costs: Option<Vec<f64>>,
    #[pyo3(from_py_with = arguments::num_virtual_stages)] num_virtual_stages: usize,
    #[pyo3(from_py_with = arguments::optional::max_cp_size)] max_cp_size: Option<usize>,
    #[pyo3(from_py_with = arguments::optional::num_micro_batches)] num_micro_batches: Option<usize>,
    #[pyo3(from_py_with = arguments::optional::min_micro_batches)] min_micro_batches: Option<usize>,
    #[pyo3(from_py_with = arguments::optional::max_micro_batches)] max_micro_batches: Option<usize>,
    #[pyo3(from_py_with = arguments::cp_seconds_per_token)] cp_seconds_per_token: f64,
    #[pyo3(from_py_with = arguments::cp_seconds_per_exchange)] cp_seconds_per_exchange: f64,
    #[pyo3(from_py_with = arguments::cp_overlap)] cp_overlap: f64,
    #[pyo3(from_py_with = arguments::p2p_seconds)] p2p_seconds: f64,
    #[pyo3(from_py_with = arguments::micro_batch_seconds)] micro_batch_seconds: f64,
    #[pyo3(from_py_with = arguments::optional::ids)] ids: Option<Vec<i64>>,
) -> PyResult<DynamicCpPlan> {
    let options = DynamicCpOptions {
        world_size,
        num_stages,
        num_virtual_stages,
        max_tokens_per_rank,
        max_cp_size,
        num_micro_batches,
        min_micro_batches,
        max_micro_batches,
        communication: Communication {
            seconds_per_exchange: cp_seconds_per_exchange,
            seconds_per_token: cp_seconds_per_token,
            overlap: cp_overlap,
        },
        p2p_seconds,
        micro_batch_seconds,
    };
    let given = document_costs(costs, None, lengths.len())?;
    let costs = match pricing(cost_model.map(|model| &model.0), given.as_ref(), None)? {
        Pricing::Model(_) if attention_costs.is_some() => {
            return Err(refuse("attention_costs", None, None, "are a part of costs: pass both"));
        }
        Pricing::Model(model) => Costs::Model(model),
        Pricing::Given(costs) => Costs::Given { costs, attention: attention_costs.as_deref() },
    };
    let plan =
        run(py, lengths.len().max(world_size), || core::plan_dynamic_cp(&lengths, ids.as_deref(), &options, costs))?;
    Ok(DynamicCpPlan(Arc::new(plan.map_err(raise)?)))
}

/// Which documents of a step run when, on which ranks of a stage: plain data that can be printed, compared, pickled and sent.
///
/// Every array is a fresh copy that the caller may keep or change.
#[pyclass(frozen, eq, hash, sequence, module = "wlb")]
#[derive(Clone, PartialEq)]
pub(crate) struct DynamicCpPlan(Arc<core::DynamicCpPlan>);

hashed_by!(DynamicCpPlan: |plan| plan.0.digest());
pickled_as_json!(DynamicCpPlan(core::DynamicCpPlan));

impl DynamicCpPlan {
    fn micro_batch(&self, index: usize) -> DynamicMicroBatch {
        DynamicMicroBatch { plan: self.clone(), index }
    }

    /// A value for each micro-batch and rank.
    fn table<T: Copy>(&self, value: impl Fn(usize) -> T) -> Table<T> {
        let plan = &self.0;
        let of_group = |group: usize| std::iter::repeat_n(value(group), plan.groups[group].cp_size as usize);
        let values = (0..plan.groups.len()).flat_map(of_group).collect();
        Table(values, [plan.num_micro_batches(), plan.world_size])
    }
}

properties! {
    DynamicCpPlan:
    /// Ranks of a pipeline stage, DP times CP.
    world_size: usize = |plan| plan.0.world_size;
    /// Pipeline stages.
    num_stages: usize = |plan| plan.0.num_stages;
    /// Parts of the model on each stage.
    num_virtual_stages: usize = |plan| plan.0.num_virtual_stages;
    /// Most tokens that a rank was allowed in a micro-batch.
    max_tokens_per_rank: i32 = |plan| plan.0.max_tokens_per_rank;
    /// Micro-batches of the step, ``m``, the same on every rank; also ``len()``.
    num_micro_batches: usize = |plan| plan.0.num_micro_batches();
    /// The micro-batches in the order in which they run, a tuple of :class:`DynamicMicroBatch`.
    micro_batches: Tuple<DynamicMicroBatch> = |plan| {
        Tuple((0..plan.0.num_micro_batches()).map(|index| plan.micro_batch(index)).collect())
    };
    /// Predicted time of the step, by simulating the pipeline with every rank's micro-batches; the ranks of a group wait for one another.
    seconds: f64 = |plan| plan.0.seconds;
    /// But for rounding, no plan takes less that has at most as many micro-batches as were tried and at least ``min_micro_batches`` (if ``num_micro_batches``
    /// was given, exactly as many). Proved from the work, the filling and draining of the pipeline, and the paths around the longest documents.
    lower_bound: f64 = |plan| plan.0.lower_bound;
    /// All work spread evenly over all ranks of all stages that never wait: what no pipeline reaches.
    balanced_seconds: f64 = |plan| plan.0.balanced_seconds;
    /// The numbers of micro-batches that were tried, ascending, and the predicted time of a step with each: a tuple of pairs. An estimate
    /// from above: every rank as slow as the slowest of its micro-batch. Of numbers given up early, the time if short documents could be divided at
    /// will, already more than that of the best.
    sweep: Tuple<(usize, f64)> = |plan| Tuple(plan.0.sweep.clone());
    /// int32[m, world_size]: ranks of the group of each rank.
    cp_sizes: Table<i32> = |plan| plan.table(|group| plan.0.groups[group].cp_size as i32);
    /// int64[m, world_size]: most tokens of each rank; the ranks of a group differ by at most one.
    tokens_per_rank: Table<i64> = |plan| plan.table(|group| plan.0.tokens_per_rank(group));
    /// float64[m, world_size]: seconds of each rank through the whole model, forward and backward.
    rank_seconds: Table<f64> = |plan| plan.table(|group| plan.0.groups[group].seconds);
}

#[pymethods]
impl DynamicCpPlan {
    /// Hex hash of which documents run when and where: equal on two ranks iff their plans are equal. O(documents + groups).
    fn digest(&self) -> String {
        self.0.digest()
    }

    fn __len__(&self) -> usize {
        self.0.num_micro_batches()
    }

    fn __getitem__(&self, index: isize) -> PyResult<DynamicMicroBatch> {
        item(index, self.0.num_micro_batches(), "micro-batch").map(|index| self.micro_batch(index))
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        self.micro_batches().into_pyobject(py)?.try_iter()
    }

    fn __repr__(&self) -> String {
        let plan = &self.0;
        let largest = plan.groups.iter().map(|group| group.cp_size).max().unwrap_or(0);
        format!(
            "DynamicCpPlan(world_size={}, num_stages={}, num_micro_batches={}, documents={}, largest_cp_size={largest}, seconds={:.6})",
            plan.world_size,
            plan.num_stages,
            plan.num_micro_batches(),
            plan.documents.len(),
            plan.seconds,
        )
    }
}

/// One micro-batch of a :class:`DynamicCpPlan`: groups that share the ranks of a stage.
#[pyclass(frozen, eq, hash, sequence, module = "wlb")]
#[derive(Clone, PartialEq, Hash)]
pub(crate) struct DynamicMicroBatch {
    plan: DynamicCpPlan,
    index: usize,
}

impl DynamicMicroBatch {
    /// Where in the plan's groups its own are.
    fn range(&self) -> Range<usize> {
        self.plan.0.groups_of(self.index)
    }

    fn group(&self, group: usize) -> CpGroup {
        CpGroup { micro_batch: self.clone(), group }
    }
}

properties! {
    DynamicMicroBatch:
    /// The groups in the order of their ranks, which are all ranks: a tuple of :class:`CpGroup`. A group may be empty.
    groups: Tuple<CpGroup> = |batch| Tuple(batch.range().map(|group| batch.group(group)).collect());
    /// Seconds of its slowest group through the whole model, forward and backward.
    seconds: f64 = |batch| batch.plan.0.groups[batch.range()].iter().map(|group| group.seconds).fold(0.0, f64::max);
    /// Tokens of all its groups.
    tokens: i64 = |batch| batch.range().map(|group| batch.plan.0.tokens(group)).sum();
}

#[pymethods]
impl DynamicMicroBatch {
    /// The group that a rank of the stage belongs to.
    ///
    /// Raises:
    ///     WlbError: no such rank.
    fn group_of(&self, rank: &Bound<'_, PyAny>) -> PyResult<CpGroup> {
        let rank = size("rank", rank, 0, self.plan.0.world_size as i64 - 1)?;
        Ok(self.group(self.plan.0.group_of(self.index, rank)))
    }

    fn __len__(&self) -> usize {
        self.range().len()
    }

    fn __getitem__(&self, index: isize) -> PyResult<CpGroup> {
        let range = self.range();
        item(index, range.len(), "group").map(|index| self.group(range.start + index))
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        self.groups().into_pyobject(py)?.try_iter()
    }

    fn __repr__(&self) -> String {
        let sizes: Vec<String> =
            self.plan.0.groups[self.range()].iter().map(|group| group.cp_size.to_string()).collect();
        format!("DynamicMicroBatch(cp_sizes=[{}], tokens={})", sizes.join(", "), self.tokens())
    }

    /// A pickle holds the whole plan: to send several micro-batches of one, send that.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Pickle<'py, (usize,)>> {
        pickled_as_part(py, self.plan.clone(), "__getitem__", (self.index,))
    }
}

/// Ranks that share the documents of one micro-batch.
#[pyclass(frozen, eq, hash, module = "wlb")]
pub(crate) struct CpGroup {
    micro_batch: DynamicMicroBatch,
    group: usize,
}

impl CpGroup {
    fn plan(&self) -> &core::DynamicCpPlan {
        &self.micro_batch.plan.0
    }

    fn group(&self) -> &core::Group {
        &self.plan().groups[self.group]
    }

    fn documents(&self) -> &[i64] {
        &self.plan().documents[self.plan().documents_of(self.group)]
    }

    fn document_lengths(&self) -> &[i32] {
        &self.plan().lengths[self.plan().documents_of(self.group)]
    }
}

/// Equal where the same documents run on the same ranks and take as long, in whatever plan.
impl PartialEq for CpGroup {
    fn eq(&self, other: &Self) -> bool {
        self.group() == other.group()
            && self.document_lengths() == other.document_lengths()
            && self.documents() == other.documents()
    }
}

hashed_by!(CpGroup: |group| (group.first_rank(), group.cp_size(), group.documents()));

properties! {
    CpGroup:
    /// First of its ranks, a multiple of ``cp_size``.
    first_rank: u32 = |group| group.group().first_rank;
    /// Number of ranks, a power of two; also ``len()``.
    cp_size: u32 = |group| group.group().cp_size;
    /// int64[k]: the documents, in order of arrival.
    document_ids: Array<&[i64]> = |group| Array(group.documents());
    /// int32[k]: tokens of each document.
    lengths: Array<&[i32]> = |group| Array(group.document_lengths());
    /// int32[k + 1]: where each document begins in the packed sequence, then its length.
    cu_seqlens: Array<Vec<i32>> = |group| Array(cu_seqlens(group.document_lengths().iter().copied()));
    /// Tokens of the longest document; 0 without documents.
    max_seqlen: i32 = |group| group.document_lengths().iter().copied().max().unwrap_or(0);
    /// Tokens of all documents.
    tokens: i64 = |group| group.plan().tokens(group.group);
    /// Most tokens of a rank, sharded "per_document": the ranks differ by at most one.
    tokens_per_rank: i64 = |group| group.plan().tokens_per_rank(group.group);
    /// Predicted time through the whole model, forward and backward, on each of its ranks.
    seconds: f64 = |group| group.group().seconds;
}

#[pymethods]
impl CpGroup {
    /// The ranks of the stage that it is made of.
    #[getter]
    fn ranks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyRange>> {
        let ranks = self.group().ranks();
        PyRange::new(py, ranks.start as isize, ranks.end as isize)
    }

    fn __len__(&self) -> usize {
        self.group().cp_size as usize
    }

    fn __repr__(&self) -> String {
        let core::Group { first_rank, cp_size, seconds } = *self.group();
        let documents = self.document_lengths().len();
        let tokens = self.tokens();
        format!(
            "CpGroup(first_rank={first_rank}, cp_size={cp_size}, documents={documents}, tokens={tokens}, seconds={seconds})"
        )
    }

    /// A pickle holds the whole plan: to send several groups of one, send that.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Pickle<'py, (u32,)>> {
        pickled_as_part(py, self.micro_batch.clone(), "group_of", (self.first_rank(),))
    }
}
