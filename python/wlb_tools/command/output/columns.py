"""Columns of numbers that reports show, each declared once."""

from __future__ import annotations

from typing import Any, NamedTuple

from wlb_tools.cluster.hardware import GIB
from wlb_tools.simulation import ATTENTION_RATES


class Column(NamedTuple):
    """The heading of its group, its own, the format of its values, and what they are divided by."""

    group: str
    heading: str
    form: str = ","
    unit: float = 1

    def cell(self, value: Any) -> str:
        """A value as text: nothing for None, and a band by its ends."""
        if value is None or isinstance(value, str):
            return value or ""
        if isinstance(value, list | tuple):
            return "-".join(f"{end:.3f}" for end in value)
        return f"{value if self.unit == 1 else value / self.unit:{self.form}}"


COLUMNS = {
    "plan": Column("", "plan"),
    "tokens_per_second": Column("speed", "tokens/s", ",.0f"),
    "step_seconds": Column("speed", "s", ".3g"),
    "gain": Column("speed", "gain", ".3f"),
    "gain_band": Column("speed", "band"),
    "speedup": Column("speed", "x", ".3f"),
    "speedup_flops": Column("speed", "FLOPs", ".3f"),
    "speedup_band": Column("speed", "band"),
    "model_flops_utilization": Column("speed", "MFU", ".1%"),
    "step_seconds_mean": Column("step", "s", ".3g"),
    "micro_batches_mean": Column("step", "n", ".3g"),
    "imbalance_mean": Column("imbalance", "mean", ".3f"),
    "imbalance_p95": Column("imbalance", "p95", ".3f"),
    "imbalance_worst": Column("imbalance", "worst", ".3f"),
    "imbalance_band": Column("imbalance", "band"),
    "micro_batch_imbalance_mean": Column("imbalance", "MB", ".3f"),
    "micro_batch_imbalance_band": Column("imbalance", "band"),
    "cp_imbalance": Column("imbalance", "CP", ".3f"),
    "lost_time": Column("lost", "time", ".3f"),
    "step_work_cv": Column("steps' work", "cv", ".3f"),
    "step_work_heaviest": Column("steps' work", "most", ".2f"),
    "delay_mean": Column("delay", "mean", ".2f"),
    "delay_p99": Column("delay", "p99"),
    "delay_max": Column("delay", "max"),
    "early_mean": Column("delay", "early", ".2f"),
    "memory_skew": Column("memory", "skew", ".2f"),
    "memory_skew_mean": Column("memory", "skew", ".2f"),
    "largest_micro_batch": Column("memory", "tokens"),
    "peak_bytes": Column("memory", "GiB", ".1f", GIB),
    "planning_microseconds": Column("planning", "µs/step", ",.0f"),
    "share": Column("", "share", ".1%"),
    "heaviest": Column("", "heaviest", ",.6g"),
    "limit": Column("", "limit", ",.6g"),
    "compute": Column("", "compute", ".1%"),
    "cp_communication": Column("communication", "CP", ".1%"),
    "tp_communication": Column("communication", "TP", ".1%"),
    "ep_communication": Column("communication", "EP", ".1%"),
    "dp_communication": Column("communication", "DP", ".1%"),
    "cp_wait": Column("waiting", "slowest CP", ".1%"),
    "ep_wait": Column("waiting", "slowest EP", ".1%"),
    "bubble": Column("waiting", "bubble", ".1%"),
    "dp_wait": Column("waiting", "slowest DP", ".1%"),
    "most_lost": Column("", "most lost"),
    "read": Column("documents", "read"),
    "trained": Column("documents", "trained once"),
    "waiting": Column("documents", "waiting"),
    "tokens": Column("", "tokens trained"),
}
"""By the keys of summaries."""

RATES = f"if attention is {min(ATTENTION_RATES):g} to {max(ATTENTION_RATES):g} times as fast as assumed"

LOST_NOTE = (
    f"band: least and most, if attention runs at {', '.join(f'{rate:g}' for rate in ATTENTION_RATES)} times the"
    " assumed rate and the plans stay as they are. lost time: sum of the heaviest micro-batches of all steps over the"
    " sum of their means. steps' work: how much whole steps differ, as coefficient of variation (cv) and as heaviest"
    " over mean (most)."
)
