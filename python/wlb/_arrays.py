"""Conversion of arguments (lists, tensors, other dtypes) into the plain arrays that the engine reads.

The engine reads int64 and float64 arrays by itself and calls this module for everything else. Errors name the argument,
and the wrong entry if it is known.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb._core import WlbError


def integers(argument: str, values: Any) -> NDArray[np.int64]:
    """int64[n] of any integers."""
    array = _array(argument, values, 1, 1)
    kind, itemsize = array.dtype.kind, array.dtype.itemsize
    if kind == "i" or (kind == "u" and (itemsize < 8 or array.max(initial=0) < 2**63)):
        return array.astype(np.int64, order="C")
    if kind in "fOu" and not array.size:  # numpy makes a float array of an empty list
        return np.zeros(0, np.int64)
    # Left are integers beyond int64, arrays of Python's integers, and wrong types.
    return _item_by_item(argument, values, array)


def floats(argument: str, values: Any, least: int, most: int) -> NDArray[np.float64]:
    """Real numbers as a float64 array of `least` to `most` dimensions."""
    array = _array(argument, values, least, most)
    if array.dtype.kind not in "iuf":
        raise _refused(argument, f"must be real numbers, not {array.dtype}", given=values)
    with np.errstate(over="ignore"):  # numbers above float64 become infinite, and are refused by their index
        return array.astype(np.float64, order="C")


def _array(argument: str, values: Any, least: int, most: int) -> NDArray[Any]:
    """An array of `least` to `most` dimensions, of the dtype that numpy gives it."""
    if isinstance(values, np.ma.MaskedArray):  # asarray would drop the mask, and pack masked entries
        raise _refused(argument, "is a masked array: fill it or drop what is masked")
    if advice := _listing(values):
        raise _refused(argument, f"is a {type(values).__name__}, not an array: pass {advice}")
    wrong = (TypeError, ValueError, OverflowError) if isinstance(values, list | tuple) else Exception
    rows = (
        "pass the number of tokens of each document: [len(x) for x in ...]" if most == 1 and _has_rows(values) else ""
    )
    try:
        array = np.asarray(values)
    except MemoryError:
        raise
    except wrong as cause:  # whatever numpy, or the object's own `__array__`, raises: wrong input
        problem = f"is no array of numbers ({type(cause).__qualname__}: {cause})"
        raise _refused(argument, rows or problem, given=values) from None
    if least <= array.ndim <= most:
        if rows and array.dtype == object:  # numpy below 1.24 makes objects of rows of unequal length
            raise _refused(argument, rows, given=values)
        return array
    if not array.ndim:
        raise _refused(argument, "must be an array or a list of numbers", given=values)
    wanted = f"{least}" if least == most else f"{least}- to {most}"
    shape = ", ".join(map(str, array.shape))
    raise _refused(argument, f"must be {wanted}-dimensional, but its shape is ({shape}){rows and f': {rows}'}")


def _listing(values: Any) -> str | None:
    """How to list what can be iterated but is no sequence: numpy would take it for a single object."""
    if isinstance(values, Mapping):
        return "a list of its values, list(x.values())"
    if isinstance(values, Set):
        return "a list, whose order says which document is which"
    return "list(x)" if isinstance(values, Iterator) and not hasattr(values, "__array__") else None


def _has_rows(values: Any) -> bool:
    return isinstance(values, list | tuple) and any(isinstance(row, list | tuple | np.ndarray) for row in values)


def _item_by_item(argument: str, values: Any, array: NDArray[Any]) -> NDArray[np.int64]:
    """Reads integers one by one, so that an error names the wrong entry. Object arrays hold Python integers only."""
    # The caller's own numbers, where they can be listed: numpy turns a list with 2**63 in it into floats.
    written = _is_iterable(values) and not isinstance(values, np.ndarray)
    found = []
    not_an_integer: tuple[int, Any] | None = None
    for index, item in enumerate(values if written else array.tolist()):
        if _is_integer(item):
            found.append(operator.index(item))
            if not -(2**63) <= found[-1] < 2**63:
                raise _refused(argument, "does not fit into int64", index, item)
        elif not _is_whole(item):
            texts = ": a number of tokens, not a text" if isinstance(item, str | bytes) else ""
            raise _refused(argument, f"must be an integer{texts}", index, item)
        elif not_an_integer is None:  # an error names a fraction or NaN first, if there is one
            not_an_integer = index, item
    if not_an_integer is not None:
        raise _refused(argument, f"must be an integer, but the array has dtype {array.dtype}", *not_an_integer)
    if array.dtype.kind not in "uOf":  # numpy lists dates and time spans as integers
        raise _refused(argument, f"must be integers, not {array.dtype}")
    return np.array(found, np.int64)


def _is_integer(item: object) -> bool:
    """Whether `item` is an integer of Python, numpy or another library; a bool is not."""
    if isinstance(item, bool):
        return False
    try:
        operator.index(item)  # type: ignore[arg-type]  # tensors have `__index__`, which fails unless they hold one integer
    except Exception:
        return False
    return True


def _is_iterable(values: Any) -> bool:
    try:
        iter(values)
    except TypeError:
        return False
    return True


def _is_whole(item: Any) -> bool:
    """A number without a fraction, of whatever type."""
    try:
        return math.fabs(item) % 1 == 0
    except Exception:
        return False


_NONE = object()


def _refused(argument: str, problem: str, index: int | None = None, given: Any = _NONE) -> WlbError:
    place = argument if index is None else f"{argument}[{index}]"
    if given is _NONE:
        error, given = WlbError(f"{place}: {problem}"), None
    else:
        try:
            shown = repr(given)
        except Exception:
            shown = "?"
        error = WlbError(f"{place} = {shown if len(shown) <= 80 else shown[:77] + '...'}: {problem}")
    error.argument, error.index, error.value = argument, index, given
    return error
