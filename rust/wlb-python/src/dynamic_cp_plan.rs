//! `wlb.DynamicCpPlan` and its parts.

use std::ops::Range;
use std::sync::Arc;

use numpy::Element;
use pyo3::prelude::*;
use pyo3::types::{PyIterator, PyRange};
use wlb_core::dynamic_cp::DynamicCpPlan as Plan;
use wlb_core::packing::Padding;

use crate::arguments;
use crate::convert::size;
use crate::error::{raise, refuse};
use crate::gil::run;
use crate::packing::{cu_seqlens, item};
use crate::plain::{Array, Pickle, Table, Tuple, hashed_by, pickled_as_json, pickled_as_part};

/// The plan of one step: which documents run when, and on which ranks of a pipeline stage.
///
/// Plain data that can be printed, compared, pickled and sent. Every array is a fresh copy that the caller may keep or
/// change. The micro-batches are its items, in the order in which they run.
#[pyclass(frozen, eq, hash, module = "wlb")]
#[derive(Clone, PartialEq)]
pub(crate) struct DynamicCpPlan(Arc<Plan>);

hashed_by!(DynamicCpPlan: |plan| plan.0.digest());
pickled_as_json!(DynamicCpPlan(Plan));

impl From<Plan> for DynamicCpPlan {
    fn from(plan: Plan) -> Self {
        Self(Arc::new(plan))
    }
}

impl DynamicCpPlan {
    /// A table [m, world_size] of a number of each rank's group.
    fn of_ranks<T: Element + Copy>(&self, of_group: impl Fn(usize) -> T) -> Table<T> {
        Table(self.0.of_ranks(of_group), [self.0.num_micro_batches(), self.0.world_size])
    }

    fn micro_batch(&self, index: usize) -> DynamicMicroBatch {
        DynamicMicroBatch { plan: self.clone(), index }
    }

    fn group(&self, index: usize) -> CpGroup {
        CpGroup { plan: self.clone(), index }
    }
}

#[pymethods]
impl DynamicCpPlan {
    /// Ranks of a pipeline stage, DP times CP.
    #[getter]
    fn world_size(&self) -> usize {
        self.0.world_size
    }

    /// Pipeline stages.
    #[getter]
    fn num_stages(&self) -> usize {
        self.0.num_stages
    }

    /// Parts of the model on each stage.
    #[getter]
    fn num_virtual_stages(&self) -> usize {
        self.0.num_virtual_stages
    }

