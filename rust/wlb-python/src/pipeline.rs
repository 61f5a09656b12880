//! `wlb.simulate_pipeline`, `wlb.simulate_steps`, `wlb.order_micro_batches`.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use wlb_core::Error;
use wlb_core::limits::MAX_CELLS;
use wlb_core::pipeline::{self as core, Buffers, Detail, Pipeline, PipelineOptions, StepTotals, Summary, Times};

use crate::arguments;
use crate::convert::{choice, count, floats_of_shape};
use crate::error::{raise, refuse, refuse_entry};
use crate::gil::{RELEASE_FROM, run};
use crate::plain::{Array, Table, column};
use crate::results::answer;

/// The arguments of a simulation: arrays of one step of one pipeline, or of many with leading dimensions.
struct Question {
    options: PipelineOptions,
    /// `[*leading, m]`, `[*leading, m, p * v]` or `[*leading, m, p * v, 3]`.
    costs: Vec<f64>,
    shape: Vec<usize>,
    /// Number of leading dimensions, before the dimension of the micro-batches.
    leading: usize,
    /// One value or `[*leading, m]`.
    p2p_seconds: Vec<f64>,
    /// `[*leading, m]`.
    activation: Option<Vec<f64>>,
    /// The shape of `costs`.
    exposed: Option<Vec<f64>>,
}

/// An argument as given by Python, if it is given.
type Given<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

impl Question {
    /// Reads the arguments.
    fn read(
        leading: usize,
        costs: &Bound<'_, PyAny>,
        schedule: &str,
        num_stages: usize,
        num_virtual_stages: Given<'_, '_>,
        p2p_seconds: Given<'_, '_>,
        [activation, exposed]: [Given<'_, '_>; 2],
    ) -> PyResult<Self> {
        let schedule = choice(schedule)?;
        let num_virtual_stages =
            num_virtual_stages.map_or(Ok(1), |value| count("num_virtual_stages", value, MAX_CELLS / num_stages))?;
        let (costs, shape) = floats_of_shape("costs", costs, leading + 1..=leading + 3)?;
        let options = PipelineOptions { schedule, num_stages, num_virtual_stages, num_micro_batches: shape[leading] };
        if shape[leading + 1..] != [options.total_stages(), 3][..shape.len() - leading - 1] {
            let stages = options.total_stages();
            let micro_batches = if leading == 0 { "micro-batches" } else { "..., micro-batches" };
            let problem = format!(
                "has shape {shape:?}, but must be [{micro_batches}], [{micro_batches}, {stages}] (num_stages * \
                 num_virtual_stages), or that with 3 passes each"
            );
            return Err(refuse("costs", None, None, problem));
        }
        let like = |argument, object: Given<'_, '_>, expected: &[usize], or_one: bool| {
            let Some(object) = object else { return Ok(None) };
            let least = if or_one { 0 } else { expected.len() };
            let (values, found) = floats_of_shape(argument, object, least..=expected.len())?;
            if found == expected || or_one && found.is_empty() {
                return Ok(Some(values));
            }
            let problem = format!("has shape {found:?}, but with these costs it must have shape {expected:?}");
            Err(refuse(argument, None, None, problem))
        };
        let per_micro_batch = &shape[..=leading];
        let p2p_seconds = like("p2p_seconds", p2p_seconds, per_micro_batch, true)?.unwrap_or(vec![0.0]);
        let activation = like("activation", activation, per_micro_batch, false)?;
        let exposed = like("exposed", exposed, &shape, false)?;
        Ok(Self { options, costs, shape, leading, p2p_seconds, activation, exposed })
    }

    /// Number of pipelines.
    fn pipelines(&self) -> usize {
        self.shape[..self.leading].iter().product()
    }

    /// Number of (micro-batch, stage) pairs of all pipelines.
    fn cells(&self) -> usize {
        self.pipelines() * self.options.num_micro_batches * self.options.total_stages()
    }

    fn detail(&self) -> Detail {
        [Detail::MicroBatch, Detail::Stage, Detail::Pass][self.shape.len() - self.leading - 1]
    }

    /// Times and activations of one pipeline.
    fn part(&self, index: usize) -> wlb_core::error::Result<(Times<'_>, Option<&[f64]>)> {
        let m = self.options.num_micro_batches;
        let entries = self.detail().entries(m, self.options.total_stages());
        let cut = |values: &'_ [f64], size: usize| index * size..((index + 1) * size).min(values.len());
        let mut times = Times::new(&self.costs[cut(&self.costs, entries)], self.detail())?;
        times = times.with_p2p(match &self.p2p_seconds[..] {
            [one] => std::slice::from_ref(one),
            each => &each[cut(each, m)],
        })?;
        if let Some(exposed) = &self.exposed {
            times = times.with_exposed(&exposed[cut(exposed, entries)])?;
        }
        Ok((times, self.activation.as_deref().map(|activation| &activation[cut(activation, m)])))
    }

