//! `wlb.pack`, `wlb.Packing`, and what turns a stream into global batches.

use std::sync::Arc;

use numpy::{PyArray1, PyArrayMethods};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyIterator;
use wlb_core::limits::MAX_MICRO_BATCHES;
use wlb_core::packing::{self as core, Method, Piece};
use wlb_core::ranks::{RankOptions, pack_for_ranks};
use wlb_core::{CostModel, Lengths};

use crate::arguments;
use crate::convert::choice;
use crate::cost::{document_costs, pricing, read_costs_if_any};
use crate::error::raise;
use crate::gil::run;
use crate::plain::{Array, Pickle, Table, Tuple, hashed_by, pickled_as_json, pickled_as_part};
use crate::results::declaration;

/// Packs one global batch of documents into micro-batches.
///
/// Args:
///     lengths: int[n], tokens of each document, in arrival order; document ids are indices into it.
///     num_micro_batches: micro-batches of a global batch, ``N``. None: as few as leave nothing over, for a batch
///         that is trained whole in one step (fine-tuning, reinforcement learning): one multiple less would leave
///         documents over. With ``dp_size`` and ``sync="step"``, one more of each rank where that makes the step
///         5 % shorter.
///     max_tokens: most tokens of a micro-batch; a memory bound (``S_max``).
///     cost_model: what documents cost, by their lengths. Or ``costs``.
///     costs: float64[n], what each document costs, in any one unit; or float64[n, r], a column for every resource
///         with a barrier of its own (vision encoder, language model). A step takes the sum over columns of the
///         heaviest micro-batch in that column; ``imbalance`` and ``lower_bound`` follow. With "var_length",
///         "refined" and "original", which shares a cost among pieces by their tokens.
///     limits: float64[r], the most that a micro-batch may have in each column, infinite for none. What has a limit
///         is memory, and takes no time.
///     method: "var_length" (WLB-LLM's Algorithm 1: longest first, each to the micro-batch with the least cost),
///         "refined" (no worse than var_length, and next to
///         optimal where ``max_tokens`` binds; 1.3 times its time at the median, about three times where a few
///         pieces fill a micro-batch that has next to no room to spare), "fixed_length" (longest first, to the
///         least attention work that has room; cuts what fits nowhere), "original" (arrival order, cut every
///         ``max_tokens``).
///     global_batches: with "fixed_length", the number of global batches in ``lengths``. They are packed together into
///         ``global_batches * N`` micro-batches; step ``i`` trains micro-batches ``i * N`` to ``(i + 1) * N - 1``.
///     multiple_of: with ``num_micro_batches=None``, what their number is a multiple of: the data-parallel ranks,
///         so that ``Packing.deal`` gives all of them as many.
///     dp_size: data-parallel ranks that the plan is made for: documents are exchanged between ranks, not only
///         micro-batches dealt, and ``packing.deal(dp_size)`` gives every rank's. All ranks have as many
///         micro-batches; they stand rank by rank in the packing. With "var_length" or "refined"; ``costs`` of one
///         column.
///     sync: where these ranks wait for each other. "step", the default: once a step (DDP, ZeRO-1 and 2, Megatron),
///         so that the sums of ranks are made equal, then the micro-batches of each rank. "micro_batch": in every
///         micro-batch (FSDP, ZeRO-3), so that those of a round are made equal, then the sums.
///     groups: int[n], with ``dp_size``: documents with the same number stay on one rank (one prompt's rollouts).
///     equal_documents: with ``dp_size``, every rank has as many documents; they differ by one where ``dp_size``
///         does not divide them. Groups whose sizes cannot be dealt so are refused.
///     max_documents: most documents of a micro-batch.
///     multiple_of_tokens: micro-batches run padded up to a multiple of so many tokens (MXFP8 32, HybridEP 128),
///         and ``max_tokens`` counts the padding: the plan's is the largest multiple within it. ``padded_tokens``
///         has the sizes; who makes the batches pads them.
///     token_buckets: int[b], ascending: the only sizes that micro-batches run with, for steps compiled or captured
///         once for each; padded up to the next, ``max_tokens`` as above.
///     leftover: what happens if documents do not fit: "error", or "return", and ``Packing.leftover`` lists
///         them: they are in no micro-batch, and will not be trained unless the caller sees to it.
///
/// Returns:
///     Packing. The same input gives the same plan, byte for byte, on every rank and machine.
///
/// Raises:
///     WlbError: a length or size out of range, a document over ``max_tokens`` (the methods that keep documents
///         whole), an unknown method, a cost that is negative or not finite, a column of zeros or none without a
///         limit, both or none of ``cost_model`` and ``costs``, several ``global_batches`` without "fixed_length",
///         ``multiple_of`` beside ``num_micro_batches``, what needs ``dp_size`` without it. Documents do not fit: the
///         message says how many, and a ``max_tokens`` that surely holds them all (with the methods that cut documents
///         the least one).
///
/// O(n) for a radix sort and, on average, a few steps for each document; O(n N) at worst, and always for
/// "fixed_length". ``num_micro_batches=None`` takes O(log n) times that, and once where as many as the tokens need
/// do. WLB-LLM, sections 3.2 and 4. Releases the GIL from 1,024 documents and micro-batches on.
///
/// Examples:
///     >>> import wlb
///     >>> cost = wlb.CostModel(attention=1.0, linear=1000.0)
///     >>> plan = wlb.pack([900, 100, 500, 400, 100], num_micro_batches=2, max_tokens=1500, cost_model=cost)
///     >>> plan.assignment
///     array([0, 1, 1, 1, 1], dtype=int32)
///     >>> round(plan.imbalance, 3)
///     1.004
#[pyfunction]
#[pyo3(signature = (
    lengths, *, num_micro_batches, max_tokens, cost_model = None, costs = None, limits = None,
    method = "var_length", global_batches = 1, multiple_of = 1, dp_size = None, sync = None, groups = None,
    equal_documents = false, max_documents = None, multiple_of_tokens = 1, token_buckets = None,
    leftover = "error"
))]
#[allow(clippy::too_many_arguments, reason = "keywords in Python")]
pub(crate) fn pack(
    py: Python<'_>,
    #[pyo3(from_py_with = arguments::lengths)] lengths: Lengths,
    #[pyo3(from_py_with = arguments::optional::num_micro_batches)] num_micro_batches: Option<usize>,
    #[pyo3(from_py_with = arguments::max_tokens)] max_tokens: i32,
    #[pyo3(from_py_with = read_costs_if_any)] cost_model: Option<CostModel>,
    #[pyo3(from_py_with = arguments::optional::costs)] costs: Option<arguments::Table>,
    #[pyo3(from_py_with = arguments::optional::limits)] limits: Option<Vec<f64>>,
    method: &str,
    #[pyo3(from_py_with = arguments::global_batches)] global_batches: usize,
    #[pyo3(from_py_with = arguments::multiple_of)] multiple_of: usize,
    #[pyo3(from_py_with = arguments::optional::dp_size)] dp_size: Option<i64>,
    sync: Option<&str>,
    #[pyo3(from_py_with = arguments::optional::groups)] groups: Option<Vec<i64>>,
    #[pyo3(from_py_with = arguments::equal_documents)] equal_documents: bool,
    #[pyo3(from_py_with = arguments::optional::max_documents)] max_documents: Option<usize>,
    #[pyo3(from_py_with = arguments::multiple_of_tokens)] multiple_of_tokens: i32,
    #[pyo3(from_py_with = arguments::optional::token_buckets)] token_buckets: Option<Vec<i32>>,
    leftover: &str,
) -> PyResult<Packing> {
    let combination = |argument, requirement| raise(wlb_core::Error::Combination { argument, requirement });
    if num_micro_batches.is_some() && multiple_of != 1 {
        return Err(combination("multiple_of", "a multiple other than 1 needs num_micro_batches=None"));
    }
    let padding = core::Padding::new(multiple_of_tokens, &token_buckets.unwrap_or_default()).map_err(raise)?;
    let most = padding.most(max_tokens).map_err(raise)?;
    let explained = |error| raise(padding.explained(error, max_tokens));
    let padded = |packing: core::Packing| {
        Packing::from(core::Packing { padding: (!padding.is_none()).then(|| padding.clone()), ..packing })
    };
    let options = core::PackOptions {
        num_micro_batches: num_micro_batches.unwrap_or(1),
        max_tokens: most,
        method: choice(method)?,
        global_batches,
        leftover: choice(leftover)?,
    };
    let given = document_costs(costs, limits.as_deref(), lengths.len())?;
    let pricing = pricing(cost_model.as_ref(), given.as_ref(), limits.as_deref())?;
    let micro_batches = options.num_micro_batches.saturating_mul(global_batches);
    let ranks = ranks(dp_size, sync)?;
    if dp_size.is_some() || max_documents.is_some() || groups.is_some() || equal_documents {
        if global_batches != 1 {
            return Err(combination("global_batches", "other than 1 goes without dp_size and max_documents"));
        }
        if options.leftover == core::Leftover::Return {
            return Err(combination("leftover", "\"return\" goes without dp_size and max_documents: all is placed"));
        }
        let options = RankOptions {
            num_micro_batches,
            multiple_of,
            max_tokens: most,
            method: options.method,
            ranks,
            groups: groups.unwrap_or_default(),
            equal_documents,
            max_documents,
        };
        return run(py, lengths.len().saturating_add(micro_batches), || pack_for_ranks(&lengths, &options, pricing))
            .map(padded)
            .map_err(explained);
    }
    run(py, lengths.len().saturating_add(micro_batches), || match num_micro_batches {
        None => core::pack_whole(&lengths, multiple_of, &options, pricing),
        Some(_) => core::pack(&lengths, &options, pricing),
    })
    .map(padded)
    .map_err(explained)
}

