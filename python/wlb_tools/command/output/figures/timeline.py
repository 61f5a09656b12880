"""The timelines of a step: when each pipeline rank computes, and what it waits for.

Forward passes are blue and backward passes rust; separate input and weight gradients are ochre and violet. Idle time is
light grey, and hatched where a whole pipeline waits for a slower one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
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
    PAPER,
    PASSES,
    SMALLEST,
    SOFT,
    STRIPES,
    WIDE,
    drawing,
    named_rows,
    wrapped,
)

LABELS = ("forward", "backward", "input gradient", "weight gradient")
# Parts of a rank's row, from 0 to 1: the bars, and the line under ops on the critical path.
BARS, CRITICAL = (0.06, 0.84), (0.87, 0.97)
GAP = 0.35  # between the rows of two pipelines
MAX_ROWS = 64
_Floats = NDArray[np.floating[Any]]


def draw_timelines(
    timelines: wlb.PipelineTimeline | Sequence[wlb.PipelineTimeline],
    *,
    title: str | None = None,
    pipelines: str = "DP",
    numbers: Sequence[int] | None = None,
    narrow: bool = False,
) -> Figure:
    """One bar per op, one row per pipeline rank, one block of rows per data-parallel rank.

    Bars show the number of their micro-batch if there is room. In interleaved schedules, later stages of a rank have
    stronger colours.
    Ops on the critical path of the slowest pipeline are underlined.

    Args:
        timelines: timeline of one pipeline, or of each data-parallel rank.
        title: title of the picture; default: the schedule, its time, and the share of idle time.
        pipelines: name of a pipeline, such as "DP".
        numbers: number of each pipeline; default: its index.
        narrow: whether the picture is for a phone.

    Raises:
        WlbError: no timeline, or more than 64 rows.
    """
    each = [timelines] if isinstance(timelines, wlb.PipelineTimeline) else list(timelines)
    ranks = sum(timeline.num_stages for timeline in each)
    numbers = range(len(each)) if numbers is None else numbers
    if not 1 <= ranks <= MAX_ROWS:
        raise wlb.WlbError(f"timelines: {ranks} rows; a picture has from 1 to {MAX_ROWS}")
    step = max(timeline.seconds for timeline in each)
    height = 1.5 + 0.36 * ranks + 0.12 * len(each)
    with drawing(NARROW if narrow else WIDE, height + (1.6 if narrow else 0)) as figure:
        ax = figure.subplots()
        ticks, labels, top = [], [], 0.0
        slowest = max(range(len(each)), key=lambda i: each[i].seconds)
        for index, (number, timeline) in enumerate(zip(numbers, each, strict=True)):
            _pipeline(figure, ax, timeline, top, step, critical=index == slowest)
            for rank in range(timeline.num_stages):
                ticks.append(top + rank + sum(BARS) / 2)
                labels.append(
                    f"{pipelines} {number} · {rank if narrow else f'PP {rank}'}" if len(each) > 1 else f"PP {rank}"
                )
            top += timeline.num_stages + GAP
        ax.set_yticks(ticks, labels)
        ax.set(xlim=(0, step or 1), ylim=(top - GAP, 0))
        named_rows(ax)
        scale, unit = unit_of(step)
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
    colours = colours_of(timeline)
    for colour in np.unique(colours):
        _bars(ax, boxes[colours == colour], facecolor=colour, edgecolor=PAPER, linewidth=0.6)
    if critical:
        path = timeline.critical_path
        line = _boxes(starts[path], stops[path], top + rows[path], CRITICAL)
        _bars(ax, line, facecolor=INK, linewidth=0)
    points = figure.get_figwidth() * 72 * 0.9  # approximate width of the step's time
    sizes = (stops - starts) / (step or 1) * points
    shown = np.flatnonzero(sizes > 6 + 7 * np.char.str_len(timeline.micro_batches.astype(str)))
    if shown.size:
        # Numbers are drawn as shapes, which is faster than text.
        numbers = PathCollection(
            [_number(int(micro_batch)) for micro_batch in timeline.micro_batches[shown]],
            offsets=np.stack([(starts + stops)[shown] / 2, top + rows[shown] + sum(BARS) / 2], axis=1),
            offset_transform=ax.transData,
            transform=Affine2D().scale(1 / 72) + figure.dpi_scale_trans,
            facecolors=PAPER,
            linewidths=0,
            in_layout=False,
            gid=f"numbers-{len(ax.collections)}",
        )
        ax.add_collection(numbers)


@functools.cache
def _number(number: int) -> Path:
    """Outline of a number's digits in points, centred at the origin."""
    digits = TextPath((0, 0), str(number), size=SMALLEST, prop=FontProperties(family="DejaVu Sans"))
    box = digits.get_extents()
    return Path(digits.vertices - [box.x0 + box.width / 2, box.y0 + box.height / 2], digits.codes)


