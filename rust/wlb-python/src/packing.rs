//! `wlb.pack`, `wlb.Packing`, and what turns a stream into global batches.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use numpy::{PyArray1, PyArrayMethods};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyIterator, PyTuple};
use wlb_core::limits::MAX_MICRO_BATCHES;
use wlb_core::packing::{self as core, self as stream, Leftover, Method, Piece};

use crate::convert::{Pickled, array, as_call, as_json, integer, integers, positive, read_lengths, size};
use crate::cost::CostModel;
use crate::error::raise;
use crate::run::run;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Packing>()?;
    module.add_class::<MicroBatch>()?;
    module.add_function(wrap_pyfunction!(pack, module)?)?;
    module.add_function(wrap_pyfunction!(batch_offsets, module)?)?;
    module.add_function(wrap_pyfunction!(split_documents, module)?)
}

/// Packs one global batch of documents into micro-batches.
///
/// Args:
///     lengths: int[n], tokens of each document, in arrival order; document ids are indices into it.
///     num_micro_batches: micro-batches of a global batch, ``N``. None: as few as leave nothing over, for a batch that is
///         trained whole in one step (fine-tuning, reinforcement learning): one multiple less would leave documents over.
///     max_tokens: most tokens of a micro-batch; a memory bound (``S_max``).
///     cost_model: what documents cost.
///     method: "var_length" (WLB-LLM's Algorithm 1: longest first, each to the micro-batch with the least cost),
///         "var_length_fast" (the same for heavy documents, the light tail poured in arrival order; costs at most 1.001 of the
///         lower bound where var_length does), "refined" (no worse than var_length, and next to optimal where ``max_tokens``
///         binds; under 1 ms for 500 documents), "fixed_length" (longest first, to the least attention work that
///         has room; cuts what fits nowhere), "original" (arrival order, cut every ``max_tokens``).
///     window: with "fixed_length", the number of global batches in ``lengths``. They are packed together
///         into ``window * N`` micro-batches; step ``i`` trains micro-batches ``i * N`` to ``(i + 1) * N - 1``.
///     multiple_of: with ``num_micro_batches=None``, what their number is a multiple of: the data-parallel ranks, so that
///         :meth:`Packing.deal` gives all of them as many.
///     leftover: what happens if documents do not fit: "error", or "return", and :attr:`Packing.leftover` lists them: they are in
///         no micro-batch, and will not be trained unless the caller sees to it.
///
/// Returns:
///     Packing. The same input gives the same plan, byte for byte, on every rank and machine.
///
/// Raises:
///     WlbError: a length or size out of range, a document over ``max_tokens`` (the methods that keep documents whole),
///         an unknown method, a window without "fixed_length", ``multiple_of`` beside ``num_micro_batches``. Documents do not
///         fit: the message says how many, and a ``max_tokens`` that surely holds them all (with the methods that cut
///         documents the least one).
///
/// O(n) for a radix sort and, on average, a few steps for each document; O(n N) at worst, and always for "fixed_length".
/// ``num_micro_batches=None`` takes O(log n) times that, and once where as many as the tokens need do.
/// WLB-LLM, sections 3.2 and 4. Releases the GIL from 1,024 documents and micro-batches on. Ctrl-C ends it within half a second.
#[pyfunction]
#[pyo3(
    signature = (
        lengths, *, num_micro_batches, max_tokens, cost_model, method = "var_length", window = None, multiple_of = None,
        leftover = "error"
    ),
    text_signature = "(lengths, *, num_micro_batches, max_tokens, cost_model, method='var_length', window=1, multiple_of=1, \
                      leftover='error')"
)]
#[allow(clippy::too_many_arguments, reason = "all are keywords in Python")]
fn pack(
    py: Python<'_>,
    lengths: &Bound<'_, PyAny>,
    num_micro_batches: Option<&Bound<'_, PyAny>>,
    max_tokens: &Bound<'_, PyAny>,
    cost_model: &Bound<'_, CostModel>,
    method: &str,
    window: Option<&Bound<'_, PyAny>>,
    multiple_of: Option<&Bound<'_, PyAny>>,
    leftover: &str,
) -> PyResult<Packing> {
    let most = MAX_MICRO_BATCHES as i64;
    let whole = num_micro_batches.is_none();
    let multiple_of = multiple_of.map_or(Ok(1), |multiple| size("multiple_of", multiple, 1, most))?;
    if !whole && multiple_of != 1 {
        let requirement = "a multiple other than 1 needs num_micro_batches=None";
        return Err(raise(wlb_core::Error::Combination { argument: "multiple_of", requirement }));
    }
    let options = core::PackOptions {
        num_micro_batches: num_micro_batches.map_or(Ok(1), |number| size("num_micro_batches", number, 1, most))?,
        max_tokens: positive("max_tokens", max_tokens)?,
        method: method.parse().map_err(raise)?,
        window: window.map_or(Ok(1), |window| size("window", window, 1, most))?,
        leftover: leftover.parse::<Leftover>().map_err(raise)?,
    };
    let lengths = read_lengths("lengths", lengths)?;
    let cost_model = &cost_model.get().0;
    let micro_batches = options.num_micro_batches.saturating_mul(options.window);
    let plan = run(py, lengths.len().saturating_add(micro_batches), || {
        if whole {
            core::pack_whole(&lengths, multiple_of, &options, cost_model)
        } else {
            core::pack(&lengths, &options, cost_model)
        }
    })?;
    Ok(Packing(Arc::new(plan.map_err(raise)?)))
}