/// Data-parallel ranks, and where they wait for each other.
pub(crate) fn ranks(dp_size: Option<i64>, sync: Option<&str>) -> PyResult<Option<core::Ranks>> {
    let Some(dp_size) = dp_size else {
        let (argument, requirement) = ("sync", "needs dp_size: the ranks that wait for each other");
        return if sync.is_none() {
            Ok(None)
        } else {
            Err(raise(wlb_core::Error::Combination { argument, requirement }))
        };
    };
    let (argument, maximum) = ("dp_size", MAX_MICRO_BATCHES as i64);
    let negative = |_| raise(wlb_core::Error::OutOfRange { argument, value: dp_size, minimum: 1, maximum });
    let dp_size = usize::try_from(dp_size).map_err(negative)?;
    Ok(Some(core::Ranks { dp_size, sync: sync.map(choice).transpose()?.unwrap_or_default() }))
}

/// The micro-batches of one global batch: plain data that can be printed, compared, pickled and sent.
///
/// Every array is a fresh copy that the caller may keep or change.
#[pyclass(frozen, eq, hash, sequence, module = "wlb")]
#[derive(Clone, PartialEq)]
pub(crate) struct Packing(pub(crate) Arc<core::Packing>);

// What micro-batches hold: a lookup shall not read the whole plan.
hashed_by!(Packing: |packing| (&packing.0.tokens, packing.0.max_tokens));
pickled_as_json!(Packing(core::Packing));

