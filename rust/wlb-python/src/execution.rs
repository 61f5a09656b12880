//! Execution plans of a rank's attention layer for `wlb.torch.attention`, as plain numbers, which Python turns into
//! tensors.

use std::num::NonZeroI64;

use numpy::PyReadonlyArray1;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use wlb_core::sharding::execution::{
    Buckets, Call, HeadsPlan, Indices, KeysPlan, Layout, MovesPlan, RingPlan, Rows, Sum, Transport,
};

use crate::arguments;
use crate::error::raise;
use crate::gil::run;
use crate::plain::Array;
use crate::sharding::Shard;

/// `(first, count, is_list)`: for a list, `first` is where it begins among the numbers.
type PlainRows = (i64, i64, bool);
/// `(rows, begins, count)`: summed rows, the begin of each result row's summands among them, and the number of result
/// rows.
type PlainSum = (PlainRows, PlainRows, i64);
/// `(queries, keys, bounds, spans, max_queries, max_keys, window, fresh)`; see `wlb_core::sharding::execution::Call`.
type PlainCall = (PlainRows, PlainRows, usize, usize, i64, i64, (i64, i64), bool);
/// All numbers (lists of rows, then bounds), and the index of the first bound.
type PlainIndices = (Array<Vec<i32>>, usize);

fn rows(rows: Rows) -> PlainRows {
    (rows.first, rows.count, rows.listed)
}

fn sum(sum: Sum) -> PlainSum {
    (rows(sum.rows), rows(sum.begins), sum.count)
}

fn calls(calls: &[Call]) -> Vec<PlainCall> {
    let plain = |call: &Call| {
        let window = (call.left, call.right);
        (
            rows(call.queries),
            rows(call.keys),
            call.bounds,
            call.spans,
            call.max_queries,
            call.max_keys,
            window,
            call.fresh,
        )
    };
    calls.iter().map(plain).collect()
}

fn indices(indices: Indices) -> PlainIndices {
    let Indices { rows: mut numbers, bounds } = indices;
    let begin = numbers.len();
    numbers.extend_from_slice(&bounds);
    (Array(numbers), begin)
}

/// Execution plan of a rank for transports that bring keys to the ranks that need them.
///
/// Args:
///     shard: the micro-batch's ``Shard``.
///     rank: one of its ranks.
///     fetch: True: every rank gets just the keys that it needs. False: all ranks get every key that some rank needs.
///     window: a token sees tokens less than this many positions away; None: any.
///     biased: whether scores have a bias by position.
///     buckets: whether to divide calls where that pays: the kernel starts thread blocks for a call's longest span.
///
/// Returns:
///     int32 numbers, and the index of the first bound among them; local calls; remote calls; the first of the rank's
///     rows in the buffer, and the buffer's rows before the arriving ones; rows sent; numbers of rows sent to and
///     arriving from each rank; whether any rank sends, and rows of keys that are gathered; sums of gradients that go
///     home, and numbers of rows that go to and come from each rank; sums of the gradients of own keys. See
///     ``wlb_core::sharding::execution``.
///
/// Raises:
///     WlbError: a call has more keys than int32 can count.
#[pyfunction]
#[pyo3(signature = (shard, rank, *, fetch, window, biased, buckets=false))]
#[allow(clippy::type_complexity, reason = "plain numbers, which a dataclass of Python names")]
pub(crate) fn keys_plan(
    py: Python<'_>,
    shard: &Shard,
    rank: usize,
    fetch: bool,
    window: Option<NonZeroI64>,
    biased: bool,
    buckets: bool,
) -> PyResult<(
    PlainIndices,
    Vec<PlainCall>,
    Vec<PlainCall>,
    (i64, i64),
    PlainRows,
    (Vec<i64>, Vec<i64>),
    (bool, i64),
    (PlainSum, Vec<i64>, Vec<i64>),
    PlainSum,
)> {
    let transport = if fetch { Transport::Fetch } else { Transport::AllGather };
    let plan = py.detach(|| {
        let layout = Layout::of(&shard.plan);
        KeysPlan::of(
            &layout,
            rank,
            transport,
            layout.reach(window.map(NonZeroI64::get)),
            biased,
            buckets.then_some(Buckets::FLASH),
        )
    });
    let plan = plan.map_err(raise)?;
    Ok((
        indices(plan.indices),
        calls(&plan.local),
        calls(&plan.remote),
        (plan.first, plan.own_rows),
        rows(plan.sent),
        (plan.sent_rows, plan.arriving_rows),
        (plan.moves, plan.gathered),
        (sum(plan.going), plan.going_rows, plan.coming_rows),
        sum(plan.own),
    ))
}

