"""The columns of several documents together: which they have, what stands where one has none, how they are sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb._errors import error
from wlb.reading.documents import AHEAD, IGNORE, WEIGHTS, Document

Layout = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, type ("i8", "f4" or "f8") and shape without tokens of each column, in the order of names."""


def layout_of(document: Document) -> Layout:
    """The columns of a document of arrays."""
    if not document.columns:
        return ()
    columns = sorted(document.columns.items())
    return tuple((name, values.dtype.str[1:], values.shape[:-1]) for name, values in columns)


def common_layout(layouts: Sequence[Layout], argument: str) -> Layout:
    """The columns of all documents of a micro-batch or step.

    Raises:
        wlb.WlbError: a column has different shapes in documents; or a document lacks a column that others have and that
            has no default. Defaults are positions from 0 and weights of 1.
    """
    if not any(layouts):
        return ()
    found: dict[str, tuple[str, str, tuple[int, ...]]] = {}
    for index, layout in enumerate(layouts):
        for column in layout:
            name, dtype, shape = column
            _, known_dtype, known = found.setdefault(name, column)
            if known != shape:
                message = f"has {name} of shape {[*shape, 'tokens']}, and documents before it of {[*known, 'tokens']}"
                raise error(argument, message, index=index, value=shape)
            found[name] = (name, max(dtype, known_dtype, key=_WIDER.index), shape)
    for index, layout in enumerate(layouts):
        missing = found.keys() - {name for name, *_ in layout} - {"position_ids", WEIGHTS}
        if missing:
            name = min(missing)
            raise error(argument, f"has no {name!r}, which other documents have", index=index, value=name)
    return tuple(found[name] for name in sorted(found))


def laid_out(document: Document, layout: Layout) -> dict[str, NDArray[Any]]:
    """The columns of a document of arrays with those of the layout, [..., tokens] each."""
    size = document.tokens.size
    found = {}
    for name, dtype, shape in layout:
        values = document.columns.get(name)
        if values is None:
            values = np.ones(size) if name == WEIGHTS else np.arange(size)
        found[name] = np.broadcast_to(values, (*shape, size)).astype(dtype)
    return found


def of_padding(name: str) -> int:
    """Value of a column for padding: -100 for labels, 0 for other columns."""
    return IGNORE if name == AHEAD else 0


def filled_up(name: str, values: NDArray[Any], padding: int) -> NDArray[Any]:
    """A column with `padding` further tokens."""
    widths = [(0, 0)] * (values.ndim - 1) + [(0, padding)]
    return np.pad(values, widths, constant_values=of_padding(name))


def num_rows(layout: Layout) -> int:
    """Number of values that the columns have for each token."""
    return sum(math.prod(shape) for *_, shape in layout)


def as_bits(columns: Mapping[str, NDArray[Any]]) -> list[NDArray[np.int64]]:
    """Columns in the form in which they are sent: int64 [rows, tokens] each, floats bit by bit."""
    found = []
    for values in columns.values():
        rows = values.reshape(-1, values.shape[-1])
        found.append(rows.astype(np.float64).view(np.int64) if rows.dtype.kind == "f" else rows.astype(np.int64))
    return found


def of_bits(rows: NDArray[np.int64], layout: Layout) -> dict[str, NDArray[Any]]:
    """Columns from their sent form, int64 [rows, tokens] of all of them."""
    found, at = {}, 0
    for name, dtype, shape in layout:
        part = np.ascontiguousarray(rows[at : (at := at + math.prod(shape))])
        values = part.view(np.float64) if dtype[0] == "f" else part
        found[name] = values.astype(dtype).reshape(*shape, rows.shape[-1])
    return found


_WIDER = ("i8", "f4", "f8")