#[pymethods]
impl Packing {
    /// How it was made: a method of ``pack``, or "assignment".
    #[getter]
    fn method(&self) -> &'static str {
        self.0.method.map_or("assignment", Method::as_str)
    }

    /// Number of micro-batches, ``M``; also ``len()``.
    #[getter]
    fn num_micro_batches(&self) -> usize {
        self.0.num_micro_batches()
    }

    /// Most tokens that a micro-batch was allowed.
    #[getter]
    fn max_tokens(&self) -> i32 {
        self.0.max_tokens
    }

    /// Global batches that were packed together: step ``i`` trains the ``i``-th ``M / global_batches`` micro-batches.
    #[getter]
    fn global_batches(&self) -> usize {
        self.0.global_batches
    }

    /// Tokens of all micro-batches.
    #[getter]
    fn num_tokens(&self) -> i64 {
        self.0.num_tokens()
    }

    /// The micro-batches, a tuple of ``MicroBatch``. An empty one is legal.
    #[getter]
    fn micro_batches(&self) -> Tuple<MicroBatch> {
        Tuple((0..self.0.num_micro_batches()).map(|index| self.micro_batch(index)).collect())
    }

    /// int32[n]: micro-batch of each document passed in, -1 if it does not lie whole in one (left over, waiting, or
    /// split). Empty for what ``Packer.flush`` returns.
    #[getter]
    fn assignment(&self) -> Array<&[i32]> {
        Array(&self.0.assignment)
    }

    /// int64[M]: tokens of each micro-batch.
    #[getter]
    fn tokens(&self) -> Array<&[i64]> {
        Array(&self.0.tokens)
    }

    /// float64[M]: cost of each micro-batch, in the cost model's unit; with several columns of costs, of all that
    /// take time.
    #[getter]
    fn costs(&self) -> Array<&[f64]> {
        Array(&self.0.costs)
    }

    /// float64[M, r]: cost of each micro-batch in each column of the documents' costs; with a cost model there is one.
    #[getter]
    fn column_costs(&self) -> Table<f64> {
        let costs = self.0.columns.as_ref().map_or(&self.0.costs, |columns| &columns.costs);
        let micro_batches = self.0.num_micro_batches();
        Table(costs.clone(), [micro_batches, costs.len() / micro_batches])
    }

    /// int64[M]: tokens of each micro-batch when it runs, padded as ``multiple_of_tokens`` and ``token_buckets`` ask.
    #[getter]
    fn padded_tokens(&self) -> Array<Vec<i64>> {
        Array(self.0.padded_tokens())
    }

    /// Time of the step: cost of the heaviest micro-batch; with several columns, the sum over them of the heaviest in
    /// each.
    #[getter]
    fn step_cost(&self) -> f64 {
        self.0.step_cost()
    }

    /// int64[l]: ids of the documents that did not fit, in the order they were tried; empty for ``pack`` unless its
    /// ``leftover`` is "return". A ``Packer`` carries them over to the next iteration.
    #[getter]
    fn leftover(&self) -> Array<Vec<i64>> {
        Array(ids(&self.0.leftover))
    }

    /// int32[l]: where in its document each left-over piece begins; 0 but for documents that were cut.
    #[getter]
    fn leftover_starts(&self) -> Array<Vec<i32>> {
        Array(starts(&self.0.leftover))
    }

    /// int32[l]: tokens of each left-over piece.
    #[getter]
    fn leftover_lengths(&self) -> Array<Vec<i32>> {
        Array(piece_lengths(&self.0.leftover))
    }

    /// ``step_cost * M / total cost``: how much longer a step takes than with perfect balance. 1.0 when nothing is
    /// placed.
    #[getter]
    fn imbalance(&self) -> f64 {
        self.0.imbalance()
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

    /// How much longer a step takes than on equal ranks. Under "step" it takes the sum of the heaviest rank, under
    /// "micro_batch" that of the heaviest micro-batch of each round. Without ranks it is the ``imbalance``.
    #[getter]
    fn rank_imbalance(&self) -> f64 {
        self.0.rank_imbalance()
    }

    /// Documents that Algorithm 1 places by token count instead of by cost. At 0 with "var_length", ``max cost <= total
    /// / M + (1 - 1/M) * w``, where ``w`` is the cost of the last document put into the heaviest micro-batch.
    #[getter]
    fn length_fallbacks(&self) -> usize {
        self.0.length_fallbacks
    }
}

