"""Numbers and names in sentences and cells."""

import os
from collections.abc import Iterable

import wlb


def counted(number: float, noun: str) -> str:
    """`1 queue`, `2 queues`, `2 batches`."""
    ending = "es" if noun.endswith("tch") else "s"
    return f"{number:,g} {noun}{'' if number == 1 else ending}"


def readable(name: str) -> str:
    """A name with what is not UTF-8 in it replaced: nothing can draw or print that."""
    return os.fsencode(name).decode("utf-8", "replace")


def listed(items: Iterable[object], between: str) -> str:
    """`4,096 and 8,192`."""
    return between.join(f"{item:,}" if isinstance(item, int | float) else str(item) for item in items)


def thresholds(of_queues: Iterable[int]) -> str:
    """Thresholds in a cell."""
    return listed(of_queues, " ") or "none"


def waits(point: wlb.TunedPoint) -> str:
    """Text for the chosen setting: a price, or thresholds."""
    price = point.delay_price
    if price is None:
        return thresholds(point.thresholds)
    return f"{price:,.0f}" if price >= 100 else f"{price:g}"
