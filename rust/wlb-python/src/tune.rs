//! `wlb.tune`.

use std::cell::RefCell;

use pyo3::prelude::*;
use wlb_core::stream::{PackerConfig, Release, StepShape};
use wlb_core::tune::{Sample, TuneOptions, Tuned, TunedPoint};
use wlb_core::{CostModel, Error, Lengths};

use crate::arguments;
use crate::cost::read_costs_if_any;
use crate::error::raise;
use crate::packer::{column_limits, config, table};
use crate::packing::ranks;
use crate::plain::Tuple;
use crate::results::answer;

/// Finds on a sample of lengths what a ``Packer`` should hold back: a delay price, or thresholds of outlier queues.
///
/// Without ``num_queues`` it finds the price of delay for ``release="adaptive"``. It runs the packer over the sample at
/// geometrically spaced prices and at the default, then at prices near the one where the mean delay passes the limit.
/// The best of many prices on the same steps is merely the luckiest, so each half of the documents judges the prices
/// found on the other. The prices that lose the least time on both halves and the default are then judged on three
/// other orders of all documents. If a half has less than twelve global batches, the prices that lose the least time on
/// all documents are judged on the other orders alone; such a price may suit only these documents.
///
/// With ``num_queues`` it finds ``outlier_thresholds``. It runs the packer with every combination of up to
/// ``num_queues`` geometrically spaced thresholds, then with thresholds near the best (WLB-LLM, section 4.3).
///
/// Deterministic. Documents over ``max_document_tokens`` are split. Releases the GIL.
///
/// Args:
///     lengths: int[n], tokens, in arrival order; some tens of global batches or more.
///     num_micro_batches, max_tokens, cost_model, max_delay, max_document_tokens, method, dp_size, sync, max_documents:
///         as for ``Packer``. With ``dp_size``, imbalance and lost time are those of ranks that wait for each other.
///     num_queues: most thresholds, 0 to 4; None for a delay price.
///     costs: float64[n] or float64[n, r], cost of each document, instead of ``cost_model``, for a packer with
///         ``cost_columns=r``; imbalance is then that of a step over all columns that take time. A delay price needs
///         one column.
///     limits: float64[r], with ``costs``, as for ``Packer``.
///     max_mean_delay: most mean delay of a token, in steps.
///     tokens_per_batch: tokens of a global batch; default ``num_micro_batches * max_document_tokens``. Do not set it
///         to ``num_micro_batches * max_tokens``: full micro-batches leave no room for balance.
///     max_step_cost: as for ``Packer``; for a delay price.
///     max_early: int from 0 to 1024, most steps by which a document may come before its turn, as for
///         ``BalancedBatchSampler``; delays then count steps before the turn, too. For a delay price; needs
///         ``cost_model``.
///
/// Returns:
///     TuneResult: the choice, and the Pareto front of balance and delay on the sample. Thresholds: those with the
///     least mean imbalance within the delay limit. A price: the one that loses the least time on the other orders,
///     within the delay limit there and on the sample. It is the default (0.03) unless another price saves 0.01 of lost
///     time in every order, is no worse on a half, and has no worse a worst step there and on the sample. If the
///     default exceeds the delay limit, the bound on the worst step holds if any price keeps it. ``judged`` has all
///     judged prices, the default among them. If nothing keeps the limit, it is the choice with the least delay.
///
/// Raises:
///     WlbError: wrong lengths, costs or options, or no documents; ``max_step_cost`` or ``max_early`` with
///         ``num_queues``; several columns of costs for a price.
///
/// A price takes one run of the packer for each of about 32 prices, another for each price within the limit, and three
/// for each judged price (nine or more). Thresholds take one run for each of about 110 choices (two queues) or 380
/// (three).
///
/// Examples:
///     >>> import numpy as np
///     >>> import wlb
///     >>> lengths = np.random.default_rng(0).lognormal(6, 1.2, 4000).astype(int).clip(1, 8192)
///     >>> cost = wlb.CostModel(attention=1.0, linear=1000.0)
///     >>> wlb.tune(lengths, num_micro_batches=8, max_tokens=12288, cost_model=cost).best
///     TunedPoint(delay_price=0.46822, imbalance_mean=1.0277, delay_mean=0.528, delay_max=10)
///     >>> wlb.tune(lengths, num_micro_batches=8, max_tokens=12288, cost_model=cost, num_queues=1).best
///     TunedPoint(thresholds=[4539], imbalance_mean=1.0667, delay_mean=0.341, delay_max=4)
#[pyfunction]
#[pyo3(signature = (
    lengths, *, num_micro_batches, max_tokens, cost_model = None, num_queues = None, costs = None, limits = None,
    max_mean_delay = 0.6, max_delay = None, max_document_tokens = None, tokens_per_batch = None,
    method = "var_length", max_step_cost = None, dp_size = None, sync = None, max_documents = None, max_early = 0
))]
#[allow(clippy::too_many_arguments, reason = "keywords in Python")]
pub(crate) fn tune<'py>(
    py: Python<'py>,
    #[pyo3(from_py_with = arguments::lengths)] lengths: Lengths,
    #[pyo3(from_py_with = arguments::num_micro_batches)] num_micro_batches: usize,
    #[pyo3(from_py_with = arguments::max_tokens)] max_tokens: i32,
    #[pyo3(from_py_with = read_costs_if_any)] cost_model: Option<CostModel>,
    #[pyo3(from_py_with = arguments::optional::num_queues)] num_queues: Option<usize>,
    #[pyo3(from_py_with = arguments::optional::costs)] costs: Option<arguments::Table>,
    #[pyo3(from_py_with = arguments::optional::limits)] limits: Option<Vec<f64>>,
    #[pyo3(from_py_with = arguments::max_mean_delay)] max_mean_delay: f64,
    #[pyo3(from_py_with = arguments::optional::max_delay)] max_delay: Option<u64>,
    #[pyo3(from_py_with = arguments::optional::max_document_tokens)] max_document_tokens: Option<i32>,
    #[pyo3(from_py_with = arguments::optional::tokens_per_batch)] tokens_per_batch: Option<i64>,
    method: &str,
    #[pyo3(from_py_with = arguments::optional::max_step_cost)] max_step_cost: Option<f64>,
    #[pyo3(from_py_with = arguments::optional::dp_size)] dp_size: Option<i64>,
    sync: Option<&str>,
    #[pyo3(from_py_with = arguments::optional::max_documents)] max_documents: Option<usize>,
    #[pyo3(from_py_with = arguments::max_early)] max_early: i64,
) -> PyResult<Bound<'py, PyAny>> {
    let wrong = |argument, requirement| Err(raise(Error::Combination { argument, requirement }));
    match (&cost_model, &costs) {
        (Some(_), Some(_)) => return wrong("costs", "take the place of cost_model: pass one of the two"),
        (None, None) => return wrong("cost_model", "is missing: pass it, or costs of the documents"),
        (Some(_), None) if limits.is_some() => return wrong("limits", "limit columns of costs: pass costs"),
        (Some(_), None) | (None, Some(_)) => {}
    }
    let max_cost = max_step_cost;
    let shape = StepShape { ranks: ranks(dp_size, sync)?, max_documents, padding: None, max_cost, tokens_per_batch };
    let release = if num_queues.is_some() { Release::Fifo } else { Release::Adaptive };
    let packer = config(release, num_micro_batches, max_tokens, cost_model, max_delay, max_document_tokens, method)?;
    let limits = column_limits(costs.as_ref().map(|(_, _, columns)| *columns), limits)?;
    let options =
        TuneOptions { packer: PackerConfig { shape, limits, ..packer }, num_queues, max_mean_delay, max_early };
    let sample = Sample { lengths: &lengths, costs: table(&costs) };
    let tuned = listening(py, |keep_going| wlb_core::tune::tune(sample, &options, keep_going))?;
    let points = |points: &[TunedPoint]| points.iter().map(|each| point(py, each)).collect::<PyResult<_>>();
    answer!(py, "TuneResult", tuned {
        evaluated;
        best: point(py, &tuned.best)?,
        pareto: Tuple(points(&tuned.pareto)?),
        judged: Tuple(points(&tuned.judged)?),
    })
}

