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
    CostTable, Offered, OnBacklog, Oversize, Packer as Core, PackerConfig, Push, Release, StepShape, StreamMethod,
    Turns, Upcoming,
};
use wlb_core::{CostModel as Model, Lengths};

use crate::arguments;
use crate::convert::choice;
use crate::cost::{CostModel, read_costs, read_costs_if_any};
use crate::error::{BacklogWarning, StateError, raise, refuse};
use crate::gil::{RELEASE_FROM, run};
use crate::packing::{Packing, padding, ranks};
use crate::plain::{Array, Pickle, Tuple};
use crate::results::answer;

/// `(end, offered, due, early)`; see `wlb_core::stream::Offered`.
type PlainOffered = (usize, Array<Vec<i64>>, usize, Option<Array<Vec<i64>>>);

/// Packs one training step after the other from a stream of documents, and lets some documents wait.
///
/// A document that costs more than a step's mean micro-batch makes its own micro-batch heavy. The packer holds such
/// documents back for a few steps, until a step has enough work to go with them. All other documents are trained in the
/// step in which they are pushed, if they fit. Those that do not fit are *carried over*, and come first in the next
/// step. Both kinds wait.
///
/// Every rank makes an equal packer and gives it the lengths of the *global* batch. All ranks then compute the same
/// plan, and each loads the documents of its own micro-batches::
///
///     for lengths, ids in global_batches:
///         packing = packer.push(lengths, ids)
///         for index in packing.deal(dp_size)[dp_rank]:
///             micro_batch = packing.micro_batches[index]  # document_ids, starts, lengths, cu_seqlens
///     for packing in packer.flush():
///         ...  # the documents that still wait
///
/// A document that waits is not read again by the packer, which knows its id and its length alone: read its tokens when
/// a step names its id. ``wlb.torch.balanced_loader`` does all of this.
///
/// Two rules choose what waits. The adaptive rule (the default) holds documents as long as the step becomes more
/// even by more than their waiting costs. With ``outlier_thresholds`` documents wait in queues by length, as in
/// WLB-LLM, until one queue holds a document for every micro-batch.
///
/// The same pushes give the same plans on every rank, and after a resume under the same configuration. A packer can be
/// pickled, and threads can share it; plans then depend on the order in which the threads push.
///
/// Args:
///     num_micro_batches: micro-batches of a step, ``N``: the sum over all data-parallel ranks. Context-, tensor- and
///         pipeline-parallel ranks do not multiply it.
///     max_tokens: most tokens of a micro-batch: what the memory of its ranks holds, all context-parallel ranks
///         together. Micro-batches become more even if it is 1.25 to 1.5 times ``max_document_tokens``.
///     cost_model: cost of a document, from its length. Give it, or ``cost_columns``.
///     cost_columns: number of costs that you give for each document in ``push(costs=)``, in the place of
///         ``cost_model``. For example 2: time of the vision encoder, and time of the language model, which run one
///         after the other. Then a step lasts as long as the heaviest micro-batch of the first column and the heaviest
///         of the second together, and the packer makes that sum small. More than one column needs queues
///         (``outlier_thresholds``).
///     limits: float64[cost_columns], most that a micro-batch may have in each column, infinite for no limit. A
///         column with a limit counts as memory: it is kept below its limit and is not balanced.
///     outlier_thresholds: int[q], tokens, ascending: shortest length of each queue. ``wlb.tune`` finds them. ``None``,
///         the default, is the adaptive rule; ``()`` holds nothing back: a document waits only if it does not fit.
///     release: "adaptive" or "fifo" (queues). It follows from ``outlier_thresholds``, so you need not give it;
///         ``release="fifo"`` alone means ``outlier_thresholds=()``.
///     delay_price: price of waiting, for the adaptive rule. With the default, 0.03, a full step of tokens
///         (``num_micro_batches * max_document_tokens``) waits a step if the heaviest micro-batch thereby falls by at
///         least 3 % of the mean one; for a tenth of these tokens 0.3 % is enough. A wait of ``d`` steps costs
///         ``d * (d + 1) / 2`` times as much as a wait of one. A higher price means shorter waits.
///         ``wlb.tune`` finds the price for a mean wait that you accept.
///     max_delay: most steps that a document waits; with queues most steps in its queue, after which it may be carried
///         over a few steps (``bounds().delay`` is the most steps together). ``None`` is 16 with the adaptive rule, and
///         no limit with queues. If pushes bring more than the packer ``admits``, documents may wait longer.
///     max_document_tokens: longest document: the context window of the model. At most ``max_tokens``, which is the
///         default: if ``max_tokens`` is larger than the context window, give both.
///     oversize: what happens to longer documents: "error", "split" into several documents, or "truncate".
///     method: "var_length"; or "refined", which packs the same documents and then exchanges them between
///         micro-batches. The heaviest micro-batch becomes no heavier, and planning takes about twice as long. It helps
///         where ``max_tokens`` leaves little room.
///     dp_size: number of data-parallel ranks. With it the packer balances what each rank has to do; without it, all
///         micro-batches alike. It divides ``num_micro_batches``; ``packing.deal(dp_size)`` gives each rank its
///         micro-batches.
///     sync: where these ranks wait for each other: "step" (default; once a step, as DDP does) or "micro_batch"
///         (in every micro-batch, as FSDP does). With "step" fewer documents wait than with "micro_batch", because the
///         other micro-batches of a rank make up for a heavy one. Needs ``dp_size``.
///     max_documents: most documents of a micro-batch. ``room``, ``admits`` and ``bounds`` then count each document as
///         at least ``max_tokens / max_documents`` tokens, since it takes that share of a micro-batch.
///     multiple_of_tokens: each of the ``cp_size`` ranks that share a micro-batch gets a multiple of this number of
///         tokens (MXFP8 needs 32, HybridEP 128): micro-batches are padded to a multiple of ``multiple_of_tokens *
///         cp_size``, which ``shard`` divides equally. ``max_tokens`` counts the padding.
///         ``packing.padded_tokens`` has the sizes; ``wlb.torch.collate(multiple_of_tokens=, cp_size=)`` adds the
///         padding.
///     cp_size: context-parallel ranks that share a micro-batch; it matters to ``multiple_of_tokens`` alone.
///     token_buckets: int[b], ascending: the only sizes of padded micro-batches.
///     max_step_cost: for the adaptive rule: most work of a step, as a multiple of an average step's. Documents that
///         wait together are trained together, so without a bound the largest step can have several times the average
///         work. Documents beyond the bound wait, so micro-batches are less even. An average step has
///         ``tokens_per_batch`` tokens, each of the mean cost of a token in the documents of the last 128 to 256 steps.
///         Documents that waited ``max_delay`` steps leave all the same; ``metrics().steps_over_max_cost`` counts the
///         steps that exceed the bound for them. ``None``: no bound.
///     tokens_per_batch: tokens of a global batch on average; give yours if you use ``max_step_cost``. The data loaders
///         of ``wlb.torch`` push so many for a step. Default: ``num_micro_batches * max_document_tokens``.
///     on_backlog: what happens when more tokens wait after a push than ``bounds`` of an empty packer allows, because
///         pushes brought more than the packer ``admits``: "warn" once with a ``BacklogWarning``; or "error": ``push``
///         raises ``WlbError`` and the packer stays as it was.
///
/// Raises:
///     WlbError: naming the argument that makes no sense.
///
/// Source: WLB-LLM, section 4 and Algorithm 1; the adaptive rule is ours (docs/semantics.md).
///
/// Examples:
///     >>> import wlb
///     >>> cost = wlb.CostModel(attention=1.0, linear=1000.0)
///     >>> packer = wlb.Packer(num_micro_batches=2, max_tokens=1500, cost_model=cost)
///     >>> packing = packer.push([900, 100, 500, 400, 100], ids=[10, 11, 12, 13, 14])
///     >>> packing
///     Packing(method="var_length", num_micro_batches=2, documents=5, tokens=2000, imbalance=1.0039, leftover=0)
///     >>> [micro_batch.document_ids.tolist() for micro_batch in packing.micro_batches]
///     [[10], [11, 12, 13, 14]]
///     >>> packer.pending
///     0
#[pyclass(frozen, module = "wlb")]
pub(crate) struct Packer {
    /// Locked only while the GIL is held, and only briefly, so that a forked process never inherits a locked lock.
    core: Mutex<Arc<Core>>,
    on_backlog: OnBacklog,
    /// Whether the warning was given already.
    warned: AtomicBool,
}

