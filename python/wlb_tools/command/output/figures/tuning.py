"""Pictures of tuning: speed and balance against memory and delay."""

from __future__ import annotations

from matplotlib.figure import Figure

import wlb
from wlb_tools.cluster.hardware import GIB
from wlb_tools.command.output.figures import style
from wlb_tools.command.words import waits
from wlb_tools.simulation import KINDS, VARIANTS, Choice, Tuning
from wlb_tools.simulation.tuning import Kind

KIND_COLOURS: dict[Kind, str] = dict(zip(KINDS, style.METHODS, strict=True))


def draw_waiting(
    queued: wlb.TuneResult, adaptive: wlb.TuneResult, max_mean_delay: float, *, narrow: bool = False
) -> Figure:
    """The Pareto fronts of imbalance and mean delay, with queues (WLB-LLM) and without (wlb)."""
    with style.drawing(style.NARROW if narrow else 9, 6.5 if narrow else 5.5) as figure:
        ax = figure.subplots()
        for name, found, color in (("queues", queued, style.WLB), ("wlb", adaptive, style.ADAPTIVE)):
            delay = [point.delay_mean for point in found.pareto]
            p95, mean = ([getattr(point, f"imbalance_{key}") for point in found.pareto] for key in ("p95", "mean"))
            ax.plot(delay, p95, "o--", color=color, lw=1.2, ms=4, label=f"{name}, p95")
            ax.plot(delay, mean, "o-", color=color, lw=2, label=f"{name}, mean")
            chosen = f"chosen: {'thresholds' if found.delay_price is None else 'price'} {waits(found.best)}"
            ax.plot(found.best.delay_mean, found.best.imbalance_mean, label=chosen, mec=color, **style.RING)
        ax.axvline(max_mean_delay, color=style.ORIGINAL, label="limit of the mean delay", **style.DASHED)
        ax.set(xlabel="mean delay of a token (iterations)", ylabel="imbalance", xlim=(0, None))
        title = f"What waiting buys: {queued.evaluated + adaptive.evaluated:,} choices tried"
        ax.set_title(style.wrapped(title, narrow=narrow))
        if narrow:
            figure.legend(loc="outside lower center")
        else:
            ax.legend(fontsize=11.5)
    return figure


def draw_choices(tuning: Tuning, *, narrow: bool = False) -> Figure:
    """Two panels: predicted speed against memory with queues, and against mean delay for every plan."""

    def speed(choice: Choice) -> float:
        return choice.speedup(tuning.baseline, tuning.by)

    with style.drawing(style.NARROW if narrow else style.WIDE, 10.5 if narrow else 5.4) as figure:
        if narrow:
            memory, delay = figure.subplots(2, 1, height_ratios=(1, 1.2))
        else:
            memory, delay = figure.subplots(1, 2, width_ratios=(1, 1.5))
        memory.axvline(tuning.scenario.hardware.memory_bytes / GIB, color=style.SOFT, **style.DASHED)
        points = [(choice.outcome.memory.total.max() / GIB, speed(choice)) for choice in tuning.by_memory]
        memory.plot(*zip(*points, strict=True), "o-", color=style.WLB, lw=2)
        for choice, at in zip(tuning.by_memory, points, strict=True):
            if choice.max_tokens == tuning.by_delay[0].max_tokens:
                memory.plot(*at, mec=style.ORIGINAL, **style.RING)
                memory.annotate(
                    f"{choice.max_tokens:,}", at, (10, 10), textcoords="offset points", color=style.ORIGINAL
                )
        memory.set(
            xlabel=style.wrapped("GiB of the fullest GPU (dashed: what it has)", narrow=narrow),
            ylabel="speed over the original order (predicted)",
        )
        memory.set_title(style.wrapped("What memory buys: S_max, with queues", narrow=narrow))
        memory.margins(x=0.15, y=0.3)

        delay.axvline(tuning.scenario.max_mean_delay, color=style.SOFT, **style.DASHED)
        delay.axhline(1, color=style.SOFT, lw=0.8, zorder=1)
        for kind, colour in KIND_COLOURS.items():
            tried = [(choice.delay, speed(choice)) for choice in tuning.tried if choice.kind == kind]
            if tried:
                points_of_kind = zip(*tried, strict=True)
                delay.plot(*points_of_kind, "o", ms=7, color=colour, label=VARIANTS[kind].title, mec="white", mew=0.6)
        at = (tuning.best.delay, speed(tuning.best))
        delay.plot(*at, mec=style.INK, **style.RING)
        delay.annotate("chosen", at, (12, -16), textcoords="offset points", color=style.INK, weight="bold")
        delay.set(
            xlabel=style.wrapped("mean delay of a token, iterations (dashed: the limit)", narrow=narrow),
            ylabel="speed over the original order (predicted)" if narrow else None,
        )
        delay.set_title(style.wrapped("What waiting buys: every plan that was tried", narrow=narrow))
        if narrow:
            handles, labels = delay.get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=2, columnspacing=1.0, handlelength=1.0)
        else:
            delay.legend(loc="best")
        delay.margins(x=0.08, y=0.12)
    return figure
