"""The report of demo and pack: plans side by side."""

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
    ("mean imbalance", "imbalance_mean"),
    ("imbalance of the worst step", "imbalance_worst"),
    ("iterations that a token waits, mean", "delay_mean"),
    ("µs to plan a step, median", "planning_microseconds"),
)
_SHOWN = (
    *("imbalance_mean", "imbalance_p95", "imbalance_worst"),
    *("delay_mean", "delay_p99", "delay_max", "memory_skew", "planning_microseconds"),
)
_GRADED = ("imbalance_mean", "imbalance_band", "lost_time", "step_work_cv", "step_work_heaviest")
_NOTES = (
    "g: global batches in the window of the fixed-length greedy.",
    "imbalance: work of the heaviest micro-batch, which everyone waits for, over the mean of its step (1 is"
    " perfect); over the steps before the flush at the end.",
    "delay: iterations from the reading of a token to its training, over all tokens, flush"
    " included. A window of g batches cannot start before its last one has arrived: 0 to 2(g-1) iterations."
    " Reading g-1 batches ahead would hide g-1 of them; documents then train up to g-1 iterations before or"
    " after their turn.",
    "memory skew: most tokens of a micro-batch over the mean, mean over steps. planning: median per step.",
)
_COLUMN_NOTE = (
    "Every column has a barrier of its own: a step takes the sum over columns of its heaviest micro-batch in each, and"
    " imbalance is that over the sum of the means. lost time: the same of one column, summed over the steps before the"
    " flush. share: of the time of these steps. A column with a limit is memory, and takes no time."
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
    """The plans, the last one beside the first.

    Args:
        command: its name.
        stream: what was packed.
        setup: what the plans have in common.
        plans: the first is the original order.
        balance: of the last plan, see `wlb_tools.command.packing.cp_balance`.
        settings: of the command.
        remark: on the queues, in words.
        files: further files.
    """
    from wlb_tools.command.output.figures.packing import draw_comparison

    shown = plans[-1]
    before, after = plans[0].summary(), shown.summary()
    levels = {plan.name: listed(plan.thresholds, ", ") for plan in plans if plan.thresholds}
    if setup.cost_model is None:
        graded = [{**plan.summary(), "columns": plan.columns()} for plan in plans]
        table, notes = _column_table(plans, graded), (_COLUMN_NOTE, *_NOTES)
    else:
        graded, table = graded_table(plans, setup.cost_model)
        notes = (*_NOTES, LOST_NOTE)
    return Report(
        command=command,
        subject=shown.name,
        title=f"Work imbalance {before['imbalance_mean']:.2f} → {after['imbalance_mean']:.2f}",
        sentences=(*stream.in_words(), remark),
        headlines=[Headline.of(label, before[key], after[key], COLUMNS[key]) for label, key in _HEADLINES],
        blocks=(
            Picture(
                lambda narrow: draw_comparison(stream, setup, plans, balance, narrow=narrow),
                f"Lengths of documents, balance of {plans[0].name} and {shown.name}, delay, context parallelism",
                f"{command}.png",
            ),
            Table.of(
                "Balance and delay",
                "method",
                _SHOWN,
                [(p.name, p.summary(), p.waits) for p in plans],
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
    """Plans by costs that they were not made by: their summaries with the bands, and a table of them."""
    graded = [plan.summary() | plan.bands(cost_model) for plan in plans]
    rows = [(plan.name, of, plan.waits) for plan, of in zip(plans, graded, strict=True)]
    return graded, Table.of(f"The same plans, {RATES}", "method", _GRADED, rows, against_first=True)


def _column_table(plans: Sequence[PackedRun], graded: Sequence[Mapping[str, Any]]) -> Table:
    """A row per plan and column of its documents' costs."""
    rows = [
        (f"{plan.name}: column {of['column']}", of, plan.waits)
        for plan, of_plan in zip(plans, graded, strict=True)
        for of in of_plan["columns"]
    ]
    return Table.of("Columns of the documents' costs", "method", ("share", "lost_time", "heaviest", "limit"), rows)


def _cp_table(balance: Sequence[Mapping[str, Any]], plan: PackedRun) -> Table:
    """A row per CP size, mean and worst of each strategy."""
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
