//! `wlb.plan_dynamic_cp` and `wlb.Exchange`.

use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};
use wlb_core::Lengths;
use wlb_core::cost::DocumentCosts;
use wlb_core::dynamic_cp::{self as core, Costs, DynamicCpOptions, GroupSizes, Node};
use wlb_core::packing::Pricing;

use crate::arguments;
use crate::convert::{choice, floats};
use crate::cost::{CostModel, pricing};
use crate::dynamic_cp_plan::DynamicCpPlan;
use crate::error::{raise, refuse};
use crate::gil::run;
use crate::packing::padding;
use crate::plain::hashed_by;

/// Prices of exchanging keys and values inside a context-parallel group, forward and backward, over all layers.
///
/// A group of ``c`` ranks with ``T`` tokens exchanges for ``(c - 1) * seconds_per_exchange + T * (c - 1) / c *
/// seconds_per_token`` seconds, of which attention hides up to ``overlap`` times its own time.
/// ``wlb_tools.profiling.probe_link`` measures a network. Immutable and picklable; equal prices compare equal.
///
/// Args:
///     seconds_per_token: seconds to exchange the keys and values of a token, and their gradients.
///     seconds_per_exchange: latency of sending keys and values to the next rank.
///     seconds_per_token_in_node, seconds_per_exchange_in_node: the same for a group inside a node, with
///         ``ranks_per_node`` of ``wlb.plan_dynamic_cp``; neither may exceed the price across nodes.
///     overlap: part of the attention, from 0 to 1, that can hide the exchange.
///
/// Raises:
///     WlbError: a price below 0 or above 1e200; an ``overlap`` outside 0 to 1.
///
/// Examples:
///     >>> import wlb
///     >>> wlb.Exchange(seconds_per_token=7e-6, overlap=0.5).overlap
///     0.5
#[pyclass(frozen, eq, hash, get_all, module = "wlb")]
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Exchange {
    /// Seconds to exchange the keys and values of a token, and their gradients.
    seconds_per_token: f64,
    /// Latency of sending keys and values to the next rank, in seconds.
    seconds_per_exchange: f64,
    /// ``seconds_per_token`` of a group inside a node.
    seconds_per_token_in_node: f64,
    /// ``seconds_per_exchange`` of a group inside a node.
    seconds_per_exchange_in_node: f64,
    /// Part of the attention, from 0 to 1, that can hide the exchange.
    overlap: f64,
}

hashed_by!(Exchange: |exchange| exchange.__repr__());

#[pymethods]
impl Exchange {
    #[new]
    #[pyo3(signature = (
        *, seconds_per_token = 0.0, seconds_per_exchange = 0.0, seconds_per_token_in_node = 0.0,
        seconds_per_exchange_in_node = 0.0, overlap = 1.0, **unknown
    ))]
    #[pyo3(text_signature = "(*, seconds_per_token=0.0, seconds_per_exchange=0.0, seconds_per_token_in_node=0.0, \
                             seconds_per_exchange_in_node=0.0, overlap=1.0)")]
    fn new(
        #[pyo3(from_py_with = arguments::seconds_per_token)] seconds_per_token: f64,
        #[pyo3(from_py_with = arguments::seconds_per_exchange)] seconds_per_exchange: f64,
        #[pyo3(from_py_with = arguments::seconds_per_token_in_node)] seconds_per_token_in_node: f64,
        #[pyo3(from_py_with = arguments::seconds_per_exchange_in_node)] seconds_per_exchange_in_node: f64,
        #[pyo3(from_py_with = arguments::overlap)] overlap: f64,
        unknown: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        arguments::refuse_unknown::<Self>(unknown)?;
        // Adding 0 turns -0.0 into 0.0: the two are equal, so that they need the same hash.
        let exchange = Self {
            seconds_per_token: seconds_per_token + 0.0,
            seconds_per_exchange: seconds_per_exchange + 0.0,
            seconds_per_token_in_node: seconds_per_token_in_node + 0.0,
            seconds_per_exchange_in_node: seconds_per_exchange_in_node + 0.0,
            overlap: overlap + 0.0,
        };
        let across = exchange.across();
        across.check().and_then(|()| exchange.inside(1).check(&across)).map_err(raise).map(|()| exchange)
    }

    fn __repr__(&self) -> String {
        let given = self.fields().into_iter().zip(Self::FREE.fields()).filter(|(given, free)| given != free);
        let shown: Vec<String> = given.map(|((name, value), _)| format!("{name}={value:?}")).collect();
        format!("Exchange({})", shown.join(", "))
    }

    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<((), Bound<'py, PyDict>)> {
        Ok(((), self.fields().into_py_dict(py)?))
    }
}

