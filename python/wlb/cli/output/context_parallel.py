"""How evenly a micro-batch's attention spreads over the ranks of a context-parallel group."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

import wlb
from wlb.cli.packing import Plan

CP_SIZES = (2, 4, 8, 16)
STRATEGIES: tuple[Literal["per_sequence", "per_document"], ...] = ("per_sequence", "per_document")


@dataclass(frozen=True)
class CpBalance:
    """(query, key) pairs of the busiest rank over the mean rank, for each micro-batch."""

    cp_size: int
    strategy: str
    ratios: NDArray[np.float64]  # [micro-batches]

    def summary(self) -> dict[str, float | int | str]:
        """The figures of the tables, as plain JSON values."""
        return {
            "cp_size": self.cp_size,
            "strategy": self.strategy,
            "mean": float(self.ratios.mean()),
            "worst": float(self.ratios.max()),
        }


def cp_balances(plan: Plan, progress: Progress) -> tuple[CpBalance, ...]:
    """Every strategy at every CP size, over the micro-batches of the plan that are not empty."""
    ends = np.flatnonzero(np.diff(plan.step * plan.costs.shape[1] + plan.micro_batch)) + 1
    packed = np.split(plan.length, ends)
    cases = [(cp_size, strategy) for cp_size in CP_SIZES for strategy in STRATEGIES]
    return tuple(
        CpBalance(cp_size, strategy, np.array([_ratio(lengths, cp_size, strategy) for lengths in packed]))
        for cp_size, strategy in progress.track(cases, description="Sharding over CP ranks")
    )


def _ratio(lengths: NDArray[np.int64], cp_size: int, strategy: Literal["per_sequence", "per_document"]) -> float:
    pairs = wlb.shard(lengths, cp_size=cp_size, strategy=strategy).pairs_per_rank
    return float(pairs.max() / pairs.mean())
