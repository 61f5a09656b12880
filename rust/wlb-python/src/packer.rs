//! `wlb.Packer`.

use std::ffi::CString;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use numpy::PyArray1;
use pyo3::exceptions::{PyRecursionError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use wlb_core::packing::Padding;
use wlb_core::stream::{
    CostTable, OnBacklog, Oversize, Packer as Core, PackerConfig, Push, Release, StepShape, StreamMethod,
};
use wlb_core::{CostModel as Model, Lengths};

use crate::arguments;
use crate::convert::choice;
use crate::cost::{CostModel, read_costs, read_costs_if_any};
use crate::error::{BacklogWarning, StateError, raise};
use crate::gil::{RELEASE_FROM, run};
use crate::packing::{Packing, ranks};
use crate::plain::{Pickle, Tuple};
use crate::results::answer;

/// Packs a stream of global batches, and holds long documents back until they can be balanced.
///
/// Without ``outlier_thresholds`` the adaptive rule decides in every step how many of the longest documents wait. With
/// them documents wait in queues, as in the paper: documents of ``outlier_thresholds[i]`` tokens or more, and fewer
/// than the next threshold, wait in level ``i``; while a level holds ``num_micro_batches`` documents, that many leave
/// it and join the batch being packed, one for each micro-batch. All other documents are emitted in the iteration they
/// arrive in, if they fit; documents that do not fit go first in the next. The same pushes give the same plans on every
/// rank, and after every resume. Safe to share between threads; picklable.
///
/// Args:
///     num_micro_batches: micro-batches of a global batch, ``N`` (``pp_size * dp_size`` in the paper).
///     max_tokens: most tokens of a micro-batch (``S_max``): a memory bound, and usually above the context window.
///     cost_model: what documents cost, by their lengths. Or ``cost_columns``.
///     cost_columns: documents bring their costs, in so many columns (``push(costs=)``, always). A step takes the sum
///         over columns of the heaviest micro-batch in that column. Said here, and not by the first push, because it
///         belongs to what ranks compare before they begin. Queues go by length all the same; "adaptive" takes one
///         column.
///     limits: float64[cost_columns], the most that a micro-batch may have in each column, infinite for none. What has
///         a limit is memory, and takes no time.
///     outlier_thresholds: tokens, ascending, where the levels of the queue begin. :func:`tune_outlier_thresholds`
///         finds good ones. ``None``, the default, takes the adaptive rule; ``()`` is a queue without levels, which
///         holds nothing back.
///     release: which waiting documents join a batch. It follows from ``outlier_thresholds`` and need not be said. With
///         thresholds it is "fifo", the paper's queues. Without them it is "adaptive": the longest documents, new or
///         waiting, are held as long as the step becomes so much more even that ``delay_price`` is paid, and short ones
///         while there is no room for them. "adaptive" balances better than queues at less delay. "fifo" without
///         thresholds holds nothing back; "adaptive" with thresholds is refused.
///     delay_price: with "adaptive": how much shorter a step must become, relative to an even one, to be worth that a
///         context for each micro-batch waits one iteration (0.03, the default: 3 %); to wait a second iteration costs
///         twice as much. At a higher price less waits. Give :func:`tune_delay_price` a mean delay, and it finds the
///         price.
///     max_delay: iterations after which a waiting document leaves whatever else waits. ``None``: 16 with "adaptive";
///         with "fifo" no limit (the paper's rule), so that an outlier may wait for others of its length for ever. What
///         keeps it: :meth:`bounds`.
///     max_document_tokens: longest document, at most ``max_tokens`` (the default): the context window.
///     oversize: what happens to a longer one: "error", "split" into documents of their own, or "truncate".
///     method: how what leaves is placed: "var_length", longest first where the cost is least; or "refined", from there
///         on as ``pack(method="refined")``: the same documents, never a heavier heaviest micro-batch, mostly in twice
///         the time. Where ``max_tokens`` binds it also finds room for documents that were carried over.
///     dp_size: data-parallel ranks that every step is planned for, as :func:`pack` does it with what leaves: documents
///         are exchanged between ranks, and ``packing.deal(dp_size)`` gives every rank's micro-batches. It divides
///         ``num_micro_batches``, and like these may be another on resume. Queues let ``dp_size`` documents of a kind
///         go together, not ``num_micro_batches``. Documents priced by a cost model, or in one column without a limit.
///     sync: where these ranks wait for each other, "step" (the default) or "micro_batch". With "step" the "adaptive"
///         rule weighs the sums of ranks, so that a document waits only if it would make its rank the longest.
///     max_documents: most documents of a micro-batch. Waiting documents then count for at least ``max_tokens /
///         max_documents`` tokens in :attr:`room` and :meth:`bounds`.
///     multiple_of_tokens: micro-batches run padded up to a multiple of so many tokens, and ``max_tokens`` counts the
///         padding: :attr:`max_tokens` is the largest multiple within it. ``packing.padded_tokens`` has the sizes;
///         ``wlb.torch.collate(multiple_of_tokens=)`` pads.
///     token_buckets: int[b], ascending: the only sizes that micro-batches run with; padded up to the next.
///     max_step_cost: with "adaptive": most work of a step, in global batches of the documents that came lately (the
///         last 128 to 256 such batches). What makes micro-batches even, long documents that leave together, makes
///         steps uneven; with 1.5 no step has more than 1.5 times the mean work, but for documents that are due by
///         ``max_delay`` (``metrics().steps_over_max_cost`` counts such steps), ``min_step_tokens`` and flushes. Long
///         documents are then spread over steps, and micro-batches are less even. Below the mean less would leave than
///         comes: all then leaves when it is due, whatever it costs. ``None``: no bound.
///     tokens_per_batch: tokens of a global batch, at most ``num_micro_batches * max_tokens``; default
///         ``num_micro_batches * max_document_tokens``. Give it where steps train another number, so that
///         ``max_step_cost`` is told in *their* work; samplers and streams take it from here. May be another on resume.
///     on_backlog: what a push does after which more waits than :meth:`bounds` allows, because it brought more than the
///         packer :meth:`admits`: "warn" once with a :class:`BacklogWarning`, or "error" and change nothing.
///
/// Raises:
///     WlbError: naming the argument that makes no sense.
///
/// WLB-LLM, section 4 and Algorithm 1.
///
/// Example:
///     >>> import wlb
///     >>> cost = wlb.CostModel(attention=1.0, linear=1000.0)
///     >>> packer = wlb.Packer(num_micro_batches=2, max_tokens=1500, cost_model=cost)
///     >>> packer.push([900, 100, 500, 400, 100])
///     Packing(method="var_length", num_micro_batches=2, documents=5, tokens=2000, imbalance=1.0039, leftover=0)
///     >>> packer.pending
///     0
#[pyclass(frozen, module = "wlb")]
pub(crate) struct Packer {
    /// Locked only with the GIL and for a moment, so that a process that forks copies no locked lock.
    core: Mutex<Arc<Core>>,
    on_backlog: OnBacklog,
    /// Whether the warning was given.
    warned: AtomicBool,
}

impl Packer {
    fn new_from(core: Core, on_backlog: OnBacklog) -> Self {
        Self { core: Mutex::new(Arc::new(core)), on_backlog, warned: AtomicBool::new(false) }
    }

    fn lock(&self) -> MutexGuard<'_, Arc<Core>> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the core; without the GIL, on a copy, if there is enough to do.
    ///
    /// # Arguments
    /// * `new` - pieces that come to those that wait.
    fn change<T: Send>(&self, py: Python<'_>, new: usize, change: impl Fn(&mut Core) -> T + Send + Sync) -> T {
        if self.size(new) < RELEASE_FROM {
            return change(Arc::make_mut(&mut self.lock()));
        }
        loop {
            let (result, before, after) = self.on_a_copy(py, new, &change);
            if self.replace(&before, after) {
                return result;
            }
        }
    }

    /// Changes the core unless too much waits afterwards and that is an error, or the warning is made an error.
    fn change_within_bounds<T: Send>(
        &self,
        py: Python<'_>,
        new: usize,
        change: impl Fn(&mut Core) -> wlb_core::Result<T> + Send + Sync,
    ) -> PyResult<T> {
        loop {
            let (result, before, after) = self.on_a_copy(py, new, &change);
            let result = result.map_err(raise)?;
            if let Some(backlog) = after.backlog() {
                match self.on_backlog {
                    OnBacklog::Error => return Err(raise(backlog)),
                    OnBacklog::Warn => self.warn(py, &backlog.to_string())?,
                }
            }
            if self.replace(&before, after) {
                return Ok(result);
            }
        }
    }

    /// What a change gives, the core before it, and the core after it.
    fn on_a_copy<T: Send>(
        &self,
        py: Python<'_>,
        new: usize,
        change: impl Fn(&mut Core) -> T + Send + Sync,
    ) -> (T, Arc<Core>, Core) {
        let before = Arc::clone(&self.lock());
        let size = self.size(new);
        run(py, size, move || {
            let mut after = Core::clone(&before);
            (change(&mut after), before, after)
        })
    }

    /// Takes over a changed copy, unless another thread changed the core since it was copied: then the change has to
    /// be made again, on the core as it is now.
    fn replace(&self, before: &Arc<Core>, after: Core) -> bool {
        let mut core = self.lock();
        let is_latest = Arc::ptr_eq(&core, before);
        if is_latest {
            *core = Arc::new(after);
        }
        is_latest
    }

    /// Warns once; what shows the warning may use the packer.
    fn warn(&self, py: Python<'_>, backlog: &str) -> PyResult<()> {
        if self.warned.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let message = CString::new(backlog)?;
        PyErr::warn(py, &py.get_type::<BacklogWarning>(), &message, 1)
            .inspect_err(|_| self.warned.store(false, Ordering::Relaxed))
    }

    /// Whether so many new tokens may make more wait than the bounds allow, and nobody knows yet.
    fn is_watched(&self, lengths: &[i32]) -> bool {
        if self.on_backlog == OnBacklog::Warn && self.warned.load(Ordering::Relaxed) {
            return false;
        }
        self.lock().may_exceed(lengths)
    }

    /// How much a change has to do, for [`run`]; `new` pieces come to those that wait.
    fn size(&self, new: usize) -> usize {
        let core = self.lock();
        new.saturating_add(core.pending()).saturating_add(core.config().num_micro_batches)
    }
}

#[pymethods]
impl Packer {
    /// Tokens that the next push may bring so that :meth:`bounds` hold; with ``max_documents`` each document counts for
    /// at least its share of a full micro-batch. :meth:`admits` says it for documents. O(pending).
    #[getter]
    fn room(&self) -> i64 {
        self.lock().room()
    }

    /// Documents (or pieces of split ones) that were pushed and not yet emitted.
    #[getter]
    fn pending(&self) -> usize {
        self.lock().pending()
    }

    /// Tokens that were pushed and not yet emitted; O(pending).
    #[getter]
    fn pending_tokens(&self) -> i64 {
        self.lock().pending_tokens()
    }

    /// Tokens that did not fit and go first in the next iteration; O(carried).
    #[getter]
    fn carried_tokens(&self) -> i64 {
        self.lock().carried_tokens()
    }

    /// Iterations that the oldest pending document has waited; 0 if none is pending. O(pending).
    #[getter]
    fn oldest_wait(&self) -> u64 {
        self.lock().oldest_wait()
    }

    /// Documents that wait in each level; one level with "adaptive".
    #[getter]
    fn queued(&self) -> Tuple<usize> {
        Tuple(self.lock().queue().levels().iter().map(|level| level.len()).collect())
    }

    /// Documents that did not fit and go first in the next iteration.
    #[getter]
    fn carried(&self) -> usize {
        self.lock().carried().len()
    }

    /// Global batches packed so far.
    #[getter]
    fn iteration(&self) -> u64 {
        self.lock().iteration()
    }

    /// Micro-batches of a global batch.
    #[getter]
    fn num_micro_batches(&self) -> usize {
        self.lock().config().num_micro_batches
    }

    /// Most tokens of a micro-batch, padding included.
    #[getter]
    fn max_tokens(&self) -> i32 {
        self.lock().config().max_tokens
    }

    /// Longest document.
    #[getter]
    fn max_document_tokens(&self) -> i32 {
        self.lock().config().max_document_tokens
    }

    /// Where the levels of the queue begin: tokens, ascending.
    #[getter]
    fn outlier_thresholds(&self) -> Tuple<i32> {
        Tuple(self.lock().config().outlier_thresholds.clone())
    }

    /// Which waiting documents join a batch: "fifo" or "adaptive".
    #[getter]
    fn release(&self) -> &'static str {
        self.lock().config().release.as_str()
    }

    /// What waiting costs with "adaptive"; ``None`` with "fifo".
    #[getter]
    fn delay_price(&self) -> Option<f64> {
        self.lock().config().delay_price
    }

    /// What happens to a document over ``max_document_tokens``: "error", "split" or "truncate".
    #[getter]
    fn oversize(&self) -> &'static str {
        self.lock().config().oversize.as_str()
    }

    /// What a push does after which too much waits: "warn" or "error".
    #[getter]
    fn on_backlog(&self) -> &'static str {
        self.on_backlog.as_str()
    }

    /// Iterations after which a waiting document is released; ``None``: no limit.
    #[getter]
    fn max_delay(&self) -> Option<u64> {
        self.lock().config().max_delay
    }

    /// How what leaves is placed: "var_length" or "refined".
    #[getter]
    fn method(&self) -> &'static str {
        self.lock().config().method.as_str()
    }

    /// Data-parallel ranks that steps are planned for; ``None``: they may be dealt to any.
    #[getter]
    fn dp_size(&self) -> Option<usize> {
        self.lock().config().shape.ranks.map(|ranks| ranks.dp_size)
    }

    /// Where these wait for each other, "step" or "micro_batch"; ``None`` without ranks.
    #[getter]
    fn sync(&self) -> Option<&'static str> {
        self.lock().config().shape.ranks.map(|ranks| ranks.sync.as_str())
    }

    /// Most documents of a micro-batch; ``None``: any number.
    #[getter]
    fn max_documents(&self) -> Option<usize> {
        self.lock().config().shape.max_documents
    }

    /// Micro-batches run padded up to a multiple of so many tokens.
    #[getter]
    fn multiple_of_tokens(&self) -> i32 {
        self.lock().config().shape.padding.as_ref().map_or(1, Padding::multiple_of)
    }

    /// The only sizes that they run with, ascending; empty: any multiple.
    #[getter]
    fn token_buckets(&self) -> Tuple<i32> {
        let packer = self.lock();
        Tuple(packer.config().shape.padding.as_ref().map_or(Vec::new(), |padding| padding.buckets().to_vec()))
    }

    /// Most work of a step, in mean global batches; ``None``: no bound.
    #[getter]
    fn max_step_cost(&self) -> Option<f64> {
        self.lock().config().shape.max_cost
    }

    /// Tokens of a global batch.
    #[getter]
    fn tokens_per_batch(&self) -> i64 {
        self.lock().config().tokens_per_batch()
    }

    /// What documents cost; ``None`` where they bring their costs.
    #[getter]
    fn cost_model(&self) -> Option<CostModel> {
        self.lock().config().cost_model.clone().map(CostModel)
    }

    /// Columns of costs that documents bring; ``None`` where a cost model prices them.
    #[getter]
    fn cost_columns(&self) -> Option<usize> {
        self.lock().config().limits.as_ref().map(Vec::len)
    }

    /// The most that a micro-batch may have in each of these columns, infinite for none; ``None`` without columns.
    #[getter]
    fn limits(&self) -> Option<Tuple<f64>> {
        let infinite = |limit: &Option<f64>| limit.unwrap_or(f64::INFINITY);
        self.lock().config().limits.as_ref().map(|limits| Tuple(limits.iter().map(infinite).collect()))
    }

    /// Hex hash of the configuration under the present cost model, all but ``num_micro_batches``, ``dp_size`` and
    /// ``tokens_per_batch``: packers of equal fingerprints in which the same documents wait give the same plans.
    #[getter]
    fn fingerprint(&self) -> String {
        self.lock().fingerprint()
    }
}

