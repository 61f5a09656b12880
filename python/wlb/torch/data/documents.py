"""Documents on their way from a data set to `collate`: whole, or the piece that the plan asks for."""

from __future__ import annotations

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
        wlb.WlbError: `tokens` is something else, or empty.
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
    return array


def as_document(document: Document | Any, number: int) -> Document:
    """`document` itself, or bare tokens under the name `number`."""
    return document if isinstance(document, Document) else Document(document, number)
