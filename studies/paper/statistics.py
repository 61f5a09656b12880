"""Paired differences over seeds, and their interval by Student's t."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


def student_cdf(t: float, degrees: int) -> float:
    """Probability that Student's t with this many degrees of freedom is below `t`.

    With `t = sqrt(degrees) * tan(angle)` its density is a power of the cosine: smooth on a bounded range, so that
    Gauss's quadrature is exact to rounding for degrees up to some hundred.
    """
    angle = math.atan(t / math.sqrt(degrees))
    constant = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    integral = angle / 2 * float(_WEIGHTS @ np.cos(angle / 2 * (_NODES + 1)) ** (degrees - 1))
    return 0.5 + constant * integral


def student_quantile(probability: float, degrees: int) -> float:
    """The t with `student_cdf(t, degrees) == probability`, by bisection of its angle."""
    low, high = -math.pi / 2, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if student_cdf(math.sqrt(degrees) * math.tan(middle), degrees) < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


@dataclass(frozen=True)
class Paired:
    """Relative differences of one method to another, seed by seed.

    Attributes:
        mean: mean of `loss / reference - 1`.
        deviation: standard deviation of the differences; NaN for one seed.
        seeds: number of seeds.
    """

    mean: float
    deviation: float
    seeds: int

    @classmethod
    def of(cls, losses: ArrayLike, reference: ArrayLike) -> Paired:
        """From float [seeds] both; a seed stands at the same place."""
        relative = np.asarray(losses, float) / np.asarray(reference, float) - 1
        seeds = relative.size
        return cls(float(relative.mean()), float(relative.std(ddof=1)) if seeds > 1 else math.nan, seeds)

    def half_width(self, level: float = 0.95) -> float:
        """The interval of this level is the mean plus and minus this; NaN for one seed."""
        if self.seeds < 2:
            return math.nan
        return student_quantile((1 + level) / 2, self.seeds - 1) * self.deviation / math.sqrt(self.seeds)