    /// The exception for an error in one pipeline, with its index in the whole arrays.
    fn raise(&self, error: Error, part: usize) -> PyErr {
        let Error::Entry { argument, index, value, requirement } = error else { return raise(error) };
        let shape = match argument {
            "p2p_seconds" if self.p2p_seconds.len() == 1 => {
                return raise(Error::Number { argument, value, requirement });
            }
            "costs" | "exposed" => &self.shape[..],
            _ => &self.shape[..=self.leading],
        };
        let mut flat = index + part * shape[self.leading..].iter().product::<usize>();
        let mut place = vec![0; shape.len()];
        for (at, &length) in place.iter_mut().zip(shape).rev() {
            *at = flat % length;
            flat /= length;
        }
        refuse_entry(argument, &place, value, requirement)
    }

    /// All arguments but the schedule as bytes: results with the same schedule and equal bytes are equal.
    fn bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let PipelineOptions { num_stages, num_virtual_stages, .. } = self.options;
        let [activation, exposed] = [&self.activation, &self.exposed].map(|values| values.as_deref().unwrap_or(&[]));
        let numbers = [&self.costs, &self.p2p_seconds[..], activation, exposed];
        let sizes = [num_stages, num_virtual_stages].into_iter().chain(self.shape.iter().copied());
        let mut bytes = Vec::with_capacity(8 * (10 + numbers.iter().map(|each| each.len()).sum::<usize>()));
        for size in sizes.chain(numbers.map(<[f64]>::len)) {
            bytes.extend_from_slice(&size.to_le_bytes());
        }
        for number in numbers.into_iter().flatten() {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        PyBytes::new(py, &bytes)
    }
}

/// Simulates one step of one pipeline.
///
/// Every rank runs its ops in the schedule's order, each as soon as the rank is free and the op's input has arrived.
///
/// Args:
///     costs: seconds; float64[m], micro-batches through the whole model, forward and backward (``Packing.costs``):
///         every stage takes an equal part, and in each stage forward, input gradient and weight gradient take a third
///         each. Or float64[m, stages], with ``stages = num_stages * num_virtual_stages``. Or float64[m, stages, 3],
///         with forward, input gradient and weight gradient given separately.
///     schedule: "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "interleaved_zero_bubble", "zbv" or
///         "dualpipev".
///     num_stages: pipeline ranks, p.
///     num_virtual_stages: stages on each rank, v; rank r has stages r, r + p, ... "zbv" and "dualpipev" need 2: rank r
///         has stages r and 2p - 1 - r. "gpipe", "1f1b", "zb_h1" and "zb_h2" need 1. The interleaved schedules take the
///         micro-batches in ``max(1, m // p)`` rounds, which must divide m.
///     p2p_seconds: latency from the end of an op until a stage on another rank can use its result; both ranks may
///         compute meanwhile. One number, or float64[m].
///     activation: float64[m], memory that a rank holds for a micro-batch from its forward to its weight gradient, over
///         all its stages; in any unit, such as tokens. Default 1 each.
///     exposed: shape of ``costs``: the part of each cost that is communication that nothing hides. Changes no time.
///
/// Returns:
///     PipelineTimeline.
///
/// Raises:
///     WlbError: a shape that does not fit, a number that is negative or not finite, or sizes that the schedule does
///         not allow.
///
/// O(ops), that is O(m p v).
///
/// Examples:
///     >>> import wlb
///     >>> timeline = wlb.simulate_pipeline([3.0, 3.0], num_stages=2)
///     >>> timeline.seconds, timeline.bubble_ratio
///     (4.5, 0.5)
#[pyfunction]
#[pyo3(signature = (costs, *, schedule = "1f1b", num_stages, num_virtual_stages = None, p2p_seconds = None, activation = None, exposed = None), text_signature = "(costs, *, schedule='1f1b', num_stages, num_virtual_stages=1, p2p_seconds=0.0, \
                         activation=None, exposed=None)")]
