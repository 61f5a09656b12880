"""Columns of the tables in reports."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from wlb_tools.cluster.hardware import GIB
from wlb_tools.simulation import ATTENTION_RATES

Change = Literal["better", "worse"]
Better = Literal["more", "less"]


class Column(NamedTuple):
    """A column of numbers."""

    group: str  # heading over this and neighbouring columns
    heading: str
    form: str = ","  # format specification of the values
    unit: float = 1  # values are divided by it
    better: Better | None = None  # whether more or less is better; None: neither

    def change(self, before: Any, after: Any) -> Change | None:
        """Whether `after` is better or worse than `before`; None if both print alike or neither can be better."""
        if self.better is None or self.cell(before) == self.cell(after) or None in (before, after):
            return None
        if isinstance(before, list | tuple | str):
            return None
        return "better" if (after > before) == (self.better == "more") else "worse"

    def cell(self, value: Any) -> str:
        """A value as text: empty for None, and both ends for a band."""
        if value is None or isinstance(value, str):
            return value or ""
        if isinstance(value, list | tuple):
            return "-".join(f"{end:.3f}" for end in value)
        return f"{value if self.unit == 1 else value / self.unit:{self.form}}"


COLUMNS = {
    "plan": Column("", "plan"),
    "tokens_per_second": Column("speed", "tokens/s", ",.0f", better="more"),
    "step_seconds": Column("speed", "s", ".3g", better="less"),
    "gain": Column("speed", "gain", ".3f"),
    "gain_band": Column("speed", "band"),
    "speedup": Column("speed", "x", ".3f", better="more"),
    "speedup_flops": Column("speed", "FLOPs", ".3f", better="more"),
    "speedup_band": Column("speed", "band"),
    "model_flops_utilization": Column("speed", "MFU", ".1%", better="more"),
    "step_seconds_mean": Column("step", "s", ".3g", better="less"),
    "micro_batches_mean": Column("step", "n", ".3g"),
    "imbalance_mean": Column("imbalance", "mean", ".3f", better="less"),
    "imbalance_p95": Column("imbalance", "p95", ".3f", better="less"),
    "imbalance_worst": Column("imbalance", "worst", ".3f", better="less"),
    "imbalance_band": Column("imbalance", "band"),
    "micro_batch_imbalance_mean": Column("imbalance", "MB", ".3f", better="less"),
    "micro_batch_imbalance_band": Column("imbalance", "band"),
    "cp_imbalance": Column("imbalance", "CP", ".3f", better="less"),
    "lost_time": Column("lost", "time", ".3f", better="less"),
    "step_work_cv": Column("steps' work", "cv", ".3f", better="less"),
    "step_work_heaviest": Column("steps' work", "most", ".2f", better="less"),
    "delay_mean": Column("delay", "mean", ".2f", better="less"),
    "delay_p99": Column("delay", "p99", better="less"),
    "delay_max": Column("delay", "max", better="less"),
    "early_mean": Column("delay", "early", ".2f", better="less"),
    "memory_skew": Column("memory", "skew", ".2f", better="less"),
    "memory_skew_mean": Column("memory", "skew", ".2f", better="less"),
    "largest_micro_batch": Column("memory", "tokens", better="less"),
    "peak_bytes": Column("memory", "GiB", ".1f", GIB, better="less"),
    "planning_microseconds": Column("planning", "µs/step", ",.0f", better="less"),
    "share": Column("", "share", ".1%"),
    "heaviest": Column("", "heaviest", ",.6g"),
    "limit": Column("", "limit", ",.6g"),
    "compute": Column("", "compute", ".1%"),
    "cp_communication": Column("communication", "CP", ".1%", better="less"),
    "tp_communication": Column("communication", "TP", ".1%", better="less"),
    "ep_communication": Column("communication", "EP", ".1%", better="less"),
    "dp_communication": Column("communication", "DP", ".1%", better="less"),
    "cp_wait": Column("waiting", "slowest CP", ".1%", better="less"),
    "ep_wait": Column("waiting", "slowest EP", ".1%", better="less"),
    "bubble": Column("waiting", "bubble", ".1%", better="less"),
    "dp_wait": Column("waiting", "slowest DP", ".1%", better="less"),
    "most_lost": Column("", "most lost"),
    "read": Column("documents", "read"),
    "trained": Column("documents", "trained once"),
    "waiting": Column("documents", "waiting"),
    "tokens": Column("", "tokens trained"),
}
"""Columns by the key that their values have in a summary."""

RATES = f"if attention is {min(ATTENTION_RATES):g} to {max(ATTENTION_RATES):g} times as fast as assumed"

LOST_NOTE = (
    f"band: least and most, if attention runs at {', '.join(f'{rate:g}' for rate in ATTENTION_RATES)} times the"
    " assumed rate and the plans stay as they are. lost time: sum of the heaviest micro-batches of all steps over the"
    " sum of their means. steps' work: how much whole steps differ, as coefficient of variation (cv) and as heaviest"
    " over mean (most)."
)
