"""Results of tuning."""

from __future__ import annotations

from dataclasses import dataclass

from wlb._core import result


@result
@dataclass(frozen=True, repr=False)
class TunedPoint:
    """One choice of thresholds, or of a price, with its figures on the whole sample.

    Attributes:
        thresholds: tokens, ascending; () with a price.
        delay_price: the price of delay; None with thresholds.
        imbalance_mean: mean imbalance over steps.
        imbalance_p95: 95th percentile of the imbalance.
        imbalance_worst: imbalance of the worst step.
        delay_mean: mean wait of a token, in steps, including documents flushed at the end of the sample.
        delay_max: longest wait of a document, in steps.
        memory_skew_mean: most over mean tokens of a step's micro-batches, mean over steps.
        lost_time: sum of the steps' heaviest micro-batches over the sum of their means.
        held_out_lost_time: lost time on other orders of the sample: mean over them; None for a choice that was not
            judged.
        held_out_worst: imbalance of the worst step of any other order.
        held_out_delay: mean wait of a token on the other orders, in steps.
    """

    thresholds: tuple[int, ...]
    delay_price: float | None
    imbalance_mean: float
    imbalance_p95: float
    imbalance_worst: float
    delay_mean: float
    delay_max: int
    memory_skew_mean: float
    lost_time: float
    held_out_lost_time: float | None
    held_out_worst: float | None
    held_out_delay: float | None

    def __repr__(self) -> str:
        by_price = self.delay_price is not None
        choice = f"delay_price={self.delay_price}" if by_price else f"thresholds={list(self.thresholds)}"
        return (
            f"TunedPoint({choice}, imbalance_mean={self.imbalance_mean:.4f}, delay_mean={self.delay_mean:.3f}, "
            f"delay_max={self.delay_max})"
        )


@result
@dataclass(frozen=True, repr=False)
class TuneResult:
    """Thresholds or a delay price chosen on a sample, and the alternatives.

    Attributes:
        best: the best choice, with its figures on the whole sample.
        pareto: choices that no other beats in both mean imbalance and mean delay, by ascending delay.
        judged: the prices that were judged on each half of the sample and on other orders, the default first; () for
            thresholds.
        evaluated: number of choices tried.
    """

    best: TunedPoint
    pareto: tuple[TunedPoint, ...]
    judged: tuple[TunedPoint, ...]
    evaluated: int

    @property
    def thresholds(self) -> tuple[int, ...]:
        """The best thresholds: tokens, ascending; () if a price was tuned."""
        return self.best.thresholds

    @property
    def delay_price(self) -> float | None:
        """The best price of delay; None if thresholds were tuned."""
        return self.best.delay_price

    def __repr__(self) -> str:
        return f"TuneResult(best={self.best!r}, pareto of {len(self.pareto)} points)"
