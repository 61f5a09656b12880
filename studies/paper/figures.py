"""The pictures of the study: rust is the paper, blue is ours, the pale band is the sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from studies.paper import Result, Row
from studies.paper.page import decimals, number, published
from wlb_tools.command.output.figures.style import INK, NARROW, ORIGINAL, SMALLEST, WLB, WLB_PALE, drawing, wrapped

_ROW_HEIGHT = 0.36  # inches


def draw(result: Result, narrow: bool = False) -> Figure:
    """A panel for each quantity, and one for what the inputs do to the chief number; for a phone under each other."""
    quantities = _by_quantity(result)
    if narrow:
        return _draw_narrow(result, quantities)
    heights = [[_height(len(rows)) for rows in quantities.values()]]
    if result.influence:
        heights.append([_height(len(result.influence))])
    tallest = max(map(sum, heights))
    with drawing(7.4 * len(heights), tallest + 0.9) as figure:
        figure.suptitle(result.title, x=0.012, ha="left", size=14, weight="bold")
        columns = figure.add_gridspec(1, len(heights))

        def panels(column: int, width_ratios: tuple[float, ...]) -> list[list[Axes]]:
            own = heights[column]
            rest = [tallest - sum(own)] if tallest > sum(own) else []
            grid = columns[0, column].subgridspec(
                len(own + rest), len(width_ratios), height_ratios=own + rest, width_ratios=width_ratios, wspace=0
            )
            return [[figure.add_subplot(grid[i, j]) for j in range(len(width_ratios))] for i in range(len(own))]

        for (ax, text), (quantity, rows) in zip(panels(0, (1, 0.42)), quantities.items(), strict=True):
            _rows(ax, quantity, rows)
            _lines(ax, [row.name for row in rows])
            _numbers(text, rows, ax.get_ylim())
        if result.influence:
            ax = panels(1, (1,))[0][0]
            _influence(ax, result)
            _lines(ax, list(result.influence))
        figure.legend(handles=_handles(), loc="outside lower left", ncols=3, handletextpad=0.5)
    return figure


def _draw_narrow(result: Result, quantities: Mapping[str, Sequence[Row]]) -> Figure:
    """Panels under each other, and names over their rows: beside them there is no room."""
    counts = [*map(len, quantities.values())] + ([len(result.influence)] if result.influence else [])
    heights = [1.6 * _ROW_HEIGHT * count + 0.9 for count in counts]
    with drawing(NARROW, sum(heights) + 1.6) as figure:
        figure.suptitle(wrapped(result.title, narrow=True), x=0.012, ha="left", size=14, weight="bold")
        panels = figure.subplots(
            len(counts), 2, squeeze=False, height_ratios=heights, width_ratios=(1, 0.55), gridspec_kw={"wspace": 0}
        )
        for (ax, text), (quantity, rows) in zip(panels, quantities.items(), strict=False):
            _rows(ax, quantity, rows)
            _lines_under(ax, [row.name for row in rows])
            _numbers(text, rows, ax.get_ylim())
        if result.influence:
            ax, text = panels[-1]
            _influence(ax, result)
            _lines_under(ax, list(result.influence))
            text.set_axis_off()
        figure.legend(handles=_handles(), loc="outside lower left", handletextpad=0.5)
    return figure


def _by_quantity(result: Result) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in result.rows:
        found.setdefault(row.quantity, []).append(row)
    return found


def _handles() -> list[Any]:
    return [
        Line2D([], [], ls="none", marker="D", ms=7, mfc="none", mec=ORIGINAL, mew=2, label="paper"),
        Line2D([], [], ls="none", marker="o", ms=7, color=WLB, label="ours"),
        Patch(color=WLB_PALE, label="ours, over the sweep or samples"),
    ]


def _height(rows: int) -> float:
    return _ROW_HEIGHT * rows + 0.85


def _numbers(ax: Axes, rows: Sequence[Row], height: tuple[float, float]) -> None:
    """The paper's number and ours beside each row."""
    ax.set_axis_off()
    ax.set(xlim=(0, 1), ylim=height)
    style: Any = {"va": "center", "ha": "right", "size": SMALLEST}
    digits = decimals(rows)
    for y, row in enumerate(rows):
        ax.text(0.42, y, published(row.paper), color=ORIGINAL, **style)
        ax.text(0.98, y, number(row.ours, digits), color=WLB, weight="bold", **style)


def _rows(ax: Axes, quantity: str, rows: Sequence[Row]) -> None:
    """A line for each row: the band, ours, the paper's."""
    for y, row in enumerate(rows):
        if row.low is not None and row.high is not None:
            ax.barh(y, row.high - row.low, left=row.low, height=0.5, color=WLB_PALE, lw=0)
        ax.plot(row.ours, y, "o", ms=7, color=WLB, zorder=3)
        if row.paper:
            ax.plot(row.paper, y, "D", ms=7, mfc="none", mec=ORIGINAL, mew=2, zorder=4)
    shown = [value for row in rows for value in (row.paper, row.ours, row.low, row.high) if value]
    lowest, highest = min(shown), max(shown)
    if highest > 50 * lowest:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))  # powers have small exponents
        ax.set_xlim(lowest / 2, highest * 2)
    else:
        margin = 0.06 * (highest - lowest) or 0.05
        ax.set_xlim(lowest - margin, highest + margin)
        if 0.5 < lowest <= 1 < highest:
            ax.axvline(1, color=INK, lw=0.8, zorder=2)
    kinds = " / ".join(dict.fromkeys(row.kind for row in rows))
    ax.set_title(f"{quantity} ({kinds})", size=11.5)


def _influence(ax: Axes, result: Result) -> None:
    """How far each input alone moves the chief number."""
    chief = next(row for row in result.rows if row.name == result.influenced)
    for y, (low, high) in enumerate(result.influence.values()):
        ax.barh(y, high - low, left=low, height=0.55, color=WLB_PALE, lw=0)
    ax.axvline(chief.ours, color=WLB, lw=2)
    values = [chief.ours, *(value for pair in result.influence.values() for value in pair)]
    if chief.paper is not None:
        ax.axvline(chief.paper, color=ORIGINAL, lw=2, ls=(0, (4, 3)))
        values.append(chief.paper)
    margin = 0.06 * (max(values) - min(values)) or 0.05
    ax.set_xlim(min(values) - margin, max(values) + margin)
    ax.set_title(f"{result.influenced}: each input alone", size=11.5)


def _lines(ax: Axes, names: Sequence[str]) -> None:
    """Rows from top to bottom, with their names."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=True, axis="x")
    ax.grid(visible=False, axis="y")


def _lines_under(ax: Axes, names: Sequence[str]) -> None:
    """Rows from top to bottom, each under its name."""
    for y, name in enumerate(names):
        ax.text(0, y - 0.5, name, va="center", transform=ax.get_yaxis_transform(), color=INK, in_layout=False)
    ax.set_yticks([])
    ax.set_ylim(len(names) - 0.5, -0.8)
    ax.grid(visible=True, axis="x")
