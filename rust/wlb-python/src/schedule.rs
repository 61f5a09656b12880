//! `wlb.simulate_pipeline`, `wlb.simulate_steps`, `wlb.order_micro_batches`.

use numpy::{PyArray1, PyArray2, PyArray3, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use wlb_core::Error;
use wlb_core::limits::{MAX_CELLS, MAX_STAGES};
use wlb_core::pipeline::{
    self as core, Buffers, Detail, Pipeline, PipelineOptions as Layout, Record, StepTotals, Summary, Times,
};

use crate::convert::{array, floats_of_shape, integer, size};
use crate::error::{raise, refuse, refuse_entry};
use crate::run::{DETACH_FROM, run};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PipelineTimeline>()?;
    module.add_class::<PipelineSteps>()?;
    module.add_function(wrap_pyfunction!(simulate_pipeline, module)?)?;
    module.add_function(wrap_pyfunction!(order_micro_batches, module)?)?;
    module.add_function(wrap_pyfunction!(simulate_steps, module)?)
}

/// What a simulation was asked for: arrays of one step of one pipeline, or of many with leading dimensions.
#[derive(Clone, PartialEq)]
struct Question {
    layout: Layout,
    /// `[*leading, m]`, `[*leading, m, p * v]` or `[*leading, m, p * v, 3]`.
    costs: Vec<f64>,
    shape: Vec<usize>,
    /// Leading dimensions, before that of the micro-batches.
    leading: usize,
    /// One value or `[*leading, m]`.
    p2p_seconds: Vec<f64>,
    /// `[*leading, m]`.
    activation: Option<Vec<f64>>,
    /// As `costs`.
    exposed: Option<Vec<f64>>,
}

/// The arguments of a simulation, as Python gives them.
struct Arguments<'a, 'py> {
    costs: &'a Bound<'py, PyAny>,
    schedule: &'a str,
    num_stages: &'a Bound<'py, PyAny>,
    num_virtual_stages: Option<&'a Bound<'py, PyAny>>,
    p2p_seconds: Option<&'a Bound<'py, PyAny>>,
    activation: Option<&'a Bound<'py, PyAny>>,
    exposed: Option<&'a Bound<'py, PyAny>>,
}

impl Question {
    fn read(arguments: &Arguments<'_, '_>, leading: usize) -> PyResult<Self> {
        let count = |argument, value: &Bound<'_, PyAny>, most: usize| size(argument, value, 1, most as i64);
        let schedule = arguments.schedule.parse().map_err(raise)?;
        let num_stages = count("num_stages", arguments.num_stages, MAX_STAGES)?;
        let virtual_stages = arguments.num_virtual_stages;
        let num_virtual_stages =
            virtual_stages.map_or(Ok(1), |value| count("num_virtual_stages", value, MAX_CELLS / num_stages))?;
        let (costs, shape) = floats_of_shape("costs", arguments.costs, leading + 1..=leading + 3)?;
        let layout = Layout { schedule, num_stages, num_virtual_stages, num_micro_batches: shape[leading] };
        if shape[leading + 1..] != [layout.total_stages(), 3][..shape.len() - leading - 1] {
            let stages = layout.total_stages();
            let micro_batches = if leading == 0 { "micro-batches" } else { "..., micro-batches" };
            let problem = format!(
                "has shape {shape:?}, but must be [{micro_batches}], [{micro_batches}, {stages}] (num_stages * \
                 num_virtual_stages), or that with 3 passes each"
            );
            return Err(refuse("costs", None, None, problem));
        }
        let like = |argument, object: Option<&Bound<'_, PyAny>>, expected: &[usize], or_one: bool| {
            let Some(object) = object else { return Ok(None) };
            let least = if or_one { 0 } else { expected.len() };
            let (values, found) = floats_of_shape(argument, object, least..=expected.len())?;
            if found == expected || or_one && found.is_empty() {
                return Ok(Some(values));
            }
            let problem = format!("has shape {found:?}, but costs ask for {expected:?}");
            Err(refuse(argument, None, None, problem))
        };
        let per_micro_batch = &shape[..=leading];
        let p2p_seconds = like("p2p_seconds", arguments.p2p_seconds, per_micro_batch, true)?.unwrap_or(vec![0.0]);
        let activation = like("activation", arguments.activation, per_micro_batch, false)?;
        let exposed = like("exposed", arguments.exposed, &shape, false)?;
        Ok(Self { layout, costs, shape, leading, p2p_seconds, activation, exposed })
    }

    /// Pipelines that it asks for.
    fn pipelines(&self) -> usize {
        self.shape[..self.leading].iter().product()
    }

    /// (micro-batch, stage) pairs of all of them.
    fn cells(&self) -> usize {
        self.pipelines() * self.layout.num_micro_batches * self.layout.total_stages()
    }

    fn detail(&self) -> Detail {
        [Detail::MicroBatch, Detail::Stage, Detail::Pass][self.shape.len() - self.leading - 1]
    }

    /// The `index`-th pipeline's times and activations.
    fn part(&self, index: usize) -> wlb_core::error::Result<(Times<'_>, Option<&[f64]>)> {
        let m = self.layout.num_micro_batches;
        let entries = self.detail().entries(m, self.layout.total_stages());
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
}

