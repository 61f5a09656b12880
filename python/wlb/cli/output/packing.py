"""The report of demo and pack: plans side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wlb.cli.inputs.stream import Stream
from wlb.cli.output.documents import describe_documents, document_sentences
from wlb.cli.output.graded import graded_table
from wlb.cli.output.report import Block, Column, Headline, Paragraphs, Picture, Report, Table
from wlb.cli.packing import CP_SIZES, STRATEGIES
from wlb.cli.words import listed
from wlb.simulation import ATTENTION_RATES
from wlb.simulation.methods import Setup
from wlb.simulation.trained import PackedRun

_HEADLINES = (
    ("mean imbalance", "imbalance_mean", ".2f"),
    ("imbalance of the worst step", "imbalance_worst", ".2f"),
    ("iterations that a token waits, mean", "delay_mean", ".2f"),
    ("µs to plan a step, median", "planning_microseconds", ",.0f"),
)
_COLUMNS = (
    Column("imbalance", "mean", "imbalance_mean", ".3f"),
    Column("imbalance", "p95", "imbalance_p95", ".3f"),
    Column("imbalance", "worst", "imbalance_worst", ".3f"),
    Column("delay", "mean", "delay_mean", ".2f"),
    Column("delay", "p99", "delay_p99"),
    Column("delay", "max", "delay_max"),
    Column("memory", "skew", "memory_skew", ".2f"),
    Column("planning", "µs/step", "planning_microseconds", ",.0f"),
)
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
COLUMN_NOTE = (
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
        balance: of the last plan, see :func:`wlb.cli.packing.cp_balance`.
        settings: of the command.
        remark: on the queues, in words.
        files: further files.
    """
    from wlb.cli.output.figures.packing import draw_comparison

    shown = plans[-1]
    before, after = plans[0].summary(), shown.summary()
    documents = describe_documents(stream, setup.context)
    thresholds = {f"thresholds: {p.name}": listed(p.thresholds, ", ") for p in plans if p.thresholds}
    if setup.cost_model is None:
        columns = [plan.columns() for plan in plans]
        graded = [{**plan.summary(), "columns": of} for plan, of in zip(plans, columns, strict=True)]
        closer: tuple[Block, ...] = (_column_table(plans, columns), Paragraphs((COLUMN_NOTE, *_NOTES), small=True))
    else:
        graded, table, note = graded_table(plans, setup.cost_model)
        closer = (table, Paragraphs((*_NOTES, note), small=True))
    return Report(
        command=command,
        subject=shown.name,
        title=f"Work imbalance {before['imbalance_mean']:.2f} → {after['imbalance_mean']:.2f}",
        sentences=(*document_sentences(documents, setup, oversize=settings["oversize"]), remark),
        headlines=[Headline(label, f"{before[key]:{form}}", f"{after[key]:{form}}") for label, key, form in _HEADLINES],
        blocks=(
            Picture(draw_comparison(stream, setup, plans, balance), f"{command}.png"),
            Table.of("Balance and delay", "method", _COLUMNS, [(p.name, p.summary(), p.waits) for p in plans]),
            *closer,
            _cp_table(balance, shown),
        ),
        numbers={
            "settings": settings,
            "documents": documents,
            "attention_rates": list(ATTENTION_RATES) if len(getattr(setup.cost_model, "models", ())) == 1 else None,
            "methods": graded,
            "context_parallel": {"method": shown.name, "balance": balance},
        },
        facts={"Settings": {**settings, **thresholds}, "Documents": documents},
        files=files or {},
    )


def _column_table(plans: Sequence[PackedRun], columns: Sequence[Sequence[Mapping[str, Any]]]) -> Table:
    """A row per plan and column of its documents' costs."""
    shown = (
        Column("", "share", "share", ".1%"),
        Column("", "lost time", "lost_time", ".3f"),
        Column("", "heaviest", "heaviest", ",.6g"),
        Column("", "limit", "limit", ",.6g"),
    )
    rows = [
        (f"{plan.name}: column {of['column']}", of, plan.waits)
        for plan, of_plan in zip(plans, columns, strict=True)
        for of in of_plan
    ]
    return Table.of("Columns of the documents' costs", "method", shown, rows)


def _cp_table(balance: Sequence[Mapping[str, Any]], plan: PackedRun) -> Table:
    """A row per CP size, mean and worst of each strategy."""
    cells: dict[int, dict[str, float]] = {size: {} for size in CP_SIZES}
    for of in balance:
        cells[of["cp_size"]] |= {f"{of['strategy']} {key}": of[key] for key in ("mean", "worst")}
    columns = [
        Column(strategy.replace("_", " "), key, f"{strategy} {key}", ".3f")
        for strategy in STRATEGIES
        for key in ("mean", "worst")
    ]
    title = f"Context parallelism: attention of the busiest rank over the mean rank ({plan.name})"
    return Table.of(title, "CP", columns, [(str(size), values, False) for size, values in cells.items()])
