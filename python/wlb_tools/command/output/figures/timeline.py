"""A picture of a step: what every rank of every pipeline does when, and what it waits for.

Blue goes forward; rust comes back, darker where only the weights' gradient is left. Idle time is bare, and hatched
where all of a pipeline waits for a slower one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import Affine2D
from numpy.typing import NDArray

import wlb
from wlb_tools.command.output.figures.style import (
    IDLE,
    INK,
    NARROW,
    ON_DARK,
    ON_PALE,
    PAPER,
    SMALLEST,
    SOFT,
    STRIPES,
    WIDE,
    drawing,
    named_rows,
    wrapped,
)

_COLOURS = ("#5b9bc8", "#d9775f", "#e59a82", "#a84a33")  # forward, backward, input gradient, weight gradient
_LABELS = ("forward", "backward", "input gradient", "weight gradient")
_PALE = "#ccdfee"
_HEIGHT = 0.84  # of a rank's bars in its row
MAX_ROWS = 64
_Floats = NDArray[np.floating[Any]]


def draw_timelines(
    timelines: wlb.PipelineTimeline | Sequence[wlb.PipelineTimeline],
    *,
    title: str | None = None,
    pipelines: str = "DP",
    narrow: bool = False,
) -> Figure:
    """One bar per op, one row per pipeline rank, one block of rows per data-parallel rank.

    Numbers are micro-batches, written where there is room. Later stages of a rank (interleaved schedules) are paler.
    Ops on the critical path of the slowest pipeline have a dark edge.

    Args:
        timelines: of one pipeline, or of each data-parallel rank.
        title: above the picture; otherwise what the step's time went into.
        pipelines: what each is of.
        narrow: for a phone.

    Raises:
        WlbError: no timeline, or more than 64 rows.
    """
    each = [timelines] if isinstance(timelines, wlb.PipelineTimeline) else list(timelines)
    ranks = sum(timeline.num_stages for timeline in each)
    if not 1 <= ranks <= MAX_ROWS:
        raise wlb.WlbError(f"timelines: {ranks} rows; a picture has from 1 to {MAX_ROWS}")
    step = max(timeline.seconds for timeline in each)
    height = 1.5 + 0.36 * ranks + 0.12 * len(each)
    with drawing(NARROW if narrow else WIDE, height + (1.6 if narrow else 0)) as figure:
        ax = figure.subplots()
        ticks, labels, top = [], [], 0.0
        slowest = max(range(len(each)), key=lambda i: each[i].seconds)
        for index, timeline in enumerate(each):
            _pipeline(figure, ax, timeline, top, step, critical=index == slowest)
            for rank in range(timeline.num_stages):
                ticks.append(top + rank + 0.5)
                labels.append(
                    f"{pipelines} {index} · {rank if narrow else f'PP {rank}'}" if len(each) > 1 else f"PP {rank}"
                )
            top += timeline.num_stages + 0.35
        ax.set_yticks(ticks, labels)
        ax.set(xlim=(0, step or 1), ylim=(top - 0.35, 0))
        named_rows(ax)
        scale, unit = _unit(step)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x * scale:g}"))
        ax.xaxis.set_major_locator(MaxNLocator(4 if narrow else 9, steps=[1, 2, 5, 10]))
        ax.set_xlabel(f"time since the step began ({unit})")
        heading = wrapped(title or _summary(each, step), narrow=narrow, characters=38)
        if narrow:
            figure.suptitle(heading, x=0.012, ha="left", size=13, weight="bold", color=INK)
            figure.legend(
                handles=_handles(each, step), loc="outside lower left", ncols=2, handlelength=1.2, labelcolor=SOFT
            )
        else:
            ax.set_title(heading, pad=30)
            _legend(ax, _handles(each, step))
    return figure


def _pipeline(
    figure: Figure, ax: Axes, timeline: wlb.PipelineTimeline, top: float, step: float, *, critical: bool
) -> None:
    starts, stops, rows = timeline.starts, timeline.ends, timeline.ranks
    ranks, seconds = np.arange(timeline.num_stages), np.full(timeline.num_stages, timeline.seconds)
    _bars(ax, _boxes(0 * seconds, seconds, top + ranks), facecolor=IDLE, linewidth=0)
    if timeline.seconds < step:
        wait = _boxes(seconds, np.full(ranks.size, step), top + ranks)
        _bars(ax, wait, facecolor="none", edgecolor=STRIPES, hatch="////", linewidth=0)
    boxes = _boxes(starts, stops, top + rows)
    chunks = timeline.stages // timeline.num_stages
    paler = 0.45 * chunks / max(1, timeline.num_virtual_stages - 1)
    colours = colours_of(timeline.kinds, paler)
    for colour in np.unique(colours, axis=0):
        alike = boxes[(colours == colour).all(axis=1)]
        _bars(ax, alike, facecolor=tuple(colour), edgecolor=PAPER, linewidth=0.6)
    if critical:
        _bars(ax, boxes[timeline.critical_path], facecolor="none", edgecolor=INK, linewidth=1.3)
    points = figure.get_figwidth() * 72 * 0.9  # that the step's time spans, about
    sizes = (stops - starts) / (step or 1) * points
    shown = np.flatnonzero(sizes > 6 + 7 * np.char.str_len(timeline.micro_batches.astype(str)))
    if shown.size:
        # Numbers as shapes: texts take longer.
        numbers = PathCollection(
            [_number(int(micro_batch)) for micro_batch in timeline.micro_batches[shown]],
            offsets=np.stack([(starts + stops)[shown] / 2, top + rows[shown] + 0.5], axis=1),
            offset_transform=ax.transData,
            transform=Affine2D().scale(1 / 72) + figure.dpi_scale_trans,
            facecolors=legible(colours[shown]),
            linewidths=0,
            in_layout=False,
        )
        ax.add_collection(numbers)


@functools.cache
def _number(number: int) -> Path:
    """Outline of a number's digits, in points, around the origin."""
    digits = TextPath((0, 0), str(number), size=SMALLEST, prop=FontProperties(family="DejaVu Sans"))
    box = digits.get_extents()
    return Path(digits.vertices - [box.x0 + box.width / 2, box.y0 + box.height / 2], digits.codes)