#[allow(clippy::too_many_arguments, reason = "keywords in Python")]
pub(crate) fn simulate_pipeline<'py>(
    py: Python<'py>,
    costs: &Bound<'py, PyAny>,
    schedule: &str,
    #[pyo3(from_py_with = arguments::num_stages)] num_stages: usize,
    num_virtual_stages: Given<'_, 'py>,
    p2p_seconds: Given<'_, 'py>,
    activation: Given<'_, 'py>,
    exposed: Given<'_, 'py>,
) -> PyResult<Bound<'py, PyAny>> {
    let given = [activation, exposed];
    let question = Question::read(0, costs, schedule, num_stages, num_virtual_stages, p2p_seconds, given)?;
    let simulate = || {
        let (times, activation) = question.part(0)?;
        Pipeline::new(&question.options)?.simulate(&times, activation)
    };
    let timeline = run(py, question.cells(), simulate).map_err(|error| question.raise(error, 0))?;
    let options = &question.options;
    let core::Timeline { summary, records, .. } = &timeline;
    answer!(py, "PipelineTimeline", options {
        num_stages, num_virtual_stages, num_micro_batches;
        _schedule: options.schedule.as_str(),
        seconds: summary.seconds,
        period_seconds: summary.period(),
        bubble_ratio: summary.bubble_ratio(),
        busy: Array(&summary.busy[..]),
        exposed: Array(&summary.exposed[..]),
        bubble: column(&summary.busy, |busy| summary.seconds - busy),
        spans: Array(&summary.spans[..]),
        peak_activation: Array(&summary.peak_activation[..]),
        ranks: column(records, |record| record.rank as i32),
        stages: column(records, |record| record.op.stage as i32),
        micro_batches: column(records, |record| record.op.micro_batch as i32),
        kinds: column(records, |record| record.op.kind as u8),
        starts: column(records, |record| record.start),
        ends: column(records, |record| record.end),
        critical_path: column(&timeline.critical_path(), |&index| index as i64),
        _question: question.bytes(py),
    })
}

/// Simulates many steps of data-parallel replicas of a pipeline, which wait for each other at the end of each step.
///
/// Like ``simulate_pipeline`` with two more dimensions before that of the micro-batches. It returns a few numbers for
/// each step instead of single ops, and simulates tens of millions of ops a second.
///
/// Args:
///     costs: seconds; float64[steps, dp, m], [steps, dp, m, stages] or [steps, dp, m, stages, 3].
///     schedule: see ``simulate_pipeline``.
///     num_stages: see ``simulate_pipeline``.
///     num_virtual_stages: see ``simulate_pipeline``.
///     p2p_seconds: one number, or float64[steps, dp, m].
///     activation: float64[steps, dp, m].
///     exposed: shape of ``costs``; see ``simulate_pipeline``.
///
/// Returns:
///     PipelineSteps.
///
/// Raises:
///     WlbError: no replicas; otherwise as for ``simulate_pipeline``.
///
/// O(ops), that is O(steps dp m p v).
///
/// Examples:
///     >>> import numpy as np
///     >>> import wlb
///     >>> costs = np.ones((1, 2, 4))  # one step, two replicas, four micro-batches
///     >>> costs[0, 1] = 2.0
///     >>> wlb.simulate_steps(costs, num_stages=2).seconds
///     array([5.])
#[pyfunction]
#[pyo3(signature = (costs, *, schedule = "1f1b", num_stages, num_virtual_stages = None, p2p_seconds = None, activation = None, exposed = None), text_signature = "(costs, *, schedule='1f1b', num_stages, num_virtual_stages=1, p2p_seconds=0.0, \
                         activation=None, exposed=None)")]