#[pymethods]
impl Packer {
    /// The packer that :meth:`state_dict` saved, configuration included.
    ///
    /// Args:
    ///     state: what :meth:`state_dict` returned, also after a round trip through JSON.
    ///     on_backlog: as for :class:`Packer`; it is in no state.
    ///
    /// Raises:
    ///     StateError: the state is corrupt, truncated, of another version, or not a packer's.
    #[staticmethod]
    #[pyo3(signature = (state, on_backlog = "warn"))]
    fn from_state_dict(state: &Bound<'_, PyAny>, on_backlog: &str) -> PyResult<Self> {
        let json = to_json(state)?;
        let core = run(state.py(), json.len() / BYTES_A_PIECE, || Core::load(&json)).map_err(raise)?;
        Ok(Self::new_from(core, choice(on_backlog)?))
    }

    /// A packer that goes on from here by itself, with the same configuration; O(pending), and much cheaper than a
    /// state.
    fn copy(&self) -> Self {
        Self::new_from(Core::clone(&self.lock()), self.on_backlog)
    }

    /// A packer with this one's configuration in which nothing waits yet.
    fn empty_copy(&self) -> PyResult<Self> {
        let core = Core::new(self.lock().config().clone()).map_err(raise)?;
        Ok(Self::new_from(core, self.on_backlog))
    }