impl Packer {
    fn new_from(core: Core, on_backlog: OnBacklog) -> Self {
        Self { core: Mutex::new(Arc::new(core)), on_backlog, warned: AtomicBool::new(false) }
    }

    fn lock(&self) -> MutexGuard<'_, Arc<Core>> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the core. A large change is made on a copy, without the GIL.
    ///
    /// # Arguments
    /// * `new` - number of pieces that are added to the waiting ones.
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

    /// Changes the core by new documents of these lengths, within its bounds if they can be exceeded.
    fn changed<T: Send>(
        &self,
        py: Python<'_>,
        lengths: &Lengths,
        change: impl Fn(&mut Core) -> wlb_core::Result<T> + Send + Sync,
    ) -> PyResult<T> {
        let pieces = self.lock().pieces_of_new(lengths);
        if self.is_watched(lengths) {
            self.change_within_bounds(py, pieces, change)
        } else {
            self.change(py, pieces, change).map_err(raise)
        }
    }

    /// Changes the core, unless too much would wait afterwards and that is an error (or the user turned the warning
    /// into one).
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

    /// The result of a change, the core before it, and the changed copy.
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

    /// Takes over a changed copy. Returns false if another thread changed the core since it was copied: the change must
    /// then be made again.
    fn replace(&self, before: &Arc<Core>, after: Core) -> bool {
        let mut core = self.lock();
        let is_latest = Arc::ptr_eq(&core, before);
        if is_latest {
            *core = Arc::new(after);
        }
        is_latest
    }

