"""The picture of plans side by side: documents, balance, delay, context parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from wlb_tools.command.inputs.stream import Stream
from wlb_tools.command.output.figures import style
from wlb_tools.command.packing import CP_SIZES, STRATEGIES
from wlb_tools.simulation.methods import Setup
from wlb_tools.simulation.trained import PackedRun

_SHOWN_STEPS = 40


def draw_comparison(
    stream: Stream,
    setup: Setup,
    plans: Sequence[PackedRun],
    balance: Sequence[Mapping[str, Any]],
    *,
    narrow: bool = False,
) -> Figure:
    """Four panels: lengths of documents, balance of the first and last plan, delay, and context parallelism."""
    documents = stream.documents
    compared = [plans[0], plans[-1]][: len(plans)]
    caption = (
        f"{documents.source} · {stream.batches:,} global batches of {setup.num_micro_batches} x {setup.context:,}"
        f" {documents.unit}"
    )
    with style.drawing(style.NARROW if narrow else style.WIDE, 19 if narrow else 9, caption=caption) as figure:
        if narrow:
            grid = figure.add_gridspec(4, 1, hspace=0.08, height_ratios=(1, 1, 1.25, 1.1))
            panels = [grid[k, 0] for k in range(4)]
        else:
            grid = figure.add_gridspec(2, 2, wspace=0.08, hspace=0.1)
            panels = [grid[0, 0], grid[0, 1], grid[1, 0], grid[1, 1]]
        _lengths(figure.add_subplot(panels[0]), stream, setup, plans[-1].thresholds)
        sides = panels[1].subgridspec(1, len(compared), wspace=0.04).subplots(sharey=True, squeeze=False)
        _balance(sides[0], compared)
        _delay(figure.add_subplot(panels[2]), plans, narrow=narrow)
        _context_parallel(figure.add_subplot(panels[3]), balance, narrow=narrow)
        if narrow:
            for ax in figure.axes:
                ax.set_title(style.wrapped(ax.get_title(loc="left"), narrow=True, characters=30))
    return figure


def _lengths(ax: Axes, stream: Stream, setup: Setup, thresholds: Sequence[int]) -> None:
    order = np.argsort(stream.lengths, kind="stable")
    lengths = stream.lengths[order]
    tokens, work = (np.cumsum(x) / np.sum(x) for x in (lengths, stream.work(setup.cost_model)[order]))
    heavy = (work > 0.5).mean()
    ax.set_title(f"Half of the work is in {heavy:.1%} of the documents")
    bins = np.geomspace(lengths[0], lengths[-1] + 1, 50)
    shares, edges = np.histogram(lengths, bins, weights=np.full(lengths.size, 1 / lengths.size))
    ax.stairs(shares, edges, fill=True, color=style.BARS)
    ax.set_ylim(0, 1.4 * shares.max())  # room for the legend at the top
    ax.set(xscale="log", xlabel=f"length of a document ({stream.documents.unit})", ylabel="share of documents")
    ticks = 2.0 ** np.arange(np.ceil(np.log2(lengths[0])), np.log2(lengths[-1]) + 0.01)
    ax.set_xticks(ticks[::-1][:: -(-ticks.size // 7)])
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _binary(x)))
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))

    share = ax.twinx()
    share.plot(lengths, tokens, color=style.WLB, lw=2.2, label="tokens up to this length")
    share.plot(lengths, work, color=style.ORIGINAL, lw=2.2, label="work up to this length")
    share.set(ylim=(0, 1.02), ylabel="cumulative share")
    share.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    share.spines.right.set_visible(True)
    share.grid(False)
    for i, threshold in enumerate(thresholds):
        share.axvline(threshold, color=style.AXIS, label=None if i else "thresholds of the queues", **style.DASHED)
    share.legend(loc="upper left")


def _balance(axes: Sequence[Axes], plans: Sequence[PackedRun]) -> None:
    """A dot for each micro-batch; the heaviest of each step is darker."""
    streamed = min(plan.streamed for plan in plans)
    first = max(0, min(streamed // 4, streamed - _SHOWN_STEPS))  # the queues fill in the first steps
    shown = slice(first, first + _SHOWN_STEPS)
    colours = (style.ORIGINAL, style.ORIGINAL_PALE), (style.WLB, style.WLB_PALE)
    for ax, plan, (strong, pale) in zip(axes, plans, colours, strict=False):
        costs = plan.costs[: plan.streamed][shown]
        mean = costs.mean(axis=1, keepdims=True)
        ratios = np.divide(costs, mean, out=np.ones_like(costs), where=mean > 0)
        steps = np.arange(first, first + len(ratios))
        ax.plot(steps, ratios, ".", ms=4, color=pale)
        ax.vlines(steps, 1, ratios.max(axis=1), color=strong, lw=1.2, alpha=0.35)
        ax.plot(steps, ratios.max(axis=1), "o", ms=4.5, color=strong)
        ax.axhline(1, color=style.INK, lw=0.8)
        ax.set_xlabel("step")
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        label = f"{plan.name}\nimbalance {plan.imbalance.mean():.2f}"
        ax.text(0.5, 0.97, label, transform=ax.transAxes, ha="center", va="top", color=strong, weight="bold")
    top = max(plan.imbalance[shown].max() for plan in plans)
    axes[0].set(ylim=(0, max(1.5, 1.25 * top)), ylabel="work of a micro-batch / mean")
    axes[0].set_title("Every step waits for its heaviest micro-batch")


def _delay(ax: Axes, plans: Sequence[PackedRun], *, narrow: bool) -> None:
    """Share of tokens that are trained k or more steps after they arrived."""
    blues, sands = iter(style.BLUES), iter(style.SANDS)
    widths = iter((3.6, 2.4, 1.2))  # decreasing, so that equal curves stay visible
    for plan in plans:
        by_delay = plan.tokens_by_delay
        if by_delay.size == 1:
            continue  # nothing waits
        waiting = 1 - np.cumsum(by_delay) / by_delay.sum()
        ax.step(
            np.arange(by_delay.size + 1),
            [1, *waiting],
            where="post",
            color=style.ADAPTIVE if plan.release == "adaptive" else next(blues if plan.thresholds else sands),
            lw=2.4 if plan.release == "adaptive" else next(widths) if plan.thresholds else 1.6,
            label=f"{_short(plan.name)}: {by_delay @ np.arange(by_delay.size) / by_delay.sum():.2f}",
        )
    ax.set(xlabel="steps from arrival to training", ylabel="tokens that wait so long or longer")
    ax.set(yscale="log", ylim=(1e-4, 1e7 if narrow else 400), xlim=(0, None))  # room for the legend above 100 %
    ax.set_yticks([1, 0.1, 0.01, 0.001, 0.0001], ["100%", "10%", "1%", "0.1%", "0.01%"])
    ax.minorticks_off()
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_title("How long tokens wait")
    if ax.lines:
        spacing = {"handlelength": 1.4, "columnspacing": 1.0, "alignment": "left"}
        ax.legend(loc="upper right", ncols=1 if narrow else 2, title="mean delay (steps)", **spacing)
    else:
        ax.text(0.5, 0.5, "no token waits", transform=ax.transAxes, ha="center", color=style.SOFT)


def _short(name: str) -> str:
    """A plan's name without the words that the picture says."""
    return name.replace(" steps at once", " steps")