    /// What waits at most, and how long, from now on, as long as no push brings more than the packer :meth:`admits`.
    ///
    /// Returns:
    ///     Bounds: with "adaptive" two global batches of ``num_micro_batches * max_tokens`` tokens, and ``max_delay``;
    ///     with "fifo" what the levels can hold and one such batch. After a state of another configuration was loaded,
    ///     or more came than was admitted, what waits may be more, and older: the bounds are then larger, none of them
    ///     rises, and after ``settles`` steps they are the former. docs/semantics.md has the proof. O(pending).
    ///
    /// Example:
    ///     >>> import wlb
    ///     >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
    ///     >>> wlb.Packer(num_micro_batches=2, max_tokens=100, cost_model=cost).bounds()
    ///     Bounds(tokens=400, delay=16, drain=5, settles=0)
    fn bounds<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let bounds = self.lock().bounds();
        answer!(py, "Bounds", bounds { tokens, delay, drain, settles })
    }

    /// One global batch of what waits, at the end of a stream: as much of it as fits, outliers too.
    ///
    /// Returns:
    ///     Packing; empty if nothing waits. Its ``assignment`` is empty.
    fn drain(&self, py: Python<'_>) -> Packing {
        self.change(py, 0, Core::drain).into()
    }

    /// Empties everything at the end of the stream, in as many global batches as it takes.
    ///
    /// Returns:
    ///     list[Packing]; empty if nothing was pending.
    ///
    /// Example:
    ///     >>> import wlb
    ///     >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
    ///     >>> packer = wlb.Packer(num_micro_batches=2, max_tokens=100, outlier_thresholds=[50], cost_model=cost)
    ///     >>> _ = packer.push([60, 10, 10])
    ///     >>> [packing.tokens.tolist() for packing in packer.flush()]
    ///     [[60, 0]]
    fn flush(&self, py: Python<'_>) -> Vec<Packing> {
        self.change(py, 0, Core::flush).into_iter().map(Packing::from).collect()
    }

    /// Balance, delay and memory since the stream began.
    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let metrics = self.lock().metrics().clone();
        answer!(py, "PackerMetrics", metrics {
            steps, documents, tokens, imbalance_mean(), imbalance_worst(), delay_mean(), delay_max(), early_mean(),
            backlog_mean(), backlog_max, tokens_per_step_cv(), step_work_cv(), step_work_heaviest(),
            steps_over_max_cost, memory_skew_mean(), memory_skew_worst(), length_fallbacks, carried_over;
            imbalance_p95: metrics.imbalance_percentile(0.95),
            imbalance_p99: metrics.imbalance_percentile(0.99),
            delay_p99: metrics.delay_percentile(0.99),
            padding_tokens: metrics.padding,
            _delays: Tuple(metrics.delays().collect()),
        })
    }

    /// The packer as plain JSON values: a dict of str, int, float, list, None.
    ///
    /// Holds documents, not shards: ``num_micro_batches`` and every parallel size may change on resume. Save it with
    /// the position of the data set that was *consumed*, not prefetched.
    ///
    /// Example:
    ///     >>> import json, wlb
    ///     >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
    ///     >>> packer = wlb.Packer(num_micro_batches=2, max_tokens=100, outlier_thresholds=[50], cost_model=cost)
    ///     >>> _ = packer.push([60, 10, 10])
    ///     >>> again = wlb.Packer.from_state_dict(json.loads(json.dumps(packer.state_dict())))
    ///     >>> again.pending_tokens
    ///     60
    fn state_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let core = Arc::clone(&self.lock());
        let text = run(py, core.pending(), || core.save());
        py.import("json")?.call_method1("loads", (text,))
    }

    fn __repr__(&self) -> String {
        let packer = self.lock();
        let config = packer.config();
        format!(
            "Packer(num_micro_batches={}, max_tokens={}, {}{}{}{}, iteration={}, pending={})",
            config.num_micro_batches,
            config.max_tokens,
            match config.delay_price {
                Some(price) => format!("release='adaptive', delay_price={price}"),
                None => format!("outlier_thresholds={:?}", config.outlier_thresholds),
            },
            match config.method {
                StreamMethod::VarLength => "",
                StreamMethod::Refined => ", method='refined'",
            },
            config.limits.as_ref().map_or(String::new(), |limits| format!(", cost_columns={}", limits.len())),
            config.shape.ranks.map_or(String::new(), |ranks| {
                format!(", dp_size={}, sync={:?}", ranks.dp_size, ranks.sync.as_str())
            }),
            packer.iteration(),
            packer.pending(),
        )
    }

    fn __copy__(&self) -> Self {
        self.copy()
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Pickle<'py, (Bound<'py, PyAny>, &'static str)>> {
        let packer = slf.get();
        Ok((slf.get_type().getattr("from_state_dict")?, (packer.state_dict(slf.py())?, packer.on_backlog())))
    }
}

