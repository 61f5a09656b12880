"""Columns of what a plan is worth by costs that it was not made by, and of what the mean imbalance does not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wlb._core import CostModel
from wlb.cli.output.report import Column, Table
from wlb.simulation import ATTENTION_RATES
from wlb.simulation.trained import PackedRun

RATES = f"were attention {min(ATTENTION_RATES):g} to {max(ATTENTION_RATES):g} times as fast as assumed"

LOST = (
    Column("lost", "time", "lost_time", ".3f"),
    Column("steps' work", "cv", "step_work_cv", ".3f"),
    Column("steps' work", "most", "step_work_heaviest", ".2f"),
)
"""Time lost, and the spread of work between steps."""

_GRADED = (
    Column("imbalance", "mean", "imbalance_mean", ".3f"),
    Column("imbalance", "band", "imbalance_ends", "s"),
    *LOST,
)

LOST_WORDS = (
    "lost time: the sum of the steps' heaviest micro-batches over the sum of their means, so that heavy steps weigh"
    " more. steps' work: coefficient of variation, and the heaviest over the mean; no packing of single steps evens"
    " that out."
)
LOST_NOTE = (
    f"band: least and most, over attention at {', '.join(f'{rate:g}' for rate in ATTENTION_RATES)} times the assumed"
    f" rate, by which nothing was planned. {LOST_WORDS}"
)


def ends(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary, with every band in words as well."""
    bands = {key.removesuffix("_band"): value for key, value in summary.items() if key.endswith("_band")}
    return {**summary, **{f"{key}_ends": f"{least:.3f}-{most:.3f}" for key, (least, most) in bands.items()}}


def graded_table(plans: Sequence[PackedRun], cost_model: CostModel) -> tuple[list[dict[str, Any]], Table, str]:
    """Plans by costs that they were not made by: their summaries with the bands, a table of them, and what it says."""
    graded = [plan.summary() | plan.bands(cost_model) for plan in plans]
    models = len(cost_model.models)
    costs = RATES if models == 1 else f"under each of the {models} cost models, one of which is true"
    rows = [(plan.name, ends(of), plan.waits) for plan, of in zip(plans, graded, strict=True)]
    note = LOST_NOTE if models == 1 else f"band: least and most, over the cost models. {LOST_WORDS}"
    return graded, Table.of(f"The same plans, {costs}", "method", _GRADED, rows), note
