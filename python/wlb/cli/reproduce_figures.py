"""The pictures of `wlb reproduce`: rust is the paper, blue is ours, the pale band is the sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from wlb.cli.figures import _STYLE, INK, ORIGINAL, WLB, WLB_PALE
from wlb.cli.reproduce_page import number
from wlb.reproduce import Result, Row

_ROW_HEIGHT = 0.36  # inches


def draw(result: Result) -> Figure:
    """A panel for each quantity, and one for what the inputs do to the chief number."""
    quantities = list(dict.fromkeys(row.quantity for row in result.rows))
    counts = [sum(row.quantity == quantity for row in result.rows) for quantity in quantities]
    left = sum(counts) * _ROW_HEIGHT + len(counts)
    right = len(result.influence) * _ROW_HEIGHT + 1
    wide = bool(result.influence)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(14 if wide else 9.5, max(left, right) + 0.9))
        figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
        figure.suptitle(result.title, x=0.012, ha="left", size=14, weight="bold")
        grid = figure.add_gridspec(1, 2 if wide else 1, width_ratios=(1.2, 1) if wide else (1,))
        panels = grid[0, 0].subgridspec(len(quantities), 1, height_ratios=[count + 1.2 for count in counts])
        for i, quantity in enumerate(quantities):
            _rows(figure.add_subplot(panels[i]), quantity, [row for row in result.rows if row.quantity == quantity])
        if wide:
            _influence(figure.add_subplot(grid[0, 1]), result)
        handles: list[Any] = [
            Line2D([], [], ls="none", marker="D", ms=7, mfc="none", mec=ORIGINAL, mew=2, label="paper"),
            Line2D([], [], ls="none", marker="o", ms=7, color=WLB, label="ours"),
            Patch(color=WLB_PALE, label="ours, over the sweep or samples"),
        ]
        figure.legend(handles=handles, loc="outside lower left", ncols=3, handletextpad=0.5)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # lay out once, not once a file
        return figure


def _rows(ax: Axes, quantity: str, rows: Sequence[Row]) -> None:
    """A line for each row: the band, ours, the paper's; the numbers at the right."""
    positive = [value for row in rows for value in (row.paper, row.ours, row.low, row.high) if value]
    right: Any = {"transform": ax.get_yaxis_transform(), "va": "center", "ha": "right", "size": 10.5}
    for y, row in enumerate(rows):
        if row.low is not None and row.high is not None:
            ax.barh(y, row.high - row.low, left=row.low, height=0.5, color=WLB_PALE, lw=0)
        ax.plot(row.ours, y, "o", ms=7, color=WLB, zorder=3)
        if row.paper:
            ax.plot(row.paper, y, "D", ms=7, mfc="none", mec=ORIGINAL, mew=2, zorder=4)
        ax.text(1.16, y, number(row.paper) or "–", color=ORIGINAL, **right)
        ax.text(1.32, y, number(row.ours), color=WLB, weight="bold", **right)
    if max(positive) > 50 * min(positive):
        ax.set_xscale("log")
    else:
        lowest, highest = min(positive), max(positive)
        ax.set_xlim(lowest - 0.06 * (highest - lowest), highest + 0.06 * (highest - lowest))
        if lowest < 1 < highest or lowest == 1:
            ax.axvline(1, color=INK, lw=0.8, zorder=2)
    _lines(ax, [row.name for row in rows])
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
    margin = 0.06 * (max(values) - min(values))
    ax.set_xlim(min(values) - margin, max(values) + margin)
    _lines(ax, list(result.influence))
    ax.set_title(f"{result.influenced}: each input alone", size=11.5)


def _lines(ax: Axes, names: Sequence[str]) -> None:
    """Rows from top to bottom, with their names."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=True, axis="x")
    ax.grid(visible=False, axis="y")