    /// Order in which a stage runs its micro-batches.
    #[getter]
    fn schedule(&self) -> &'static str {
        self.0.schedule.as_str()
    }

    /// Where the ranks of a stage wait for each other, once a "step" or in every "micro_batch".
    #[getter]
    fn sync(&self) -> &'static str {
        self.0.sync.as_str()
    }

    /// Most tokens that a rank was allowed in a micro-batch; with padding, the largest padded size within that.
    #[getter]
    fn max_tokens_per_rank(&self) -> i32 {
        self.0.max_tokens_per_rank
    }

    /// Most documents that a group was allowed; None: any number.
    #[getter]
    fn max_documents(&self) -> Option<usize> {
        self.0.max_documents
    }

    /// Each rank's tokens in a micro-batch are padded to a multiple of this.
    #[getter]
    fn multiple_of_tokens(&self) -> i32 {
        self.0.padding.as_ref().map_or(1, Padding::multiple_of)
    }

    /// The only padded sizes, ascending; empty for any.
    #[getter]
    fn token_buckets(&self) -> Tuple<i32> {
        Tuple(self.0.padding.as_ref().map_or(Vec::new(), |padding| padding.buckets().to_vec()))
    }

    /// Predicted time of the step, by simulating the pipeline with every rank's micro-batches; the ranks of a group
    /// wait for one another, and all ranks of a stage where ``sync`` says so.
    #[getter]
    fn seconds(&self) -> f64 {
        self.0.seconds
    }

    /// Latency between pipeline stages, included in ``seconds``.
    #[getter]
    fn p2p_seconds(&self) -> f64 {
        self.0.p2p_seconds
    }

    /// Lower bound on ``seconds`` (up to rounding) for any plan with at most as many micro-batches as were tried and at
    /// least ``min_micro_batches``; if ``num_micro_batches`` was given, with exactly as many. Proved from the work, the
    /// filling and draining of the pipeline, and the paths around the longest documents.
    #[getter]
    fn lower_bound(&self) -> f64 {
        self.0.lower_bound
    }

    /// Time if all work were spread evenly over all ranks of all stages and no rank ever waited; no pipeline reaches
    /// it.
    #[getter]
    fn balanced_seconds(&self) -> f64 {
        self.0.balanced_seconds
    }

    /// The numbers of micro-batches that were tried, ascending, each with an estimate of its step in which every rank
    /// is as slow as the slowest of the micro-batch. For numbers given up early it is a lower time (with short
    /// documents divided at will, or with a part of the documents) that already exceeds the best. With exchange at a
    /// price and very many documents, most are judged by a sample of these: as much slower as they are there.
    #[getter]
    fn sweep(&self) -> Tuple<(usize, f64)> {
        Tuple(self.0.sweep.clone())
    }

    /// Micro-batches of the step, ``m``, the same on every rank; also ``len()``.
    #[getter]
    fn num_micro_batches(&self) -> usize {
        self.0.num_micro_batches()
    }

    /// The micro-batches in the order in which they run.
    #[getter]
    fn micro_batches(&self) -> Tuple<DynamicMicroBatch> {
        Tuple((0..self.0.num_micro_batches()).map(|index| self.micro_batch(index)).collect())
    }

    /// int32[m, world_size]: for each rank, the number of ranks in its group.
    #[getter]
    fn cp_sizes(&self) -> Table<i32> {
        self.of_ranks(|group| self.0.groups[group].cp_size as i32)
    }

    /// int64[m, world_size]: most tokens of each rank; the ranks of a group differ by at most one.
    #[getter]
    fn tokens_per_rank(&self) -> Table<i64> {
        self.of_ranks(|group| self.0.tokens_per_rank(group))
    }

    /// int64[m, world_size]: tokens of each rank including padding.
    #[getter]
    fn padded_tokens_per_rank(&self) -> Table<i64> {
        self.of_ranks(|group| self.0.padded_tokens_per_rank(group))
    }

    /// float64[m, world_size]: seconds of each rank through the whole model, forward and backward.
    #[getter]
    fn rank_seconds(&self) -> Table<f64> {
        self.of_ranks(|group| self.0.groups[group].seconds)
    }

    /// Tokens of padding in all micro-batches.
    #[getter]
    fn padding_tokens(&self) -> i64 {
        (0..self.0.groups.len()).map(|group| self.0.padding_tokens(group)).sum()
    }
}

#[pymethods]
impl DynamicCpPlan {
    /// The step's time if its groups took ``group_seconds`` instead of the predicted times, in any unit.
    ///
    /// Args:
    ///     group_seconds: float [groups], time of each group through the whole model, forward and backward: micro-batch
    ///         by micro-batch, and inside each in the order of ranks.
    ///
    /// Raises:
    ///     WlbError: their number is not that of the groups, or one is negative or not finite.
    ///
    /// O(num_stages * m * world_size): the pipeline is simulated.
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> shape = {"world_size": 4, "num_stages": 1, "max_tokens_per_rank": 1000, "num_micro_batches": 1}
    ///     >>> plan = wlb.plan_dynamic_cp([2000, 1000, 1000], costs=[2.0, 1.0, 1.0], **shape)
    ///     >>> plan.seconds, plan.step_seconds([3.0, 1.0, 1.0])
    ///     (1.0, 3.0)
    #[pyo3(signature = (group_seconds))]
    fn step_seconds(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::group_seconds)] group_seconds: Vec<f64>,
    ) -> PyResult<f64> {
        let groups = self.0.groups.len();
        if group_seconds.len() != groups {
            let problem = format!("has {} entries, but the plan has {groups} groups", group_seconds.len());
            return Err(refuse("group_seconds", None, None, problem));
        }
        run(py, groups.max(self.0.world_size), || self.0.step_seconds(&group_seconds)).map_err(raise)
    }

    /// Hex hash of which documents run when and where: equal if and only if two plans are, apart from seconds.
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> shape = {"world_size": 2, "num_stages": 1, "max_tokens_per_rank": 1000}
    ///     >>> plans = [wlb.plan_dynamic_cp([500, 100], costs=[5.0, last], **shape) for last in (1.0, 1.1)]
    ///     >>> plans[0] == plans[1], plans[0].digest() == plans[1].digest()
    ///     (False, True)
    fn digest(&self, py: Python<'_>) -> String {
        run(py, self.0.documents.len().max(self.0.world_size), || self.0.digest())
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
        format!(
            "DynamicCpPlan(world_size={}, num_stages={}, num_micro_batches={}, documents={}, largest_cp_size={}, \
             seconds={:.6})",
            self.0.world_size,
            self.0.num_stages,
            self.0.num_micro_batches(),
            self.0.documents.len(),
            self.0.groups.iter().map(|group| group.cp_size).max().unwrap_or(1),
            self.0.seconds,
        )
    }
}