impl Question {
    /// The exception for what is wrong with one part, saying where in the whole.
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

    /// The arguments as a pickle holds them.
    fn reduce<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyDict>)> {
        let shaped = |values: &[f64], shape: &[usize]| PyArray1::from_slice(py, values).reshape(shape.to_vec());
        let per_micro_batch = &self.shape[..=self.leading];
        let arguments = PyDict::new(py);
        arguments.set_item("schedule", self.layout.schedule.as_str())?;
        arguments.set_item("num_stages", self.layout.num_stages)?;
        arguments.set_item("num_virtual_stages", self.layout.num_virtual_stages)?;
        match &self.p2p_seconds[..] {
            [seconds] => arguments.set_item("p2p_seconds", seconds)?,
            each => arguments.set_item("p2p_seconds", shaped(each, per_micro_batch)?)?,
        }
        if let Some(activation) = &self.activation {
            arguments.set_item("activation", shaped(activation, per_micro_batch)?)?;
        }
        if let Some(exposed) = &self.exposed {
            arguments.set_item("exposed", shaped(exposed, &self.shape)?)?;
        }
        Ok((shaped(&self.costs, &self.shape)?.into_any(), arguments))
    }
}

/// Simulates one step of one pipeline.
///
/// Every rank runs its ops in the schedule's order, each as soon as the rank is free and its input is there.
///
/// Args:
///     costs: seconds; float64[m], micro-batches through the whole model, forward and backward (:attr:`Packing.costs`): every
///         stage takes an equal part, and of that a third each the forward and the gradients of input and weights. Or
///         float64[m, stages], with ``stages = num_stages * num_virtual_stages``; or float64[m, stages, 3], with
///         forward, input gradient and weight gradient apart.
///     schedule: "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "interleaved_zero_bubble" or "zbv".
///     num_stages: pipeline ranks, p.
///     num_virtual_stages: stages on each rank, v; rank r has stages r, r + p, ... With "zbv" 2: r and 2p - 1 - r; with
///         "gpipe", "1f1b", "zb_h1" and "zb_h2" 1. The interleaved schedules take the micro-batches in
///         ``max(1, m // p)`` rounds, which must divide m.
///     p2p_seconds: latency from the end of an op to when a stage on another rank can start on what it sends; it
///         occupies neither. One number, or float64[m].
///     activation: float64[m], what a rank holds of a micro-batch from its forward to its weight gradient, over
///         all its stages; in any unit, such as tokens. 1 each without it.
///     exposed: like ``costs``: which part of them is communication that nothing hides. Changes no time.
///
/// Returns:
///     PipelineTimeline.
///
/// Raises:
///     WlbError: a shape that does not fit, a number that is negative or not finite, a layout that the schedule does not
///         take.
///
/// O(ops), that is O(m p v).
#[pyfunction]
#[pyo3(
    signature = (costs, *, schedule = "1f1b", num_stages, num_virtual_stages = None, p2p_seconds = None,
                 activation = None, exposed = None),
    text_signature = "(costs, *, schedule='1f1b', num_stages, num_virtual_stages=1, p2p_seconds=0.0, activation=None, \
                      exposed=None)"
)]
#[allow(clippy::too_many_arguments, reason = "keyword-only in Python")]
fn simulate_pipeline<'py>(
    py: Python<'py>,
    costs: &Bound<'py, PyAny>,
    schedule: &str,
    num_stages: &Bound<'py, PyAny>,
    num_virtual_stages: Option<&Bound<'py, PyAny>>,
    p2p_seconds: Option<&Bound<'py, PyAny>>,
    activation: Option<&Bound<'py, PyAny>>,
    exposed: Option<&Bound<'py, PyAny>>,
) -> PyResult<PipelineTimeline> {
    let arguments = Arguments { costs, schedule, num_stages, num_virtual_stages, p2p_seconds, activation, exposed };
    let question = Question::read(&arguments, 0)?;
    let simulate = || {
        let (times, activation) = question.part(0)?;
        Pipeline::new(&question.layout)?.simulate(&times, activation)
    };
    let timeline = run(py, question.cells(), simulate)?.map_err(|error| question.raise(error, 0))?;
    Ok(PipelineTimeline { question, timeline })
}

