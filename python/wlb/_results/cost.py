"""Results of fitting costs to measured times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wlb._core import CostModel, result


@result
@dataclass(frozen=True, eq=False, repr=False)
class CostFit:
    """Costs that measured times show: what `CostModel.fit` gives.

    Attributes:
        cost_model: what documents cost, in seconds.
        rates: seconds for one unit of each term that was asked for; 0 for one that was not kept.
        shares: of each term: its part of all time.
        share_errors: standard error of each share: the truth is off by more in about one of three fits.
        merged: terms that the times could not tell apart, group by group. Their time stands with those of the group
            that were kept; the others have the rate 0.
        residual: median of ``|predicted - measured| / measured`` over the rows.
        held_out_error: the same, of rows that a fit to the others did not see: what new micro-batches will be off by,
            their own noise included.
        held_out: how many rows that were.
        outliers: int64, rows that count for nothing because the others contradict them.
        rows: micro-batches in all.
    """

    cost_model: CostModel
    rates: dict[str, float]
    shares: dict[str, float]
    share_errors: dict[str, float]
    merged: tuple[tuple[str, ...], ...]
    residual: float
    held_out_error: float
    held_out: int
    outliers: NDArray[np.int64]
    rows: int

    def report(self) -> str:
        """A table of the terms, and what to know of them, for people."""
        width = max(map(len, self.rates))
        lines = [f"{'term':<{width}}   seconds per unit   share of time"]
        for name, rate in self.rates.items():
            gone = next((group for group in self.merged if name in group and not rate), None)
            kept = [other for other in gone or () if self.rates[other]]
            if rate:
                share = f"{self.shares[name]:>6.1%} +- {self.share_errors[name]:.1%}"
                lines.append(f"{name:<{width}}   {rate:<16.6g}   {share}")
            elif gone:
                lines.append(f"{name:<{width}}   in {' and '.join(kept) or 'the others'}")
            else:
                lines.append(f"{name:<{width}}   nothing seen")
        lines += [
            f"could not be told apart: {', '.join(group)}; vary one of them without the others to see which it is"
            for group in self.merged
        ]
        lines.append(
            f"{self.rows} micro-batches, {len(self.outliers)} of them outliers; half are off by at most "
            f"{self.residual:.1%}, of {self.held_out} held out {self.held_out_error:.1%}"
        )
        return "\n".join(lines)

    def __repr__(self) -> str:
        terms = ", ".join(f"{name}={rate:.4g}" for name, rate in self.rates.items() if rate)
        return f"CostFit({terms}, held_out_error={self.held_out_error:.4f}, rows={self.rows}, merged={self.merged})"
