"""Figures of balance over many steps, also with attention faster or slower than assumed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb._core import IMBALANCE_RESOLUTION
from wlb._shown import explained

Floats = NDArray[np.float64]

ATTENTION_RATES = (0.35, 0.6, 1.0, 1.6, 2.5)
"""Rates of attention relative to everything else at which a plan is also judged; 1 is the assumed rate.

Otherwise a plan would be judged by the costs that it was made with. Rates differ that much in practice: the backward
pass or short documents may reach half of the published rate, and exposed communication may make the rest of a layer
twice as slow. If 0.85 is assumed, these reach from 0.3 to 2.1."""


@explained
@dataclass(frozen=True)
class Balance:
    """Balance of a stream: the heaviest and the mean micro-batch of each step.

    Args:
        heaviest: float64[steps] work, or seconds, of the heaviest micro-batch.
        mean: float64[steps] work of the mean micro-batch.
        work: float64[steps] work of all micro-batches.
    """

    heaviest: Floats
    mean: Floats
    work: Floats

    @classmethod
    def of(cls, costs: Floats) -> Balance:
        """From costs [steps, micro-batches], or [steps, micro-batches, columns] if steps wait in each column."""
        found = costs.max(axis=1), costs.mean(axis=1), costs.sum(axis=1)
        return cls(*(of.sum(axis=1) for of in found)) if costs.ndim == 3 else cls(*found)

    def first(self, steps: int) -> Balance:
        """The balance of the first steps only."""
        return Balance(self.heaviest[:steps], self.mean[:steps], self.work[:steps])

    @property
    def imbalance(self) -> Floats:
        """float64[steps]: the heaviest micro-batch over the mean; 1 if there is no work."""
        return np.divide(self.heaviest, self.mean, out=np.ones_like(self.mean), where=self.mean > 0)

    @property
    def lost_time(self) -> float:
        """The sum of the heaviest micro-batches over the sum of the means: heavy steps weigh more."""
        return float(self.heaviest.sum() / self.mean.sum())

    @property
    def step_cv(self) -> float:
        """Coefficient of variation of the steps' work: standard deviation over mean."""
        return float(self.work.std() / self.work.mean())

    @property
    def heaviest_step(self) -> float:
        """Work of the heaviest step, divided by that of the mean step."""
        return float(self.work.max() / self.work.mean())

    def summary(self) -> dict[str, Any]:
        """Figures that the mean imbalance does not show, as plain JSON values."""
        return {
            "lost_time": self.lost_time,
            "step_work_cv": self.step_cv,
            "step_work_heaviest": self.heaviest_step,
        }


@dataclass(frozen=True)
class Swept:
    """A plan's step times at one rate of attention."""

    attention_rate: float
    total_seconds: float
    steady_seconds: float
    balance: Balance


def band(values: list[float]) -> tuple[float, float]:
    """The least and the most of a figure over all rates."""
    return min(values), max(values)


def percentile(values: NDArray[np.float64], fraction: float) -> float:
    """The smallest value that at least a share `fraction` of the values does not exceed.

    Args:
        values: float64[n], at least one.
        fraction: above 0, at most 1.

    Complexity:
        O(n log n).
    """
    return float(np.quantile(values, fraction, method="inverted_cdf"))


def imbalance_percentile(imbalance: NDArray[np.float64], fraction: float) -> float:
    """Percentile of an imbalance, as ``PackerMetrics.imbalance_p95``: rounded up to 0.001, at most the largest.

    A packer counts steps in bins of that width, because it keeps no list of them.

    Args:
        imbalance: float64[steps], the slowest micro-batch over the mean of its step.
        fraction: above 0, at most 1.
    """
    rounded = math.ceil(percentile(imbalance, fraction) * IMBALANCE_RESOLUTION) / IMBALANCE_RESOLUTION
    return max(1.0, min(rounded, float(np.max(imbalance))))
