"""Ranks that divide experts among them go through every micro-batch together, whatever documents each of them has.

In each layer an all-to-all waits until all of them have come so far. So where expert parallelism reaches over
data-parallel replicas, or over groups of Dynamic-CP, these wait for the slowest in each micro-batch and not once a
step: forwards and backwards take as long as the longest, and begin when all can. A weight gradient that is computed by
itself takes as long too.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from wlb.cluster.parallel import ParallelLayout
from wlb.simulation.balance import Floats


class Replicas:
    """Data-parallel replicas of a layout that meet: neighbours, by an ep group of theirs or by several in a row."""

    def __init__(self, layout: ParallelLayout) -> None:
        self.count = math.lcm(layout.ep, layout.cp) // layout.cp if layout.ep > 1 else 1

    def most(self, values: Floats) -> Floats:
        """float64[steps, dp, ...]: of each the most among the replicas that it meets."""
        return self._spread(self._met(values).max(axis=2), values)

    def mean(self, values: Floats) -> Floats:
        """The same of the mean."""
        return self._spread(self._met(values).mean(axis=2), values)

    def _met(self, values: Floats) -> Floats:
        return values.reshape(values.shape[0], -1, self.count, *values.shape[2:])

    def _spread(self, met: Floats, values: Floats) -> Floats:
        return np.repeat(met, self.count, axis=1).reshape(values.shape)


class Groups:
    """Groups of Dynamic-CP that meet, in each micro-batch.

    Args:
        sizes: int64[groups] ranks of each group, micro-batch after micro-batch, in the order of the dp x cp ranks.
        ep: ranks that divide experts among them; neighbours, and a divisor of the dp x cp ranks.
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
