"""Documents in arrival order, divided into global batches or read by a packer as in training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from wlb._core import CostModel, Packer, Packing
from wlb.reading.filling import Offer, next_packing
from wlb.reading.sizes import batch_tokens, check_max_early, least_tokens


@dataclass(frozen=True)
class GlobalBatches:
    """Documents in arrival order, divided into global batches: batch i is `lengths[offsets[i]:offsets[i + 1]]`."""

    lengths: NDArray[np.int64]  # [n] tokens
    offsets: NDArray[np.int64]  # [batches + 1]
    costs: NDArray[np.float64] | None = field(default=None, kw_only=True)  # [n, columns] if documents have given ones
    limits: tuple[float, ...] = field(default=(), kw_only=True)  # most of a micro-batch in each column

    @property
    def batches(self) -> int:
        """The number of global batches."""
        return self.offsets.size - 1

    @property
    def arrival(self) -> NDArray[np.int64]:
        """int64[n]: the global batch of each document."""
        return np.repeat(np.arange(self.batches), np.diff(self.offsets))

    def head(self, batches: int) -> NDArray[np.int64]:
        """Lengths of the first `batches` global batches."""
        return self.lengths[: self.offsets[batches]]

    def costs_of_head(self, batches: int) -> tuple[NDArray[np.float64] | None, tuple[float, ...]]:
        """Their given costs and the limits, or None: only the columns in which any of these documents has a cost."""
        if self.costs is None:
            return None, ()
        costs = self.costs[: self.offsets[batches]]
        present = costs.any(axis=0)
        return costs[:, present], tuple(np.asarray(self.limits)[present].tolist())

    def work(self, cost_model: CostModel | None) -> NDArray[np.float64]:
        """float64[n]: given costs of each document, or its costs by the model; columns of memory do not count."""
        if self.costs is not None:
            return np.asarray(self.costs[:, np.isinf(self.limits)].sum(axis=1))
        assert cost_model is not None
        return cost_model.cost(self.lengths)

    def full(self, tokens: int) -> PieceBatches:
        """The tokens of this stream in global batches of exactly `tokens` each, except the last one.

        For methods that cut documents anyway, and so also where a global batch ends.
        """
        ends = np.cumsum(self.lengths)
        total = int(ends[-1])
        batch_starts = np.arange(0, total, tokens)
        starts = np.union1d(ends - self.lengths, batch_starts)
        documents = np.searchsorted(ends, starts, side="right")
        return PieceBatches(
            lengths=np.diff(starts, append=total),
            offsets=np.append(np.searchsorted(starts, batch_starts), starts.size),
            documents=documents,
            firsts=starts - (ends - self.lengths)[documents],
            remainder=total % tokens != 0,
        )


@dataclass(frozen=True)
class PieceBatches(GlobalBatches):
    """Global batches of pieces of documents."""

    documents: NDArray[np.int64]  # [n] the document of each piece
    firsts: NDArray[np.int64]  # [n] its first token inside that document
    remainder: bool  # whether the last global batch is not full


@dataclass(frozen=True)
class Read:
    """The packing of one step."""

    packing: Packing
    iteration: int  # of the packer: number of pushes before
    seconds: float | None  # of planning; None at the end of the stream, when queues are emptied


class Reading:
    """Documents in order of arrival, on their way into a packer: the `wlb.reading.filling.Source` of a simulation.

    They are read as by the loaders of `wlb.torch`, so that a simulation has the plans of a run (tested). Documents that
    a packer does not admit enter in a later step, so a stream may have more steps than global batches.

    Args:
        lengths: int64[n] tokens; none is longer than the packer's documents.
        packer: a new one; it is not changed.
        tokens_per_batch: most tokens that enter in a step, at least one document; by default the packer's.
        costs: float64[n, columns] for a packer with cost columns.
        max_early: iterations that a document may come before its turn, as for `BalancedBatchSampler`.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        packer: Packer,
        tokens_per_batch: int | None = None,
        costs: NDArray[np.float64] | None = None,
        *,
        max_early: int = 0,
    ) -> None:
        check_max_early(max_early, packer)
        self._lengths = lengths
        self._costs = costs
        self._ends = lengths.cumsum()
        self.packer = packer
        self._tokens_per_batch = batch_tokens(packer, tokens_per_batch)
        self._least = least_tokens(packer, self._tokens_per_batch, None)
        self._max_early = max_early
        self._offered = np.empty(0, np.int64)
        self._early: NDArray[np.int64] | None = None
        self._turns = self._due = 0
        self._read = 0
        self._taken = np.empty(0, np.int64)  # later documents that have entered before their turn, ascending
        self._iteration = 0
        self.turns = np.zeros(lengths.size, dtype=np.int64)
        """int64[n]: the iteration in which the turn of each document was, for documents read so far."""

    def offer(self, extra: int) -> Offer:
        """See `wlb.reading.filling.Source`. The last offer has all the rest, so that no small step is left."""
        wanted = (1 + extra) * self._tokens_per_batch
        first, ends = self._read, self._ends
        before = int(ends[first] - self._lengths[first])
        entered = int((self._taken == first + np.arange(self._taken.size)).sum())
        known = int(ends[first + entered - 1]) - before if entered else 0
        looked_at = max(wanted, known + self.packer.max_document_tokens)
        looked_at += self._max_early * self._tokens_per_batch + self._least
        seen = int(np.searchsorted(ends, before + looked_at, side="right")) + 1
        end = min(max(seen, int(self._taken[-1:].sum()) + 2), ends.size)
        ids = np.arange(first, end)
        self._turns, offered, self._due, self._early = self.packer.offered(
            self._lengths[first:end],
            most_early=np.where(np.isin(ids, self._taken), -1, self._max_early),
            wanted=wanted,
            tokens_per_batch=self._tokens_per_batch,
            min_step_tokens=self._least,
            to_the_end=end == ends.size,
        )
        more = end < ends.size or self._turns < ids.size
        ids = ids[offered]
        costs = None if self._costs is None else self._costs[ids]
        self._offered = ids
        return Offer(ids, None, self._lengths[ids], more=more, rest_waits=not more, costs=costs, early=self._early)

    def advance(self, pieces: int) -> None:
        """See `wlb.reading.filling.Source`."""
        entered = self._offered[:pieces]
        self.turns[entered] = self._iteration
        if self._early is not None:
            self.turns[entered] += self._early[:pieces]
        if pieces >= self._due:
            self._read += self._turns
        elif pieces:
            self._read = int(entered[-1]) + 1
        self._taken = np.union1d(self._taken, entered[self._due :])
        self._taken = self._taken[self._taken >= self._read]
        self._iteration += 1

    def steps(self) -> Iterator[Read]:
        """The stream step by step, until every document is trained; ids are indices into the stream."""
        while self._read < self._lengths.size:
            began = time.perf_counter()
            self.packer, packing = next_packing(self.packer, self, min_step_tokens=self._least)
            yield Read(packing, self._iteration - 1, time.perf_counter() - began)
        for iteration, packing in enumerate(self.packer.flush(), start=self._iteration):
            yield Read(packing, iteration, None)
