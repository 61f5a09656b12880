"""Pictures of a simulation: where the time goes, and how much of a step is idle."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import wlb_tools
from wlb_tools.command.output.figures.style import INK, ORIGINAL, WLB, drawing, named_rows
from wlb_tools.command.output.figures.timeline import MAX_ROWS, draw_timelines
from wlb_tools.simulation import ATTRIBUTION, Outcome

# Work is blue, communication sand, waiting rust.
_PARTS = {
    "compute": ("compute", "#0a5c91"),
    "tp_communication": ("TP communication", "#e3bd6b"),
    "cp_communication": ("CP communication", "#c9942f"),
    "ep_communication": ("EP communication", "#ab7b22"),
    "dp_communication": ("DP communication", "#8f641a"),
    "cp_wait": ("waits for slowest CP rank", "#e8b4a4"),
    "ep_wait": ("waits for slowest EP rank", "#e19680"),
    "bubble": ("pipeline bubble", "#d9775f"),
    "dp_wait": ("waits for slowest DP rank", "#a3361f"),
}
assert set(_PARTS) == set(ATTRIBUTION)
_SHOWN_PIPELINES = 4


def draw_simulation(simulation: wlb_tools.Simulation, shown: str, caption: str) -> Figure:
    """Two panels: what a GPU's time goes to under each variant, and how idle steps are."""
    with drawing(13, 2.6 + 0.42 * len(simulation.outcomes), caption=caption) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(2.2, 1))
        _time(left, simulation, shown)
        _idle(right, simulation, shown)
        handles, labels = left.get_legend_handles_labels()
        style: Any = {"loc": "outside lower center", "columnspacing": 1.4, "handlelength": 1.0}
        figure.legend(handles, labels, ncols=len(labels), **style)
    return figure


def _time(ax: Axes, simulation: wlb_tools.Simulation, shown: str) -> None:
    """A bar per variant: GPU time for the same tokens, by what it goes to."""
    gpus = simulation.scenario.layout.world_size
    outcomes = list(simulation.outcomes.items())
    y = np.arange(len(outcomes))
    per_token = np.array([1e6 * gpus / outcome.tokens for _, outcome in outcomes])  # GPU seconds for 1M tokens
    left = np.zeros(len(outcomes))
    for name, (label, colour) in _PARTS.items():
        width = per_token * [float(outcome.attribution[name].sum()) for _, outcome in outcomes]
        if width.max() > 0.001 * per_token.max():
            ax.barh(y, width, left=left, height=0.68, color=colour, label=label)
        left += width
    for row, (name, outcome) in enumerate(outcomes):
        text = f" {_thousands(outcome.tokens_per_second)} tokens/s"
        if row:
            text += f"  {simulation.speedup(name):.2f}x"
        ax.text(left[row], row, text, va="center", color=INK, weight="bold" if name == shown else "normal")
    ax.set_yticks(y, [outcome.title for _, outcome in outcomes])
    for title, (name, _) in zip(ax.get_yticklabels(), outcomes, strict=True):
        title.set_fontweight("bold" if name == shown else "normal")
    ax.invert_yaxis()
    named_rows(ax)
    ax.grid(visible=True, axis="x")
    ax.set(xlim=(0, 1.42 * left.max()), xlabel="GPU seconds for a million tokens (predicted)")
    ax.set_title("What a GPU's time goes to")


def _idle(ax: Axes, simulation: wlb_tools.Simulation, shown: str) -> None:
    """Draws the share of steps that are idle for at most a given share of their time."""
    drawn = [(simulation.baseline, ORIGINAL)]
    if simulation.outcomes[shown] is not simulation.baseline:
        drawn.append((simulation.outcomes[shown], WLB))
    for outcome, colour in drawn:
        idle = 100 * np.sort(outcome.idle[: outcome.run.streamed])
        share = 100 * np.arange(1, idle.size + 1) / idle.size
        ax.step([idle[0], *idle], [0, *share], where="post", color=colour, lw=2.2, label=outcome.title)
    ax.set(xlabel="GPUs wait for other stages or replicas (%)", ylabel="steps at most so idle (%)", ylim=(0, 122))
    ax.set(xlim=(0, None), yticks=range(0, 101, 20))
    ax.set_title("How idle steps are")
    ax.legend(loc="upper left")


def draw_step(outcome: Outcome, step: int, kind: str) -> Figure | None:
    """The pipelines of one step; of many those that take longest.

    None where not even one fits into a picture.
    """
    shown = min(_SHOWN_PIPELINES, MAX_ROWS // outcome.scenario.layout.pp)
    if not shown:
        return None
    timelines = sorted(outcome.timelines(step), key=lambda timeline: -timeline.seconds)[:shown]
    title = f"{outcome.title}, {kind} step: idle {outcome.idle[step]:.0%} of {outcome.seconds[step]:.3g} s"
    return draw_timelines(timelines, title=title, pipelines=outcome.pipelines)


def _thousands(number: float) -> str:
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.3g}"
