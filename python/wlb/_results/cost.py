"""Results of fitting costs to measured times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wlb._core import CostModel, result


@result
@dataclass(frozen=True, eq=False, repr=False)
class CostFit:
    """A cost model fitted to measured times: the result of `CostModel.fit`.

    Attributes:
        cost_model: cost of documents, in seconds.
        rates: for each term that was tried, seconds for one unit of it; 0 for a term that was not kept.
        shares: for each term, its share of all time.
        share_errors: standard error of each share: in about one of three fits the truth is off by more.
        merged: groups of terms that the times could not tell apart. The time of a group counts for its terms that were
            kept; the others have the rate 0.
        residual: median of ``|predicted - measured| / measured`` over the rows.
        held_out_error: the same over held-out rows, predicted by a fit to the other rows: the error to expect for new
            micro-batches, their own noise included.
        held_out: number of held-out rows.
        outliers: int64, rows that were ignored because the others contradict them.
        rows: number of micro-batches.
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
        """A table of the terms with remarks, for people."""
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