#[allow(clippy::too_many_arguments, reason = "keywords in Python")]
pub(crate) fn simulate_steps<'py>(
    py: Python<'py>,
    costs: &Bound<'py, PyAny>,
    schedule: &str,
    #[pyo3(from_py_with = arguments::num_stages)] num_stages: usize,
    num_virtual_stages: Given<'_, 'py>,
    p2p_seconds: Given<'_, 'py>,
    activation: Given<'_, 'py>,
    exposed: Given<'_, 'py>,
) -> PyResult<Bound<'py, PyAny>> {
    let given = [activation, exposed];
    let question = Question::read(2, costs, schedule, num_stages, num_virtual_stages, p2p_seconds, given)?;
    let dp_size = question.shape[1];
    if dp_size == 0 {
        let problem = format!("has shape {:?}, but a step needs at least one replica", question.shape);
        return Err(refuse("costs", None, None, problem));
    }
    let simulate = || {
        let pipeline = Pipeline::new(&question.options).map_err(|error| (error, 0))?;
        let mut buffers = Buffers::default();
        let mut one = |index| {
            let (times, activation) = question.part(index)?;
            pipeline.summarize(&times, activation, &mut buffers)
        };
        (0..question.pipelines()).map(|index| one(index).map_err(|error| (error, index))).collect::<Result<Vec<_>, _>>()
    };
    let replicas = run(py, question.cells(), simulate).map_err(|(error, part)| question.raise(error, part))?;
    let totals: Vec<_> = replicas.chunks(dp_size).map(StepTotals::new).collect();
    let (schedule, shape) = (question.options.schedule, [totals.len(), dp_size, question.options.num_stages]);
    let of_ranks = |values: fn(&Summary) -> &[f64]| Table(replicas.iter().flat_map(values).copied().collect(), shape);
    answer!(py, "PipelineSteps", {
        seconds: column(&totals, |step| step.seconds),
        compute: column(&totals, |step| step.compute),
        exposed: column(&totals, |step| step.exposed),
        bubble: column(&totals, |step| step.bubble),
        dp_wait: column(&totals, |step| step.dp_wait),
        pipeline_seconds: Table(replicas.iter().map(|replica| replica.seconds).collect(), [shape[0], shape[1]]),
        busy: of_ranks(|replica| &replica.busy),
        spans: of_ranks(|replica| &replica.spans),
        peak_activation: of_ranks(|replica| &replica.peak_activation),
        _schedule: schedule.as_str(),
        _question: question.bytes(py),
    })
}

/// Deals the micro-batches of a step to data-parallel ranks in equal counts, ordered for the schedule, so that the
/// slowest rank finishes early.
///
/// It deals by cost, then tries sorted orders, swaps and moves in the simulator. The result is never slower than
/// ``Packing.deal``, which ignores the schedule.
///
/// Args:
///     costs: seconds of all micro-batches of a step; float64[M], [M, stages] or [M, stages, 3] as for
///         ``simulate_pipeline``.
///     dp_size: data-parallel ranks; divides M.
///     schedule: see ``simulate_pipeline``.
///     num_stages: see ``simulate_pipeline``.
///     num_virtual_stages: see ``simulate_pipeline``.
///     p2p_seconds: one number, or float64[M].
///
/// Returns:
///     int64[dp_size, M / dp_size]: indices of each rank's micro-batches in the order of running. ``costs[order]`` are
///     the costs in this order. Ranks that pass the same costs get the same result.
///
/// Raises:
///     WlbError: ``dp_size`` does not divide M; otherwise as for ``simulate_pipeline``.
///
/// Simulates about a million ops (milliseconds), or four orders of each rank if that is more: at most 2^24 ops and one
/// order. Ranks beyond that keep the order of ``Packing.deal``.
///
/// Examples:
///     >>> import wlb
///     >>> wlb.order_micro_batches([4.0, 1.0, 2.0, 3.0], dp_size=2, num_stages=2)
///     array([[1, 0],
///            [3, 2]])
#[pyfunction]
#[pyo3(signature = (costs, *, dp_size = 1, schedule = "1f1b", num_stages, num_virtual_stages = None, p2p_seconds = None), text_signature = "(costs, *, dp_size=1, schedule='1f1b', num_stages, num_virtual_stages=1, p2p_seconds=0.0)")]
pub(crate) fn order_micro_batches<'py>(
    py: Python<'py>,
    costs: &Bound<'py, PyAny>,
    #[pyo3(from_py_with = arguments::dp_size)] dp_size: i64,
    schedule: &str,
    #[pyo3(from_py_with = arguments::num_stages)] num_stages: usize,
    num_virtual_stages: Given<'_, 'py>,
    p2p_seconds: Given<'_, 'py>,
) -> PyResult<Table<i64>> {
    let question = Question::read(0, costs, schedule, num_stages, num_virtual_stages, p2p_seconds, [None; 2])?;
    let total = question.options.num_micro_batches;
    let divides = usize::try_from(dp_size).ok().filter(|&dp_size| dp_size > 0 && total.is_multiple_of(dp_size));
    let Some(ranks) = divides else {
        return Err(raise(Error::Indivisible { argument: "dp_size", value: dp_size, total }));
    };
    let options = PipelineOptions { num_micro_batches: total / ranks, ..question.options };
    let place = || core::order_micro_batches(&options, &question.part(0)?.0, ranks);
    let order = run(py, RELEASE_FROM, place).map_err(|error| question.raise(error, 0))?;
    Ok(Table(order.into_iter().map(|micro_batch| micro_batch as i64).collect(), [ranks, total / ranks]))
}