    /// Warns once. The warning is shown while the lock is free, since Python code that shows it may use the packer.
    fn warn(&self, py: Python<'_>, backlog: &str) -> PyResult<()> {
        if self.warned.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let message = CString::new(backlog)?;
        PyErr::warn(py, &py.get_type::<BacklogWarning>(), &message, 1)
            .inspect_err(|_| self.warned.store(false, Ordering::Relaxed))
    }

    /// Whether these new documents may make more wait than the bounds allow, and the warning was not given yet.
    fn is_watched(&self, lengths: &[i32]) -> bool {
        if self.on_backlog == OnBacklog::Warn && self.warned.load(Ordering::Relaxed) {
            return false;
        }
        self.lock().may_exceed(lengths)
    }

    /// Size of a change, for [`run`]; `new` pieces are added to the waiting ones.
    fn size(&self, new: usize) -> usize {
        let core = self.lock();
        new.saturating_add(core.pending()).saturating_add(core.config().num_micro_batches)
    }
}

#[pymethods]
impl Packer {
    /// Tokens that the next push may bring so that ``bounds`` hold: with "adaptive" twice what a step holds, less
    /// ``pending_tokens``; with "fifo" what a step holds, less ``carried_tokens``. ``admits`` answers for documents,
    /// which must also fit. With ``max_documents`` a document counts as at least its share of a full micro-batch.
    /// O(pending).
    #[getter]
    fn room(&self) -> i64 {
        self.lock().room()
    }

    /// Number of documents (or pieces of split ones) that wait, those that are carried over among them.
    #[getter]
    fn pending(&self) -> usize {
        self.lock().pending()
    }

    /// Tokens of the documents that wait, those that are carried over among them. O(pending).
    #[getter]
    fn pending_tokens(&self) -> i64 {
        self.lock().pending_tokens()
    }

    /// Tokens of the documents that are carried over. O(carried).
    #[getter]
    fn carried_tokens(&self) -> i64 {
        self.lock().carried_tokens()
    }

    /// Steps that the oldest waiting document has waited; 0 if none waits. O(pending).
    #[getter]
    fn oldest_wait(&self) -> u64 {
        self.lock().oldest_wait()
    }

    /// Number of documents that wait in each queue, without those that are carried over; the adaptive rule has one
    /// queue.
    #[getter]
    fn queued(&self) -> Tuple<usize> {
        Tuple(self.lock().queue().levels().iter().map(|level| level.len()).collect())
    }

    /// Number of documents that are carried over: they found no room in the last step and come first in the next one.
    #[getter]
    fn carried(&self) -> usize {
        self.lock().carried().len()
    }

    /// Steps packed so far, by ``push``, ``drain`` and ``flush``.
    #[getter]
    fn iteration(&self) -> u64 {
        self.lock().iteration()
    }

    /// Micro-batches of a step.
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

    /// Shortest length of each queue: tokens, ascending; empty without queues.
    #[getter]
    fn outlier_thresholds(&self) -> Tuple<i32> {
        Tuple(self.lock().config().outlier_thresholds.clone())
    }

