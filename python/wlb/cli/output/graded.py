"""Columns of what a plan is worth by costs that it was not made by, and of what the mean imbalance does not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wlb.cli.output.report import Column
from wlb.simulation import ATTENTION_RATES

RATES = f"were attention {min(ATTENTION_RATES):g} to {max(ATTENTION_RATES):g} times as fast as assumed"

LOST = (
    Column("lost", "time", "lost_time", ".3f"),
    Column("steps' work", "cv", "step_work_cv", ".3f"),
    Column("steps' work", "most", "step_work_heaviest", ".2f"),
)
"""Time lost, and the spread of work between steps."""

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