impl Exchange {
    /// Exchange that costs nothing.
    const FREE: Self = Self {
        seconds_per_token: 0.0,
        seconds_per_exchange: 0.0,
        seconds_per_token_in_node: 0.0,
        seconds_per_exchange_in_node: 0.0,
        overlap: 1.0,
    };

    fn fields(&self) -> [(&'static str, f64); 5] {
        [
            ("seconds_per_token", self.seconds_per_token),
            ("seconds_per_exchange", self.seconds_per_exchange),
            ("seconds_per_token_in_node", self.seconds_per_token_in_node),
            ("seconds_per_exchange_in_node", self.seconds_per_exchange_in_node),
            ("overlap", self.overlap),
        ]
    }

    /// Prices of a group with ranks on several nodes.
    fn across(&self) -> core::Exchange {
        let &Self { seconds_per_token, seconds_per_exchange, overlap, .. } = self;
        core::Exchange { seconds_per_exchange, seconds_per_token, overlap }
    }

    /// Prices of a group inside a node of this many ranks.
    fn inside(&self, ranks: usize) -> Node {
        let (seconds_per_exchange, seconds_per_token) =
            (self.seconds_per_exchange_in_node, self.seconds_per_token_in_node);
        Node { ranks, seconds_per_exchange, seconds_per_token }
    }

    /// Prices inside a node, if the caller says how many ranks a node has.
    fn of_node(&self, ranks: Option<usize>) -> PyResult<Option<Node>> {
        if ranks.is_none() && (self.seconds_per_token_in_node > 0.0 || self.seconds_per_exchange_in_node > 0.0) {
            return Err(refuse("exchange", None, None, "has prices inside a node: pass ranks_per_node, too"));
        }
        Ok(ranks.map(|ranks| self.inside(ranks)))
    }
}

/// Allowed groups: a named rule, or a list of sizes.
pub(crate) enum Sizes {
    Named(GroupSizes),
    Only(Vec<i64>),
}

impl Sizes {
    fn read(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        match object.extract::<&str>() {
            Ok(name) => Ok(Self::Named(choice(name)?)),
            Err(_) => Ok(Self::Only(arguments::group_sizes(object)?)),
        }
    }
}

/// Plans one step with dynamic context parallelism: every micro-batch divides the ranks into groups as its
/// documents need.
///
/// A long document gets as many ranks as it needs to finish with the others; short documents share few ranks. Groups
/// are aligned powers of two inside any ``world_size``, so that all of them can be built once; or groups of any size.
/// All ranks have the same number of micro-batches.
///
/// On a group of ``c`` ranks, documents with ``T`` tokens together take ``micro_batch_seconds + cost / c + max(0,
/// exchange - overlap * attention_cost / c)`` seconds through the whole model, forward and backward, with ``exchange =
/// (c - 1) * seconds_per_exchange + T * (c - 1) / c * seconds_per_token`` (``wlb.Exchange``). Each rank holds at most
/// ``ceil(T / c)`` of the tokens (documents are sharded "per_document").
///
/// Args:
///     lengths: int[n], tokens of the documents of the step.
///     world_size: ranks of one pipeline stage (DP times CP), which are divided into groups. Any number.
///     num_stages: pipeline stages, PP.
///     max_tokens_per_rank: most tokens of a rank in a micro-batch, as memory allows. An interleaved pipeline also
///         has no more tokens under way than rounds of ``num_stages`` such micro-batches have, unless
///         ``num_micro_batches`` is given.
///     cost_model: cost of a document on one rank, in seconds for the whole model. Give it, or ``costs``.
///     costs: float64[n], cost of each document on one rank, in seconds for the whole model, if the length does not
///         tell the work. The ranks of a group share the cost; memory is counted in tokens.
///     attention_costs: float64[n], the part of each of ``costs`` that is attention, which hides exchange. Required
///         with ``costs`` if ``exchange`` has a price and an ``overlap`` above 0.
///     num_virtual_stages: parts of the model on each stage.
///     schedule: "1f1b" or "interleaved_1f1b"; or "zbv" or "dualpipev", with ``num_virtual_stages=2``. None: "1f1b", or
///         "interleaved_1f1b" with several virtual stages. "dualpipev" needs at least two micro-batches for each stage.
///     sync: where the ranks of a stage wait for each other: "step", once a step; or "micro_batch", in each micro-batch
///         (FSDP, ZeRO-3, experts over all of them), so that a micro-batch takes as long as its slowest group.
///     max_cp_size: largest group; default ``world_size``. Rounded down to a power of two if all groups are.
///     group_sizes: "powers_of_two": each group begins at a multiple of its size. "any": any number of neighbouring
///         ranks; useful for 24 or 48 ranks, and if the longest documents fill the memory. int[s]: the only allowed
///         sizes, ascending from 1, such as the sizes that attention can run (``wlb.torch.cp_sizes``).
///     ranks_per_node: ranks of a stage on each node, if exchange is cheaper inside a node: rank ``r`` is on node ``r
///         // ranks_per_node``.
///     max_documents: most documents of a group in a micro-batch, so that its ``cu_seqlens`` have a fixed number of
///         entries (CUDA graphs); padding counts as one more.
///     multiple_of_tokens: each rank's tokens in a micro-batch are padded to a multiple of this (MXFP8 needs 32,
///         HybridEP 128), by one more document of the whole group. ``max_tokens_per_rank`` counts the padding: the
///         plan's is the largest multiple within it. Padding takes no time in a plan.
///     token_buckets: int[b], ascending, multiples of ``multiple_of_tokens``: the only padded sizes of a rank's tokens;
///         a group without documents has the smallest.
///     num_micro_batches: micro-batches of the step; None tries several numbers and takes the fastest.
///     min_micro_batches: least number that is tried, for schedules that need more: torch's 1F1B one for each stage,
///         its DualPipeV two.
///     max_micro_batches: largest number that is tried; default 4 times the first, or more if the documents do not fit.
///         The first is ``num_stages``, or more if memory or ``min_micro_batches`` needs more; with
///         ``micro_batch_seconds``, as few as memory allows.
///     exchange: prices of exchange inside a group; None: it is free.
///     p2p_seconds: latency between pipeline stages.
///     micro_batch_seconds: time of every micro-batch through the whole model, besides its documents.
///     ids: int64[n], ids of the documents in the plan; default their indices.
///
/// Returns:
///     DynamicCpPlan. The same input gives the same plan, byte for byte, on every rank and machine.
///
/// Raises:
///     WlbError: an argument out of range; a document that does not fit on the largest group; too few micro-batches
///         for the documents.
///
/// O(n log world_size) for each of about ten numbers of micro-batches (several times as many attempts if exchange
/// costs, all but four of them for a sample of 8,192 documents or more if there are twice as many, on 512 ranks), and
/// O(num_stages * micro-batches * world_size) to simulate the best. In a world that is no power of two, up
/// to O(n * micro-batches * log world_size) for each number, and O(n * micro-batches * world_size) if memory binds.
/// Releases the GIL from 1,024 documents on.
///
/// Examples:
///     >>> import wlb
///     >>> cost = wlb.CostModel(attention=0.0, linear=1.0)
///     >>> plan = wlb.plan_dynamic_cp([2000, 1000, 1000], world_size=4, num_stages=1, max_tokens_per_rank=1000,
///     ...                            cost_model=cost, num_micro_batches=1)
///     >>> plan.cp_sizes
///     array([[2, 2, 1, 1]], dtype=int32)
///     >>> plan.seconds
///     1000.0
#[pyfunction]
#[pyo3(text_signature = "(lengths, *, world_size, num_stages, max_tokens_per_rank, cost_model=None, costs=None, \
                      attention_costs=None, num_virtual_stages=1, schedule=None, sync='step', max_cp_size=None, \
                      group_sizes='powers_of_two', ranks_per_node=None, max_documents=None, multiple_of_tokens=1, \
                      token_buckets=None, num_micro_batches=None, min_micro_batches=None, max_micro_batches=None, \
                      exchange=None, p2p_seconds=0.0, micro_batch_seconds=0.0, ids=None)")]