/// Simulates many steps of data-parallel replicas of a pipeline, which wait for each other at the end of each step.
///
/// As :func:`simulate_pipeline`, with two dimensions before that of the micro-batches, and without single ops: a few
/// numbers a step, tens of millions of ops a second.
///
/// Args:
///     costs: seconds; float64[steps, dp, m], or that with [..., stages] or [..., stages, 3].
///     schedule: see :func:`simulate_pipeline`.
///     num_stages: see there.
///     num_virtual_stages: see there.
///     p2p_seconds: one number, or float64[steps, dp, m].
///     activation: float64[steps, dp, m].
///     exposed: like ``costs``.
///
/// Returns:
///     PipelineSteps.
///
/// Raises:
///     WlbError: no replicas; and see :func:`simulate_pipeline`.
///
/// O(ops), that is O(steps dp m p v).
#[pyfunction]
#[pyo3(
    signature = (costs, *, schedule = "1f1b", num_stages, num_virtual_stages = None, p2p_seconds = None,
                 activation = None, exposed = None),
    text_signature = "(costs, *, schedule='1f1b', num_stages, num_virtual_stages=1, p2p_seconds=0.0, activation=None, \
                      exposed=None)"
)]
#[allow(clippy::too_many_arguments, reason = "keyword-only in Python")]
fn simulate_steps<'py>(
    py: Python<'py>,
    costs: &Bound<'py, PyAny>,
    schedule: &str,
    num_stages: &Bound<'py, PyAny>,
    num_virtual_stages: Option<&Bound<'py, PyAny>>,
    p2p_seconds: Option<&Bound<'py, PyAny>>,
    activation: Option<&Bound<'py, PyAny>>,
    exposed: Option<&Bound<'py, PyAny>>,
) -> PyResult<PipelineSteps> {
    let arguments = Arguments { costs, schedule, num_stages, num_virtual_stages, p2p_seconds, activation, exposed };
    let question = Question::read(&arguments, 2)?;
    let dp_size = question.shape[1];
    if dp_size == 0 {
        let problem = format!("has shape {:?}, but a step needs at least one replica", question.shape);
        return Err(refuse("costs", None, None, problem));
    }
    let simulate = || {
        let pipeline = Pipeline::new(&question.layout).map_err(|error| (error, 0))?;
        let mut buffers = Buffers::default();
        let mut one = |index| {
            let (times, activation) = question.part(index)?;
            pipeline.summarize(&times, activation, &mut buffers)
        };
        (0..question.pipelines()).map(|index| one(index).map_err(|error| (error, index))).collect::<Result<Vec<_>, _>>()
    };
    let replicas = run(py, question.cells(), simulate)?.map_err(|(error, part)| question.raise(error, part))?;
    let totals = replicas.chunks(dp_size).map(StepTotals::new).collect();
    Ok(PipelineSteps { question, replicas, totals })
}