#[pymethods]
impl Packing {
    /// No packing of the placed documents into as many micro-batches of ``max_tokens`` has a smaller ``step_cost``:
    /// ``max(total cost / M, largest document)``, or what a linear program says where tokens are scarce; summed over
    /// columns. O(n log n) when it is first asked for.
    #[getter]
    fn lower_bound(&self, py: Python<'_>) -> f64 {
        run(py, self.0.pieces.len(), || self.0.lower_bound())
    }

    /// Hex hash of where every token goes: equal on two ranks iff every token goes to the same place. O(documents).
    fn digest(&self, py: Python<'_>) -> String {
        run(py, self.0.pieces.len(), || self.0.digest())
    }

    fn __len__(&self) -> usize {
        self.0.num_micro_batches()
    }

    fn __getitem__(&self, index: isize) -> PyResult<MicroBatch> {
        item(index, self.0.num_micro_batches(), "micro-batch").map(|index| self.micro_batch(index))
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        self.micro_batches().into_pyobject(py)?.try_iter()
    }

    fn __repr__(&self) -> String {
        format!(
            "Packing(method={:?}, num_micro_batches={}, documents={}, tokens={}, imbalance={:.4}, leftover={})",
            self.method(),
            self.0.num_micro_batches(),
            self.0.pieces.len(),
            self.0.num_tokens(),
            self.0.imbalance(),
            self.0.leftover.len(),
        )
    }
}

