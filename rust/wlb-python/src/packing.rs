//! `wlb.pack` and `wlb.Packing`, and cutting a stream into global batches.

use std::sync::Arc;

use numpy::{PyArray1, PyArrayMethods};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyIterator;
use wlb_core::limits::MAX_MICRO_BATCHES;
use wlb_core::packing::{self as core, Method, Piece};
use wlb_core::ranks::{ForestOptions, RankOptions, pack_for_ranks, pack_forest};
use wlb_core::{CostModel, Lengths};

use crate::arguments;
use crate::convert::choice;
use crate::cost::{document_costs, pricing, read_costs_if_any};
use crate::error::{raise, refuse};
use crate::forest::{Batch, PrefixForest, refuse_for_forests};
use crate::gil::run;
use crate::plain::{Array, Pickle, Table, Tuple, hashed_by, pickled_as_json, pickled_as_part};
use crate::results::declaration;

/// Packs one global batch of documents, or the samples of a forest, into micro-batches.
///
/// Args:
///     lengths: int[n], tokens of each document, in arrival order; document ids are indices into it. Or a
///         ``PrefixForest``: its samples are the documents, and a micro-batch computes tokens that its samples share
///         once. A node of ``n`` tokens at depth ``p`` costs ``c(p + n) - c(p)``, where ``c`` is the cost model without
///         constants: exact for causal pairs, windows and chunks; for measured tables it is the definition. A tree is
///         cut between micro-batches, which then compute the shared tokens again, where that costs less than the
///         imbalance that it removes, or where ``max_tokens`` requires it.
///     num_micro_batches: micro-batches of a global batch, ``N``. "fewest": the smallest number (a multiple of
///         ``multiple_of`` or ``dp_size``) that leaves no document over, for a batch that is trained whole in one step
///         (fine-tuning, reinforcement learning). None: the same, or with ``dp_size`` up to two more on each rank, if
///         each makes the step 1 % shorter. If the cost model says what a micro-batch costs besides its documents
///         (``micro_batch``), that cost decides instead of the 1 %.
///     max_tokens: most tokens of a micro-batch, as memory allows (``S_max``). A token that samples share counts once.
///     cost_model: cost of a document, from its length. Give it, or ``costs``. For a forest it must be of causal
///         attention.
///     costs: float64[n], cost of each document in any one unit; or float64[n, r], one column for every resource
///         with a barrier of its own (vision encoder, language model). A step takes the sum over columns of the
///         heaviest micro-batch in each column, and ``imbalance`` and ``lower_bound`` are of this sum. For
///         "var_length", "refined" and "original"; pieces of a document share its cost by their tokens.
///     limits: float64[r], most that a micro-batch may have in each column, infinite for no limit. A column with a
///         limit is memory and takes no time.
///     method: "var_length" (WLB-LLM's Algorithm 1): longest document first, each to the micro-batch with the least
///         cost. "refined": no worse than "var_length", and nearly optimal if ``max_tokens`` leaves little room; it
///         takes twice as long in the median, up to eight times as long if few pieces fill each of thousands of
///         micro-batches to the brim. "fixed_length": longest first, each to the micro-batch with room and the least
///         attention work; a document that fits nowhere is cut. "original": arrival order, cut every ``max_tokens``
///         tokens.
///     global_batches: with "fixed_length", the number of global batches in ``lengths``. They are packed together into
///         ``global_batches * N`` micro-batches; step ``i`` trains micro-batches ``i * N`` to ``(i + 1) * N - 1``.
///     multiple_of: with ``num_micro_batches=None``: the number of micro-batches is a multiple of this, usually the
///         number of data-parallel ranks, so that ``Packing.deal`` can give each of them equally many.
///     dp_size: data-parallel ranks to make the plan for. Documents are then exchanged between ranks, too, and
///         ``packing.deal(dp_size)`` gives each rank its micro-batches. All ranks have the same number; the packing
///         lists them rank by rank. For "var_length" and "refined", with ``costs`` of at most one column.
///     sync: where these ranks wait for each other. "step" (default): once a step, as under DDP, ZeRO-1 and 2,
///         Megatron. Then the sums of ranks are made equal first, the micro-batches of each rank second. "micro_batch":
///         in every micro-batch, as under FSDP, ZeRO-3. Then the micro-batches of each round are made equal first, the
///         sums of ranks second.
///     groups: int[n]: documents with the same number stay together, as ``together`` says.
///     together: "rank": a group stays on one of ``dp_size`` ranks (the rollouts of one prompt, whose rewards are
///         compared). "micro_batch": a group stays in one micro-batch, with or without ``dp_size``, and is never cut:
///         examples whose loss needs several documents at once (the pairs of DPO and of reward models). A group over
///         ``max_tokens`` or ``max_documents`` is then refused.
///     equal_documents: with ``dp_size``, all ranks get equally many documents (they differ by at most one). Groups
///         whose sizes do not allow that are refused.
///     max_documents: most documents of a micro-batch.
///     multiple_of_tokens: each of the ``cp_size`` ranks that share a micro-batch gets a multiple of this number of
///         tokens (MXFP8 needs 32, HybridEP 128): micro-batches are padded to a multiple of ``multiple_of_tokens *
///         cp_size``, which ``shard`` divides equally. ``max_tokens`` counts the padding: the plan's
///         ``max_tokens`` is the largest such multiple within it. ``padded_tokens`` has the padded sizes; whoever makes
///         the tensors adds the padding (``wlb.torch.collate``).
///     cp_size: context-parallel ranks that share a micro-batch; it matters to ``multiple_of_tokens`` alone.
///     token_buckets: int[b], ascending: the only sizes of padded micro-batches (of all their ranks together), for
///         steps that are compiled or captured once for each size. ``max_tokens`` counts the padding, as above. Each is
///         a multiple of ``multiple_of_tokens * cp_size``, unless ``multiple_of_tokens`` is 1.
///     leftover: what happens if documents do not fit: "error"; or "return": ``Packing.leftover`` lists them. They are
///         then in no micro-batch and are not trained unless you pass them again.
///
/// A forest does not take ``costs``, ``limits``, ``method``, ``global_batches``, ``multiple_of``, ``together``,
/// ``token_buckets`` and ``leftover``.
///
/// Returns:
///     Packing. The same input gives the same plan, byte for byte, on every rank and machine. The plan of a forest that
///     shares nothing is that of its samples' lengths, with the same digest.
///
/// Raises:
///     WlbError: a length or size out of range; a document over ``max_tokens`` (for methods that keep documents
///         whole); an unknown method; a cost that is negative or not finite; a column of zeros, or limits on all
///         columns; both or none of ``cost_model`` and ``costs``; several ``global_batches`` without "fixed_length";
///         ``multiple_of`` beside ``num_micro_batches``; an option that needs ``dp_size`` without it; a group that
///         stays in one micro-batch and is larger than it may be (the message names the group). If documents do not
///         fit, the message says how many, and names a ``max_tokens`` that holds all of them (the least one for
///         methods that cut documents).
///
/// O(n) for a radix sort and, on average, a few steps for each document; O(n N) in the worst case, and always for
/// "fixed_length". ``num_micro_batches=None`` takes O(log n) times that, or once if a number derived from the tokens is
/// enough. WLB-LLM, sections 3.2 and 4. Releases the GIL from 1,024 documents and micro-batches on.
///
/// Examples:
///     >>> import wlb
///     >>> cost = wlb.CostModel(attention=1.0, linear=1000.0)
///     >>> plan = wlb.pack([900, 100, 500, 400, 100], num_micro_batches=2, max_tokens=1500, cost_model=cost)
///     >>> plan.assignment
///     array([0, 1, 1, 1, 1], dtype=int32)
///     >>> round(plan.imbalance, 3)
///     1.004
///     >>> forest = wlb.PrefixForest.from_prompts([100, 100], 2, [30, 20, 40, 10])
///     >>> plan = wlb.pack(forest, num_micro_batches=2, max_tokens=200, cost_model=cost)
///     >>> [batch.document_ids.tolist() for batch in plan]
///     [[2, 3], [0, 1]]
///     >>> plan.num_tokens, plan.raw_tokens
///     (300, 500)
#[pyfunction]
#[pyo3(signature = (
    lengths, *, num_micro_batches, max_tokens, cost_model = None, costs = None, limits = None,
    method = "var_length", global_batches = 1, multiple_of = 1, dp_size = None, sync = None, groups = None,
    together = "rank", equal_documents = false, max_documents = None, multiple_of_tokens = 1, cp_size = 1,
    token_buckets = None,
    leftover = "error"
))]
#[allow(clippy::too_many_arguments, reason = "keywords in Python")]
pub(crate) fn pack(
    py: Python<'_>,
    #[pyo3(from_py_with = Batch::read)] lengths: Batch,
    #[pyo3(from_py_with = arguments::number_or_fewest)] num_micro_batches: (Option<usize>, bool),
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
    together: &str,
    #[pyo3(from_py_with = arguments::equal_documents)] equal_documents: bool,
    #[pyo3(from_py_with = arguments::optional::max_documents)] max_documents: Option<usize>,
    #[pyo3(from_py_with = arguments::multiple_of_tokens)] multiple_of_tokens: i32,
    #[pyo3(from_py_with = arguments::cp_size)] cp_size: usize,
    #[pyo3(from_py_with = arguments::optional::token_buckets)] token_buckets: Option<Vec<i32>>,
    leftover: &str,
) -> PyResult<Packing> {
    let combination = |argument, requirement| raise(wlb_core::Error::Combination { argument, requirement });
    let (num_micro_batches, fewest) = num_micro_batches;
    if num_micro_batches.is_some() && multiple_of != 1 {
        return Err(combination("multiple_of", "a multiple other than 1 needs num_micro_batches=None"));
    }
    if matches!(lengths, Batch::Forest(_)) {
        refuse_for_forests(&[
            ("costs", costs.is_some(), "are of documents: a forest takes a cost_model, which gives each node a cost"),
            ("limits", limits.is_some(), "limit columns of costs, which a forest does not take"),
            ("method", method != "var_length", "is for documents: a forest has a method of its own; leave it out"),
            ("global_batches", global_batches != 1, "is for documents: a forest is one global batch"),
            ("multiple_of", multiple_of != 1, "is for documents: with dp_size a forest's plan is a multiple of it"),
            ("together", together != "rank", "is for documents: a group of samples stays on one rank"),
            ("token_buckets", token_buckets.is_some(), "are for documents: a forest takes multiple_of_tokens"),
            ("leftover", leftover != "error", "is for documents: all samples of a forest are placed"),
        ])?;
    }
    let padding = padding(multiple_of_tokens, cp_size, token_buckets)?;
    let most = padding.most(max_tokens).map_err(raise)?;
    let explained = |error| raise(padding.explained(error, max_tokens));
    let padded = |packing| Packing::padded(packing, padding.clone());
    let ranks = ranks(dp_size, sync)?;
    let lengths = match lengths {
        Batch::Documents(lengths) => lengths,
        Batch::Forest(forest) => {
            let groups = groups.unwrap_or_default();
            let options = ForestOptions {
                num_micro_batches,
                fewest,
                max_tokens: most,
                ranks,
                groups,
                equal_documents,
                max_documents,
            };
            let missing = || refuse("cost_model", None, None, "is missing: it gives the nodes of a forest their costs");
            let model = cost_model.ok_or_else(missing)?;
            return run(py, forest.num_samples(), || pack_forest(&forest, &options, &model))
                .map(padded)
                .map_err(explained);
        }
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
    let together = choice(together)?;
    if together == core::Together::MicroBatch && groups.is_none() {
        return Err(combination("together", "\"micro_batch\" needs groups: the documents that stay together"));
    }
    if dp_size.is_some() || max_documents.is_some() || groups.is_some() || equal_documents {
        if global_batches != 1 {
            return Err(combination("global_batches", "other than 1 goes without dp_size, groups and max_documents"));
        }
        if options.leftover == core::Leftover::Return {
            return Err(combination(
                "leftover",
                "\"return\" goes without dp_size, groups and max_documents: all is placed",
            ));
        }
        let options = RankOptions {
            num_micro_batches,
            fewest,
            multiple_of,
            max_tokens: most,
            method: options.method,
            ranks,
            groups: groups.unwrap_or_default(),
            together,
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

/// The sizes that micro-batches are padded up to.
pub(crate) fn padding(
    multiple_of_tokens: i32,
    cp_size: usize,
    token_buckets: Option<Vec<i32>>,
) -> PyResult<core::Padding> {
    core::Padding::new(multiple_of_tokens, cp_size, &token_buckets.unwrap_or_default()).map_err(raise)
}

/// The data-parallel ranks, and where they wait for each other.
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

// Only from the sizes of micro-batches: a look-up should not read the whole plan.
hashed_by!(Packing: |packing| (&packing.0.tokens, packing.0.max_tokens));
pickled_as_json!(Packing(core::Packing));

#[pymethods]
impl Packing {
    /// Method that made the packing: a method of ``pack``, "forest", or "assignment".
    #[getter]
    fn method(&self) -> &'static str {
        let elsewhere = if self.0.forest.is_some() { "forest" } else { "assignment" };
        self.0.method.map_or(elsewhere, Method::as_str)
    }

    /// The forest whose samples were packed; None if documents were.
    #[getter]
    fn forest(&self) -> Option<PrefixForest> {
        self.0.forest.clone().map(PrefixForest)
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

    /// Tokens of all micro-batches. Tokens that samples of a forest share count once for each micro-batch that computes
    /// them.
    #[getter]
    fn num_tokens(&self) -> i64 {
        self.0.num_tokens()
    }

    /// Tokens of all samples of the forest: what is computed without sharing. None without a forest.
    #[getter]
    fn raw_tokens(&self) -> Option<i64> {
        self.0.forest.as_ref().map(|forest| forest.raw_tokens())
    }

    /// The micro-batches, a tuple of ``MicroBatch``. An empty one is legal.
    #[getter]
    fn micro_batches(&self) -> Tuple<MicroBatch> {
        Tuple((0..self.0.num_micro_batches()).map(|index| self.micro_batch(index)).collect())
    }

    /// int32[n]: micro-batch of each document that was passed in; -1 if it is not whole in one (left over, waiting, or
    /// split). Empty for plans of ``Packer.drain`` and ``Packer.flush``.
    #[getter]
    fn assignment(&self) -> Array<&[i32]> {
        Array(&self.0.assignment)
    }

    /// int64[M]: tokens of each micro-batch.
    #[getter]
    fn tokens(&self) -> Array<&[i64]> {
        Array(&self.0.tokens)
    }

    /// float64[M]: cost of each micro-batch, in the cost model's unit; with several columns, the sum of all columns
    /// that take time.
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

    /// int64[M]: tokens of each micro-batch including the padding of ``multiple_of_tokens`` and ``token_buckets``.
    #[getter]
    fn padded_tokens(&self) -> Array<Vec<i64>> {
        Array(self.0.padded_tokens())
    }

    /// Time of the step: the heaviest rank under "step"; the sum of the heaviest micro-batch of each round under
    /// "micro_batch"; without ranks the heaviest micro-batch; with several columns, the sum over columns of the
    /// heaviest in each.
    #[getter]
    fn step_cost(&self) -> f64 {
        self.0.step_cost()
    }

    /// int64[l]: ids of the documents that did not fit, in the order in which they were tried. Empty for ``pack``,
    /// unless ``leftover="return"``. A ``Packer`` carries them over to the next step.
    #[getter]
    fn leftover(&self) -> Array<Vec<i64>> {
        Array(ids(&self.0.leftover))
    }

    /// int32[l]: position in its document of each left-over piece's first token; 0 unless the document was cut.
    #[getter]
    fn leftover_starts(&self) -> Array<Vec<i32>> {
        Array(starts(&self.0.leftover))
    }

    /// int32[l]: tokens of each left-over piece.
    #[getter]
    fn leftover_lengths(&self) -> Array<Vec<i32>> {
        Array(piece_lengths(&self.0.leftover))
    }

    /// ``max cost * M / total cost``: the heaviest micro-batch over the mean, whatever ranks they are on (see
    /// ``rank_imbalance``); with several columns, the sum over columns of the heaviest in each. 1.0 when nothing is
    /// placed.
    #[getter]
    fn imbalance(&self) -> f64 {
        self.0.imbalance()
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

    /// How much longer a step takes than with equal ranks. Under "step" a step takes as long as the heaviest rank,
    /// under "micro_batch" the sum of the heaviest micro-batch of each round. Without ranks it is the ``imbalance``.
    #[getter]
    fn rank_imbalance(&self) -> f64 {
        self.0.rank_imbalance()
    }

    /// Documents that Algorithm 1 placed by token count instead of by cost. If it is 0 with "var_length", ``max cost <=
    /// total / M + (1 - 1/M) * w``, where ``w`` is the cost of the last document put into the heaviest micro-batch.
    #[getter]
    fn length_fallbacks(&self) -> usize {
        self.0.length_fallbacks
    }
}

#[pymethods]
impl Packing {
    /// Lower bound on ``step_cost`` for any packing of the placed documents into as many micro-batches of
    /// ``max_tokens`` on as many ranks: the largest of an equal share of all cost, the largest document, and the
    /// optimum of a linear program if tokens are scarce; summed over columns. O(n log n), once. Of a forest:
    /// the largest of an equal share of all nodes (with what ``max_tokens`` and ``max_documents`` force to be computed
    /// twice), the heaviest sample, and the heaviest group.
    #[getter]
    fn lower_bound(&self, py: Python<'_>) -> f64 {
        run(py, self.0.pieces.len(), || self.0.lower_bound())
    }

    /// Hex hash of the place of every token: equal on two ranks if and only if their plans are. O(documents), and of a
    /// forest O(nodes).
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
            "Packing(method={:?}, num_micro_batches={}, documents={}, tokens={}{}, imbalance={:.4}, leftover={})",
            self.method(),
            self.0.num_micro_batches(),
            self.0.pieces.len(),
            self.0.num_tokens(),
            raw_tokens(self.raw_tokens()),
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
    ///         (cost); of a forest also raw_tokens.
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
    /// A packing from an assignment that was made elsewhere (by a solver, by another packer), with our costs and
    /// imbalance.
    ///
    /// Args:
    ///     lengths: int[n], tokens.
    ///     assignment: int[n], micro-batch of each document; -1 leaves it over.
    ///     num_micro_batches, max_tokens, cost_model, costs, limits: as for ``pack``.
    ///
    /// Raises:
    ///     WlbError: a wrong argument, a micro-batch that does not exist, or one that gets more than ``max_tokens``
    ///         tokens.
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
    /// Inside a rank the lightest micro-batches are at both ends, where a pipeline fills and drains. A packing that was
    /// made for ranks (``pack(dp_size=...)``) keeps its order.
    ///
    /// Returns:
    ///     int64[dp_size, M / dp_size]: micro-batch indices of each rank; with several global batches
    ///     int64[global_batches, dp_size, M / global_batches / dp_size].
    ///
    /// Raises:
    ///     WlbError: ``dp_size`` does not divide the number of micro-batches of a step, or is not the ``dp_size`` that
    ///         the packing was made for.
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
    /// A plan whose micro-batches are padded when they run.
    fn padded(packing: core::Packing, padding: core::Padding) -> Self {
        Self::from(core::Packing { padding: padding.if_any(), ..packing })
    }

    fn micro_batch(&self, index: usize) -> MicroBatch {
        MicroBatch { packing: self.clone(), index }
    }
}

/// The documents of one micro-batch, in arrival order; of a forest its samples, with their nodes.
#[pyclass(frozen, eq, hash, module = "wlb")]
pub(crate) struct MicroBatch {
    packing: Packing,
    index: usize,
}

impl MicroBatch {
    fn pieces(&self) -> &[Piece] {
        self.packing.0.micro_batch(self.index)
    }

    fn samples(&self) -> Vec<u32> {
        self.packing.0.samples(self.index)
    }

    /// What ``wlb.shard`` cuts.
    pub(crate) fn batch(&self) -> PyResult<Batch> {
        match self.forest() {
            Some(forest) => Ok(Batch::Forest(forest.0)),
            None => {
                let lengths: Vec<i64> = self.pieces().iter().map(|piece| piece.length.into()).collect();
                Lengths::new("lengths", &lengths).map(Batch::Documents).map_err(raise)
            }
        }
    }
}

/// Equal if they have the same pieces, of equal forests, at the same cost, in whatever packing.
impl PartialEq for MicroBatch {
    fn eq(&self, other: &Self) -> bool {
        let forests = (&self.packing.0.forest, &other.packing.0.forest);
        self.pieces() == other.pieces() && self.cost() == other.cost() && forests.0 == forests.1
    }
}

hashed_by!(MicroBatch: |batch| (batch.pieces().len(), batch.pieces().first().map(|piece| piece.id), batch.tokens()));

#[pymethods]
impl MicroBatch {
    /// int64[k]: ids of the documents; of a document that was cut there may be only a part. Of a forest: numbers of the
    /// samples.
    #[getter]
    fn document_ids(&self) -> Array<Vec<i64>> {
        Array(ids(self.pieces()))
    }

    /// int32[k]: position in its document of each piece's first token; 0 for whole documents.
    #[getter]
    fn starts(&self) -> Array<Vec<i32>> {
        Array(starts(self.pieces()))
    }

    /// int32[k]: tokens of each piece; of a forest, of each sample with the tokens that it shares.
    #[getter]
    fn lengths(&self) -> Array<Vec<i32>> {
        Array(piece_lengths(self.pieces()))
    }

    /// int32[k + 1]: index of each piece's first token in the packed sequence, and at the end the number of tokens.
    ///
    /// Raises:
    ///     WlbError: of a forest: samples that share tokens do not lie one after the other; take ``wlb.shard``.
    #[getter]
    fn cu_seqlens(&self) -> PyResult<Array<Vec<i32>>> {
        if self.packing.0.forest.is_some() {
            let problem = "are of documents one after the other, and samples of a forest share tokens: \
                           wlb.shard(micro_batch, cp_size=...) says which keys each run of tokens sees";
            return Err(refuse("cu_seqlens", None, None, problem));
        }
        Ok(Array(cu_seqlens(self.pieces().iter().map(|piece| piece.length))))
    }

    /// int64[m]: nodes of the samples in the plan's forest, in memory order: depth-first, the longest of siblings
    /// first, so that it follows its parent. None without a forest.
    #[getter]
    fn nodes(&self) -> Option<Array<Vec<i64>>> {
        let forest = self.packing.0.forest.as_ref()?;
        Some(Array(forest.nodes_of(&self.samples()).into_iter().map(i64::from).collect()))
    }

    /// The forest of these samples alone; its nodes are in the order of ``nodes``, its samples in that of
    /// ``document_ids``. None without a forest.
    #[getter]
    pub(crate) fn forest(&self) -> Option<PrefixForest> {
        let forest = self.packing.0.forest.as_ref()?;
        let samples = self.samples();
        Some(PrefixForest::from(forest.of_samples(&samples, &forest.nodes_of(&samples))))
    }

    /// Tokens of the longest piece, 0 without one: what varlen attention takes beside ``cu_seqlens``.
    #[getter]
    fn max_seqlen(&self) -> i32 {
        self.pieces().iter().map(|piece| piece.length).max().unwrap_or(0)
    }

    /// Tokens of the micro-batch; of a forest those of its nodes, each shared token once.
    #[getter]
    fn tokens(&self) -> i64 {
        self.packing.0.tokens[self.index]
    }

    /// Tokens of the samples, as many as without sharing. None without a forest.
    #[getter]
    fn raw_tokens(&self) -> Option<i64> {
        self.packing.0.forest.as_ref()?;
        Some(self.pieces().iter().map(|piece| i64::from(piece.length)).sum())
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

    /// A pickle holds the whole packing. To send several micro-batches of one packing, send the packing.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Pickle<'py, (usize,)>> {
        pickled_as_part(py, self.packing.clone(), "__getitem__", (self.index,))
    }

    fn __repr__(&self) -> String {
        let (documents, raw_tokens) = (self.pieces().len(), raw_tokens(self.raw_tokens()));
        format!("MicroBatch(documents={documents}, tokens={}{raw_tokens}, cost={})", self.tokens(), self.cost())
    }
}

/// Cuts a stream of documents into global batches: each takes as many whole documents as fit, at least one.
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

/// Padded size of a micro-batch, for code that makes its tensors.
///
/// Args:
///     tokens: tokens of its documents.
///     multiple_of_tokens: as for ``pack``.
///     cp_size: as for ``pack``.
///     token_buckets: as for ``pack``.
///
/// Returns:
///     int: tokens including padding, as in ``Packing.padded_tokens``. An empty micro-batch has 0, or the smallest
///         bucket.
///
/// Raises:
///     WlbError: sizes that make no sense, or more tokens than the largest bucket.
#[pyfunction]
#[pyo3(signature = (tokens, *, multiple_of_tokens = 1, cp_size = 1, token_buckets = None))]
pub(crate) fn padded_tokens(
    #[pyo3(from_py_with = arguments::tokens)] tokens: i64,
    #[pyo3(from_py_with = arguments::multiple_of_tokens)] multiple_of_tokens: i32,
    #[pyo3(from_py_with = arguments::cp_size)] cp_size: usize,
    #[pyo3(from_py_with = arguments::optional::token_buckets)] token_buckets: Option<Vec<i32>>,
) -> PyResult<i64> {
    padding(multiple_of_tokens, cp_size, token_buckets)?.checked(tokens).map_err(raise)
}

/// Largest padded size within ``max_tokens``: the ``max_tokens`` of a packer with these options.
///
/// Args:
///     max_tokens: most tokens of a micro-batch.
///     multiple_of_tokens: as for ``pack``.
///     cp_size: as for ``pack``.
///     token_buckets: as for ``pack``.
///
/// Raises:
///     WlbError: sizes that make no sense, or all sizes above ``max_tokens``.
#[pyfunction]
#[pyo3(signature = (max_tokens, *, multiple_of_tokens = 1, cp_size = 1, token_buckets = None))]
pub(crate) fn most_tokens(
    #[pyo3(from_py_with = arguments::max_tokens)] max_tokens: i32,
    #[pyo3(from_py_with = arguments::multiple_of_tokens)] multiple_of_tokens: i32,
    #[pyo3(from_py_with = arguments::cp_size)] cp_size: usize,
    #[pyo3(from_py_with = arguments::optional::token_buckets)] token_buckets: Option<Vec<i32>>,
) -> PyResult<i32> {
    padding(multiple_of_tokens, cp_size, token_buckets)?.most(max_tokens).map_err(raise)
}

/// Cuts documents into pieces of at most ``max_document_tokens``, such as a context window.
///
/// Args:
///     lengths: int[n], tokens.
///     max_document_tokens: longest piece.
///
/// Returns:
///     ``(documents int64[p], starts int32[p], lengths int64[p])``: for each piece, the index of its document, the
///     position of its first token there, and its tokens.
///
/// Raises:
///     WlbError: a length or ``max_document_tokens`` out of range, or more than 2^23 cuts.
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

/// Turns a Python index, which may be negative, into one from the front.
pub(crate) fn item(index: isize, count: usize, what: &str) -> PyResult<usize> {
    let wrapped = if index < 0 { index + count as isize } else { index };
    match usize::try_from(wrapped) {
        Ok(index) if index < count => Ok(index),
        _ => Err(PyIndexError::new_err(format!("{what} {index} of {count}"))),
    }
}

/// Begin of each of these lengths, and at the end their sum.
pub(crate) fn cu_seqlens(lengths: impl Iterator<Item = i32>) -> Vec<i32> {
    let mut total = 0;
    let ends = lengths.map(|length| {
        total += length;
        total
    });
    std::iter::once(0).chain(ends).collect()
}

/// Tokens without sharing, for the repr of a plan of a forest.
fn raw_tokens(tokens: Option<i64>) -> String {
    tokens.map_or_else(String::new, |tokens| format!(", raw_tokens={tokens}"))
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
