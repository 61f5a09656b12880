"""How fast the machine is while a run lasts, by micro-batches that no method trains, timed in turn with the methods.

A processor that other machines share is faster in one minute than in the next, and not for all work alike: what was
profiled before a run says little about its seconds. Two sorts of even micro-batches show both: one document that fills
the context, which is mostly attention, and many short ones. So much longer as they take than predicted, the methods
are predicted to take; the ratios between methods hardly change. Nothing is fitted to what is predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import wlb
from studies.proof.batches import Part
from wlb.simulation import Outcome

Floats = NDArray[np.float64]

KINDS = (1, 16)
"""Documents of a micro-batch that together fill a context."""

WIDEST = 4.0
"""Attention is taken for at most so many times faster or slower than the profile says."""


@dataclass(frozen=True)
class Pace:
    """Of a run, beside what a profile says.

    Args:
        seconds: how many times as long everything takes.
        attention_rate: how many times as fast attention is, at that.
    """

    seconds: float
    attention_rate: float

    @classmethod
    def of(cls, measured: Sequence[float], predicted: Callable[[int, float], float]) -> Pace:
        """The pace at which both sorts take what was measured.

        Args:
            measured: seconds of each of :data:`KINDS`, and of no others.
            predicted: seconds of a sort (its index) at an attention rate.
        """

        def beyond(rate: float) -> float:
            return predicted(0, rate) / predicted(1, rate) - measured[0] / measured[1]

        # The ratio of the sorts only falls, or only rises, with the rate. Where none gives it, the end that is closer.
        low, high = sorted((1 / WIDEST, WIDEST), key=beyond)
        for _ in range(60):
            middle = float(np.sqrt(low * high))
            if beyond(middle) < 0:
                low = middle
            else:
                high = middle
        rate = float(np.sqrt(low * high))
        return cls(measured[1] / predicted(1, rate), rate)

    def predicted(self, outcome: Outcome) -> tuple[Floats, Floats]:
        """Seconds and work of every step of a run at this pace."""
        here = outcome.at_attention_rate(self.attention_rate)
        return here.seconds * self.seconds, here.work * self.seconds


def parts(context: int, cp_size: int) -> list[list[Part]]:
    """Of each sort, the part of every context-parallel rank."""
    return [parts_of([context // many] * many, cp_size) for many in KINDS]


def parts_of(lengths: list[int], cp_size: int) -> list[Part]:
    """Of a micro-batch of these documents, the part of every context-parallel rank."""
    shard = wlb.shard(lengths, cp_size=cp_size, strategy="per_document")
    rows = np.arange(len(lengths)), np.zeros(len(lengths), np.int64), np.array(lengths)
    return [Part(*rows, shard, rank, cp_size, None) for rank in range(cp_size)]


def step_seconds(scenario: wlb.Scenario, lengths: Sequence[int], count: int, *, rate: float = 1.0) -> float:
    """Predicted seconds of a step in which every data-parallel rank has `count` micro-batches of these documents."""
    return pipeline_seconds(scenario, *pass_seconds(scenario, lengths, rate=rate), count)


def pipeline_seconds(scenario: wlb.Scenario, costs: Floats, p2p: Floats, count: int) -> float:
    """Predicted seconds of a step of `count` micro-batches that are all alike, by :func:`pass_seconds` of one."""
    timeline = wlb.simulate_pipeline(
        np.repeat(costs, count, axis=0), num_stages=scenario.layout.pp, p2p_seconds=np.repeat(p2p, count)
    )
    return float(timeline.seconds) + scenario.step_end


def pass_seconds(
    scenario: wlb.Scenario, lengths: Sequence[int], *, rate: float = 1.0, alone: bool = False
) -> tuple[Floats, Floats]:
    """float64[1, stages, 3] of a micro-batch, float64[1] between its stages.

    Args:
        scenario: the layout, and what is predicted of it.
        lengths: of the documents that a group of context-parallel ranks shares.
        rate: how many times as fast attention is.
        alone: what the slowest rank computes, without what it sends or waits for.
    """
    shard = wlb.shard(lengths, cp_size=scenario.layout.cp, strategy="per_document")
    forward, backward = (
        scenario.rank_seconds(shard, passes=one).max(axis=0)[None] / rate for one in ("forward", "backward")
    )
    tokens = [int(shard.tokens_per_rank.max())]
    each = scenario.stage_seconds(tokens, attention_forward=forward, attention_backward=backward)
    if alone:
        return each.computing, each.p2p
    return each.seconds + scenario.exposed_dp(each.seconds), each.p2p
