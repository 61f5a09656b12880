"""Ranks that meet inside every micro-batch, and so go through them together.

Ranks that divide experts do: in each layer an all-to-all waits for all of them. So if expert parallelism reaches over
data-parallel replicas, or over groups of Dynamic-CP, these wait for the slowest one in each micro-batch instead of once
a step: forward and backward passes begin when all can, and take as long as the longest; so does a separate gradient of
weights. The same holds for all ranks of a stage that gather parameters or sum gradients in every micro-batch
(`sync="micro_batch"`), layer by layer.
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
    """Seconds of passes that ranks go through together: forward and backward passes take those of the slowest rank.

    Args:
        most: function that takes values of ranks and returns the largest among those that meet.
        seconds: float64[..., 3] of forward pass, gradient of inputs and gradient of weights of each rank alone.
        split: whether the schedule runs the two gradients separately. Otherwise they are one pass, in which one rank
            may be slow in one gradient and another rank in the other; a rank's waiting is added to its gradient of
            inputs.
    """
    if split:
        return most(seconds)
    made: Floats = seconds.copy()
    made[..., 0] = most(seconds[..., 0])
    own = seconds[..., 1] + seconds[..., 2]
    made[..., 1] += np.maximum(most(own) - own, 0.0)
    return made


class Replicas:
    """Data-parallel replicas that meet: those of one ep group, or of several neighbouring ones; or all replicas.

    Args:
        layout: has the number of replicas.
        sync: where ranks with the same parameters wait for each other; with "step" only those that divide experts meet.
    """

    def __init__(self, layout: ParallelLayout, *, sync: Sync = "step") -> None:
        of_experts = math.lcm(layout.ranks_of_experts, layout.cp) // layout.cp
        self.count = layout.dp if sync == "micro_batch" else of_experts

    def most(self, values: Floats) -> Floats:
        """float64[steps, dp, ...]: for each replica the largest among those that it meets."""
        return self._spread(self._met(values).max(axis=2), values)

    def mean(self, values: Floats) -> Floats:
        """Mean over the replicas of a lockstep group."""
        return self._spread(self._met(values).mean(axis=2), values)

    def _met(self, values: Floats) -> Floats:
        return values.reshape(values.shape[0], -1, self.count, *values.shape[2:])

    def _spread(self, met: Floats, values: Floats) -> Floats:
        return np.repeat(met, self.count, axis=1).reshape(values.shape)


class Groups:
    """Groups of Dynamic-CP that meet in each micro-batch.

    Args:
        sizes: int64[groups] ranks of each group, micro-batch after micro-batch, in the order of the dp x cp ranks.
        ep: number of neighbouring ranks that meet, such as those that divide experts; divides the number of dp x cp
            ranks.
    """

    def __init__(self, sizes: NDArray[np.int64], *, ep: int) -> None:
        self._sizes = sizes
        begins = (np.cumsum(sizes) - sizes) % ep == 0  # where an ep group ends together with the group before
        self.number = np.cumsum(begins) - 1  # int64[groups] number of those that meet
        self._begins = np.flatnonzero(begins)

    def most(self, values: Floats) -> Floats:
        """float64[groups, ...]: for each group the largest among those that it meets."""
        return np.asarray(np.maximum.reduceat(values, self._begins, axis=0)[self.number])

    def mean(self, values: Floats) -> Floats:
        """float64[groups]: the mean over the ranks of groups that meet."""
        ranks, total = (np.add.reduceat(of, self._begins) for of in (self._sizes, self._sizes * values))
        return np.asarray((total / ranks)[self.number])
