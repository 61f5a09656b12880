"""What tuning chooses, in a cell of a table or a label of a picture."""

from collections.abc import Sequence

import wlb


def waiting_choice(point: wlb.TunedPoint) -> str:
    """Thresholds, or a price."""
    if point.delay_price is not None:
        return f"{point.delay_price:,.0f}" if point.delay_price >= 100 else f"{point.delay_price:g}"
    return thresholds_choice(point.thresholds)


def thresholds_choice(thresholds: Sequence[int]) -> str:
    """Thresholds in a cell."""
    return " ".join(f"{threshold:,}" for threshold in thresholds) or "none"