/// Tunes without the GIL, and handles signals between two candidates, so that Ctrl-C ends the search.
fn listening(
    py: Python<'_>,
    tune: impl FnOnce(&dyn Fn() -> bool) -> wlb_core::Result<Tuned> + Send,
) -> PyResult<Tuned> {
    let (tuned, raised) = py.detach(|| {
        let raised = RefCell::new(None);
        let keep_going = || {
            *raised.borrow_mut() = Python::attach(|py| py.check_signals()).err();
            raised.borrow().is_none()
        };
        (tune(&keep_going), raised.into_inner())
    });
    tuned.map_err(|error| raised.unwrap_or_else(|| raise(error)))
}

fn point<'py>(py: Python<'py>, point: &TunedPoint) -> PyResult<Bound<'py, PyAny>> {
    answer!(py, "TunedPoint", point {
        delay_price, imbalance_mean, imbalance_p95, imbalance_worst, delay_mean, delay_max, memory_skew_mean, lost_time;
        thresholds: Tuple(point.thresholds.clone()),
        held_out_lost_time: point.held_out.map(|held_out| held_out.lost_time),
        held_out_worst: point.held_out.map(|held_out| held_out.imbalance_worst),
        held_out_delay: point.held_out.map(|held_out| held_out.delay_mean),
    })
}