/// The micro-batches of one global batch: plain data that can be printed, compared, pickled and sent.
///
/// Every array is a fresh copy that the caller may keep or change.
#[pyclass(frozen, eq, hash, sequence, module = "wlb")]
#[derive(Clone, PartialEq)]
pub(crate) struct Packing(pub(crate) Arc<core::Packing>);

impl Hash for Packing {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.digest().hash(state);
    }
}

#[pymethods]
impl Packing {
    /// A packing from an assignment made elsewhere (a solver, another packer), scored like ours.
    ///
    /// Args:
    ///     lengths: int[n], tokens.
    ///     assignment: int[n], micro-batch of each document; -1 leaves it over.
    ///     num_micro_batches, max_tokens, cost_model: as in :func:`pack`.
    ///
    /// Raises:
    ///     WlbError: also when a micro-batch does not exist or gets more than ``max_tokens`` tokens.
    #[staticmethod]
    #[pyo3(signature = (lengths, assignment, *, num_micro_batches, max_tokens, cost_model))]
    fn from_assignment(
        lengths: &Bound<'_, PyAny>,
        assignment: &Bound<'_, PyAny>,
        num_micro_batches: &Bound<'_, PyAny>,
        max_tokens: &Bound<'_, PyAny>,
        cost_model: &Bound<'_, CostModel>,
    ) -> PyResult<Self> {
        let plan = core::Packing::from_assignment(
            &read_lengths("lengths", lengths)?,
            &integers("assignment", assignment)?,
            size("num_micro_batches", num_micro_batches, 1, MAX_MICRO_BATCHES as i64)?,
            positive("max_tokens", max_tokens)?,
            &cost_model.get().0,
        );
        Ok(Self(Arc::new(plan.map_err(raise)?)))
    }

    /// How it was made: a method of :func:`pack`, or "assignment".
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

    /// Global batches that were packed together: step ``i`` trains the ``i``-th ``M / window`` micro-batches.
    #[getter]
    fn window(&self) -> usize {
        self.0.window
    }

    /// Tokens of all micro-batches.
    #[getter]
    fn num_tokens(&self) -> i64 {
        self.0.num_tokens()
    }

    /// The micro-batches, a tuple of :class:`MicroBatch`. An empty one is legal.
    #[getter]
    fn micro_batches<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, (0..self.0.num_micro_batches()).map(|index| self.micro_batch(index)))
    }

    /// int32[n]: micro-batch of each document passed in, -1 if it does not lie whole in one (left over, waiting, or split).
    /// Empty for what :meth:`Packer.flush` returns.
    #[getter]
    fn assignment<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.0.assignment)
    }

    /// int64[M]: tokens of each micro-batch.
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        PyArray1::from_slice(py, &self.0.tokens)
    }

    /// float64[M]: cost of each micro-batch, in the cost model's unit.
    #[getter]
    fn costs<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        PyArray1::from_slice(py, &self.0.costs)
    }

    /// int64[l]: ids of the documents that did not fit, in the order they were tried; empty for :func:`pack` unless its
    /// ``leftover`` is "return". A :class:`Packer` carries them over to the next iteration.
    #[getter]
    fn leftover<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        array(py, ids(&self.0.leftover))
    }

    /// int32[l]: where in its document each left-over piece begins; 0 but for documents that were cut.
    #[getter]
    fn leftover_starts<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        array(py, starts(&self.0.leftover))
    }

    /// int32[l]: tokens of each left-over piece.
    #[getter]
    fn leftover_lengths<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        array(py, piece_lengths(&self.0.leftover))
    }

    /// ``max cost * M / total cost``: how much longer a step takes than with perfect balance. 1.0 when nothing is placed.
    #[getter]
    fn imbalance(&self) -> f64 {
        self.0.imbalance()
    }

    /// No packing of the placed documents has a smaller maximum cost: ``max(total cost / M, largest document)``.
    #[getter]
    fn lower_bound(&self) -> f64 {
        self.0.lower_bound()
    }

    /// Documents that Algorithm 1 places by token count instead of by cost. At 0 with "var_length", ``max cost <= total / M + (1 - 1/M) * w``, where ``w``
    /// is the cost of the last document put into the heaviest micro-batch.
    #[getter]
    fn length_fallbacks(&self) -> usize {
        self.0.length_fallbacks
    }

    /// Hex hash of where every token goes: equal on two ranks iff every token goes to the same place. O(documents).
    fn digest(&self) -> String {
        self.0.digest()
    }

    /// Deals the micro-batches of each step to data-parallel ranks: equal counts, balanced costs, in schedule order.
    ///
    /// Inside a rank the lightest micro-batches stand at both ends, where a pipeline fills and drains.
    ///
    /// Returns:
    ///     int64[dp_size, M / dp_size]: micro-batch indices of each rank; with a window of several global batches
    ///     int64[window, dp_size, M / window / dp_size].
    ///
    /// Raises:
    ///     WlbError: ``dp_size`` does not divide the number of micro-batches of a step.
    fn deal<'py>(&self, py: Python<'py>, dp_size: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let value = integer("dp_size", dp_size)?;
        let (window, per_step) = (self.0.window, self.0.num_micro_batches() / self.0.window);
        let dp_size = usize::try_from(value)
            .map_err(|_| raise(wlb_core::Error::Indivisible { argument: "dp_size", value, total: per_step }))?;
        let dealt = run(py, self.0.num_micro_batches(), || self.0.deal(dp_size))?.map_err(raise)?;
        let dealt = array(py, dealt.into_iter().map(|micro_batch| micro_batch as i64).collect());
        Ok(if window == 1 {
            dealt.reshape([dp_size, per_step / dp_size])?.into_any()
        } else {
            dealt.reshape([window, dp_size, per_step / dp_size])?.into_any()
        })
    }

    fn __len__(&self) -> usize {
        self.0.num_micro_batches()
    }

    fn __getitem__(&self, index: isize) -> PyResult<MicroBatch> {
        item(index, self.0.num_micro_batches(), "micro-batch").map(|index| self.micro_batch(index))
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        self.micro_batches(py)?.try_iter()
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

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Pickled<'py, (String,)>> {
        as_json(slf, slf.get().0.to_json())
    }

    #[staticmethod]
    fn _from_json(json: &str) -> PyResult<Self> {
        core::Packing::from_json(json).map(|plan| Self(Arc::new(plan))).map_err(raise)
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

impl Hash for MicroBatch {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.pieces().iter().for_each(|piece| (piece.id, piece.start, piece.length).hash(state));
    }
}