/// Execution plan of a rank for a ring over blocks of ``degree`` ranks, where the ranks of a block exchange heads.
///
/// Args:
///     shard: the micro-batch's ``Shard``.
///     rank: one of its ranks.
///     degree: ranks of a block.
///     window: a token sees tokens less than this many positions away; None: any.
///     biased: whether scores have a bias by position.
///     buckets: whether to divide calls where that pays: the kernel starts thread blocks for a call's longest span.
///
/// Returns:
///     int32 numbers, and the index of the first bound among them; calls of each step; number of keys of each position;
///     for each position the last step in which another position uses its keys; with several ranks in a block: their
///     tokens, this rank's position, and two lists of rows: to the packed order of the block's tokens, and back. See
///     ``wlb_core::sharding::execution``.
///
/// Raises:
///     WlbError: a call has more keys than int32 can count.
#[pyfunction]
#[pyo3(signature = (shard, rank, degree, *, window, biased, buckets=false))]
#[allow(clippy::type_complexity, reason = "plain numbers, which a dataclass of Python names")]
pub(crate) fn ring_plan(
    py: Python<'_>,
    shard: &Shard,
    rank: usize,
    degree: usize,
    window: Option<NonZeroI64>,
    biased: bool,
    buckets: bool,
) -> PyResult<(PlainIndices, Vec<Vec<PlainCall>>, Vec<i64>, Vec<usize>, Option<(Vec<i64>, usize, Array<Vec<i32>>)>)> {
    let plan = py.detach(|| {
        let layout = Layout::of(&shard.plan);
        RingPlan::of(
            &layout,
            rank,
            degree,
            layout.reach(window.map(NonZeroI64::get)),
            biased,
            buckets.then_some(Buckets::FLASH),
        )
    });
    let (heads, plan) = plan.map_err(raise)?;
    let heads = heads.map(|HeadsPlan { counts, place, indices }| (counts, place, Array(indices.rows)));
    let steps = plan.steps.iter().map(|step| calls(step)).collect();
    Ok((indices(plan.indices), steps, plan.rows, plan.last, heads))
}

/// Rows that a rank sends and receives when tokens move from one division of a micro-batch to another.
///
/// Args:
///     before: the present shard.
///     after: the next shard, of the same documents and ranks.
///     rank: one of the ranks.
///
/// Returns:
///     int32 numbers; rows sent, ordered by destination; number of rows for each rank; for each row afterwards, its
///     index among the arriving rows; number of rows from each rank.
#[pyfunction]
pub(crate) fn moves_plan(
    py: Python<'_>,
    before: &Shard,
    after: &Shard,
    rank: usize,
) -> (Array<Vec<i32>>, PlainRows, Vec<i64>, PlainRows, Vec<i64>) {
    let plan = py.detach(|| MovesPlan::of(&Layout::of(&before.plan), &Layout::of(&after.plan), rank));
    (Array(plan.indices.rows), rows(plan.sent), plan.sent_rows, rows(plan.placed), plan.arriving_rows)
}

/// The rows and predictions of one rank of a forest, as `wlb.torch.ForestBatch` names them.
///
/// Args:
///     shard: the micro-batch's ``Shard``, of a forest.
///     rank: one of its ranks.
///     tokens: int64[R], tokens of the samples, one sample after the other; further samples are padding.
///     counts: bool[R], whether the sample predicts each token; never its first.
///
/// Returns:
///     dict of int64 arrays: ``tokens`` and ``sample_counts`` of each row; ``edge_rows``, ``edge_targets`` and
///     ``edge_weights`` of each edge; ``sample_edges``, ``sample_of`` and ``sample_positions`` of each prediction.
///
/// Raises:
///     WlbError: a shard of documents, tokens that are no whole samples, or a first token that counts.
#[pyfunction]
#[pyo3(signature = (shard, rank, *, tokens, counts))]
pub(crate) fn forest_edges<'py>(
    py: Python<'py>,
    shard: &Shard,
    rank: usize,
    #[pyo3(from_py_with = arguments::sample_tokens)] tokens: Vec<i64>,
    counts: PyReadonlyArray1<'_, bool>,
) -> PyResult<Bound<'py, PyDict>> {
    let counts = counts.as_slice()?.to_vec();
    let edges = run(py, tokens.len(), || shard.plan.edges(rank, &tokens, &counts)).map_err(raise)?;
    let arrays = [
        ("tokens", edges.tokens),
        ("sample_counts", edges.sample_counts),
        ("edge_rows", edges.rows),
        ("edge_targets", edges.targets),
        ("edge_weights", edges.weights),
        ("sample_edges", edges.sample_edges),
        ("sample_of", edges.samples),
        ("sample_positions", edges.positions),
    ];
    let found = PyDict::new(py);
    arrays.into_iter().try_for_each(|(name, values)| found.set_item(name, Array(values)))?;
    Ok(found)
}
