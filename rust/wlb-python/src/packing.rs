//! `wlb.pack`, `wlb.Packing`, and what turns a stream into global batches.

use std::sync::Arc;

use numpy::{PyArray1, PyArrayMethods};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyIterator;
use wlb_core::CostModel;
use wlb_core::limits::MAX_MICRO_BATCHES;
use wlb_core::packing::{self as core, Method, Piece};
use wlb_core::ranks::{RankOptions, pack_for_ranks};

use crate::arguments::{self, functions};
use crate::convert::choice;
use crate::cost::{document_costs, pricing, read_costs_if_any};
use crate::error::raise;
use crate::gil::run;
use crate::plain::{Array, Pickle, Table, Tuple, hashed_by, pickled_as_json, pickled_as_part, properties};

functions! {
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
    ///         so that :meth:`Packing.deal` gives all of them as many.
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
    ///     leftover: what happens if documents do not fit: "error", or "return", and :attr:`Packing.leftover` lists
    ///         them: they are in no micro-batch, and will not be trained unless the caller sees to it.
    ///
    /// Returns:
    ///     Packing. The same input gives the same plan, byte for byte, on every rank and machine.
    ///
    /// Raises:
    ///     WlbError: a length or size out of range, a document over ``max_tokens`` (the methods that keep documents
    ///         whole), an unknown method, a cost that is negative or not finite, a column of zeros or none without a
    ///         limit, both or none of ``cost_model`` and ``costs``, several ``global_batches`` without "fixed_length", ``multiple_of``
    ///         beside ``num_micro_batches``, what needs ``dp_size`` without it. Documents do not fit: the message says
    ///         how many, and a ``max_tokens`` that surely holds them all (with the methods that cut documents the least
    ///         one).
    ///
    /// O(n) for a radix sort and, on average, a few steps for each document; O(n N) at worst, and always for
    /// "fixed_length". ``num_micro_batches=None`` takes O(log n) times that, and once where as many as the tokens need
    /// do. WLB-LLM, sections 3.2 and 4. Releases the GIL from 1,024 documents and micro-batches on. Ctrl-C ends it
    /// within half a second.
    fn pack[py: Python<'_>](
        lengths, *, num_micro_batches by arguments::optional::num_micro_batches: Option<usize>, max_tokens,
        cost_model by read_costs_if_any: Option<CostModel> = None, costs?, limits?, method: &str = "var_length",
        global_batches = 1, multiple_of = 1, dp_size?, sync: Option<&str> = None, groups?, equal_documents = false,
        max_documents?, multiple_of_tokens = 1, token_buckets?, leftover: &str = "error",
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
                return Err(combination(
                    "leftover",
                    "\"return\" goes without dp_size and max_documents: all is placed",
                ));
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
            return run(py, lengths.len().saturating_add(micro_batches), || {
                pack_for_ranks(&lengths, &options, pricing)
            })
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

properties! {
    Packing:
    /// How it was made: a method of :func:`pack`, or "assignment".
    method: &'static str = |packing| packing.0.method.map_or("assignment", Method::as_str);
    /// Number of micro-batches, ``M``; also ``len()``.
    num_micro_batches: usize = |packing| packing.0.num_micro_batches();
    /// Most tokens that a micro-batch was allowed.
    max_tokens: i32 = |packing| packing.0.max_tokens;
    /// Global batches that were packed together: step ``i`` trains the ``i``-th ``M / global_batches`` micro-batches.
    global_batches: usize = |packing| packing.0.global_batches;
    /// Tokens of all micro-batches.
    num_tokens: i64 = |packing| packing.0.num_tokens();
    /// The micro-batches, a tuple of :class:`MicroBatch`. An empty one is legal.
    micro_batches: Tuple<MicroBatch> = |packing| {
        Tuple((0..packing.0.num_micro_batches()).map(|index| packing.micro_batch(index)).collect())
    };
    /// int32[n]: micro-batch of each document passed in, -1 if it does not lie whole in one (left over, waiting, or
    /// split). Empty for what :meth:`Packer.flush` returns.
    assignment: Array<&[i32]> = |packing| Array(&packing.0.assignment);
    /// int64[M]: tokens of each micro-batch.
    tokens: Array<&[i64]> = |packing| Array(&packing.0.tokens);
    /// float64[M]: cost of each micro-batch, in the cost model's unit; with several columns of costs, of all that take
    /// time.
    costs: Array<&[f64]> = |packing| Array(&packing.0.costs);
    /// float64[M, r]: cost of each micro-batch in each column of the documents' costs; with a cost model there is one.
    column_costs: Table<f64> = |packing| {
        let costs = packing.0.columns.as_ref().map_or(&packing.0.costs, |columns| &columns.costs);
        let micro_batches = packing.0.num_micro_batches();
        Table(costs.clone(), [micro_batches, costs.len() / micro_batches])
    };
    /// int64[M]: tokens of each micro-batch when it runs, padded as ``multiple_of_tokens`` and ``token_buckets`` ask.
    padded_tokens: Array<Vec<i64>> = |packing| Array(packing.0.padded_tokens());
    /// Time of the step: cost of the heaviest micro-batch; with several columns, the sum over them of the heaviest in
    /// each.
    step_cost: f64 = |packing| packing.0.step_cost();
    /// int64[l]: ids of the documents that did not fit, in the order they were tried; empty for :func:`pack` unless its
    /// ``leftover`` is "return". A :class:`Packer` carries them over to the next iteration.
    leftover: Array<Vec<i64>> = |packing| Array(ids(&packing.0.leftover));
    /// int32[l]: where in its document each left-over piece begins; 0 but for documents that were cut.
    leftover_starts: Array<Vec<i32>> = |packing| Array(starts(&packing.0.leftover));
    /// int32[l]: tokens of each left-over piece.
    leftover_lengths: Array<Vec<i32>> = |packing| Array(piece_lengths(&packing.0.leftover));
    /// ``step_cost * M / total cost``: how much longer a step takes than with perfect balance. 1.0 when nothing is
    /// placed.
    imbalance: f64 = |packing| packing.0.imbalance();
    /// Data-parallel ranks that it was made for; None where it may be dealt to any.
    dp_size: Option<usize> = |packing| packing.0.ranks.map(|ranks| ranks.dp_size);
    /// Where these ranks wait for each other, "step" or "micro_batch"; None without ranks.
    sync: Option<&'static str> = |packing| packing.0.ranks.map(|ranks| ranks.sync.as_str());
    /// How much longer a step takes than on equal ranks. Under "step" it takes the sum of the heaviest rank, under
    /// "micro_batch" that of the heaviest micro-batch of each round. Without ranks it is the :attr:`imbalance`.
    rank_imbalance: f64 = |packing| packing.0.rank_imbalance();
    /// Documents that Algorithm 1 places by token count instead of by cost. At 0 with "var_length", ``max cost <= total
    /// / M + (1 - 1/M) * w``, where ``w`` is the cost of the last document put into the heaviest micro-batch.
    length_fallbacks: usize = |packing| packing.0.length_fallbacks;
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

functions! {
    Packing:
    /// A packing from an assignment made elsewhere (a solver, another packer), scored like ours.
    ///
    /// Args:
    ///     lengths: int[n], tokens.
    ///     assignment: int[n], micro-batch of each document; -1 leaves it over.
    ///     num_micro_batches, max_tokens, cost_model, costs, limits: as in :func:`pack`.
    ///
    /// Raises:
    ///     WlbError: also when a micro-batch does not exist or gets more than ``max_tokens`` tokens.
    #[staticmethod]
    fn from_assignment[py: Python<'_>](
        lengths, assignment, *, num_micro_batches, max_tokens,
        cost_model by read_costs_if_any: Option<CostModel> = None, costs?, limits?,
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
    fn deal<'py>[&self, py: Python<'py>](dp_size) -> PyResult<Bound<'py, PyAny>> {
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

properties! {
    MicroBatch:
    /// int64[k]: the documents; one that was cut may stand here with only a part.
    document_ids: Array<Vec<i64>> = |batch| Array(ids(batch.pieces()));
    /// int32[k]: where in its document each piece begins; 0 for whole documents.
    starts: Array<Vec<i32>> = |batch| Array(starts(batch.pieces()));
    /// int32[k]: tokens of each piece.
    lengths: Array<Vec<i32>> = |batch| Array(piece_lengths(batch.pieces()));
    /// int32[k + 1]: where each piece begins in the packed sequence, then its length.
    cu_seqlens: Array<Vec<i32>> = |batch| Array(cu_seqlens(batch.pieces().iter().map(|piece| piece.length)));
    /// Tokens of the micro-batch.
    tokens: i64 = |batch| batch.packing.0.tokens[batch.index];
    /// Cost of the micro-batch, in the cost model's unit.
    cost: f64 = |batch| batch.packing.0.costs[batch.index];
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

functions! {
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
    fn batch_offsets[py: Python<'_>](lengths, *, tokens_per_batch) -> PyResult<Array<Vec<i64>>> {
        let offsets = run(py, lengths.len(), || core::batch_offsets(&lengths, tokens_per_batch)).map_err(raise)?;
        Ok(Array(offsets.into_iter().map(|offset| offset as i64).collect()))
    }

    /// The size that a micro-batch runs with, for who makes its batch.
    ///
    /// Args:
    ///     tokens: of its documents.
    ///     multiple_of_tokens: as for :func:`pack`.
    ///     token_buckets: likewise.
    ///
    /// Returns:
    ///     ``tokens`` and the padding, as ``Packing.padded_tokens`` has it. Nothing of an empty micro-batch, but with
    ///     buckets.
    ///
    /// Raises:
    ///     WlbError: sizes that make no sense, or more tokens than the largest of them.
    fn padded_tokens[](tokens, *, multiple_of_tokens = 1, token_buckets?) -> PyResult<i64> {
        let padding = core::Padding::new(multiple_of_tokens, &token_buckets.unwrap_or_default()).map_err(raise)?;
        padding.checked(tokens).map_err(raise)
    }

    /// The largest size within ``max_tokens``: what a packer makes of it.
    ///
    /// Args:
    ///     max_tokens: most tokens of a micro-batch.
    ///     multiple_of_tokens: as for :func:`pack`.
    ///     token_buckets: likewise.
    ///
    /// Raises:
    ///     WlbError: sizes that make no sense, or all above ``max_tokens``.
    fn most_tokens[](max_tokens, *, multiple_of_tokens = 1, token_buckets?) -> PyResult<i32> {
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
    #[allow(clippy::type_complexity, reason = "three arrays")]
    fn split_documents[py: Python<'_>](
        lengths, *, max_document_tokens,
    ) -> PyResult<(Array<Vec<i64>>, Array<Vec<i32>>, Array<Vec<i64>>)> {
        let limit = i64::from(max_document_tokens);
        let pieces = run(py, lengths.len(), || core::split_documents(&lengths, limit)).map_err(raise)?;
        let lengths = pieces.iter().map(|piece| i64::from(piece.length)).collect();
        Ok((Array(ids(&pieces)), Array(starts(&pieces)), Array(lengths)))
    }
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