#[pymethods]
impl Packer {
    #[new]
    #[pyo3(text_signature = "(*, num_micro_batches, max_tokens, cost_model=None, cost_columns=None, limits=None, \
                          outlier_thresholds=None, release=None, delay_price=None, max_delay=None, \
                          max_document_tokens=None, oversize='error', method='var_length', dp_size=None, \
                          sync=None, max_documents=None, multiple_of_tokens=1, token_buckets=(), \
                          max_step_cost=None, tokens_per_batch=None, on_backlog='warn')")]
    #[pyo3(signature = (
    *, num_micro_batches, max_tokens, cost_model = None, cost_columns = None, limits = None,
    outlier_thresholds = None, release = None, delay_price = None, max_delay = None, max_document_tokens = None,
    oversize = "error", method = "var_length", dp_size = None, sync = None, max_documents = None,
    multiple_of_tokens = 1, token_buckets = None, max_step_cost = None, tokens_per_batch = None,
    on_backlog = "warn"
))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        #[pyo3(from_py_with = arguments::num_micro_batches)] num_micro_batches: usize,
        #[pyo3(from_py_with = arguments::max_tokens)] max_tokens: i32,
        #[pyo3(from_py_with = read_costs_if_any)] cost_model: Option<Model>,
        #[pyo3(from_py_with = arguments::optional::cost_columns)] cost_columns: Option<usize>,
        #[pyo3(from_py_with = arguments::optional::limits)] limits: Option<Vec<f64>>,
        #[pyo3(from_py_with = arguments::optional::outlier_thresholds)] outlier_thresholds: Option<Vec<i32>>,
        release: Option<&str>,
        #[pyo3(from_py_with = arguments::optional::delay_price)] delay_price: Option<f64>,
        #[pyo3(from_py_with = arguments::optional::max_delay)] max_delay: Option<u64>,
        #[pyo3(from_py_with = arguments::optional::max_document_tokens)] max_document_tokens: Option<i32>,
        oversize: &str,
        method: &str,
        #[pyo3(from_py_with = arguments::optional::dp_size)] dp_size: Option<i64>,
        sync: Option<&str>,
        #[pyo3(from_py_with = arguments::optional::max_documents)] max_documents: Option<usize>,
        #[pyo3(from_py_with = arguments::multiple_of_tokens)] multiple_of_tokens: i32,
        #[pyo3(from_py_with = arguments::optional::token_buckets)] token_buckets: Option<Vec<i32>>,
        #[pyo3(from_py_with = arguments::optional::max_step_cost)] max_step_cost: Option<f64>,
        #[pyo3(from_py_with = arguments::optional::tokens_per_batch)] tokens_per_batch: Option<i64>,
        on_backlog: &str,
    ) -> PyResult<Self> {
        let release = match release {
            Some(release) => choice(release)?,
            None => Release::of_thresholds(outlier_thresholds.as_deref()),
        };
        let padding = Padding::new(multiple_of_tokens, &token_buckets.unwrap_or_default()).map_err(raise)?;
        let max_tokens = padding.most(max_tokens).map_err(raise)?;
        let padding = Some(padding).filter(|padding| !padding.is_none());
        let packer = Core::new(PackerConfig {
            outlier_thresholds: outlier_thresholds.unwrap_or_default(),
            delay_price: delay_price.or(release.default_price()),
            oversize: choice(oversize)?,
            limits: column_limits(cost_columns, limits)?,
            shape: StepShape {
                ranks: ranks(dp_size, sync)?,
                max_documents,
                padding,
                max_cost: max_step_cost,
                tokens_per_batch,
            },
            ..config(release, num_micro_batches, max_tokens, cost_model, max_delay, max_document_tokens, method)?
        });
        Ok(Self::new_from(packer.map_err(raise)?, choice(on_backlog)?))
    }

    /// Packs one global batch: these documents, what was carried over, and the outliers whose time has come.
    ///
    /// Args:
    ///     lengths: int[n], tokens of the new documents; may be empty.
    ///     ids: int64[n], their names, unique among these and the pending documents; default a running number.
    ///     starts: int[n], where each begins inside the document that ``ids`` names, for a reader that cuts documents
    ///         itself and lets their pieces enter over several iterations; default: all are whole documents.
    ///     costs: float64[n] or float64[n, cost_columns], what each document costs, where the packer was made with
    ///         ``cost_columns``, and only there; what it costs that is cut is shared among its pieces by their tokens.
    ///         What waits keeps its costs.
    ///     min_step_tokens: more leaves than the release rule lets go, if that is fewer tokens than these and more is
    ///         there. Such a step is less balanced. It holds so many tokens at least, or all that is there, or
    ///         ``num_micro_batches // 2 * max_tokens`` (without ``limits``, which may leave less room).
    ///     early: int[n], from 0 to 1024, by how many iterations each comes before its turn in the order of the stream
    ///         (see :meth:`leads`), only with release="adaptive". Until its turn a document is not late: it may be
    ///         trained, and waiting costs nothing. Delays count from the turn on.
    ///
    /// Returns:
    ///     Packing of ``num_micro_batches`` micro-batches. ``assignment`` follows ``lengths`` (-1: waits, or was
    ///     split); ``leftover`` is what is carried over to the next iteration.
    ///
    /// Raises:
    ///     WlbError: wrong lengths, ids, starts or costs, a document over ``max_document_tokens`` under
    ///         oversize="error", more than 2^23 cuts under oversize="split", or, under on_backlog="error", more waits
    ///         afterwards than the :meth:`bounds` of an empty packer allow. The packer is unchanged. An empty push is
    ///         never refused: it trains of what waits.
    ///
    /// Warns:
    ///     BacklogWarning: documents were pushed, and more waits afterwards than those bounds allow; once.
    ///
    /// Cost as for :func:`pack`, for the documents new, carried over and released. Releases the GIL from 1,024 pieces
    /// on, those that wait included.
    ///
    /// Example:
    ///     >>> import wlb
    ///     >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
    ///     >>> packer = wlb.Packer(num_micro_batches=2, max_tokens=100, outlier_thresholds=[50], cost_model=cost)
    ///     >>> packer.push([60, 10, 10]).tokens  # the document of 60 tokens waits for a second one of its kind
    ///     array([10, 10])
    ///     >>> packer.push([60, 10, 10]).tokens
    ///     array([70, 70])
    #[pyo3(signature = (lengths, ids = None, *, starts = None, costs = None, min_step_tokens = 0, early = None))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn push(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::lengths)] lengths: Lengths,
        #[pyo3(from_py_with = arguments::optional::ids)] ids: Option<Vec<i64>>,
        #[pyo3(from_py_with = arguments::optional::starts)] starts: Option<Vec<i32>>,
        #[pyo3(from_py_with = arguments::optional::costs)] costs: Option<arguments::Table>,
        #[pyo3(from_py_with = arguments::min_step_tokens)] min_step_tokens: i64,
        #[pyo3(from_py_with = arguments::optional::early)] early: Option<Vec<i64>>,
    ) -> PyResult<Packing> {
        let push = |core: &mut Core| {
            let (ids, starts, early) = (ids.as_deref(), starts.as_deref(), early.as_deref());
            core.push_pieces(&Push { lengths: &lengths, ids, starts, min_step_tokens, early, costs: table(&costs) })
        };
        let pieces = self.lock().pieces_of_new(&lengths);
        let packing = if self.is_watched(&lengths) {
            self.change_within_bounds(py, pieces, push)
        } else {
            self.change(py, pieces, push).map_err(raise)
        };
        packing.map(Packing::from)
    }

    /// By how many iterations each of the documents that come next should come before its turn, for :meth:`push`.
    ///
    /// A document that costs as much as ``c`` mean micro-batches is level only in a step of ``c`` times the work, which
    /// has to be gathered: it waits. Where it comes ``2 * (c - 1)`` iterations before its turn, it is trained about
    /// then.
    ///
    /// Args:
    ///     lengths: int[n], tokens of the documents that come next, in order: as many global batches as are known.
    ///     tokens_per_batch: tokens of a global batch.
    ///     most: iterations, at most 1024.
    ///
    /// Returns:
    ///     int64[n], from 0 to ``most``.
    ///
    /// Raises:
    ///     WlbError: wrong lengths or numbers; the packer was made with ``cost_columns``.
    ///
    /// O(n).
    ///
    /// Example:
    ///     >>> import wlb
    ///     >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
    ///     >>> packer = wlb.Packer(num_micro_batches=4, max_tokens=200, cost_model=cost)
    ///     >>> packer.leads([200, 10, 10, 10, 10, 20, 30], tokens_per_batch=290, most=8)
    ///     array([5, 0, 0, 0, 0, 0, 0])
    #[pyo3(signature = (lengths, *, tokens_per_batch, most))]
    fn leads<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = arguments::lengths)] lengths: Lengths,
        #[pyo3(from_py_with = arguments::tokens_per_batch)] tokens_per_batch: i64,
        #[pyo3(from_py_with = arguments::most)] most: i64,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        // Not in one expression: an exception is made where the lock is free, since Python may do anything meanwhile.
        let leads = self.lock().leads(&lengths, tokens_per_batch, most);
        Ok(PyArray1::from_vec(py, leads.map_err(raise)?))
    }

    /// How many of the first of these documents the next push may bring, so that the packer keeps its :meth:`bounds`.
    ///
    /// Their tokens are at most its :attr:`room`, and their costs in a column with a limit at most what a step may have
    /// of it less what is carried over. With "adaptive" they also fit into the micro-batches of one step by themselves,
    /// longest first where the tokens are fewest. Where nothing waits, at least one.
    ///
    /// Args:
    ///     lengths: int[n], tokens of the documents that come next.
    ///     costs: float64[n] or float64[n, cost_columns], what they cost; needed only where a column has a limit.
    ///
    /// Returns:
    ///     0 to n. With 0, push nothing until there is room: ``push([])`` trains of what waits.
    ///
    /// Raises:
    ///     WlbError: wrong lengths or costs; or, under oversize="split", the first document has more pieces than a step
    ///         holds, so that it would never be admitted: cut it with :func:`split_documents`, and push its pieces step
    ///         by step with ``starts``.
    ///
    /// O(n + pending); a sort, and log(n) placements where they do not all fit.
    ///
    /// Example:
    ///     >>> import wlb
    ///     >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
    ///     >>> packer = wlb.Packer(num_micro_batches=2, max_tokens=100, cost_model=cost)
    ///     >>> packer.admits([80, 80, 80, 80])
    ///     2
    #[pyo3(signature = (lengths, *, costs = None))]
    fn admits(
        &self,
        #[pyo3(from_py_with = arguments::lengths)] lengths: Lengths,
        #[pyo3(from_py_with = arguments::optional::costs)] costs: Option<arguments::Table>,
    ) -> PyResult<usize> {
        let admitted = self.lock().admits(&lengths, table(&costs)); // as in `leads`
        admitted.map_err(raise)
    }

    /// Goes on where the saved packer stopped, under this packer's configuration.
    ///
    /// Args:
    ///     state: what :meth:`state_dict` returned, also after a round trip through JSON.
    ///     allow_config_change: go on although the cost model, thresholds or limits differ: waiting documents are filed
    ///         anew, and those that are no outliers any more are emitted first. :meth:`bounds` says what that does to
    ///         waits. Another ``num_micro_batches``, ``dp_size`` or ``tokens_per_batch`` is always allowed, but for the
    ///         first ``tokens_per_batch`` beside a ``max_step_cost``, which meant another number of tokens without it.
    ///
    /// Raises:
    ///     StateError: the state is corrupt, truncated, of another version, or not a packer's; or the configuration
    ///         differs (says in which fields); or a waiting document is longer than this packer allows. The packer is
    ///         unchanged.
    ///
    /// Example:
    ///     >>> import wlb
    ///     >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
    ///     >>> small = wlb.Packer(num_micro_batches=2, max_tokens=100, outlier_thresholds=[50], cost_model=cost)
    ///     >>> _ = small.push([60, 10, 10])
    ///     >>> large = wlb.Packer(num_micro_batches=4, max_tokens=100, outlier_thresholds=[50], cost_model=cost)
    ///     >>> large.load_state_dict(small.state_dict())
    ///     >>> large.pending_tokens, large.iteration
    ///     (60, 1)
    #[pyo3(signature = (state, *, allow_config_change = false))]
    fn load_state_dict(
        &self,
        py: Python<'_>,
        state: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::allow_config_change)] allow_config_change: bool,
    ) -> PyResult<()> {
        let json = to_json(state)?;
        let loaded = self.change(py, json.len() / BYTES_A_PIECE, |core| core.restore(&json, allow_config_change));
        loaded.map_err(raise)
    }

    /// Packs by other costs from the next push on.
    ///
    /// Documents that wait are priced anew then: what is kept of them is their lengths. ``outlier_thresholds`` are
    /// lengths and ``delay_price`` is a share of a step, so both still mean what they meant; but what was tuned to a
    /// mean delay was tuned under the costs before.
    ///
    /// A state holds both cost models. A packer that loads it is made with the *first* one, as in the run that saved
    /// it, and goes on with the present one. Equal costs are no change.
    ///
    /// Args:
    ///     cost_model: what documents cost from now on. The same on every rank, at the same iteration.
    ///
    /// Raises:
    ///     WlbError: sums of such costs could overflow, or documents bring their costs. The packer is unchanged.
    ///
    /// Example:
    ///     >>> import wlb
    ///     >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
    ///     >>> packer = wlb.Packer(num_micro_batches=2, max_tokens=100, cost_model=cost)
    ///     >>> packer.set_cost_model(wlb.CostModel(attention=2.0, linear=1.0))
    ///     >>> packer.cost_model.terms
    ///     {'pairs': 2.0, 'tokens': 1.0}
    #[pyo3(signature = (cost_model))]
    fn set_cost_model(&self, py: Python<'_>, #[pyo3(from_py_with = read_costs)] cost_model: Model) -> PyResult<()> {
        self.change(py, 0, |core| core.set_cost_model(cost_model.clone())).map_err(raise)
    }
}