    /// The rule that releases waiting documents: "fifo" (queues) or "adaptive".
    #[getter]
    fn release(&self) -> &'static str {
        self.lock().config().release.as_str()
    }

    /// Price of waiting of the adaptive rule; ``None`` with "fifo".
    #[getter]
    fn delay_price(&self) -> Option<f64> {
        self.lock().config().delay_price
    }

    /// Treatment of documents over ``max_document_tokens``: "error", "split" or "truncate".
    #[getter]
    fn oversize(&self) -> &'static str {
        self.lock().config().oversize.as_str()
    }

    /// Reaction to a push after which too much waits: "warn" or "error".
    #[getter]
    fn on_backlog(&self) -> &'static str {
        self.on_backlog.as_str()
    }

    /// Most steps that a document waits; ``None``: no limit.
    #[getter]
    fn max_delay(&self) -> Option<u64> {
        self.lock().config().max_delay
    }

    /// Packing method of a step: "var_length" or "refined".
    #[getter]
    fn method(&self) -> &'static str {
        self.lock().config().method.as_str()
    }

    /// Data-parallel ranks that steps are planned for; ``None``: any number.
    #[getter]
    fn dp_size(&self) -> Option<usize> {
        self.lock().config().shape.ranks.map(|ranks| ranks.dp_size)
    }

    /// Where the ranks wait for each other, "step" or "micro_batch"; ``None`` without ranks.
    #[getter]
    fn sync(&self) -> Option<&'static str> {
        self.lock().config().shape.ranks.map(|ranks| ranks.sync.as_str())
    }

    /// Most documents of a micro-batch; ``None``: any number.
    #[getter]
    fn max_documents(&self) -> Option<usize> {
        self.lock().config().shape.max_documents
    }

    /// The part of each of ``cp_size`` ranks in a micro-batch is padded to a multiple of this number of tokens.
    #[getter]
    fn multiple_of_tokens(&self) -> i32 {
        self.lock().config().shape.padding.as_ref().map_or(1, Padding::multiple_of)
    }

    /// Context-parallel ranks that share a micro-batch, as given; 1 if nothing is padded.
    #[getter]
    fn cp_size(&self) -> usize {
        self.lock().config().shape.padding.as_ref().map_or(1, Padding::cp_size)
    }

    /// The only sizes of padded micro-batches, ascending; empty: any multiple.
    #[getter]
    fn token_buckets(&self) -> Tuple<i32> {
        let packer = self.lock();
        Tuple(packer.config().shape.padding.as_ref().map_or(Vec::new(), |padding| padding.buckets().to_vec()))
    }

    /// Most work of a step, as a multiple of an average step's; ``None``: no bound.
    #[getter]
    fn max_step_cost(&self) -> Option<f64> {
        self.lock().config().shape.max_cost
    }

    /// Tokens of a global batch on average.
    #[getter]
    fn tokens_per_batch(&self) -> i64 {
        self.lock().config().tokens_per_batch()
    }

    /// The cost model in use; ``None`` if documents bring their costs.
    #[getter]
    fn cost_model(&self) -> Option<CostModel> {
        self.lock().config().cost_model.clone().map(CostModel)
    }

    /// Cost columns that documents bring; ``None`` with a cost model.
    #[getter]
    fn cost_columns(&self) -> Option<usize> {
        self.lock().config().limits.as_ref().map(Vec::len)
    }

    /// Most that a micro-batch may have in each cost column, infinite for no limit; ``None`` without columns.
    #[getter]
    fn limits(&self) -> Option<Tuple<f64>> {
        let infinite = |limit: &Option<f64>| limit.unwrap_or(f64::INFINITY);
        self.lock().config().limits.as_ref().map(|limits| Tuple(limits.iter().map(infinite).collect()))
    }

    /// Hex hash of the configuration under the present cost model, without ``num_micro_batches``, ``dp_size`` and
    /// ``tokens_per_batch``. If it and these three are equal on two packers, they have the same configuration. They
    /// then give the same plans from here on if the same documents wait in both: if their ``state_dict`` are equal.
    #[getter]
    fn fingerprint(&self) -> String {
        self.lock().fingerprint()
    }
}

#[pymethods]
impl Packer {
    /// Makes the packer that ``state_dict`` saved, with its configuration.
    ///
    /// Args:
    ///     state: what ``state_dict`` returned, also after a round trip through JSON.
    ///     on_backlog: as for ``Packer``; a state does not hold it.
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

    /// An independent copy with the same configuration and the same waiting documents. O(pending), much cheaper than
    /// a state.
    fn copy(&self) -> Self {
        Self::new_from(Core::clone(&self.lock()), self.on_backlog)
    }

    /// A packer with the same configuration in which nothing waits.
    fn empty_copy(&self) -> PyResult<Self> {
        let core = Core::new(self.lock().config().clone()).map_err(raise)?;
        Ok(Self::new_from(core, self.on_backlog))
    }