/// One micro-batch of a ``DynamicCpPlan``: groups that together have all ranks of a stage, in the order of their ranks.
/// The groups are its items; a group may be empty.
///
/// A pickle holds the whole plan. To send several micro-batches of one plan, send the plan.
#[pyclass(frozen, eq, hash, module = "wlb")]
#[derive(PartialEq)]
pub(crate) struct DynamicMicroBatch {
    plan: DynamicCpPlan,
    index: usize,
}

hashed_by!(DynamicMicroBatch: |batch| (batch.plan.0.digest(), batch.index));

impl DynamicMicroBatch {
    fn range(&self) -> Range<usize> {
        self.plan.0.groups_of(self.index)
    }
}

#[pymethods]
impl DynamicMicroBatch {
    /// The groups in the order of their ranks; together they have all ranks. A group may be empty.
    #[getter]
    fn groups(&self) -> Tuple<CpGroup> {
        Tuple(self.range().map(|group| self.plan.group(group)).collect())
    }

    /// Seconds of its slowest group through the whole model, forward and backward.
    #[getter]
    fn seconds(&self) -> f64 {
        self.plan.0.groups[self.range()].iter().map(|group| group.seconds).fold(0.0, f64::max)
    }

    /// Tokens of all its groups.
    #[getter]
    fn tokens(&self) -> i64 {
        self.range().map(|group| self.plan.0.tokens(group)).sum()
    }

    /// The group that a rank of the stage belongs to.
    ///
    /// Raises:
    ///     WlbError: no such rank.
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> shape = {"world_size": 4, "num_stages": 1, "max_tokens_per_rank": 1000, "num_micro_batches": 1}
    ///     >>> plan = wlb.plan_dynamic_cp([2000, 1000, 1000], costs=[2.0, 1.0, 1.0], **shape)
    ///     >>> plan[0].group_of(1).ranks
    ///     range(0, 2)
    fn group_of(&self, rank: &Bound<'_, PyAny>) -> PyResult<CpGroup> {
        let rank = size("rank", rank, 0, self.plan.0.world_size as i64 - 1)?;
        Ok(self.plan.group(self.plan.0.group_of(self.index, rank)))
    }

    fn __len__(&self) -> usize {
        self.range().len()
    }

    fn __getitem__(&self, index: isize) -> PyResult<CpGroup> {
        let range = self.range();
        item(index, range.len(), "group").map(|index| self.plan.group(range.start + index))
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        self.groups().into_pyobject(py)?.try_iter()
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Pickle<'py, (usize,)>> {
        pickled_as_part(py, self.plan.clone(), "__getitem__", (self.index,))
    }

    fn __repr__(&self) -> String {
        let sizes: Vec<u32> = self.plan.0.groups[self.range()].iter().map(|group| group.cp_size).collect();
        format!("DynamicMicroBatch(cp_sizes={sizes:?}, tokens={})", self.tokens())
    }
}

/// Ranks that share the documents of one micro-batch; ``len()`` is their number.
///
/// Every array is a fresh copy that the caller may keep or change. Groups are equal if they run the same documents on
/// the same ranks in the same time, in whatever plan. A pickle holds the whole plan.
#[pyclass(frozen, eq, hash, module = "wlb")]
pub(crate) struct CpGroup {
    plan: DynamicCpPlan,
    index: usize,
}

