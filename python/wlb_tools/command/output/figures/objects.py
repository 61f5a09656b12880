"""Pictures of single objects."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

import wlb
import wlb_tools
from wlb_tools.command.output.figures import style
from wlb_tools.command.output.figures.simulation import draw_simulation
from wlb_tools.command.output.figures.timeline import draw_timelines
from wlb_tools.simulation.words import describe

__all__ = ["draw_methods", "draw_packing", "draw_timelines"]

_DRAWN = 2000  # most documents drawn separately


def draw_packing(packing: wlb.Packing) -> Figure:
    """A bar for each micro-batch: its cost. If documents are few, each is a part of its bar."""
    costs, each = packing.costs, list(packing)
    documents = sum(len(micro_batch.document_ids) for micro_batch in each)
    with style.drawing(9, 4.5) as figure:
        ax = figure.subplots()
        places = np.arange(len(each))
        ax.bar(places, costs, width=0.8, color=style.WLB)
        if documents <= _DRAWN:
            for place, (micro_batch, cost) in enumerate(zip(each, costs.tolist(), strict=True)):
                lengths = micro_batch.lengths.astype(np.float64)
                # The cost of a micro-batch is divided by tokens, which is not exact but enough for a picture.
                edges = cost * np.cumsum(lengths)[:-1] / max(lengths.sum(), 1.0)
                ax.hlines(edges, place - 0.4, place + 0.4, color=style.PAPER, lw=0.8)
        ax.axhline(costs.mean(), color=style.ORIGINAL, label="mean", **style.DASHED)
        ax.set(xlabel="micro-batch", ylabel="cost", ylim=(0, 1.2 * max(costs.max(), 1e-300)))
        ax.set_title(f"{documents:,} documents in {len(each):,} micro-batches: imbalance {packing.imbalance:.3f}")
        ax.legend(loc="upper right")
    return figure


def draw_methods(simulation: wlb_tools.Simulation) -> Figure:
    """Shares of a GPU's time under each method; the fastest is compared with the first."""
    best = max(simulation.outcomes, key=simulation.speedup)
    return draw_simulation(simulation, best, describe(simulation.scenario))