    /// Most tokens that wait and longest wait from now on, if no push brings more than the packer ``admits``.
    ///
    /// Returns:
    ///     Bounds: ``tokens``, most tokens that wait after a push; ``delay``, most steps that a document waits;
    ///     ``drain``, most steps that ``flush`` takes; ``settles``, steps until all are those of an empty packer, 0 if
    ///     they are. Of an empty packer with "adaptive", ``tokens`` is ``2 * num_micro_batches * max_tokens`` and
    ///     ``delay`` is ``max_delay``. With "fifo", ``tokens`` is ``num_micro_batches * max_tokens``, plus for each
    ///     queue ``num_micro_batches - 1`` times the longest length that it takes, and ``delay`` is above ``max_delay``
    ///     by ``2 * (tokens // (num_micro_batches * max_tokens)) + 1``. They are higher after a state of another
    ///     configuration was loaded, or a push brought more than was admitted, and never rise while pushes bring what
    ///     is admitted. docs/semantics.md has the proof. O(pending).
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
    ///     >>> wlb.Packer(num_micro_batches=2, max_tokens=100, cost_model=cost).bounds()
    ///     Bounds(tokens=400, delay=16, drain=6, settles=0)
    fn bounds<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let bounds = self.lock().bounds();
        answer!(py, "Bounds", bounds { tokens, delay, drain, settles })
    }

    /// Packs one step at the end of a stream: of the documents that wait, as many as fit, as even as they can be.
    ///
    /// Returns:
    ///     Packing of ``num_micro_batches`` micro-batches, which are all empty if nothing waits. Its ``assignment`` is
    ///     empty, because no document is new.
    fn drain(&self, py: Python<'_>) -> Packing {
        self.change(py, 0, Core::drain).into()
    }

    /// Packs everything that waits at the end of a stream: calls ``drain`` until nothing waits.
    ///
    /// Returns:
    ///     list[Packing], one for each step; empty if nothing waited.
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
    ///     >>> packer = wlb.Packer(num_micro_batches=2, max_tokens=100, outlier_thresholds=[50], cost_model=cost)
    ///     >>> _ = packer.push([60, 10, 10])
    ///     >>> [packing.tokens.tolist() for packing in packer.flush()]
    ///     [[60, 0]]
    fn flush(&self, py: Python<'_>) -> Vec<Packing> {
        self.change(py, 0, Core::flush).into_iter().map(Packing::from).collect()
    }

    /// Figures since the stream began: imbalance, waits, tokens and work of steps (``PackerMetrics``).
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

    /// The packer as plain JSON values, for a checkpoint.
    ///
    /// It has the configuration, and the ids and lengths of the documents that wait. It is the same on every rank, and
    /// ``num_micro_batches`` and every parallel size may change on resume. Take it after each push, together with the
    /// number of the first document that was not pushed yet, and save both as they were after the push of the last step
    /// that was *trained*. A loader that works ahead has pushed more since.
    ///
    /// Examples:
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
                          sync=None, max_documents=None, multiple_of_tokens=1, cp_size=1, token_buckets=(), \
                          max_step_cost=None, tokens_per_batch=None, on_backlog='warn')")]
    #[pyo3(signature = (
    *, num_micro_batches, max_tokens, cost_model = None, cost_columns = None, limits = None,
    outlier_thresholds = None, release = None, delay_price = None, max_delay = None, max_document_tokens = None,
    oversize = "error", method = "var_length", dp_size = None, sync = None, max_documents = None,
    multiple_of_tokens = 1, cp_size = 1, token_buckets = None, max_step_cost = None, tokens_per_batch = None,
    on_backlog = "warn", **unknown
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
        #[pyo3(from_py_with = arguments::cp_size)] cp_size: usize,
        #[pyo3(from_py_with = arguments::optional::token_buckets)] token_buckets: Option<Vec<i32>>,
        #[pyo3(from_py_with = arguments::optional::max_step_cost)] max_step_cost: Option<f64>,
        #[pyo3(from_py_with = arguments::optional::tokens_per_batch)] tokens_per_batch: Option<i64>,
        on_backlog: &str,
        unknown: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        arguments::refuse_unknown::<Self>(unknown)?;
        let release = match release {
            Some(release) => choice(release)?,
            None => Release::of_thresholds(outlier_thresholds.as_deref()),
        };
        let padding = padding(multiple_of_tokens, cp_size, token_buckets)?;
        let max_tokens = padding.most(max_tokens).map_err(raise)?;
        let packer = Core::new(PackerConfig {
            outlier_thresholds: outlier_thresholds.unwrap_or_default(),
            delay_price: delay_price.or(release.default_price()),
            oversize: choice(oversize)?,
            limits: column_limits(cost_columns, limits)?,
            shape: StepShape {
                ranks: ranks(dp_size, sync)?,
                max_documents,
                padding: padding.if_any(),
                max_cost: max_step_cost,
                tokens_per_batch,
            },
            ..config(release, num_micro_batches, max_tokens, cost_model, max_delay, max_document_tokens, method)?
        });
        Ok(Self::new_from(packer.map_err(raise)?, choice(on_backlog)?))
    }

    /// Packs one step from new documents, documents that were carried over, and waiting documents that are released.
    ///
    /// Args:
    ///     lengths: int[n], tokens of the new documents; may be empty.
    ///     ids: int64[n], names of the documents: none twice among those that are new or wait. With ``starts``, pieces
    ///         of one document have its id. Default: a running number.
    ///     starts: int[n], first token of each piece inside the document that ``ids`` names, for a reader that cuts
    ///         documents itself. Default: 0, whole documents.
    ///     costs: float64[n] or float64[n, cost_columns], cost of each document, exactly if the packer was made with
    ///         ``cost_columns``. Pieces of a split document share its cost by their tokens.
    ///     min_step_tokens: least tokens of the step, if new and waiting documents together have so many. The packer
    ///         releases more documents to reach it, and the step is less even. Up to ``num_micro_batches // 2 *
    ///         max_tokens`` tokens are always reached (``limits`` may leave less room). Above that, documents may not
    ///         fit together, and the step has fewer tokens, without an error.
    ///     early: int[n], from 0 to 1024, for the adaptive rule: steps by which each document is pushed before the step
    ///         in which the stream would bring it, its turn (see ``leads``). The packer may train it from now on;
    ///         waiting costs nothing before the turn, and delays count from the turn on.
    ///
    /// Returns:
    ///     Packing of ``num_micro_batches`` micro-batches. ``assignment`` follows ``lengths`` (-1: the document waits,
    ///     or was split); ``leftover`` has the documents that are carried over to the next step.
    ///
    /// Raises:
    ///     WlbError: wrong lengths, ids, starts or costs, a document over ``max_document_tokens`` under
    ///         oversize="error", more than 2^23 cuts under oversize="split", or, under on_backlog="error", more tokens
    ///         would wait afterwards than ``bounds`` of an empty packer allows. The packer is unchanged. An empty push
    ///         is never refused: it plans a step from documents that wait.
    ///
    /// Warns:
    ///     BacklogWarning: documents were pushed, and more tokens wait afterwards than these bounds allow; once.
    ///
    /// Takes as long as ``pack`` does for the new, carried and released documents. Releases the GIL from 1,024
    /// pieces on, waiting ones included.
    ///
    /// Examples:
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
        self.changed(py, &lengths, push).map(Packing::from)
    }

    /// Chooses the pieces that a reader offers in a step: pieces whose turn is now, and pieces of later steps that come
    /// early (``leads``). The last offer takes a rest with it that is too small for a step.
    ///
    /// Args:
    ///     lengths: int[n], tokens of the pieces that come next, in the order of their turns; enough of them to know
    ///         whether a whole step remains.
    ///     most_early: int[n], most steps by which each piece may come early: 0 for a part of a document, -1 for a piece
    ///         that has entered already.
    ///     tokens_per_batch: tokens of a global batch.
    ///     min_step_tokens: least tokens of a step.
    ///     to_the_end: whether there are no pieces after these.
    ///     wanted: tokens whose turn is now; at least one new piece. Give this, or ``steps``.
    ///     steps: int[n], ascending, steps until the turn of each piece; 0 is now.
    ///
    /// Returns:
    ///     ``(end int, offered int64[k], due int, early int64[k] or None)``: pieces whose turn is now, with those that
    ///     have entered; indices of the offered pieces; how many of those are due; by how many steps each comes early
    ///     (None: all are due).
    ///
    /// Raises:
    ///     WlbError: arrays of other lengths, or numbers out of range; pieces may come early, and the packer has no cost
    ///         model.
    ///
    /// O(n).
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
    ///     >>> packer = wlb.Packer(num_micro_batches=4, max_tokens=200, cost_model=cost)
    ///     >>> packer.offered([50, 50, 200, 10, 10], most_early=[4] * 5, wanted=100, tokens_per_batch=100,
    ///     ...                min_step_tokens=10, to_the_end=False)
    ///     (2, array([0, 1, 2]), 2, array([0, 0, 1]))
    #[pyo3(signature = (
        lengths, *, most_early, tokens_per_batch, min_step_tokens, to_the_end, wanted = None, steps = None
    ))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn offered(
        &self,
        #[pyo3(from_py_with = arguments::lengths)] lengths: Lengths,
        #[pyo3(from_py_with = arguments::most_early)] most_early: Vec<i64>,
        #[pyo3(from_py_with = arguments::tokens_per_batch)] tokens_per_batch: i64,
        #[pyo3(from_py_with = arguments::min_step_tokens)] min_step_tokens: i64,
        #[pyo3(from_py_with = arguments::to_the_end)] to_the_end: bool,
        #[pyo3(from_py_with = arguments::optional::wanted)] wanted: Option<i64>,
        #[pyo3(from_py_with = arguments::optional::steps)] steps: Option<Vec<i64>>,
    ) -> PyResult<PlainOffered> {
        let turns = match (wanted, &steps) {
            (Some(wanted), None) => Turns::Tokens(wanted),
            (None, Some(steps)) => Turns::Steps(steps),
            _ => return Err(refuse("wanted", None, None, "give this or steps, one of the two")),
        };
        let (lengths, most_early) = (&lengths, &most_early[..]);
        let upcoming = Upcoming { lengths, most_early, turns, tokens_per_batch, min_step_tokens, to_the_end };
        let offered = self.lock().offered(&upcoming); // two statements, as in `leads`
        let Offered { end, pieces, due, early } = offered.map_err(raise)?;
        let pieces = pieces.into_iter().map(|index| index as i64).collect();
        Ok((end, Array(pieces), due, Some(early).filter(|early| !early.is_empty()).map(Array)))
    }

    /// Packs one step of as many of these pieces as are admitted (``admits``), from the first on.
    ///
    /// Args:
    ///     lengths, ids, starts, costs, early: as for ``push``.
    ///     min_step_tokens: as for ``push``, unless the caller may offer more.
    ///     more: whether there are further pieces: if all of these enter, the step may be small, and the caller adds
    ///         more before it takes the step.
    ///     rest_waits: whether pieces that do not enter make a step of their own, which needs ``min_step_tokens``: fewer
    ///         enter if too little would be left.
    ///
    /// Returns:
    ///     ``(entered int, Packing)``: the number of pieces that entered, and the plan of the step.
    ///
    /// Raises:
    ///     WlbError: as ``admits`` and ``push``. The packer is unchanged.
    ///
    /// Takes as long as ``admits`` and ``push``.
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
    ///     >>> packer = wlb.Packer(num_micro_batches=2, max_tokens=100, cost_model=cost, max_delay=0)
    ///     >>> entered, step = packer.fill([80, 80, 80], [0, 1, 2], min_step_tokens=10, more=True, rest_waits=False)
    ///     >>> entered, step.tokens
    ///     (2, array([80, 80]))
    #[pyo3(signature = (
        lengths, ids, *, starts = None, costs = None, early = None, min_step_tokens, more, rest_waits
    ))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn fill(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::lengths)] lengths: Lengths,
        #[pyo3(from_py_with = arguments::optional::ids)] ids: Option<Vec<i64>>,
        #[pyo3(from_py_with = arguments::optional::starts)] starts: Option<Vec<i32>>,
        #[pyo3(from_py_with = arguments::optional::costs)] costs: Option<arguments::Table>,
        #[pyo3(from_py_with = arguments::optional::early)] early: Option<Vec<i64>>,
        #[pyo3(from_py_with = arguments::min_step_tokens)] min_step_tokens: i64,
        #[pyo3(from_py_with = arguments::more)] more: bool,
        #[pyo3(from_py_with = arguments::rest_waits)] rest_waits: bool,
    ) -> PyResult<(usize, Packing)> {
        let fill = |core: &mut Core| {
            let (ids, starts, early) = (ids.as_deref(), starts.as_deref(), early.as_deref());
            let offer = Push { lengths: &lengths, ids, starts, min_step_tokens, early, costs: table(&costs) };
            core.fill(&offer, more, rest_waits)
        };
        let (entered, packing) = self.changed(py, &lengths, fill)?;
        Ok((entered, Packing::from(packing)))
    }

    /// Number of steps by which each upcoming document should be pushed before its turn (``push(early=)``).
    ///
    /// A document that costs as much as ``c`` mean micro-batches waits until documents of ``c`` steps have gathered, so
    /// that the other micro-batches of its step are as heavy as its own. Pushed ``2 * (c - 1)`` steps before its turn
    /// (the step in which the stream would bring it), it is trained at about its turn.
    ///
    /// Args:
    ///     lengths: int[n], tokens of the documents that come next, in order: as many global batches as are known.
    ///     tokens_per_batch: tokens of a global batch.
    ///     most: most steps before the turn, at most 1024.
    ///
    /// Returns:
    ///     int64[n], from 0 to ``most``.
    ///
    /// Raises:
    ///     WlbError: wrong lengths or numbers; the packer was made with ``cost_columns``.
    ///
    /// O(n).
    ///
    /// Examples:
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
        // Two statements: an exception must be made after the lock is released, since that may run Python code.
        let leads = self.lock().leads(&lengths, tokens_per_batch, most);
        Ok(PyArray1::from_vec(py, leads.map_err(raise)?))
    }

    /// Number of these documents, from the first on, that the next push may bring so that ``bounds`` hold.
    ///
    /// Their tokens are at most ``room``. Their costs in a column with a limit are at most the limit of a step less
    /// what is carried over. With the adaptive rule they also fit into the micro-batches of one empty step: placed
    /// longest first, each into the micro-batch that has the fewest tokens. If nothing waits and there is a document,
    /// the answer is at least 1.
    ///
    /// Args:
    ///     lengths: int[n], tokens of the documents that come next.
    ///     costs: float64[n] or float64[n, cost_columns], cost of each document; needed only if a column has a limit.
    ///
    /// Returns:
    ///     0 to n. With 0, push no documents until there is room: ``push([])`` trains documents that wait.
    ///
    /// Raises:
    ///     WlbError: wrong lengths or costs; or, under oversize="split", the first document has more pieces than a step
    ///         holds, so that it would never be admitted: cut it with ``split_documents``, and push its pieces step
    ///         by step with ``starts``.
    ///
    /// O(n + pending); if not all documents fit, also a sort and log(n) placements.
    ///
    /// Examples:
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
        let admitted = self.lock().admits(&lengths, table(&costs)); // two statements, as in `leads`
        admitted.map_err(raise)
    }

    /// Resumes from a saved packer, under this packer's configuration.
    ///
    /// Args:
    ///     state: what ``state_dict`` returned, also after a round trip through JSON.
    ///     allow_config_change: go on although another argument of the saved packer differs, such as the cost model,
    ///         thresholds or ``max_tokens``. Waiting documents are sorted into the new queues; those that belong to
    ///         none are carried over. ``bounds`` says how long they wait. Another ``num_micro_batches``, ``dp_size``,
    ///         ``sync``, ``multiple_of_tokens``, ``cp_size`` or ``tokens_per_batch`` needs no permission.
    ///
    /// Raises:
    ///     StateError: the state is corrupt, truncated, of another version, or not a packer's; or the configuration
    ///         differs (says in which fields); or a waiting document is longer than this packer allows. The packer is
    ///         unchanged.
    ///
    /// Examples:
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

    /// Uses another cost model from the next push on.
    ///
    /// Waiting documents are priced anew from their lengths. ``outlier_thresholds`` are lengths and ``delay_price`` is
    /// relative, so both keep their meaning. If they were tuned for a mean wait, they were tuned under the old costs.
    ///
    /// A state holds both cost models. To resume, make a packer with the cost model that the saved run began with;
    /// ``load_state_dict`` then sets the one that was in use when the state was saved. ``from_state_dict`` needs
    /// neither. Setting costs that are equal to the present ones does nothing.
    ///
    /// Args:
    ///     cost_model: the new cost model, the same on every rank at the same step.
    ///
    /// Raises:
    ///     WlbError: sums of such costs could overflow, or documents bring their costs. The packer is unchanged.
    ///
    /// Examples:
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