def _context_parallel(ax: Axes, balance: Sequence[Mapping[str, Any]], *, narrow: bool) -> None:
    """Bars show the mean; a whisker reaches the worst micro-batch."""
    text: Any = {"ha": "center", "size": style.SMALLEST, "rotation": 90 if narrow else 0}
    for k, (strategy, colour) in enumerate(zip(STRATEGIES, (style.ORIGINAL, style.WLB), strict=True)):
        mean, worst = (np.array([of[key] for of in balance if of["strategy"] == strategy]) for key in ("mean", "worst"))
        at = np.arange(len(CP_SIZES)) + (k - 0.5) * 0.42
        ax.bar(at, mean, width=0.38, color=colour, label=strategy.replace("_", " "))
        ax.vlines(at, mean, worst, color=colour, lw=1.4)
        ax.plot(at, worst, "_", color=colour, ms=12, mew=1.6)
        for xi, m, w in zip(at, mean, worst, strict=True):
            ax.text(xi, m - 0.05, f"{m:.2f}", va="top", color=style.PAPER, weight="bold", **text)
            ax.text(xi, w + 0.04, f"{w:.2f}", va="bottom", color=colour, **text)
    ax.set_xticks(range(len(CP_SIZES)), [f"CP {size}" for size in CP_SIZES])
    ax.set_ylabel("attention of the busiest rank / mean")
    ax.set_title("Sharding inside documents evens out the ranks")
    ax.margins(y=0.5 if narrow else 0.35)  # room for the legend at the top
    ax.legend(loc="upper left", ncols=1 if narrow else 2, title="bar: mean, whisker: worst", alignment="left")


def _binary(tokens: float) -> str:
    return f"{tokens / 1024:g}K" if tokens >= 1024 else f"{tokens:g}"
