"""`WlbError` raised from Python, like those of the core."""

from __future__ import annotations

from wlb._core import WlbError


def error(argument: str, message: str, *, index: int | None = None, value: object = None) -> WlbError:
    """A `WlbError` that names the argument, and where it applies the index in it and the offending value."""
    where = argument if index is None else f"{argument}[{index}]"
    result = WlbError(f"{where} {message}")
    result.argument, result.index, result.value = argument, index, value
    return result
