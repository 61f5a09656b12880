"""The timelines of a step as an interactive plotly picture, drawn over the static one where scripts run."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

import wlb
from wlb_tools.command.output.figures.style import AXIS, GRID, IDLE, INK, PAPER, SOFT, STRIPES
from wlb_tools.command.output.figures.timeline import BARS, CRITICAL, GAP, LABELS, colours_of, unit_of
from wlb_tools.command.output.report import Interactive
from wlb_tools.command.words import counted
from wlb_tools.simulation.outcome import Contents

MOST_OPS = 4000
"""Most ops of a picture: a browser draws about as many in a second."""

_ROW = 26  # height of a rank's row in pixels
_AXIS: dict[str, Any] = {"gridcolor": GRID, "linecolor": AXIS, "tickcolor": AXIS, "zeroline": False, "automargin": True}
_CLEAR = "rgba(0,0,0,0)"
_AT_BOTTOM = {"yref": "container", "yanchor": "bottom"}


def interactive_timelines(
    every: Sequence[wlb.PipelineTimeline],
    contents: Sequence[Sequence[Contents]],
    *,
    title: str,
    pipelines: str,
    numbers: Sequence[int],
) -> Interactive | None:
    """Timelines of a step, with a bar for each op. Pointing at a bar shows its rank, micro-batch and time.

    Args:
        every: timelines of all pipelines of a step.
        contents: documents of each pipeline, by micro-batch.
        title: title of the picture.
        pipelines: name of a pipeline, such as "DP".
        numbers: indices of the pipelines to draw, in this order.

    Returns:
        The picture, or None if there are more than `MOST_OPS` ops.
    """
    if sum(len(every[number]) for number in numbers) > MOST_OPS:
        return None
    step = max(timeline.seconds for timeline in every)
    scale, unit = unit_of(step)
    work = [_work(timeline) for timeline in every]
    mean = float(np.concatenate(work).mean()) or 1.0
    traces: dict[str, dict[str, Any]] = {
        "bubble": _bars("pipeline bubble", color=IDLE),
        "wait": _bars("waits for DP", color=_CLEAR, pattern={"shape": "/", "fgcolor": STRIPES, "size": 6}),
        **{str(kind): _bars(label, color=[], named=True) for kind, label in enumerate(LABELS)},
        "critical": _bars("critical path", color=INK, row=CRITICAL),
    }

    def add(name: str, row: float, start: float, end: float) -> None:
        trace = traces[name]
        trace["base"].append(_rounded(start * scale))
        trace["x"].append(_rounded((end - start) * scale))
        trace["y"].append(row)

    ticks: dict[float, str] = {}
    top = 0.0
    slowest = max(numbers, key=lambda number: every[number].seconds)
    for number in numbers:
        timeline = every[number]
        ranks = timeline.num_stages
        for rank in range(ranks):
            name = f"{pipelines} {number} · PP {rank}" if len(every) > 1 else f"PP {rank}"
            ticks[top + rank + sum(BARS) / 2] = name
            add("bubble", top + rank, 0.0, timeline.seconds)
            if timeline.seconds < step:
                add("wait", top + rank, timeline.seconds, step)
        shares = work[number] / mean
        about = [
            f"{_documents(each)}<br>{seconds * scale:.3g} {unit} of work on all stages, {share:.2f} times the mean"
            for each, seconds, share in zip(contents[number], work[number].tolist(), shares.tolist(), strict=True)
        ]
        columns = (timeline.ranks, timeline.kinds, timeline.micro_batches, timeline.stages)
        times = (timeline.starts, timeline.ends)
        rows = zip(*(column.tolist() for column in (*columns, *times)), colours_of(timeline).tolist(), strict=True)
        for rank, kind, micro_batch, stage, start, end, colour in rows:
            add(str(kind), top + rank, start, end)
            trace = traces[str(kind)]
            trace["marker"]["color"].append(colour)
            trace["text"].append(str(micro_batch))
            of_stage = f", stage {stage}" if timeline.num_virtual_stages > 1 else ""
            trace["hovertext"].append(
                f"<b>{html.escape(ticks[top + rank + sum(BARS) / 2])}: {LABELS[kind]} of micro-batch {micro_batch}</b>"
                f"{of_stage}<br>{about[micro_batch]}<br>{start * scale:.4g} to {end * scale:.4g} {unit}"
                f" ({(end - start) * scale:.3g} {unit})"
            )
        if number == slowest:
            starts, ends = times
            for op in timeline.critical_path.tolist():
                add("critical", top + float(timeline.ranks[op]), float(starts[op]), float(ends[op]))
        top += ranks + GAP
    height = round(_ROW * top) + 110
    return Interactive(
        title=title,
        data=[trace for trace in traces.values() if trace["x"]],
        layout={
            "height": height,
            "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},  # no text is smaller
            "paper_bgcolor": _CLEAR,
            "plot_bgcolor": _CLEAR,
            "margin": {"l": 8, "r": 8, "t": 36, "b": 8},  # buttons are at the top, the legend at the bottom
            "legend": {"orientation": "h", "x": 0, "y": 0, "font": {"color": SOFT}, **_AT_BOTTOM},
            "hoverlabel": {"bgcolor": PAPER, "bordercolor": AXIS, "font": {"color": INK, "size": 13}, "align": "left"},
            "modebar": {"bgcolor": _CLEAR, "color": SOFT, "activecolor": INK},
            "barmode": "overlay",
            "bargap": 0,
            "xaxis": _AXIS
            | {"title": {"text": f"time since the step began ({unit})"}, "range": [0, _rounded(step * scale) or 1]},
            "yaxis": _AXIS
            | {
                "tickvals": list(ticks),
                "ticktext": list(ticks.values()),
                "range": [top - GAP, 0],
                "fixedrange": True,
                "showgrid": False,
                "showline": False,
            },
            "dragmode": "zoom",
        },
        narrow={"height": height + 70, "dragmode": False},  # a finger scrolls the page
        hint="Point at a bar for its micro-batch. Drag over a time, or press +, to zoom in; a double-click shows all.",
    )


def _bars(label: str, *, color: Any, row: tuple[float, float] = BARS, named: bool = False, **marker: Any) -> Any:
    """An empty trace of bars that cover these heights of their rows. With a name, pointing at a bar shows text."""
    low, high = row
    text: dict[str, Any] = {
        "text": [],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"color": PAPER, "size": 11},
        "hovertext": [],
        "hoverinfo": "text",
        "constraintext": "none",
    }
    return {
        "type": "bar",
        "orientation": "h",
        "name": label,
        "base": [],
        "x": [],
        "y": [],
        "offset": low,
        "width": high - low,
        "marker": {"color": color, "line": {"color": PAPER, "width": 0.6 if named else 0}, **marker},
        **(text if named else {"hoverinfo": "skip"}),
    }


def _work(timeline: wlb.PipelineTimeline) -> Any:
    """Seconds of all ops of each micro-batch, float64[micro-batches]."""
    return np.bincount(
        timeline.micro_batches, weights=timeline.ends - timeline.starts, minlength=timeline.num_micro_batches
    )


def _documents(contents: Contents) -> str:
    if not contents.documents:
        return "no documents"
    longest = f", the longest {contents.longest:,}" if contents.documents > 1 else ""
    ranks = f", on {contents.cp_size} CP ranks" if contents.cp_size > 1 else ""
    return f"{contents.tokens:,} tokens in {counted(contents.documents, 'document')}{longest}{ranks}"


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
