"""Pictures of a simulation: where the time goes, and how much of a step is idle."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import wlb_tools
from wlb_tools.command.output.figures.interactive import interactive_timelines
from wlb_tools.command.output.figures.style import INK, NARROW, ORIGINAL, SANDS, WAITING, WIDE, WLB, drawing, named_rows
from wlb_tools.command.output.figures.timeline import MAX_ROWS, draw_timelines
from wlb_tools.command.output.report import Picture
from wlb_tools.simulation import ATTRIBUTION, Outcome

# Work is blue, communication sand, waiting rust.
_PARTS = {
    "compute": ("compute", WLB),
    "tp_communication": ("TP communication", SANDS[0]),
    "cp_communication": ("CP communication", SANDS[1]),
    "ep_communication": ("EP communication", "#ab7b22"),
    "dp_communication": ("DP communication", SANDS[2]),
    "cp_wait": ("waits for slowest CP rank", WAITING[0]),
    "ep_wait": ("waits for slowest EP rank", WAITING[1]),
    "bubble": ("pipeline bubble", WAITING[2]),
    "dp_wait": ("waits for slowest DP rank", WAITING[3]),
}
assert set(_PARTS) == set(ATTRIBUTION)
_SHOWN_PIPELINES = 4


def draw_simulation(simulation: wlb_tools.Simulation, shown: str, caption: str, *, narrow: bool = False) -> Figure:
    """Two panels: shares of a GPU's time under each method, and how much of each step is idle."""
    bars = 0.6 + (0.62 if narrow else 0.42) * len(simulation.outcomes)
    with drawing(NARROW if narrow else WIDE, bars + (7 if narrow else 2), caption=caption) as figure:
        if narrow:
            left, right = figure.subplots(2, 1, height_ratios=(bars + 0.4, 3))
        else:
            left, right = figure.subplots(1, 2, width_ratios=(2.2, 1))
        _time(left, simulation, shown, narrow=narrow)
        _idle(right, simulation, shown)
        handles, labels = left.get_legend_handles_labels()
        style: Any = {"loc": "outside lower center", "columnspacing": 1.4, "handlelength": 1.0}
        figure.legend(handles, labels, ncols=2 if narrow else min(len(labels), 6), **style)
    return figure


def _time(ax: Axes, simulation: wlb_tools.Simulation, shown: str, *, narrow: bool) -> None:
    """A bar for each method: GPU time for a million tokens, divided into compute, communication and waiting."""
    gpus = simulation.scenario.layout.world_size
    outcomes = list(simulation.outcomes.items())
    y = np.arange(len(outcomes))
    per_token = np.array([1e6 * gpus / outcome.tokens for _, outcome in outcomes])  # GPU seconds for 1M tokens
    left = np.zeros(len(outcomes))
    for name, (label, colour) in _PARTS.items():
        width = per_token * [float(outcome.attribution[name].sum()) for _, outcome in outcomes]
        if width.max() > 0.001 * per_token.max():
            ax.barh(y, width, left=left, height=0.4 if narrow else 0.68, color=colour, label=label)
        left += width
    for row, (name, outcome) in enumerate(outcomes):
        text = f" {_thousands(outcome.tokens_per_second)} tokens/s"
        if row:
            text += f"  {simulation.speedup(name):.2f}x"
        weight = "bold" if name == shown else "normal"
        if narrow:  # names are over the bars: there is no room beside them
            ax.text(
                0, row - 0.4, outcome.title + text.replace(" tokens/s", "/s"), va="bottom", color=INK, weight=weight
            )
        else:
            ax.text(left[row], row, text, va="center", color=INK, weight=weight)
    ax.set_yticks(y, ["" if narrow else outcome.title for _, outcome in outcomes])
    for title, (name, _) in zip(ax.get_yticklabels(), outcomes, strict=True):
        title.set_fontweight("bold" if name == shown else "normal")
    if narrow:
        ax.set_ylim(-0.95, len(outcomes) - 0.6)
    ax.invert_yaxis()
    named_rows(ax)
    ax.grid(visible=True, axis="x")
    ax.set(xlim=(0, (1.02 if narrow else 1.42) * left.max()), xlabel="GPU seconds for a million tokens (predicted)")
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
    ax.set(xlabel="GPUs wait for others (%)", ylabel="steps at most so idle (%)", ylim=(0, 130))
    ax.set(xlim=(0, None), yticks=range(0, 101, 20))
    ax.set_title("How idle steps are")
    ax.legend(loc="upper left")


def draw_step(outcome: Outcome, step: int, kind: str) -> Picture | None:
    """The timelines of one step, of the slowest pipelines if there are many. None if not even one pipeline fits."""
    shown = min(_SHOWN_PIPELINES, MAX_ROWS // outcome.scenario.layout.pp)
    if not shown:
        return None
    every = outcome.timelines(step)
    numbers = sorted(range(len(every)), key=lambda number: -every[number].seconds)[:shown]
    timelines = [every[number] for number in numbers]
    title = f"{outcome.title}, {kind} step: idle {outcome.idle[step]:.0%} of {outcome.seconds[step]:.3g} s"
    style: Any = {"pipelines": outcome.pipelines, "numbers": numbers}
    return Picture(
        lambda narrow: draw_timelines(timelines, title=title, narrow=narrow, **style),
        f"Pipelines of {outcome.title} in {kind} step",
        interactively=lambda: interactive_timelines(every, outcome.contents(step), title=title, **style),
    )


def _thousands(number: float) -> str:
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.3g}"