#[pymethods]
impl Packing {
    /// Figures of the plan, for a log or a notebook.
    ///
    /// Returns:
    ///     dict: method, micro_batches, documents, tokens, leftover, imbalance, largest_micro_batch (tokens), heaviest
    ///         (cost).
    ///
    /// Complexity:
    ///     O(documents).
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> wlb.pack([5, 3, 2], num_micro_batches=2, max_tokens=8, costs=[5, 3, 2]).summary()["imbalance"]
    ///     1.0
    fn summary<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        declaration(slf.py(), "wlb._shown.summary")?.call1((slf,))
    }

    /// Pieces of documents as a table: a row for each, in the order of the micro-batches.
    ///
    /// Returns:
    ///     pandas.DataFrame: micro_batch, document_id, start, length (tokens).
    ///
    /// Raises:
    ///     WlbError: pandas is not installed.
    ///
    /// Complexity:
    ///     O(documents).
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> p = wlb.pack([5, 3, 2], num_micro_batches=2, max_tokens=8, costs=[5, 3, 2])
    ///     >>> p.to_pandas().groupby("micro_batch")["length"].sum().tolist()  # doctest: +SKIP
    ///     [5, 5]
    fn to_pandas<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        declaration(slf.py(), "wlb._shown.to_pandas")?.call1((slf,))
    }

    fn _repr_html_<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        declaration(slf.py(), "wlb._shown.html")?.call1((slf,))
    }
}