def _boxes(left: _Floats, right: _Floats, row: _Floats, of_row: tuple[float, float] = BARS) -> _Floats:
    """Corners of bars, float[n, 4, 2]. `row`: where each bar's row begins; `of_row`: the part of it that bars cover."""
    low, high = row + of_row[0], row + of_row[1]
    corners = (left, low), (right, low), (right, high), (left, high)
    return np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)


def _bars(ax: Axes, boxes: _Floats, **style: Any) -> None:
    """Draws all bars of one style as one shape, because drawing separate shapes would take most of the time."""
    ground = style.get("facecolor") in (IDLE, "none")
    name = f"{'ground' if ground else 'bars'}-{len(ax.patches)}"  # tests of pages find the bars by it
    ax.add_patch(PathPatch(Path.make_compound_path_from_polys(boxes), in_layout=False, gid=name, **style))


def _summary(pipelines: Sequence[wlb.PipelineTimeline], step: float) -> str:
    scale, unit = unit_of(step)
    ranks = sum(timeline.num_stages for timeline in pipelines)
    total = ranks * step or 1.0
    bubble = sum(float(timeline.bubble.sum()) for timeline in pipelines) / total
    wait = sum(timeline.num_stages * (step - timeline.seconds) for timeline in pipelines) / total
    parts = [f"{pipelines[0].schedule}: {step * scale:.3g} {unit}", f"{bubble:.1%} bubble"]
    if len(pipelines) > 1:
        parts.append(f"{wait:.1%} waiting for the slowest DP rank")
    return ", ".join(parts)


def colours_of(timeline: wlb.PipelineTimeline) -> NDArray[np.str_]:
    """The colour of each op: its pass gives the hue, its stage on the rank the shade."""
    colours = np.array(PASSES)
    last = max(1, timeline.num_virtual_stages - 1)
    shades = (timeline.stages // timeline.num_stages) * (colours.shape[1] - 1) // last
    return np.asarray(colours[timeline.kinds, shades])


def _handles(pipelines: Sequence[wlb.PipelineTimeline], step: float) -> list[Artist]:
    kinds = sorted({int(kind) for timeline in pipelines for kind in np.unique(timeline.kinds)})
    handles: list[Artist] = [Patch(facecolor=PASSES[kind][0], label=LABELS[kind]) for kind in kinds]
    if any(timeline.num_virtual_stages > 1 for timeline in pipelines):
        handles.append(Patch(facecolor=PASSES[0][-1], label="stronger: later stage"))
    handles.append(Patch(facecolor=IDLE, label="pipeline bubble"))
    if any(timeline.seconds < step for timeline in pipelines):
        handles.append(Patch(facecolor="none", edgecolor=STRIPES, hatch="////", lw=0, label="waits for DP"))
    handles.append(Line2D([], [], color=INK, lw=2.5, label="critical path"))
    return handles


def _legend(ax: Axes, handles: Sequence[Artist]) -> None:
    style: Any = {"loc": "lower left", "bbox_to_anchor": (-0.005, 1.0), "ncols": len(handles), "borderaxespad": 0.2}
    ax.legend(handles=handles, handlelength=1.2, columnspacing=1.4, labelcolor=SOFT, **style)


def unit_of(seconds: float) -> tuple[float, str]:
    """Factor and name of a readable unit for a time: s, ms or µs."""
    for factor, name in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return factor, name
    return 1.0, "s"
