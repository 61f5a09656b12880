//! `wlb.rl.plan`: rounds of reinforcement learning.

use pyo3::prelude::*;
use wlb_core::ranks::{self as core, RoundOptions, Steps};
use wlb_core::{CostModel, Lengths};

use crate::arguments;
use crate::convert::choice;
use crate::cost::{document_costs, pricing, read_costs_if_any};
use crate::error::{raise, refuse};
use crate::gil::run;
use crate::packing::ranks;
use crate::plain::{Array, column};
use crate::results::answer;

/// Plans a round of samples; see ``wlb.rl.plan``.
#[pyfunction]
#[pyo3(signature = (
    lengths, *, dp_size, max_tokens, cost_model, costs, num_steps, prompts_per_step, samples_per_step, step_samples,
    groups, together, classes, class_rounds, sync, order, oversize, equal_samples, max_samples, num_micro_batches,
    multiple_of
))]
#[allow(clippy::too_many_arguments, reason = "keywords in Python")]
pub(crate) fn plan_round<'py>(
    py: Python<'py>,
    #[pyo3(from_py_with = arguments::lengths)] lengths: Lengths,
    #[pyo3(from_py_with = arguments::dp_size)] dp_size: i64,
    #[pyo3(from_py_with = arguments::max_tokens)] max_tokens: i32,
    #[pyo3(from_py_with = read_costs_if_any)] cost_model: Option<CostModel>,
    #[pyo3(from_py_with = arguments::optional::costs)] costs: Option<arguments::Table>,
    #[pyo3(from_py_with = arguments::optional::num_steps)] num_steps: Option<usize>,
    #[pyo3(from_py_with = arguments::optional::prompts_per_step)] prompts_per_step: Option<usize>,
    #[pyo3(from_py_with = arguments::optional::samples_per_step)] samples_per_step: Option<usize>,
    step_samples: &str,
    #[pyo3(from_py_with = arguments::optional::groups)] groups: Option<Vec<i64>>,
    together: &str,
    #[pyo3(from_py_with = arguments::optional::classes)] classes: Option<Vec<i64>>,
    #[pyo3(from_py_with = arguments::class_rounds)] class_rounds: bool,
    sync: &str,
    order: &str,
    oversize: &str,
    #[pyo3(from_py_with = arguments::equal_samples)] equal_samples: bool,
    #[pyo3(from_py_with = arguments::optional::max_samples)] max_samples: Option<usize>,
    #[pyo3(from_py_with = arguments::number_or_fewest)] num_micro_batches: (Option<usize>, bool),
    #[pyo3(from_py_with = arguments::multiple_of)] multiple_of: usize,
) -> PyResult<Bound<'py, PyAny>> {
    let steps = match (num_steps, prompts_per_step, samples_per_step) {
        (None, None, None) => Steps::Number(1),
        (Some(number), None, None) => Steps::Number(number),
        (None, Some(prompts), None) => Steps::Prompts(prompts),
        (None, None, Some(samples)) => Steps::Samples(samples),
        _ => {
            let message = "give one of num_steps, prompts_per_step and samples_per_step";
            return Err(refuse("num_steps", None, None, message));
        }
    };
    let (num_micro_batches, fewest) = num_micro_batches;
    if num_micro_batches.is_some() && multiple_of != 1 {
        return Err(refuse("multiple_of", None, None, "a multiple other than 1 needs num_micro_batches=None"));
    }
    let Some(ranks) = ranks(Some(dp_size), Some(sync))? else {
        return Err(refuse("dp_size", None, None, "is needed"));
    };
    let options = RoundOptions {
        ranks,
        max_tokens,
        steps,
        step_samples: choice(step_samples)?,
        groups: groups.unwrap_or_default(),
        together: choice(together)?,
        classes: classes.unwrap_or_default(),
        class_rounds,
        order: choice(order)?,
        oversize: choice(oversize)?,
        equal_samples,
        max_samples,
        num_micro_batches,
        fewest,
        multiple_of,
    };
    let given = document_costs(costs, None, lengths.len())?;
    let pricing = pricing(cost_model.as_ref(), given.as_ref(), None)?;
    let plan = run(py, lengths.len(), || core::plan_round(&lengths, &options, pricing)).map_err(raise)?;
    let number = |&number: &usize| number as i64;
    let sample = |&sample: &u32| i64::from(sample);
    answer!(py, "RoundPlan", {
        dp_size: plan.ranks.dp_size,
        sync: plan.ranks.sync.as_str(),
        together: options.together.as_str(),
        num_micro_batches: column(&plan.per_rank, number),
        samples: column(&plan.samples, sample),
        offsets: column(&plan.offsets, number),
        costs: Array(plan.costs.as_slice()),
        tokens: Array(plan.tokens.as_slice()),
        step_costs: Array(plan.step_costs.as_slice()),
        lower_bounds: Array(plan.bounds.as_slice()),
        parted_bounds: Array(plan.parted_bounds.as_slice()),
        alone: column(&plan.alone, sample),
        imbalance: plan.imbalance(),
        _costliest: column(&plan.costliest, sample),
        _groups: Array(if options.groups.is_empty() { (0..lengths.len() as i64).collect() } else { options.groups }),
        _digest: plan.digest(),
    })
}