#[pymethods]
impl Packing {
    /// A packing from an assignment made elsewhere (a solver, another packer), scored like ours.
    ///
    /// Args:
    ///     lengths: int[n], tokens.
    ///     assignment: int[n], micro-batch of each document; -1 leaves it over.
    ///     num_micro_batches, max_tokens, cost_model, costs, limits: as in ``pack``.
    ///
    /// Raises:
    ///     WlbError: also when a micro-batch does not exist or gets more than ``max_tokens`` tokens.
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> cost = wlb.CostModel(attention=1.0, linear=0.0)
    ///     >>> p = wlb.Packing.from_assignment([4, 2, 2], [0, 1, 1], num_micro_batches=2, max_tokens=8,
    ///     ...                                 cost_model=cost)
    ///     >>> p.costs, p.imbalance
    ///     (array([10.,  6.]), 1.25)
    #[staticmethod]
    #[pyo3(signature = (
    lengths, assignment, *, num_micro_batches, max_tokens, cost_model = None, costs = None, limits = None
))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn from_assignment(
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::lengths)] lengths: Lengths,
        #[pyo3(from_py_with = arguments::assignment)] assignment: Vec<i64>,
        #[pyo3(from_py_with = arguments::num_micro_batches)] num_micro_batches: usize,
        #[pyo3(from_py_with = arguments::max_tokens)] max_tokens: i32,
        #[pyo3(from_py_with = read_costs_if_any)] cost_model: Option<CostModel>,
        #[pyo3(from_py_with = arguments::optional::costs)] costs: Option<arguments::Table>,
        #[pyo3(from_py_with = arguments::optional::limits)] limits: Option<Vec<f64>>,
    ) -> PyResult<Self> {
        let given = document_costs(costs, limits.as_deref(), lengths.len())?;
        let pricing = pricing(cost_model.as_ref(), given.as_ref(), limits.as_deref())?;
        let score = || core::Packing::from_assignment(&lengths, &assignment, num_micro_batches, max_tokens, pricing);
        run(py, lengths.len().saturating_add(num_micro_batches), score).map(Self::from).map_err(raise)
    }

    /// Deals the micro-batches of each step to data-parallel ranks: equal counts, balanced costs, in schedule order.
    ///
    /// Inside a rank the lightest micro-batches stand at both ends, where a pipeline fills and drains. A packing that
    /// was made for ranks (``pack(dp_size=...)``) is dealt as it was made.
    ///
    /// Returns:
    ///     int64[dp_size, M / dp_size]: micro-batch indices of each rank; with several global batches
    ///     int64[global_batches, dp_size, M / global_batches / dp_size].
    ///
    /// Raises:
    ///     WlbError: ``dp_size`` does not divide the number of micro-batches of a step, or is not what the packing was
    ///         made for.
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> cost = wlb.CostModel(attention=0.0, linear=1.0)
    ///     >>> p = wlb.pack([8, 6, 3, 1], num_micro_batches=4, max_tokens=8, cost_model=cost)
    ///     >>> p.deal(2)
    ///     array([[3, 0],
    ///            [2, 1]])
    #[pyo3(signature = (dp_size))]
    fn deal<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = arguments::dp_size)] dp_size: i64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let global_batches = self.0.global_batches;
        let per_step = self.0.num_micro_batches() / global_batches;
        let ranks = usize::try_from(dp_size).map_err(|_| {
            raise(wlb_core::Error::Indivisible { argument: "dp_size", value: dp_size, total: per_step })
        })?;
        let dealt = run(py, self.0.num_micro_batches(), || self.0.deal(ranks)).map_err(raise)?;
        let dealt = PyArray1::from_vec(py, dealt.into_iter().map(|micro_batch| micro_batch as i64).collect());
        Ok(match global_batches {
            1 => dealt.reshape([ranks, per_step / ranks])?.into_any(),
            _ => dealt.reshape([global_batches, ranks, per_step / ranks])?.into_any(),
        })
    }
}

impl From<core::Packing> for Packing {
    fn from(packing: core::Packing) -> Self {
        Self(Arc::new(packing))
    }
}

impl Packing {
    fn micro_batch(&self, index: usize) -> MicroBatch {
        MicroBatch { packing: self.clone(), index }
    }
}

/// The documents of one micro-batch, in arrival order.
#[pyclass(frozen, eq, hash, module = "wlb")]
pub(crate) struct MicroBatch {
    packing: Packing,
    index: usize,
}

impl MicroBatch {
    fn pieces(&self) -> &[Piece] {
        self.packing.0.micro_batch(self.index)
    }
}

/// Equal where the same pieces cost the same, in whatever packing.
impl PartialEq for MicroBatch {
    fn eq(&self, other: &Self) -> bool {
        self.pieces() == other.pieces() && self.cost() == other.cost()
    }
}

