"""Documents in arrival order, divided into the global batches that a method packs one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from wlb._core import CostModel


@dataclass(frozen=True)
class GlobalBatches:
    """Documents in arrival order, divided into global batches: batch i is `lengths[offsets[i]:offsets[i + 1]]`."""

    lengths: NDArray[np.int64]  # [n] tokens
    offsets: NDArray[np.int64]  # [batches + 1]
    costs: NDArray[np.float64] | None = field(default=None, kw_only=True)  # [n, columns] of documents that bring them
    limits: tuple[float, ...] = field(default=(), kw_only=True)  # the most of a micro-batch in each column

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
        """Their costs and the limits, where documents bring them: the columns in which any of them costs something."""
        if self.costs is None:
            return None, ()
        costs = self.costs[: self.offsets[batches]]
        present = costs.any(axis=0)
        return costs[:, present], tuple(np.asarray(self.limits)[present].tolist())

    def work(self, cost_model: CostModel | None) -> NDArray[np.float64]:
        """float64[n]: what each document costs by itself, or else by the model; memory is no work."""
        if self.costs is not None:
            return np.asarray(self.costs[:, np.isinf(self.limits)].sum(axis=1))
        assert cost_model is not None
        return cost_model.cost(self.lengths)

    def full(self, tokens: int) -> PieceBatches:
        """The same tokens in global batches of exactly `tokens` each, the last one excepted.

        For methods that cut documents anyway: where global batches divide, too.
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

    documents: NDArray[np.int64]  # [n] the document of a piece
    firsts: NDArray[np.int64]  # [n] its first token inside that document
    remainder: bool  # whether the last global batch is not full
