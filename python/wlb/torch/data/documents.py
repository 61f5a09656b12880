"""Documents on their way from a data set to `collate`: whole, or the piece that the plan asks for."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from wlb._errors import error


class Piece(NamedTuple):
    """A part of a document, where the plan cuts one (`oversize="split"` or `"truncate"`).

    No integer on purpose: a data set that knows nothing of pieces fails instead of giving the whole document.
    """

    document: int
    start: int
    length: int


@dataclass(frozen=True)
class Document:
    """Tokens with their name and what follows them.

    Attributes:
        tokens: int[n], anything `collate` takes.
        id: The document in its data set.
        start: Where `tokens` begins inside the document, in tokens.
        next_token: The token that follows in the document, None at its end. It is predicted by the last of `tokens`, so
            that cutting a document changes what a token sees, but not which tokens are learnt.
    """

    tokens: Any
    id: int
    start: int = 0
    next_token: int | None = None


class Documents(Dataset[Document]):
    """A map-style data set of token sequences that understands what `BalancedBatchSampler` yields.

    Args:
        dataset: `dataset[i]` gives document `i`: a one-dimensional array, tensor or sequence of token ids.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int | Piece) -> Document:
        """The document, or the piece of it.

        Raises:
            wlb.WlbError: The document ends before the piece does: its length in the plan is not the data set's.
        """
        if not isinstance(index, Piece):
            return Document(self.dataset[index], index)
        number, start, length = index
        tokens = self.dataset[number]
        if len(tokens) < start + length:
            message = f"has {len(tokens)} tokens, but the plan wants those from {start} to {start + length}"
            raise error("dataset", message, index=number, value=len(tokens))
        return cut(tokens, number, start, length)


def cut(tokens: Any, number: int, start: int, length: int) -> Document:
    """The piece of `length` tokens from `start` on, with the token that follows."""
    end = start + length
    return Document(tokens[start:end], number, start, int(tokens[end]) if end < len(tokens) else None)


def token_array(tokens: Any, argument: str, index: int) -> NDArray[Any]:
    """One-dimensional integers, not copied where that can be.

    Raises:
        wlb.WlbError: `tokens` is something else, or empty, or has a token beyond int64.
    """
    if isinstance(tokens, Tensor):
        tokens = tokens.detach().cpu().numpy()
    elif isinstance(tokens, (bytes, bytearray, memoryview)):
        tokens = np.frombuffer(tokens, np.uint8)
    try:
        array = np.asarray(tokens)
    except ValueError as cause:
        raise error(argument, f"is no sequence of token ids: {cause}", index=index) from None
    if array.ndim != 1:
        raise error(argument, f"has shape {array.shape}, not [tokens]", index=index, value=array.shape)
    if array.size == 0:
        raise error(argument, "has no tokens", index=index, value=0)
    if array.dtype.kind not in "iu":
        raise error(argument, f"holds {array.dtype}, not integers", index=index, value=str(array.dtype))
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise error(argument, f"has token {array.max()}: must be below 2**63", index=index, value=int(array.max()))
    return array


def whole_number(value: Any, argument: str, name: str, index: int) -> int:
    """A number that says something of the document at `index`, as an int.

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


def whole_numbers(values: Sequence[Any], argument: str, name: str) -> NDArray[np.int64]:
    """Of each document the `whole_number`: int64 [documents]; one that is none raises."""
    try:
        numbers = np.fromiter(map(operator.index, values), np.int64, len(values))
    except (TypeError, OverflowError):
        numbers = None
    if numbers is None or numbers.min(initial=0) < 0:  # some number is bad: which?
        numbers = np.array([whole_number(value, argument, name, at) for at, value in enumerate(values)], np.int64)
    return numbers


def as_document(document: Document | Any, number: int) -> Document:
    """`document` itself, or bare tokens under the name `number`."""
    return document if isinstance(document, Document) else Document(document, number)