def _boxes(left: _Floats, right: _Floats, row: _Floats) -> _Floats:
    """float[n, 4, 2]: corners of bars in rows that begin there."""
    low, high = row + (1 - _HEIGHT) / 2, row + (1 + _HEIGHT) / 2
    corners = (left, low), (right, low), (right, high), (left, high)
    return np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)


def _bars(ax: Axes, boxes: _Floats, **style: Any) -> None:
    """All of one style as one shape: that many shapes would take most of the time."""
    ax.add_patch(PathPatch(Path.make_compound_path_from_polys(boxes), in_layout=False, **style))


def _summary(pipelines: Sequence[wlb.PipelineTimeline], step: float) -> str:
    scale, unit = _unit(step)
    ranks = sum(timeline.num_stages for timeline in pipelines)
    total = ranks * step or 1.0
    bubble = sum(float(timeline.bubble.sum()) for timeline in pipelines) / total
    wait = sum(timeline.num_stages * (step - timeline.seconds) for timeline in pipelines) / total
    parts = [f"{pipelines[0].schedule}: {step * scale:.3g} {unit}", f"{bubble:.1%} bubble"]
    if len(pipelines) > 1:
        parts.append(f"{wait:.1%} waiting for the slowest DP rank")
    return ", ".join(parts)


def colours_of(kinds: NDArray[np.integer[Any]], paler: _Floats) -> _Floats:
    """float[n, 3]: colours of passes, so much nearer to white."""
    colours = np.asarray([to_rgb(colour) for colour in _COLOURS])[kinds]
    return np.asarray(colours + (1 - colours) * paler[:, None])


def legible(colours: _Floats) -> NDArray[np.str_]:
    """Colours of texts on bars of these colours: contrast 4.5 at least."""
    return np.where(_luminance(colours) < 0.18, ON_DARK, ON_PALE)


def _luminance(colours: _Floats) -> _Floats:
    """Relative luminance of sRGB colours, float[n, 3] from 0 to 1, as contrasts are computed from it."""
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    return np.asarray(linear @ (0.2126, 0.7152, 0.0722))


def _handles(pipelines: Sequence[wlb.PipelineTimeline], step: float) -> list[Patch]:
    kinds = sorted({int(kind) for timeline in pipelines for kind in np.unique(timeline.kinds)})
    handles = [Patch(facecolor=_COLOURS[kind], label=_LABELS[kind]) for kind in kinds]
    if any(timeline.num_virtual_stages > 1 for timeline in pipelines):
        handles.append(Patch(facecolor=_PALE, label="paler: later stage of the rank"))
    handles.append(Patch(facecolor=IDLE, label="pipeline bubble"))
    if any(timeline.seconds < step for timeline in pipelines):
        handles.append(Patch(facecolor="none", edgecolor=STRIPES, hatch="////", lw=0, label="waits for DP"))
    handles.append(Patch(facecolor="none", edgecolor=INK, lw=1.3, label="critical path"))
    return handles


def _legend(ax: Axes, handles: Sequence[Patch]) -> None:
    style: Any = {"loc": "lower left", "bbox_to_anchor": (-0.005, 1.0), "ncols": len(handles), "borderaxespad": 0.2}
    ax.legend(handles=handles, handlelength=1.2, columnspacing=1.4, labelcolor=SOFT, **style)


def _unit(seconds: float) -> tuple[float, str]:
    """Factor and name of the unit in which a time is easy to read."""
    for factor, name in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return factor, name
    return 1.0, "s"