impl CpGroup {
    fn core(&self) -> &wlb_core::dynamic_cp::Group {
        &self.plan.0.groups[self.index]
    }

    fn document_slice(&self) -> &[i64] {
        &self.plan.0.documents[self.plan.0.documents_of(self.index)]
    }

    fn length_slice(&self) -> &[i32] {
        &self.plan.0.lengths[self.plan.0.documents_of(self.index)]
    }
}

impl PartialEq for CpGroup {
    fn eq(&self, other: &Self) -> bool {
        let key = |group: &Self| (*group.core(), group.document_slice().to_vec(), group.length_slice().to_vec());
        key(self) == key(other)
    }
}

hashed_by!(CpGroup: |group| (group.core().first_rank, group.core().cp_size, group.document_slice()));

#[pymethods]
impl CpGroup {
    /// First of its ranks; a multiple of ``cp_size``, unless ``group_sizes="any"``.
    #[getter]
    fn first_rank(&self) -> u32 {
        self.core().first_rank
    }

    /// Number of ranks, a power of two, unless ``group_sizes="any"``; also ``len()``.
    #[getter]
    fn cp_size(&self) -> u32 {
        self.core().cp_size
    }

    /// The ranks of the stage that belong to it.
    #[getter]
    fn ranks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyRange>> {
        let ranks = self.core().ranks();
        PyRange::new(py, ranks.start as isize, ranks.end as isize)
    }

    /// int64[k]: the documents, in order of arrival.
    #[getter]
    fn document_ids(&self) -> Array<&[i64]> {
        Array(self.document_slice())
    }

    /// int32[k]: tokens of each document.
    #[getter]
    fn lengths(&self) -> Array<&[i32]> {
        Array(self.length_slice())
    }

    /// int32[k + 1]: index of each document's first token in the packed sequence, and at the end its length.
    #[getter]
    fn cu_seqlens(&self) -> Array<Vec<i32>> {
        Array(cu_seqlens(self.length_slice().iter().copied()))
    }

    /// Tokens of the longest document; 0 without documents.
    #[getter]
    fn max_seqlen(&self) -> i32 {
        self.length_slice().iter().copied().max().unwrap_or(0)
    }

    /// Tokens of all documents.
    #[getter]
    fn tokens(&self) -> i64 {
        self.plan.0.tokens(self.index)
    }

    /// Most tokens of a rank, sharded "per_document": the ranks differ by at most one.
    #[getter]
    fn tokens_per_rank(&self) -> i64 {
        self.plan.0.tokens_per_rank(self.index)
    }

    /// Most tokens of a rank including padding; with padding all of its ranks have equally many.
    #[getter]
    fn padded_tokens_per_rank(&self) -> i64 {
        self.plan.0.padded_tokens_per_rank(self.index)
    }

    /// Tokens of one more document after the others, which fills all ranks to the same padded size
    /// (``multiple_of_tokens``, ``token_buckets``); 0 without padding.
    #[getter]
    fn padding_tokens(&self) -> i64 {
        self.plan.0.padding_tokens(self.index)
    }

    /// Predicted time through the whole model, forward and backward, on each of its ranks.
    #[getter]
    fn seconds(&self) -> f64 {
        self.core().seconds
    }

    fn __len__(&self) -> usize {
        self.core().cp_size as usize
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Pickle<'py, (usize,)>> {
        let batch = self.plan.0.group_offsets.partition_point(|&first| first <= self.index) - 1;
        let inside = self.index - self.plan.0.group_offsets[batch];
        pickled_as_part(py, self.plan.micro_batch(batch), "__getitem__", (inside,))
    }

    fn __repr__(&self) -> String {
        let (first_rank, cp_size, documents) = (self.first_rank(), self.cp_size(), self.document_slice().len());
        format!(
            "CpGroup(first_rank={first_rank}, cp_size={cp_size}, documents={documents}, tokens={}, seconds={:?})",
            self.tokens(),
            self.seconds()
        )
    }
}
