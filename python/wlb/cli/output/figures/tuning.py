"""Pictures of tuning: what waiting and memory buy."""

from __future__ import annotations

from typing import Any

import matplotlib
from matplotlib.figure import Figure

import wlb
from wlb.cli.output.choices import waiting_choice
from wlb.cli.output.figures.style import ADAPTIVE, ADAPTIVE_PALE, INK, ORIGINAL, SOFT, STYLE, WLB, WLB_PALE
from wlb.cluster.hardware import GIB
from wlb.simulation import KINDS, Choice, Tuning
from wlb.simulation.tuning import Kind

_KIND_COLOURS: dict[Kind, str] = {
    "no_waiting": SOFT,
    "queues": "#5b9bc8",
    "adaptive_release": WLB,
    "dynamic_cp": "#e3bd6b",
    "wlb_dynamic_cp": "#a3361f",
}


def draw_waiting(queued: wlb.TuneResult, adaptive: wlb.TuneResult, max_mean_delay: float) -> Figure:
    """The Pareto fronts: imbalance against mean delay."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        ax = figure.subplots()
        ring: Any = {"ls": "none", "marker": "o", "ms": 14, "mfc": "none", "mew": 2.2}
        for name, found, color, pale in (
            ("queues", queued, WLB, WLB_PALE),
            ("adaptive release", adaptive, ADAPTIVE, ADAPTIVE_PALE),
        ):
            delay = [p.delay_mean for p in found.pareto]
            ax.plot(delay, [p.imbalance_p95 for p in found.pareto], "o--", color=pale, lw=1.5, label=f"{name}, p95")
            ax.plot(delay, [p.imbalance_mean for p in found.pareto], "o-", color=color, lw=2, label=f"{name}, mean")
            best = found.best
            kind = "price" if best.delay_price is not None else "thresholds"
            chosen = f"chosen: {kind} {waiting_choice(best)}"
            ax.plot(best.delay_mean, best.imbalance_mean, label=chosen, mec=color, **ring)
        ax.axvline(max_mean_delay, color=ORIGINAL, ls=(0, (4, 3)), lw=1.4, label="limit of the mean delay")
        ax.set(xlabel="mean delay of a token (iterations)", ylabel="imbalance", xlim=(0, None))
        ax.set_title(f"What waiting buys: {queued.evaluated + adaptive.evaluated:,} choices tried")
        ax.legend(fontsize=11.5)
        return figure


def draw_choices(tuning: Tuning) -> Figure:
    """Two panels: what memory buys with queues, and what waiting buys with any plan."""

    def speed(choice: Choice) -> float:
        return tuning.baseline.steady_seconds / choice.outcome.steady_seconds

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 5.4), layout="constrained")
        memory, delay = figure.subplots(1, 2, width_ratios=(1, 1.5))
        memory.axvline(tuning.scenario.hardware.memory_bytes / GIB, color=SOFT, lw=1.2, ls=(0, (4, 3)))
        memory.plot(
            [choice.outcome.memory.total.max() / GIB for choice in tuning.by_memory],
            [speed(choice) for choice in tuning.by_memory],
            "o-",
            color=WLB,
            lw=2,
        )
        for choice in tuning.by_memory:
            at = (choice.outcome.memory.total.max() / GIB, speed(choice))
            if choice.max_tokens == tuning.by_delay[0].max_tokens:
                memory.plot(*at, "o", ms=14, mfc="none", mec=ORIGINAL, mew=2.2)
                memory.annotate(f"{choice.max_tokens:,}", at, (10, 10), textcoords="offset points", color=ORIGINAL)
        memory.set(xlabel="GiB of the fullest GPU (dashed: what it has)", ylabel="speed over Plain-4D (predicted)")
        memory.set_title("What memory buys: S_max, with queues")
        memory.margins(x=0.15, y=0.3)

        delay.axvline(tuning.scenario.max_mean_delay, color=SOFT, lw=1.2, ls=(0, (4, 3)))
        delay.axhline(1, color=SOFT, lw=0.8, zorder=1)
        for kind, colour in _KIND_COLOURS.items():
            choices = [choice for choice in tuning.tried if choice.kind == kind]
            if choices:
                style: Any = {"ms": 7, "color": colour, "label": KINDS[kind], "mec": "white", "mew": 0.6}
                delay.plot([c.delay for c in choices], [speed(c) for c in choices], "o", **style)
        best = tuning.best
        at = (best.delay, speed(best))
        delay.plot(*at, "o", ms=15, mfc="none", mec=INK, mew=2)
        delay.annotate("chosen", at, (12, -16), textcoords="offset points", color=INK, weight="bold")
        delay.set(xlabel="mean delay of a token, iterations (dashed: the limit)")
        delay.set_title("What waiting buys: every plan that was tried")
        delay.legend(loc="best")
        delay.margins(x=0.08, y=0.12)
        return figure