hashed_by!(MicroBatch: |batch| (batch.pieces().len(), batch.pieces().first().map(|piece| piece.id), batch.tokens()));

#[pymethods]
impl MicroBatch {
    /// int64[k]: the documents; one that was cut may stand here with only a part.
    #[getter]
    fn document_ids(&self) -> Array<Vec<i64>> {
        Array(ids(self.pieces()))
    }

    /// int32[k]: where in its document each piece begins; 0 for whole documents.
    #[getter]
    fn starts(&self) -> Array<Vec<i32>> {
        Array(starts(self.pieces()))
    }

    /// int32[k]: tokens of each piece.
    #[getter]
    fn lengths(&self) -> Array<Vec<i32>> {
        Array(piece_lengths(self.pieces()))
    }

    /// int32[k + 1]: where each piece begins in the packed sequence, then its length.
    #[getter]
    fn cu_seqlens(&self) -> Array<Vec<i32>> {
        Array(cu_seqlens(self.pieces().iter().map(|piece| piece.length)))
    }

    /// Tokens of the micro-batch.
    #[getter]
    fn tokens(&self) -> i64 {
        self.packing.0.tokens[self.index]
    }

    /// Cost of the micro-batch, in the cost model's unit.
    #[getter]
    fn cost(&self) -> f64 {
        self.packing.0.costs[self.index]
    }
}

#[pymethods]
impl MicroBatch {
    fn __len__(&self) -> usize {
        self.pieces().len()
    }

    /// A pickle holds the whole packing: to send several micro-batches of one, send that.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Pickle<'py, (usize,)>> {
        pickled_as_part(py, self.packing.clone(), "__getitem__", (self.index,))
    }

    fn __repr__(&self) -> String {
        format!("MicroBatch(documents={}, tokens={}, cost={})", self.pieces().len(), self.tokens(), self.cost())
    }
}

/// Cuts a stream of documents into global batches: as many whole documents as fit, at least one each.
///
/// Args:
///     lengths: int[n], tokens.
///     tokens_per_batch: most tokens of a global batch.
///
/// Returns:
///     int64[b + 1]: batch ``i`` is ``lengths[offsets[i]:offsets[i + 1]]``.
///
/// Raises:
///     WlbError: a length or ``tokens_per_batch`` out of range.
///
/// Examples:
///     >>> import wlb
///     >>> wlb.batch_offsets([5, 9, 2, 4], tokens_per_batch=8)
///     array([0, 1, 2, 4])
#[pyfunction]
#[pyo3(signature = (lengths, *, tokens_per_batch))]
pub(crate) fn batch_offsets(
    py: Python<'_>,
    #[pyo3(from_py_with = arguments::lengths)] lengths: Lengths,
    #[pyo3(from_py_with = arguments::tokens_per_batch)] tokens_per_batch: i64,
) -> PyResult<Array<Vec<i64>>> {
    let offsets = run(py, lengths.len(), || core::batch_offsets(&lengths, tokens_per_batch)).map_err(raise)?;
    Ok(Array(offsets.into_iter().map(|offset| offset as i64).collect()))
}

/// The size that a micro-batch runs with, for who makes its batch.
///
/// Args:
///     tokens: of its documents.
///     multiple_of_tokens: as for ``pack``.
///     token_buckets: likewise.
///
/// Returns:
///     ``tokens`` and the padding, as ``Packing.padded_tokens`` has it. Nothing of an empty micro-batch, but with
///     buckets.
///
/// Raises:
///     WlbError: sizes that make no sense, or more tokens than the largest of them.
#[pyfunction]
#[pyo3(signature = (tokens, *, multiple_of_tokens = 1, token_buckets = None))]
pub(crate) fn padded_tokens(
    #[pyo3(from_py_with = arguments::tokens)] tokens: i64,
    #[pyo3(from_py_with = arguments::multiple_of_tokens)] multiple_of_tokens: i32,
    #[pyo3(from_py_with = arguments::optional::token_buckets)] token_buckets: Option<Vec<i32>>,
) -> PyResult<i64> {
    let padding = core::Padding::new(multiple_of_tokens, &token_buckets.unwrap_or_default()).map_err(raise)?;
    padding.checked(tokens).map_err(raise)
}

