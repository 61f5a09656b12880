"""The report of `wlb demo` and `wlb pack`: plans side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wlb._core import CostModel
from wlb_tools.command.inputs.stream import Stream
from wlb_tools.command.output.columns import COLUMNS, LOST_NOTE, RATES, Column
from wlb_tools.command.output.report import Headline, Paragraphs, Picture, Report, Table
from wlb_tools.command.packing import CP_SIZES, STRATEGIES
from wlb_tools.command.words import listed
from wlb_tools.simulation import ATTENTION_RATES
from wlb_tools.simulation.methods import Setup
from wlb_tools.simulation.trained import PackedRun

_HEADLINES = (
    ("speed for the same tokens", "speedup"),
    ("mean imbalance", "imbalance_mean"),
    ("imbalance of the worst step", "imbalance_worst"),
    ("steps that a token waits, mean", "delay_mean"),
    ("µs to plan a step, median", "planning_microseconds"),
)
_SHOWN = (
    "speedup",
    *("imbalance_mean", "imbalance_p95", "imbalance_worst"),
    *("delay_mean", "delay_p99", "delay_max", "memory_skew", "planning_microseconds"),
)
_GRADED = ("imbalance_mean", "imbalance_band", "lost_time", "step_work_cv", "step_work_heaviest")
_NOTES = (
    "speed: tokens trained in the time of the heaviest micro-batches, over those of the first plan, if every"
    " micro-batch has ranks of its own (data parallelism). `wlb simulate` and `wlb advise` know pipelines, rounds and a"
    " cluster.",
    "fixed length: documents of so many steps are packed at once, and cut at the end of a context.",
    "imbalance: work of the heaviest micro-batch over the mean of its step; 1 is perfect. All ranks wait for the"
    " heaviest micro-batch. The steps of the flush at the end are left out.",
    "delay: steps from reading a token to training it, over all tokens, with the flush. Packing g steps at once starts"
    " when the last of them has arrived, so tokens wait 0 to 2(g-1) steps. Reading g-1 steps ahead would hide g-1 of"
    " these; documents would then train up to g-1 steps before or after their turn.",
    "memory skew: tokens of the largest micro-batch over the mean, averaged over steps. planning: median of a step.",
)
_COLUMN_NOTE = (
    "Ranks wait for each other in every column. A step takes the sum, over columns, of its heaviest micro-batch in the"
    " column; imbalance is that time over the sum of the columns' means. lost time: the heaviest micro-batches of one"
    " column over its means, summed over the steps before the flush. share: part of these steps' time. A column with a"
    " limit is memory and takes no time."
)


def packing_report(
    command: str,
    stream: Stream,
    setup: Setup,
    plans: Sequence[PackedRun],
    balance: Sequence[Mapping[str, Any]],
    *,
    settings: Mapping[str, Any],
    remark: str,
    files: Mapping[str, Callable[[Path], None]] | None = None,
) -> Report:
    """Makes the report, which compares the last plan with the first.

    Args:
        command: name of the command.
        stream: documents that were packed.
        setup: settings that all plans share.
        plans: plans to compare; the first is the original order.
        balance: context-parallel balance of the last plan, see `wlb_tools.command.packing.cp_balance`.
        settings: settings of the command.
        remark: sentence about the queues.
        files: further files by name, each with a function that writes it.
    """
    from wlb_tools.command.output.figures.packing import draw_comparison

    shown = plans[-1]
    per_token = {plan.name: plan.cost_per_token for plan in plans}
    speeds = {name: per_token[plans[0].name] / cost if cost else 1.0 for name, cost in per_token.items()}
    summaries = {plan.name: {"speedup": speeds[plan.name], **plan.summary()} for plan in plans}
    before, after = summaries[plans[0].name], summaries[shown.name]
    levels = {plan.name: listed(plan.thresholds, ", ") for plan in plans if plan.thresholds}
    if setup.cost_model is None:
        graded = [{**summaries[plan.name], "columns": plan.columns()} for plan in plans]
        table, notes = _column_table(plans, graded), (_COLUMN_NOTE, *_NOTES)
    else:
        graded, table = graded_table(plans, setup.cost_model)
        graded = [{"speedup": speeds[plan.name], **of} for plan, of in zip(plans, graded, strict=True)]
        notes = (*_NOTES, LOST_NOTE)
    return Report(
        command=command,
        subject=shown.name,
        title=f"{after['speedup']:.2f} times the speed for the same tokens",
        sentences=(*stream.in_words(), remark),
        headlines=[Headline.of(label, before[key], after[key], COLUMNS[key]) for label, key in _HEADLINES],
        blocks=(
            Picture(
                lambda narrow: draw_comparison(stream, setup, plans, balance, narrow=narrow),
                f"Lengths of documents, balance of {plans[0].name} and {shown.name}, delay, context parallelism",
                f"{command}.png",
            ),
            Table.of(
                "Speed, balance and delay",
                "method",
                _SHOWN,
                [(p.name, summaries[p.name], p.waits) for p in plans],
                against_first=True,
            ),
            table,
            Paragraphs(notes, small=True),
            _cp_table(balance, shown),
        ),
        facts={
            "Settings": settings,
            **({"Thresholds": levels} if levels else {}),
            "Documents": stream.described(),
        },
        numbers={
            "attention_rates": None if setup.cost_model is None else list(ATTENTION_RATES),
            "methods": graded,
            "context_parallel": {"method": shown.name, "balance": balance},
        },
        files=files or {},
    )


def graded_table(plans: Sequence[PackedRun], cost_model: CostModel) -> tuple[list[dict[str, Any]], Table]:
    """Evaluates plans with attention faster and slower than the cost model says; returns summaries and a table."""
    graded = [plan.summary() | plan.bands(cost_model) for plan in plans]
    rows = [(plan.name, of, plan.waits) for plan, of in zip(plans, graded, strict=True)]
    return graded, Table.of(f"The same plans, {RATES}", "method", _GRADED, rows, against_first=True)


def _column_table(plans: Sequence[PackedRun], graded: Sequence[Mapping[str, Any]]) -> Table:
    """Table with a row for each plan and each column of the documents' costs."""
    rows = [
        (f"{plan.name}: column {of['column']}", of, plan.waits)
        for plan, of_plan in zip(plans, graded, strict=True)
        for of in of_plan["columns"]
    ]
    return Table.of("Columns of the documents' costs", "method", ("share", "lost_time", "heaviest", "limit"), rows)


def _cp_table(balance: Sequence[Mapping[str, Any]], plan: PackedRun) -> Table:
    """Table with a row for each context-parallel size: mean and worst imbalance of each strategy."""
    cells: dict[int, dict[str, float]] = {size: {} for size in CP_SIZES}
    for of in balance:
        cells[of["cp_size"]] |= {f"{of['strategy']} {key}": of[key] for key in ("mean", "worst")}
    columns = {
        f"{strategy} {key}": Column(strategy.replace("_", " "), key, ".3f")
        for strategy in STRATEGIES
        for key in ("mean", "worst")
    }
    title = f"Context parallelism: attention of the busiest rank over the mean rank ({plan.name})"
    return Table.of(title, "CP", columns, [(str(size), values, False) for size, values in cells.items()], columns)
