"""Raises `WlbError` from Python, with the attributes of the core's errors; checks single values."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._core import WlbError


def error(argument: str, message: str, *, index: int | None = None, value: object = None) -> WlbError:
    """A `WlbError` that names the argument, and if given the index in it and the wrong value."""
    where = argument if index is None else f"{argument}[{index}]"
    result = WlbError(f"{where} {message}")
    result.argument, result.index, result.value = argument, index, value
    return result


def check_integer(
    argument: str, value: object, *, minimum: int, maximum: int | None = None, index: int | None = None
) -> None:
    """Refuses a value that is no whole number (a bool is none), too small or too large."""
    if not is_integer(value):
        raise error(argument, f"= {value!r}: must be an integer", index=index, value=value)
    if value < minimum:
        message = "must not be negative" if minimum == 0 else f"must be at least {minimum}"
        raise error(argument, f"= {value}: {message}", index=index, value=value)
    if maximum is not None and value > maximum:
        raise error(argument, f"= {value}: must be at most {maximum}", index=index, value=value)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is a whole number of Python or numpy; a bool is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


@contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Errors raised inside this context name their arguments as the caller does.

    Args:
        **names: for each argument name in the inner errors, the caller's name.
    """
    try:
        yield
    except WlbError as cause:
        name = names.get(cause.argument or "")
        if name is None:
            raise
        text = str(cause)
        for theirs, ours in names.items():
            text = re.sub(rf"\b{theirs}\b", ours, text)
        result = WlbError(text)
        result.argument, result.index, result.value = name, cause.index, cause.value
        raise result from None


def check_positive(argument: str, value: object) -> None:
    """Refuses a value that is no number above 0 (a bool is no number)."""
    if not _is_number(value) or not 0 < value < math.inf:
        raise error(argument, f"= {value!r}: must be a finite number above 0", value=value)


def check_share(argument: str, value: object) -> None:
    """Refuses a value that is no number from 0 to 1 (a bool is no number)."""
    if not _is_number(value) or not 0 <= value <= 1:
        raise error(argument, f"= {value!r}: must be from 0 to 1", value=value)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def numbers(argument: str, value: ArrayLike) -> NDArray[Any]:
    """An array of integers or floats; refuses anything else, and rows of different lengths."""
    try:
        array = np.asarray(value)
    except ValueError:
        raise error(argument, "must be numbers in rows of the same length", value=value) from None
    if array.dtype.kind not in "iuf":
        raise error(argument, f"must be numbers, not {array.dtype}", value=value)
    return array


def check_bool(argument: str, value: object) -> None:
    """Refuses a value that is not True or False, such as the word "true"."""
    if not isinstance(value, bool | np.bool_):
        raise error(argument, f"= {value!r}: must be true or false", value=value)


def check_options(options: Iterable[str], *functions: Callable[..., Any], but: Collection[str] = ()) -> None:
    """Refuses an option that none of these functions has as a parameter, or that is in `but`."""
    known = {name for function in functions for name in inspect.signature(function).parameters} - set(but)
    for name in options:
        if name not in known:
            raise error(name, f"is no option here; known are {', '.join(sorted(known))}")
