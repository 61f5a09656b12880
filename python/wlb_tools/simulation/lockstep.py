"""Ranks that go through every micro-batch together, whatever documents each of them has: they meet inside it.

Ranks that divide experts among them do. In each layer an all-to-all waits until all of them have come so far. So where
expert parallelism reaches over data-parallel replicas, or over groups of Dynamic-CP, these wait for the slowest in each
micro-batch and not once a step: forwards and backwards take as long as the longest, and begin when all can. A weight
gradient that is computed by itself takes as long too. The same holds for all ranks of a stage that gather parameters or
sum gradients in every micro-batch (`sync="micro_batch"`), which they do layer by layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from wlb._choices import Sync
from wlb_tools.cluster.parallel import ParallelLayout
from wlb_tools.simulation.balance import Floats

Most = Callable[[Floats], Floats]


def in_lockstep(most: Most, seconds: Floats, *, split: bool) -> Floats:
    """Seconds of passes that ranks go through together: of forwards and backwards those of the slowest.

    Args:
        most: of values of each of the ranks that meet, the most.
        seconds: float64[..., 3] of forward, inputs' and weights' gradient of each of them by itself.
        split: whether the schedule runs the two gradients apart. Otherwise they are one pass, in which one rank may be
            slow in one of them and another in the other: what a rank waits for is added to its inputs' gradient.
    """
    if split:
        return most(seconds)
    made: Floats = seconds.copy()
    made[..., 0] = most(seconds[..., 0])
    own = seconds[..., 1] + seconds[..., 2]
    made[..., 1] += np.maximum(most(own) - own, 0.0)
    return made


class Replicas:
    """Data-parallel replicas of a layout that meet: neighbours, by one of their ep groups or several in a row; or all.

    Args:
        layout: how many there are.
        sync: where ranks with the same parameters wait for each other; "step": those that divide experts meet.
    """

    def __init__(self, layout: ParallelLayout, *, sync: Sync = "step") -> None:
        of_experts = math.lcm(layout.ranks_of_experts, layout.cp) // layout.cp
        self.count = layout.dp if sync == "micro_batch" else of_experts

    def most(self, values: Floats) -> Floats:
        """float64[steps, dp, ...]: of each the most among the replicas that it meets."""
        return self._spread(self._met(values).max(axis=2), values)

    def mean(self, values: Floats) -> Floats:
        """Mean over the replicas of a lockstep group."""
        return self._spread(self._met(values).mean(axis=2), values)

    def _met(self, values: Floats) -> Floats:
        return values.reshape(values.shape[0], -1, self.count, *values.shape[2:])

    def _spread(self, met: Floats, values: Floats) -> Floats:
        return np.repeat(met, self.count, axis=1).reshape(values.shape)


class Groups:
    """Groups of Dynamic-CP that meet, in each micro-batch.

    Args:
        sizes: int64[groups] ranks of each group, micro-batch after micro-batch, in the order of the dp x cp ranks.
        ep: ranks that meet, as those do that divide experts among them; neighbours, and a divisor of the dp x cp ranks.
    """

    def __init__(self, sizes: NDArray[np.int64], *, ep: int) -> None:
        self._sizes = sizes
        begins = (np.cumsum(sizes) - sizes) % ep == 0  # where an ep group ends just as the group before does
        self.number = np.cumsum(begins) - 1  # int64[groups] of those that meet, one after the other
        self._begins = np.flatnonzero(begins)

    def most(self, values: Floats) -> Floats:
        """float64[groups, ...]: of each the most among the groups that it meets."""
        return np.asarray(np.maximum.reduceat(values, self._begins, axis=0)[self.number])

    def mean(self, values: Floats) -> Floats:
        """float64[groups]: the mean over their ranks."""
        ranks, total = (np.add.reduceat(of, self._begins) for of in (self._sizes, self._sizes * values))
        return np.asarray((total / ranks)[self.number])