/// Costs of documents in the form that the core takes.
pub(crate) fn table(costs: &Option<arguments::Table>) -> Option<CostTable<'_>> {
    costs.as_ref().map(|(values, _, columns)| CostTable { values, columns: *columns })
}

/// The limit of each column, if documents bring columns.
pub(crate) fn column_limits(columns: Option<usize>, limits: Option<Vec<f64>>) -> PyResult<Option<Vec<Option<f64>>>> {
    let argument = "limits";
    match (columns, limits) {
        (None, None) => Ok(None),
        (None, Some(_)) => {
            let requirement = "limit cost columns: pass cost_columns";
            Err(raise(wlb_core::Error::Combination { argument, requirement }))
        }
        (Some(columns), Some(limits)) if limits.len() != columns => {
            let (found, other) = (limits.len(), "cost_columns");
            Err(raise(wlb_core::Error::Mismatch { argument, found, other, expected: columns }))
        }
        // An infinite limit means none; the core refuses NaN.
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

/// Bytes of a saved state that take about as long to read as a piece of a push.
const BYTES_A_PIECE: usize = 16;

/// The JSON text of a state; refuses an object that JSON cannot hold.
fn to_json(state: &Bound<'_, PyAny>) -> PyResult<String> {
    let py = state.py();
    let refuse = |problem: String| {
        let error = StateError::new_err(format!("state: {problem}"));
        // Cannot fail: exceptions accept attributes.
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