/// Deals the micro-batches of a step to data-parallel ranks in equal counts, in an order that suits the schedule, so
/// that the slowest rank is done early.
///
/// Deals by cost, then tries sorted orders, swaps and moves in the simulator: never slower than
/// :meth:`Packing.deal`, which knows no schedule.
///
/// Args:
///     costs: seconds of all micro-batches of a step; float64[M], [M, stages] or [M, stages, 3] as for
///         :func:`simulate_pipeline`.
///     dp_size: data-parallel ranks; divides M.
///     schedule: see :func:`simulate_pipeline`.
///     num_stages: see there.
///     num_virtual_stages: see there.
///     p2p_seconds: one number, or float64[M].
///
/// Returns:
///     int64[dp_size, M / dp_size]: indices of each rank's micro-batches, the first of each row to go first. So
///     ``costs[order]`` is what the ranks run. The same on every rank that has the same costs.
///
/// Raises:
///     WlbError: ``dp_size`` does not divide M; and see :func:`simulate_pipeline`.
///
/// Simulates about a million ops (milliseconds), or four orders of each rank if those are more: at most 2^24 ops and one order.
/// Ranks beyond that keep the order of :meth:`Packing.deal`.
#[pyfunction]
#[pyo3(
    signature = (costs, *, dp_size = None, schedule = "1f1b", num_stages, num_virtual_stages = None, p2p_seconds = None),
    text_signature = "(costs, *, dp_size=1, schedule='1f1b', num_stages, num_virtual_stages=1, p2p_seconds=0.0)"
)]
fn order_micro_batches<'py>(
    py: Python<'py>,
    costs: &Bound<'py, PyAny>,
    dp_size: Option<&Bound<'py, PyAny>>,
    schedule: &str,
    num_stages: &Bound<'py, PyAny>,
    num_virtual_stages: Option<&Bound<'py, PyAny>>,
    p2p_seconds: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyArray2<i64>>> {
    let arguments =
        Arguments { costs, schedule, num_stages, num_virtual_stages, p2p_seconds, activation: None, exposed: None };
    let question = Question::read(&arguments, 0)?;
    let dp_size = dp_size.map_or(Ok(1), |dp_size| integer("dp_size", dp_size))?;
    let total = question.layout.num_micro_batches;
    let divides = usize::try_from(dp_size).ok().filter(|&dp_size| dp_size > 0 && total.is_multiple_of(dp_size));
    let Some(ranks) = divides else {
        return Err(raise(Error::Indivisible { argument: "dp_size", value: dp_size, total }));
    };
    let layout = Layout { num_micro_batches: total / ranks, ..question.layout };
    let place = || core::order_micro_batches(&layout, &question.part(0)?.0, ranks);
    let order = run(py, DETACH_FROM, place)?.map_err(|error| question.raise(error, 0))?;
    array(py, order.into_iter().map(|micro_batch| micro_batch as i64).collect()).reshape([ranks, total / ranks])
}

/// One step of one pipeline, op by op. Times are in seconds since the step began.
///
/// Every array is a fresh copy that the caller may keep or change.
#[pyclass(frozen, module = "wlb", name = "PipelineTimeline")]
pub(crate) struct PipelineTimeline {
    question: Question,
    timeline: core::Timeline,
}

impl PipelineTimeline {
    fn of_records<'py, T: numpy::Element>(
        &self,
        py: Python<'py>,
        get: impl Fn(&Record) -> T,
    ) -> Bound<'py, PyArray1<T>> {
        array(py, self.timeline.records.iter().map(get).collect())
    }

    fn of_ranks<'py>(&self, py: Python<'py>, values: &[f64]) -> Bound<'py, PyArray1<f64>> {
        PyArray1::from_slice(py, values)
    }
}

#[pymethods]
impl PipelineTimeline {
    /// What the numbers in :attr:`kinds` stand for.
    #[classattr]
    #[allow(non_snake_case, reason = "a constant")]
    fn KINDS() -> (&'static str, &'static str, &'static str, &'static str) {
        ("forward", "backward", "input_gradient", "weight_gradient")
    }

