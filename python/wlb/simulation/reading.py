"""A stream as training reads it: no more enters a packer than it admits, and every step is worth training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wlb._core import Packer, Packing
from wlb.filling import Offer, batch_tokens, least_tokens, next_packing


@dataclass(frozen=True)
class Read:
    """The packing of one step."""

    packing: Packing
    iteration: int  # of the packer: pushes so far, this one not counted
    seconds: float | None  # of planning; None where the stream is over and the queues are emptied


class Reading:
    """Documents in order of arrival, on their way into a packer: the :class:`wlb.filling.Source` of a simulation.

    Read as by the loaders of `wlb.torch`, so that a simulation gives the plans that a run has (tested). What a packer
    does not admit waits outside and enters a later step; so a stream can have more steps than global batches.

    Args:
        lengths: int64[n] tokens; none is longer than the packer's documents.
        packer: new; it stays as it is.
        tokens_per_batch: most tokens that enter in a step, one document at least.
        costs: float64[n, columns] for a packer that takes them.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        packer: Packer,
        tokens_per_batch: int,
        costs: NDArray[np.float64] | None = None,
    ) -> None:
        self._lengths = lengths
        self._costs = costs
        self._ends = lengths.cumsum()
        self.packer = packer
        self._tokens_per_batch = batch_tokens(packer, tokens_per_batch)
        self._least = least_tokens(packer, self._tokens_per_batch, None)
        self._read = 0
        self._iteration = 0
        self.arrival = np.zeros(lengths.size, dtype=np.int64)
        """int64[n]: the iteration in which each document entered, of those read so far."""

    def offer(self, extra: int) -> Offer:
        """See :class:`wlb.filling.Source`; the last offer leaves no rest of less than a step."""
        wanted = (1 + extra) * self._tokens_per_batch
        before = self._ends[self._read] - self._lengths[self._read]
        end = max(int(np.searchsorted(self._ends, before + wanted, side="right")), self._read + 1)
        if self._ends[-1] - self._ends[end - 1] < self._least:
            end = self._ends.size
        last = end == self._ends.size
        ids = np.arange(self._read, end)
        costs = None if self._costs is None else self._costs[ids]
        return Offer(ids, starts=None, lengths=self._lengths[ids], more=not last, rest_waits=last, costs=costs)

    def advance(self, pieces: int) -> None:
        """See :class:`wlb.filling.Source`."""
        self.arrival[self._read : self._read + pieces] = self._iteration
        self._read += pieces
        self._iteration += 1

    def steps(self) -> Iterator[Read]:
        """The stream step by step, until every document is trained; ids are indices into the stream."""
        while self._read < self._lengths.size:
            began = time.perf_counter()
            self.packer, packing = next_packing(self.packer, self, min_step_tokens=self._least)
            yield Read(packing, self._iteration - 1, time.perf_counter() - began)
        for iteration, packing in enumerate(self.packer.flush(), start=self._iteration):
            yield Read(packing, iteration, None)