#[pyo3(signature = (
    lengths, *, world_size, num_stages, max_tokens_per_rank, cost_model = None, costs = None, attention_costs =
    None, num_virtual_stages = 1, schedule = None, sync = "step", max_cp_size = None, group_sizes =
    Sizes::Named(GroupSizes::PowersOfTwo), ranks_per_node = None, max_documents = None, multiple_of_tokens = 1, token_buckets = None,
    num_micro_batches = None, min_micro_batches = None, max_micro_batches = None, exchange = None,
    p2p_seconds = 0.0, micro_batch_seconds = 0.0, ids = None
))]
#[allow(clippy::too_many_arguments, reason = "keywords in Python")]
pub(crate) fn plan_dynamic_cp<'py>(
    py: Python<'py>,
    #[pyo3(from_py_with = arguments::lengths)] lengths: Lengths,
    #[pyo3(from_py_with = arguments::world_size)] world_size: usize,
    #[pyo3(from_py_with = arguments::num_stages)] num_stages: usize,
    #[pyo3(from_py_with = arguments::max_tokens_per_rank)] max_tokens_per_rank: i32,
    cost_model: Option<&CostModel>,
    costs: Option<&Bound<'py, PyAny>>,
    #[pyo3(from_py_with = arguments::optional::attention_costs)] attention_costs: Option<Vec<f64>>,
    #[pyo3(from_py_with = arguments::num_virtual_stages)] num_virtual_stages: usize,
    schedule: Option<&str>,
    sync: &str,
    #[pyo3(from_py_with = arguments::optional::max_cp_size)] max_cp_size: Option<usize>,
    #[pyo3(from_py_with = Sizes::read)] group_sizes: Sizes,
    #[pyo3(from_py_with = arguments::optional::ranks_per_node)] ranks_per_node: Option<usize>,
    #[pyo3(from_py_with = arguments::optional::max_documents)] max_documents: Option<usize>,
    #[pyo3(from_py_with = arguments::multiple_of_tokens)] multiple_of_tokens: i32,
    #[pyo3(from_py_with = arguments::optional::token_buckets)] token_buckets: Option<Vec<i32>>,
    #[pyo3(from_py_with = arguments::optional::num_micro_batches)] num_micro_batches: Option<usize>,
    #[pyo3(from_py_with = arguments::optional::min_micro_batches)] min_micro_batches: Option<usize>,
    #[pyo3(from_py_with = arguments::optional::max_micro_batches)] max_micro_batches: Option<usize>,
    exchange: Option<&Exchange>,
    #[pyo3(from_py_with = arguments::p2p_seconds)] p2p_seconds: f64,
    #[pyo3(from_py_with = arguments::micro_batch_seconds)] micro_batch_seconds: f64,
    #[pyo3(from_py_with = arguments::optional::ids)] ids: Option<Vec<i64>>,
) -> PyResult<DynamicCpPlan> {
    let exchange = exchange.unwrap_or(&Exchange::FREE);
    let options = DynamicCpOptions {
        world_size,
        num_stages,
        num_virtual_stages,
        schedule: schedule.map(choice).transpose()?,
        sync: choice(sync)?,
        max_tokens_per_rank,
        padding: padding(multiple_of_tokens, 1, token_buckets)?.if_any(),
        max_documents,
        max_cp_size,
        num_micro_batches,
        min_micro_batches,
        max_micro_batches,
        exchange: exchange.across(),
        node: exchange.of_node(ranks_per_node)?,
        p2p_seconds,
        micro_batch_seconds,
        ..DynamicCpOptions::new(world_size, num_stages, max_tokens_per_rank)
    };
    let options = match group_sizes {
        Sizes::Named(group_sizes) => DynamicCpOptions { group_sizes, ..options },
        Sizes::Only(sizes) => options.of_sizes(&sizes).map_err(raise)?,
    };
    let costs = costs.map(|costs| floats("costs", costs)).transpose()?;
    let costs = costs.map(|costs| DocumentCosts::new(costs, lengths.len(), 1, &[]).map_err(raise)).transpose()?;
    let costs = match pricing(cost_model.map(|model| &model.0), costs.as_ref(), None)? {
        Pricing::Model(_) if attention_costs.is_some() => {
            return Err(refuse("attention_costs", None, None, "are a part of costs: pass both"));
        }
        Pricing::Model(model) => Costs::Model(model),
        Pricing::Given(costs) => Costs::Given { costs, attention: attention_costs.as_deref() },
    };
    run(py, lengths.len().max(world_size), || core::plan_dynamic_cp(&lengths, ids.as_deref(), &options, costs))
        .map(DynamicCpPlan::from)
        .map_err(raise)
}