    /// The schedule's name.
    #[getter]
    fn schedule(&self) -> &'static str {
        self.question.layout.schedule.as_str()
    }

    /// Pipeline ranks.
    #[getter]
    fn num_stages(&self) -> usize {
        self.question.layout.num_stages
    }

    /// Stages on each rank.
    #[getter]
    fn num_virtual_stages(&self) -> usize {
        self.question.layout.num_virtual_stages
    }

    /// Micro-batches of the step.
    #[getter]
    fn num_micro_batches(&self) -> usize {
        self.question.layout.num_micro_batches
    }

    /// When the last op ends: the step, if the ranks wait for each other at its end.
    #[getter]
    fn seconds(&self) -> f64 {
        self.timeline.summary.seconds
    }

    /// Seconds from step to step if no rank waits for the others at the end of one: the longest of the spans. What the
    /// zero-bubble schedules are made for (Qi et al. 2023, section 4).
    #[getter]
    fn period_seconds(&self) -> f64 {
        self.timeline.summary.period()
    }

    /// Idle time over busy time, of all ranks: (p - 1) / m for equal micro-batches under "gpipe" and "1f1b".
    #[getter]
    fn bubble_ratio(&self) -> f64 {
        self.timeline.summary.bubble_ratio()
    }

    /// float64[p]: seconds that each rank computes, or communicates with nothing to hide it.
    #[getter]
    fn busy<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        self.of_ranks(py, &self.timeline.summary.busy)
    }

    /// float64[p]: the part of ``busy`` that is exposed communication.
    #[getter]
    fn exposed<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        self.of_ranks(py, &self.timeline.summary.exposed)
    }

    /// float64[p]: seconds that each rank is idle before the last op of all ends.
    #[getter]
    fn bubble<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        let summary = &self.timeline.summary;
        array(py, summary.busy.iter().map(|busy| summary.seconds - busy).collect())
    }

    /// float64[p]: seconds from each rank's first op to the end of its last.
    #[getter]
    fn spans<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        self.of_ranks(py, &self.timeline.summary.spans)
    }

    /// float64[p]: the most activation that each rank holds at a time, in the unit of ``activation``.
    #[getter]
    fn peak_activation<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        self.of_ranks(py, &self.timeline.summary.peak_activation)
    }

    /// int32[ops]: the rank of each op. Ops stand behind what they waited for, and those of a rank in its order.
    #[getter]
    fn ranks<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.of_records(py, |record| record.rank as i32)
    }

    /// int32[ops]: the stage of each op, from 0 to p * v - 1.
    #[getter]
    fn stages<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.of_records(py, |record| record.op.stage as i32)
    }

    /// int32[ops]: the micro-batch of each op.
    #[getter]
    fn micro_batches<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.of_records(py, |record| record.op.micro_batch as i32)
    }

    /// uint8[ops]: what each op computes: indices into ``KINDS``.
    #[getter]
    fn kinds<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u8>> {
        self.of_records(py, |record| record.op.kind as u8)
    }

    /// float64[ops]: when each op starts.
    #[getter]
    fn starts<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        self.of_records(py, |record| record.start)
    }

    /// float64[ops]: when each op ends.
    #[getter]
    fn ends<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        self.of_records(py, |record| record.end)
    }

    /// int64[...]: indices of ops that, one after the other, take the whole step. O(ops).
    #[getter]
    fn critical_path<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        array(py, self.timeline.critical_path().into_iter().map(|index| index as i64).collect())
    }

    /// Number of ops.
    fn __len__(&self) -> usize {
        self.timeline.records.len()
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Self>().is_ok_and(|other| other.get().question == self.question)
    }

    fn __repr__(&self) -> String {
        let Layout { schedule, num_stages: p, num_virtual_stages: v, num_micro_batches: m } = self.question.layout;
        let (schedule, seconds, bubble) = (schedule.as_str(), self.seconds(), self.bubble_ratio());
        format!(
            "PipelineTimeline(schedule={schedule:?}, num_stages={p}, num_virtual_stages={v}, num_micro_batches={m}, \
             seconds={seconds}, bubble_ratio={bubble:.4})"
        )
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Pickled<'py>)> {
        Ok((slf.get_type().getattr("_of")?, slf.get().question.reduce(slf.py())?))
    }

    #[staticmethod]
    fn _of<'py>(costs: &Bound<'py, PyAny>, arguments: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyAny>> {
        again(wrap_pyfunction!(simulate_pipeline, costs.py())?.as_any(), costs, arguments)
    }
}