/// The largest size within ``max_tokens``: what a packer makes of it.
///
/// Args:
///     max_tokens: most tokens of a micro-batch.
///     multiple_of_tokens: as for ``pack``.
///     token_buckets: likewise.
///
/// Raises:
///     WlbError: sizes that make no sense, or all above ``max_tokens``.
#[pyfunction]
#[pyo3(signature = (max_tokens, *, multiple_of_tokens = 1, token_buckets = None))]
pub(crate) fn most_tokens(
    #[pyo3(from_py_with = arguments::max_tokens)] max_tokens: i32,
    #[pyo3(from_py_with = arguments::multiple_of_tokens)] multiple_of_tokens: i32,
    #[pyo3(from_py_with = arguments::optional::token_buckets)] token_buckets: Option<Vec<i32>>,
) -> PyResult<i32> {
    let padding = core::Padding::new(multiple_of_tokens, &token_buckets.unwrap_or_default()).map_err(raise)?;
    padding.most(max_tokens).map_err(raise)
}

/// Cuts documents into pieces of at most ``max_document_tokens``: those that a context window has.
///
/// Args:
///     lengths: int[n], tokens.
///     max_document_tokens: longest piece.
///
/// Returns:
///     ``(documents int64[p], starts int32[p], lengths int64[p])``: index of the document, where in it the piece
///     begins, tokens.
///
/// Raises:
///     WlbError: a length or ``max_document_tokens`` out of range, or one so low that it takes more than 2^23 cuts.
///
/// Examples:
///     >>> import wlb
///     >>> wlb.split_documents([5, 2], max_document_tokens=4)
///     (array([0, 0, 1]), array([0, 4, 0], dtype=int32), array([4, 1, 2]))
#[allow(clippy::type_complexity, reason = "three arrays")]
#[pyfunction]
#[pyo3(signature = (lengths, *, max_document_tokens))]
pub(crate) fn split_documents(
    py: Python<'_>,
    #[pyo3(from_py_with = arguments::lengths)] lengths: Lengths,
    #[pyo3(from_py_with = arguments::max_document_tokens)] max_document_tokens: i32,
) -> PyResult<(Array<Vec<i64>>, Array<Vec<i32>>, Array<Vec<i64>>)> {
    let limit = i64::from(max_document_tokens);
    let pieces = run(py, lengths.len(), || core::split_documents(&lengths, limit)).map_err(raise)?;
    let lengths = pieces.iter().map(|piece| i64::from(piece.length)).collect();
    Ok((Array(ids(&pieces)), Array(starts(&pieces)), Array(lengths)))
}

/// A Python index as one from the front.
pub(crate) fn item(index: isize, count: usize, what: &str) -> PyResult<usize> {
    let wrapped = if index < 0 { index + count as isize } else { index };
    match usize::try_from(wrapped) {
        Ok(index) if index < count => Ok(index),
        _ => Err(PyIndexError::new_err(format!("{what} {index} of {count}"))),
    }
}

/// Where each of these lengths begins, then their sum.
pub(crate) fn cu_seqlens(lengths: impl Iterator<Item = i32>) -> Vec<i32> {
    let mut total = 0;
    let ends = lengths.map(|length| {
        total += length;
        total
    });
    std::iter::once(0).chain(ends).collect()
}

fn ids(pieces: &[Piece]) -> Vec<i64> {
    pieces.iter().map(|piece| piece.id).collect()
}

fn starts(pieces: &[Piece]) -> Vec<i32> {
    pieces.iter().map(|piece| piece.start).collect()
}

fn piece_lengths(pieces: &[Piece]) -> Vec<i32> {
    pieces.iter().map(|piece| piece.length).collect()
}
