"""Documents between a data set and `collate`: whole ones, or the pieces of a plan."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

import wlb
from wlb._errors import error
from wlb._shown import explained

IGNORE: Final = -100
"""The label of a token that predicts nothing; `torch.nn.functional.cross_entropy` ignores it by default."""

WEIGHTS: Final = "loss_weights"
"""The column of weights of losses, float [tokens]."""

AHEAD: Final = "labels_ahead"
"""The column of labels two and more ahead, int64 [k - 1, tokens]."""


class Piece(NamedTuple):
    """A part of a document that the plan cuts (`oversize="split"` or `"truncate"`).

    It is not an integer, so that a data set that does not support pieces fails instead of returning the whole document.
    """

    document: int
    start: int
    length: int


@explained
@dataclass(frozen=True)
class Document:
    """Tokens of a document or piece, with its name and what follows.

    Attributes:
        tokens: int[n], anything that `collate` takes.
        id: Number of the document in its data set.
        start: Where `tokens` begins inside the document, in tokens.
        next_token: The token that follows in the document; None at its end, or if it is not to be learnt. The last of
            `tokens` predicts it, so that a cut changes what tokens see, but not which tokens are learnt.
        labels: int[n], not shifted, as Hugging Face has them: what is to be predicted at each token's place, IGNORE
            where nothing is learnt, as in a prompt. None: all tokens are learnt.
        columns: Further values of each token by name, numbers [..., n]: "position_ids", "loss_weights" (float, shifted:
            factors of the loss of each token's prediction), "labels_ahead" (see `collate`), and the columns that a
            loader was asked to carry.
    """

    tokens: Any
    id: int
    start: int = 0
    next_token: int | None = None
    labels: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)


def cut(document: Document, start: int, length: int) -> Document:
    """The piece of `length` tokens from `start` on, with the token that follows."""
    end, labels = start + length, document.labels
    predicted = document.tokens if labels is None else labels
    next_token = int(predicted[end]) if end < len(predicted) else document.next_token
    if labels is not None:
        labels = labels[start:end]
        if next_token == IGNORE:
            next_token = None
    columns = {name: values[..., start:end] for name, values in document.columns.items()}
    return Document(document.tokens[start:end], document.id, document.start + start, next_token, labels, columns)


def num_labels(document: Document) -> int:
    """Predictions of a document of arrays that count in the loss."""
    of_others = document.tokens.size if document.labels is None else np.count_nonzero(document.labels[1:] != IGNORE) + 1
    return int(of_others) - (document.next_token is None)


def tokens_of(row: Any, argument: str, index: int) -> Any:
    """The tokens of a row as they are: of a mapping its `input_ids`, else the row itself. Their `len` is its length.

    Raises:
        wlb.WlbError: There are none (null).
    """
    column = "input_ids" if isinstance(row, Mapping) else ""
    tokens = row["input_ids"] if column else row
    if tokens is None:
        raise nothing(argument, index, column)
    return tokens


def nothing(argument: str, index: int, column: str = "") -> wlb.WlbError:
    """The error for a row without a value (null) in a column, or without any."""
    where = f"has nothing in column {column!r} (null)" if column else "is nothing (null)"
    return error(argument, f"{where}: filter such rows out", index=index, value=None)


def token_array(tokens: Any, argument: str, index: int) -> NDArray[Any]:
    """One-dimensional integers, not copied if possible.

    Raises:
        wlb.WlbError: `tokens` is something else, or nothing, or has a token that is nothing or beyond int64.
    """
    if tokens is None:
        raise nothing(argument, index)
    if isinstance(tokens, (bytes, bytearray, memoryview)):
        tokens = np.frombuffer(tokens, np.uint8)
    try:
        array = as_numpy(tokens)
    except ValueError as cause:
        raise error(argument, f"is no sequence of token ids: {cause}", index=index) from None
    if array.ndim != 1:
        raise error(argument, f"has shape {array.shape}, not [tokens]", index=index, value=array.shape)
    if array.size == 0:
        raise error(argument, "has no tokens", index=index, value=0)
    if array.dtype.kind == "O" and (missing := [at for at, token in enumerate(array) if token is None]):
        message = f"has nothing at place {missing[0]} (null) of {array.size}: filter such rows out"
        raise error(argument, message, index=index, value=None)
    if array.dtype.kind not in "iu":
        raise error(argument, f"holds {array.dtype}, not integers", index=index, value=str(array.dtype))
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise error(argument, f"has token {array.max()}: must be below 2**63", index=index, value=int(array.max()))
    return array


def label_array(labels: Any, num_tokens: int, argument: str, index: int) -> NDArray[Any]:
    """The labels of a document, not copied if possible.

    Raises:
        wlb.WlbError: They are no integers, not as many as tokens, or negative without being IGNORE.
    """
    flat = isinstance(labels, list | tuple) or getattr(labels, "ndim", 0) == 1
    if flat and len(labels) != num_tokens:
        raise not_as_many(len(labels), num_tokens, argument, index)
    array = token_array(labels, f"{argument}.labels", index)
    if array.size != num_tokens:  # of bytes
        raise not_as_many(array.size, num_tokens, argument, index)
    if (bad := array[(array < 0) & (array != IGNORE)]).size:
        message = f"has label {bad[0]}: must be a token, or {IGNORE} where there is nothing to predict"
        raise error(argument, message, index=index, value=int(bad[0]))
    return array


def column_array(values: Any, num_tokens: int, argument: str, name: str, index: int) -> NDArray[Any]:
    """The values of a column, int64 or float [..., tokens]; a single number is repeated for every token.

    Raises:
        wlb.WlbError: They are no numbers, or not as many as tokens.
    """
    try:
        array = as_numpy(values)
    except ValueError as cause:
        raise error(argument, f"has {name} that are no array: {cause}", index=index, value=name) from None
    if array.dtype.kind not in "biuf":
        raise error(argument, f"has {name} of {array.dtype}, not numbers", index=index, value=name)
    if array.ndim == 0:
        array = np.full(num_tokens, array)
    if array.shape[-1] != num_tokens:
        message = f"has {name} of shape {array.shape} for {num_tokens} tokens: must be [..., {num_tokens}]"
        raise error(argument, message, index=index, value=array.shape)
    if array.dtype.kind == "f":
        return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
    return array.astype(np.int64, copy=False)


def as_numpy(values: Any) -> NDArray[Any]:
    """An array of anything that numpy takes, or of a tensor of torch on any device, which is not imported for it."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.float() if str(values.dtype) == "torch.bfloat16" else values).numpy()  # numpy has no bfloat16
    return np.asarray(values)


def not_as_many(labels: int, tokens: int, argument: str, index: int) -> wlb.WlbError:
    """The error for a document whose labels are not as many as its tokens."""
    return error(argument, f"has {labels} labels for {tokens} tokens", index=index, value=labels)


def integer(value: Any, argument: str, name: str, index: int) -> int:
    """An integer property of the document at `index`.

    Raises:
        wlb.WlbError: It is no integer, below 0, or beyond int64.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise error(argument, f"has {name} = {value!r}: must be an integer", index=index, value=value) from None
    if not 0 <= number < 2**63:
        raise error(argument, f"has {name} = {value}: must be from 0 to 2**63 - 1", index=index, value=value)
    return number


def integers(values: Sequence[Any], argument: str, name: str) -> NDArray[np.int64]:
    """Reads the integer `name` of each document: int64[documents]. Raises if one is no integer."""
    try:
        numbers = np.fromiter(map(operator.index, values), np.int64, len(values))
    except (TypeError, OverflowError):
        numbers = None
    if numbers is None or numbers.min(initial=0) < 0:  # find the bad number for the error
        numbers = np.array([integer(value, argument, name, at) for at, value in enumerate(values)], np.int64)
    return numbers


def as_arrays(document: Document, argument: str, index: int) -> Document:
    """A document with its tokens and labels as arrays; see `as_document`.

    Raises:
        wlb.WlbError: As `token_array`, `label_array` and `column_array`.
    """
    tokens, labels = token_array(document.tokens, argument, index), document.labels
    if tokens is document.tokens and labels is None and not document.columns:
        return document
    if labels is not None:
        labels = label_array(labels, tokens.size, argument, index)
    columns = {
        name: column_array(values, tokens.size, argument, name, index) for name, values in document.columns.items()
    }
    return Document(tokens, document.id, document.start, document.next_token, labels, columns)


# --- columns of several documents -------------------------------------------------------------------------------------

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
        wlb.WlbError: A column has different shapes in documents; or a document lacks a column that others have and that
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