/// Steps of data-parallel replicas of a pipeline. Times are in seconds.
///
/// ``compute``, ``exposed``, ``bubble`` and ``dp_wait`` are summed over all ranks of a step, and add up to ``seconds``
/// times ``dp * num_stages``. Every array is a fresh copy that the caller may keep or change.
#[pyclass(frozen, module = "wlb", name = "PipelineSteps")]
pub(crate) struct PipelineSteps {
    question: Question,
    /// Step by step, replica by replica.
    replicas: Vec<Summary>,
    totals: Vec<StepTotals>,
}

impl PipelineSteps {
    fn of_steps<'py>(&self, py: Python<'py>, get: impl Fn(&StepTotals) -> f64) -> Bound<'py, PyArray1<f64>> {
        array(py, self.totals.iter().map(get).collect())
    }

    fn of_ranks<'py>(&self, py: Python<'py>, get: impl Fn(&Summary) -> &[f64]) -> PyResult<Bound<'py, PyArray3<f64>>> {
        let values = self.replicas.iter().flat_map(|replica| get(replica).iter().copied()).collect();
        array(py, values).reshape([self.question.shape[0], self.question.shape[1], self.question.layout.num_stages])
    }
}

#[pymethods]
impl PipelineSteps {
    /// float64[steps]: until the slowest replica is done.
    #[getter]
    fn seconds<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        self.of_steps(py, |step| step.seconds)
    }

    /// float64[steps]: computing.
    #[getter]
    fn compute<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        self.of_steps(py, |step| step.compute)
    }

    /// float64[steps]: communicating with nothing to hide it.
    #[getter]
    fn exposed<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        self.of_steps(py, |step| step.exposed)
    }

    /// float64[steps]: idle before the own replica is done.
    #[getter]
    fn bubble<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        self.of_steps(py, |step| step.bubble)
    }

    /// float64[steps]: waiting for the slowest replica after that.
    #[getter]
    fn dp_wait<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        self.of_steps(py, |step| step.dp_wait)
    }

    /// float64[steps, dp]: until each replica is done.
    #[getter]
    fn pipeline_seconds<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<f64>>> {
        let values = self.replicas.iter().map(|replica| replica.seconds).collect();
        array(py, values).reshape([self.question.shape[0], self.question.shape[1]])
    }

    /// float64[steps, dp, p]: see :attr:`PipelineTimeline.busy`.
    #[getter]
    fn busy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray3<f64>>> {
        self.of_ranks(py, |replica| &replica.busy)
    }

    /// float64[steps, dp, p]: see :attr:`PipelineTimeline.spans`.
    #[getter]
    fn spans<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray3<f64>>> {
        self.of_ranks(py, |replica| &replica.spans)
    }

    /// float64[steps, dp, p]: see :attr:`PipelineTimeline.peak_activation`.
    #[getter]
    fn peak_activation<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray3<f64>>> {
        self.of_ranks(py, |replica| &replica.peak_activation)
    }

    /// Number of steps.
    fn __len__(&self) -> usize {
        self.totals.len()
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Self>().is_ok_and(|other| other.get().question == self.question)
    }

    fn __repr__(&self) -> String {
        let (steps, dp) = (self.question.shape[0], self.question.shape[1]);
        let seconds: f64 = self.totals.iter().map(|step| step.seconds).sum();
        format!(
            "PipelineSteps(schedule={:?}, steps={steps}, dp={dp}, seconds={seconds})",
            self.question.layout.schedule.as_str()
        )
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Pickled<'py>)> {
        Ok((slf.get_type().getattr("_of")?, slf.get().question.reduce(slf.py())?))
    }

    #[staticmethod]
    fn _of<'py>(costs: &Bound<'py, PyAny>, arguments: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyAny>> {
        again(wrap_pyfunction!(simulate_steps, costs.py())?.as_any(), costs, arguments)
    }
}

/// Costs, and the other arguments by name.
type Pickled<'py> = (Bound<'py, PyAny>, Bound<'py, PyDict>);

fn again<'py>(
    simulate: &Bound<'py, PyAny>,
    costs: &Bound<'py, PyAny>,
    arguments: &Bound<'py, PyDict>,
) -> PyResult<Bound<'py, PyAny>> {
    simulate.call(PyTuple::new(costs.py(), [costs])?, Some(arguments))
}