#[pymethods]
impl MicroBatch {
    /// int64[k]: the documents; one that was cut may stand here with only a part.
    #[getter]
    fn document_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        array(py, ids(self.pieces()))
    }

    /// int32[k]: where in its document each piece begins; 0 for whole documents.
    #[getter]
    fn starts<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        array(py, starts(self.pieces()))
    }

    /// int32[k]: tokens of each piece.
    #[getter]
    fn lengths<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        array(py, piece_lengths(self.pieces()))
    }

    /// int32[k + 1]: where each piece begins in the packed sequence, then its length.
    #[getter]
    fn cu_seqlens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        let mut total = 0;
        let ends = self.pieces().iter().map(|piece| {
            total += piece.length;
            total
        });
        array(py, std::iter::once(0).chain(ends).collect())
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

    fn __len__(&self) -> usize {
        self.pieces().len()
    }

    /// A pickle holds the whole packing: to send several micro-batches of one, send that.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Pickled<'py, (usize,)>> {
        as_call(py, self.packing.clone(), "__getitem__", (self.index,))
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
#[pyfunction]
#[pyo3(signature = (lengths, *, tokens_per_batch))]
fn batch_offsets<'py>(
    py: Python<'py>,
    lengths: &Bound<'py, PyAny>,
    tokens_per_batch: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    let lengths = read_lengths("lengths", lengths)?;
    let offsets = stream::batch_offsets(&lengths, integer("tokens_per_batch", tokens_per_batch)?).map_err(raise)?;
    Ok(array(py, offsets.into_iter().map(|offset| offset as i64).collect()))
}

/// Cuts documents into pieces of at most ``max_document_tokens``: those that a context window has.
///
/// Args:
///     lengths: int[n], tokens.
///     max_document_tokens: longest piece.
///
/// Returns:
///     ``(documents int64[p], starts int32[p], lengths int64[p])``: index of the document, where in it the piece begins, tokens.
///
/// Raises:
///     WlbError: a length or ``max_document_tokens`` out of range, or one so low that it takes more than 2^23 cuts.
#[pyfunction]
#[pyo3(signature = (lengths, *, max_document_tokens))]
#[allow(clippy::type_complexity, reason = "three arrays")]
fn split_documents<'py>(
    py: Python<'py>,
    lengths: &Bound<'py, PyAny>,
    max_document_tokens: &Bound<'py, PyAny>,
) -> PyResult<(Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<i32>>, Bound<'py, PyArray1<i64>>)> {
    let lengths = read_lengths("lengths", lengths)?;
    let limit = integer("max_document_tokens", max_document_tokens)?;
    let pieces = stream::split_documents(&lengths, limit).map_err(raise)?;
    let piece_lengths = pieces.iter().map(|piece| i64::from(piece.length)).collect();
    Ok((array(py, ids(&pieces)), array(py, starts(&pieces)), array(py, piece_lengths)))
}

/// A Python index as one from the front.
pub(crate) fn item(index: isize, count: usize, what: &str) -> PyResult<usize> {
    let wrapped = if index < 0 { index + count as isize } else { index };
    match usize::try_from(wrapped) {
        Ok(index) if index < count => Ok(index),
        _ => Err(PyIndexError::new_err(format!("{what} {index} of {count}"))),
    }
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
