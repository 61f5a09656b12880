"""The report of demo and pack: plans side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wlb.cli.output.documents import describe_documents, document_sentences
from wlb.cli.output.report import Headline, Paragraphs, Picture, Report, origin
from wlb.cli.output.table import Table
from wlb.cli.packing import CP_SIZES, STRATEGIES, Comparison, CpBalance
from wlb.simulation.trained import Plan

Settings = Mapping[str, str | int | float | None]

_HEADLINES = (
    ("mean imbalance", "imbalance_mean", ".2f"),
    ("imbalance of the worst step", "imbalance_worst", ".2f"),
    ("iterations that a token waits, mean", "delay_mean", ".2f"),
    ("µs to plan a step, median", "planning_microseconds", ",.0f"),
)
_NOTES = (
    "g: global batches in the window of the fixed-length greedy.",
    "imbalance: work of the heaviest micro-batch, which everyone waits for, over the mean of its step (1 is"
    " perfect); over the steps before the flush at the end.",
    "delay: iterations from the arrival of a token's global batch to its training, over all tokens, flush"
    " included. A window of g batches cannot start before its last one has arrived: 0 to 2(g-1) iterations."
    " Reading g-1 batches ahead would hide g-1 of them; documents then train up to g-1 iterations before or"
    " after their turn.",
    "memory skew: most tokens of a micro-batch over the mean, mean over steps. planning: median per step.",
)


def packing_report(command: str, comparison: Comparison, *, settings: Settings, remark: str) -> Report:
    """The plans, the shown one beside the original; `remark` is on the queues, in words."""
    from wlb.cli.output.figures.packing import draw_comparison

    shown, plans = comparison.shown, comparison.plans
    before, after = plans[0].summary(), shown.summary()
    documents = describe_documents(comparison.documents, comparison.stream, comparison.setup.context)
    sentences = (*document_sentences(documents, comparison.setup, oversize=str(settings["oversize"])), remark)
    tables = (
        method_table(plans),
        Paragraphs(_NOTES, small=True),
        cp_table(comparison.balances, shown),
    )
    return Report(
        command=command,
        subject=shown.name,
        title=f"Work imbalance {before['imbalance_mean']:.2f} → {after['imbalance_mean']:.2f}",
        sentences=sentences,
        headlines=[Headline(label, f"{before[key]:{form}}", f"{after[key]:{form}}") for label, key, form in _HEADLINES],
        page=(Picture(draw_comparison(comparison), f"{command}.png"), *tables),
        terminal=(Paragraphs(sentences), *tables),
        numbers={
            "command": command,
            **origin(),
            "settings": settings,
            "documents": documents,
            "methods": [plan.summary() for plan in plans],
            "context_parallel": {
                "method": shown.name,
                "balance": [balance.summary() for balance in comparison.balances],
            },
        },
        facts={"Settings": {**settings, **_thresholds(plans)}, "Documents": documents},
    )


def _thresholds(plans: Sequence[Plan]) -> dict[str, str]:
    return {
        f"thresholds: {plan.name}": ", ".join(f"{threshold:,}" for threshold in plan.thresholds)
        for plan in plans
        if plan.thresholds
    }


def method_table(plans: Sequence[Plan]) -> Table:
    """Balance against delay, method by method."""
    rows = []
    for plan in plans:
        s = plan.summary()
        rows.append(
            (
                plan.name,
                *(f"{s[key]:.3f}" for key in ("imbalance_mean", "imbalance_p95", "imbalance_worst")),
                f"{s['delay_mean']:.2f}",
                *(f"{s[key]:,}" for key in ("delay_p99", "delay_max")),
                f"{s['memory_skew']:.2f}",
                f"{s['planning_microseconds']:,.0f}",
            )
        )
    return Table(
        title="Balance and delay",
        groups=(("", 1), ("imbalance", 3), ("delay", 3), ("memory", 1), ("planning", 1)),
        columns=("method", "mean", "p95", "worst", "mean", "p99", "max", "skew", "µs/step"),
        rows=tuple(rows),
        strong=frozenset(i for i, plan in enumerate(plans) if plan.waits),
    )


def cp_table(balances: Sequence[CpBalance], plan: Plan) -> Table:
    """A row per CP size, mean and worst of each strategy."""
    cells = {(b.cp_size, b.strategy): b.summary() for b in balances}
    return Table(
        title=f"Context parallelism: attention of the busiest rank over the mean rank ({plan.name})",
        groups=(("", 1), *((strategy.replace("_", " "), 2) for strategy in STRATEGIES)),
        columns=("CP", *("mean", "worst") * len(STRATEGIES)),
        rows=tuple(
            (
                str(size),
                *(f"{cells[size, strategy][key]:.3f}" for strategy in STRATEGIES for key in ("mean", "worst")),
            )
            for size in CP_SIZES
        ),
    )
