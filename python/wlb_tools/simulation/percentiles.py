"""Percentiles as the packer's metrics define them, so that one stream has one p95 wherever it is counted."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from wlb._core import IMBALANCE_RESOLUTION


def percentile(values: NDArray[np.float64], fraction: float) -> float:
    """The smallest of the values that at least `fraction` of them do not exceed.

    Args:
        values: float64[n], at least one.
        fraction: above 0, at most 1.

    Complexity:
        O(n log n).
    """
    return float(np.quantile(values, fraction, method="inverted_cdf"))


def imbalance_percentile(imbalance: NDArray[np.float64], fraction: float) -> float:
    """As ``PackerMetrics.imbalance_p95``: rounded up to 0.001, and no more than the worst.

    A packer counts in bins of that width, because it keeps no list of its steps.

    Args:
        imbalance: float64[steps], the slowest micro-batch over the mean of its step.
        fraction: above 0, at most 1.
    """
    rounded = math.ceil(percentile(imbalance, fraction) * IMBALANCE_RESOLUTION) / IMBALANCE_RESOLUTION
    return max(1.0, min(rounded, float(np.max(imbalance))))