/// Costs of documents as the core takes them.
pub(crate) fn table(costs: &Option<arguments::Table>) -> Option<CostTable<'_>> {
    costs.as_ref().map(|(values, _, columns)| CostTable { values, columns: *columns })
}

/// The limit of each column, if there are columns.
pub(crate) fn column_limits(columns: Option<usize>, limits: Option<Vec<f64>>) -> PyResult<Option<Vec<Option<f64>>>> {
    let argument = "limits";
    match (columns, limits) {
        (None, None) => Ok(None),
        (None, Some(_)) => {
            let requirement = "are of columns of costs: say how many with cost_columns";
            Err(raise(wlb_core::Error::Combination { argument, requirement }))
        }
        (Some(columns), Some(limits)) if limits.len() != columns => {
            let (found, other) = (limits.len(), "cost_columns");
            Err(raise(wlb_core::Error::Mismatch { argument, found, other, expected: columns }))
        }
        // Infinite is none; what is no number is for the core to refuse.
        (Some(columns), limits) => {
            let limits = limits.unwrap_or_else(|| vec![f64::INFINITY; columns]);
            Ok(Some(limits.into_iter().map(|limit| Some(limit).filter(|&limit| limit != f64::INFINITY)).collect()))
        }
    }
}

/// The configuration that a packer and its tuning share.
pub(crate) fn config(
    release: Release,
    num_micro_batches: usize,
    max_tokens: i32,
    cost_model: Option<Model>,
    max_delay: Option<u64>,
    max_document_tokens: Option<i32>,
    method: &str,
) -> PyResult<PackerConfig> {
    Ok(PackerConfig {
        num_micro_batches,
        max_tokens,
        max_document_tokens: max_document_tokens.unwrap_or(max_tokens),
        oversize: Oversize::default(),
        outlier_thresholds: Vec::new(),
        release,
        delay_price: None,
        method: choice(method)?,
        max_delay: max_delay.or(release.default_max_delay()),
        cost_model,
        limits: None,
        shape: StepShape::default(),
    })
}

/// Bytes of a state that take about as long as a piece of a push.
const BYTES_A_PIECE: usize = 16;

/// The JSON text of a state. What JSON cannot hold is no state.
fn to_json(state: &Bound<'_, PyAny>) -> PyResult<String> {
    let py = state.py();
    let refuse = |problem: String| {
        let error = StateError::new_err(format!("state: {problem}"));
        // Cannot fail: exceptions take attributes.
        error.value(py).setattr("argument", "state").map_or_else(|error| error, |()| error)
    };
    if !state.is_instance_of::<PyDict>() {
        return Err(refuse(format!("is a {}, not a dict", state.get_type().name()?)));
    }
    let options = PyDict::new(py);
    options.set_item("allow_nan", false)?;
    let text = py.import("json")?.call_method("dumps", (state,), Some(&options)).map_err(|error| {
        let is_wrong = error.is_instance_of::<PyTypeError>(py)
            || error.is_instance_of::<PyValueError>(py)
            || error.is_instance_of::<PyRecursionError>(py);
        if is_wrong { refuse(format!("is not plain JSON values ({})", error.value(py))) } else { error }
    })?;
    text.extract()
}
