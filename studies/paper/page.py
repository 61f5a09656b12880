"""What the study shows: tables for the terminal and one HTML file that loads nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from studies.paper import SWEEP, Result, Row
from wlb_tools.command.output.report import Block, Headline, Paragraphs, Picture, Report, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HOW = (
    "measured: taken with a clock, or counted, on this machine. simulated: a predicted time of the paper's cluster; no"
    " GPU ran. emulated: predicted under a protocol as near the paper's as what was published allows.",
    "least and greatest: over a sweep of every input that is not published, each alone and all together; where a clock"
    " ran, 5 % and 95 % of its samples. width: between them; inside: whether the paper's number is. recovered: how far"
    " ours is above 1, as a share of how far the paper's is.",
)


def tables(result: Result) -> list[Table]:
    """A table for each quantity, then the reasons."""
    made: list[Table] = []
    for quantity in dict.fromkeys(row.quantity for row in result.rows):
        rows = [row for row in result.rows if row.quantity == quantity]
        digits = decimals(rows)
        made.append(
            Table(
                title=f"{result.title}: {quantity}" if not made else quantity,
                groups=(("", 1), ("paper", 1), ("ours", 4), ("paper's", 2), ("", 1)),
                columns=("", "", "central", "least", "greatest", "width", "inside", "recovered", "how"),
                rows=tuple(_cells(row, digits) for row in rows),
            )
        )
    made += (Table(facts.title, facts.columns, facts.rows) for facts in result.facts)
    if result.influence:
        ranges = tuple((name, number(low), number(high)) for name, (low, high) in result.influence.items())
        title = f"{result.influenced}: over the values of each input alone"
        made.append(Table(title, ("", "least", "greatest"), ranges))
    return made


def misses(made: Sequence[Result]) -> tuple[str, ...]:
    """How many of the published numbers that are predicted here lie in our bands, and which do not.

    Only rows of the sweep have a band in this sense: nothing without one, and not the solver's few samples. What was
    measured is left out: the machines differ.
    """
    rows = [
        (result, row) for result in made for row in result.rows if row.kind != "measured" and row.inside is not None
    ]
    rows = [(result, row) for result, row in rows if row.low_at != row.high_at]
    if not rows:
        return ()
    outside = [
        f"{result.name} {row.name} {published(row.paper)} (ours {number(row.low, 3)} to {number(row.high, 3)})"
        for result, row in rows
        if not row.inside
    ]
    said = (
        f"Of {len(rows)} rows with a published number that is predicted here, {len(rows) - len(outside)} have it"
        " between least and greatest. A wide band says little: read its width first."
    )
    return (f"{said} Outside: {'; '.join(outside)}." if outside else said,)


def decimals(rows: Sequence[Row]) -> int:
    """Two, or three where a number of the paper has three."""
    return 3 if any(row.paper is not None and round(row.paper, 2) != row.paper for row in rows) else 2


def published(value: float | None) -> str:
    """A number as the paper gives it."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else number(value, 2 if round(value, 2) == value else 3)


def number(value: float | None, digits: int = 2) -> str:
    """Decimals where they say something."""
    if value is None:
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{digits}f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def _cells(row: Row, digits: int) -> tuple[str, ...]:
    ours = (number(value, digits) for value in (row.ours, row.low, row.high, row.width))
    inside = {None: "", True: "yes", False: "no"}[row.inside]
    recovered = "" if row.recovered is None else f"{row.recovered:.0%}"
    return (row.name, published(row.paper), *ours, inside, recovered, row.kind)


def report(made: Sequence[Result], draw: Callable[[Result, bool], Figure], settings: Mapping[str, Any]) -> Report:
    """The report: of every result its picture, its notes and its tables.

    Args:
        made: the results.
        draw: draws one for a screen, or with True for a phone.
        settings: of the study.
    """
    blocks: list[Block] = []
    for result in made:
        label = f"{result.name}, the paper's numbers beside ours"
        picture = Picture(functools.partial(draw, result), label, f"{result.name}.png")
        blocks += [picture, *tables(result), Paragraphs(result.notes, small=True)]
    return Report(
        command="reproduce",
        subject=", ".join(result.name for result in made),
        title="The papers' tables and figures beside ours",
        sentences=(*HOW, *misses(made)),
        headlines=[
            Headline(f"{row.name}: paper, ours", published(row.paper), number(row.ours), "·")
            for result in made
            for row in result.rows
            if row.name == result.influenced and row.paper is not None
        ],
        blocks=blocks,
        details=[inputs()],
        numbers={"settings": settings, "results": [result.as_json() for result in made]},
        facts={"Settings": settings},
    )


def inputs() -> Table:
    """What is not published, and what is assumed instead."""
    return Table(
        title="Inputs that are not published",
        columns=("", "central", "swept", "why"),
        rows=tuple(
            (one.label, _text(one.field, one.central), ", ".join(map(str, one.values)), one.reason) for one in SWEEP
        ),
    )


def _text(field: str, value: object) -> str:
    return {"max_contexts": "GPU memory", "attention_efficiency": "profiled"}.get(field, str(value))
