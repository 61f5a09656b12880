"""What users give as tokens, labels and columns of a document, as checked arrays."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import wlb
from wlb._errors import error
from wlb.reading.documents import IGNORE, Document


def tokens_of(row: Any, argument: str, index: int) -> Any:
    """The tokens of a row as they are: of a mapping its `input_ids`, else the row itself. Their `len` is its length.

    Raises:
        wlb.WlbError: there are none (null).
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
    if array.dtype == np.uint64 and array.max() >= 2**63:
        raise error(argument, f"has token {array.max()}: must be below 2**63", index=index, value=int(array.max()))
    return array


def label_array(labels: Any, num_tokens: int, argument: str, index: int) -> NDArray[Any]:
    """The labels of a document, not copied if possible.

    Raises:
        wlb.WlbError: they are no integers, not as many as tokens, or negative without being IGNORE.
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
        wlb.WlbError: they are no numbers, or not as many as tokens.
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


def sequence_lengths(values: Any, argument: str, index: int) -> NDArray[np.int64]:
    """Tokens of each document of a row, int64 [documents].

    Raises:
        wlb.WlbError: they are no integers from 1 on.
    """
    lengths = token_array(values, f"{argument}.seq_lengths", index)
    if (lengths < 1).any():
        raise error(
            argument, f"has seq_lengths {lengths.tolist()}: must be from 1 on", index=index, value="seq_lengths"
        )
    return lengths.astype(np.int64)


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
        wlb.WlbError: it is no integer, below 0, or beyond int64.
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
        wlb.WlbError: as `token_array`, `label_array` and `column_array`.
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
