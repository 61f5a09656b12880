"""Ranks that share a machine: each is faster while others wait, since caches and memory are its own then.

GPUs have their own, so that :func:`wlb_tools.simulate` knows nothing of it. Where ranks are the processors of one
machine a step of uneven ranks takes a little less than that says: what a rank computes while others wait takes `alone`
times as long as beside busy ones. By how much changes from one minute to the next, since other machines have these
caches, too: steps in which ranks wait much and little are timed in turn with the methods
(:func:`studies.proof.processes.waiting`).
"""

from __future__ import annotations

from typing import Any

from wlb_tools.simulation import Outcome

LEAST = 0.8
"""What `alone` was never below where hundreds of steps told it: of a few it may be anything."""

WAITS = ("cp_wait", "dp_wait", "bubble")
"""What the mean rank of a step waits for others, by :data:`wlb_tools.simulation.ATTRIBUTION`."""


def of_steps(outcome: Outcome, alone: float) -> Any:
    """float64[steps]: predicted seconds, less what waiting of some saves the others."""
    waits = sum(outcome.attribution[name] for name in WAITS)
    return less(outcome.seconds, waits, alone, ranks=outcome.scenario.layout.world_size)


def less(seconds: Any, waits: Any, alone: float, *, ranks: int) -> Any:
    """Seconds in which the mean of these ranks waits so long.

    At every time the ranks that all others wait for are faster by the share of the others that waits.
    """
    return seconds - (1 - alone) * waits * ranks / max(ranks - 1, 1)


def found(ratio: float, seconds: Any) -> float:
    """What `alone` is where of two steps one took `ratio` times as long as the other; at most 1: waiting slows nobody.

    Args:
        ratio: of a step in which ranks wait more, to one in which they wait less.
        seconds: of both, as :func:`studies.proof.probe.waiting_seconds` predicts them.
    """
    (more, saved_more), (less, saved_less) = seconds
    return min(1.0, float(1 - (more - ratio * less) / (saved_more - ratio * saved_less)))
