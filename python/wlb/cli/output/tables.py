"""The figures as tables: once, for the terminal and for the page."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table as RichTable

import wlb
from wlb.cli.output.context_parallel import CP_SIZES, STRATEGIES, CpBalance
from wlb.cli.packing import Plan


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column names the row, the others are numbers."""

    title: str
    groups: tuple[tuple[str, int], ...]  # a heading over the columns, and how many it covers
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: frozenset[int] = frozenset()  # rows to make stand out

    def for_terminal(self) -> RichTable:
        """Rich has no cells that span columns: a group's heading stands over the first of its columns."""
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)  # fits 80 columns
        table.title, table.title_style, table.title_justify = self.title, "bold", "left"
        headings = [text for group, width in self.groups for text in [group, *[""] * (width - 1)]]
        for i, (heading, column) in enumerate(zip(headings, self.columns, strict=True)):
            table.add_column(f"{heading}\n{column}", justify="left" if i == 0 else "right", no_wrap=True)
        for i, row in enumerate(self.rows):
            table.add_row(*row, style="bold cyan" if i in self.strong else None)
        return table


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


METHOD_NOTES = (
    "g: global batches in the window of the fixed-length greedy.",
    "imbalance: work of the heaviest micro-batch, which everyone waits for, over the mean of its step (1 is"
    " perfect); over the steps before the flush at the end.",
    "delay: iterations from the arrival of a token's global batch to its training, over all tokens, flush"
    " included. A window of g batches cannot start before its last one has arrived: 0 to 2(g-1) iterations."
    " Reading g-1 batches ahead would hide g-1 of them; documents then train up to g-1 iterations before or"
    " after their turn.",
    "memory skew: most tokens of a micro-batch over the mean, mean over steps. planning: median per step.",
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


def waiting_table(title: str, found: wlb.TuneResult) -> Table:
    """The Pareto front of thresholds or prices: no other choice has both less delay and less imbalance."""
    return Table(
        title=f"{title}: less delay or less imbalance",
        groups=(("", 1), ("imbalance", 3), ("delay", 2), ("memory", 1)),
        columns=(
            "thresholds" if found.delay_price is None else "price of delay",
            "mean",
            "p95",
            "worst",
            "mean",
            "max",
            "skew",
        ),
        rows=tuple(
            (
                waiting_choice(point),
                *(f"{x:.3f}" for x in (point.imbalance_mean, point.imbalance_p95, point.imbalance_worst)),
                f"{point.delay_mean:.2f}",
                f"{point.delay_max:,}",
                f"{point.memory_skew_mean:.2f}",
            )
            for point in found.pareto
        ),
        strong=frozenset(i for i, point in enumerate(found.pareto) if point == found.best),
    )


def waiting_choice(point: wlb.TunedPoint) -> str:
    """Thresholds, or a price."""
    if point.delay_price is not None:
        return f"{point.delay_price:,.0f}" if point.delay_price >= 100 else f"{point.delay_price:g}"
    return thresholds_choice(point.thresholds)


def thresholds_choice(thresholds: Sequence[int]) -> str:
    """Thresholds in a cell."""
    return " ".join(f"{threshold:,}" for threshold in thresholds) or "none"
