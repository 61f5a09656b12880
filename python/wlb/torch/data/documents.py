"""Documents on their way from a data set to `collate`: whole, or the piece that the plan asks for."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils.data import Dataset

import wlb
from wlb._errors import error
from wlb.torch.data.arrow import ArrowRows, arrow_lengths
from wlb.torch.data.batch import IGNORE


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
        next_token: The token that follows in the document, None at its end or where it is not to be learnt. It is
            predicted by the last of `tokens`, so that cutting a document changes what a token sees, but not which
            tokens are learnt.
        labels: int[n], not shifted, as Hugging Face has them: what is to be predicted in each token's place, IGNORE
            where nothing is: in a prompt, say. None: all tokens are.
    """

    tokens: Any
    id: int
    start: int = 0
    next_token: int | None = None
    labels: Any = None


class Documents(Dataset[Document]):
    """A map-style data set of token sequences that understands what `BalancedBatchSampler` yields.

    Args:
        dataset: `dataset[i]` gives document `i`: a one-dimensional array, tensor or sequence of token ids; or a mapping
            with these as `"input_ids"` and maybe `"labels"` (see `Document`), such as a row of Hugging Face's datasets.
            Those are read from their Arrow tables as arrays, whatever format they are set to, unless a function of
            your own (`set_transform`) makes the rows.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._rows = ArrowRows.of(dataset)

    def lengths(self) -> NDArray[np.int64]:
        """int64 [documents], tokens of each. Those in Arrow tables are not read for it, others once."""
        found = arrow_lengths(self.dataset)
        if found is not None:
            return found
        return np.array([len(self[index].tokens) for index in range(len(self))], np.int64)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int | Piece) -> Document:
        """The document, or the piece of it.

        Raises:
            wlb.WlbError: The document ends before the piece does: its length in the plan is not the data set's. Or it
                has not as many labels as tokens, or is a mapping without `"input_ids"`.
        """
        number = index.document if isinstance(index, Piece) else index
        row = self.dataset[number] if self._rows is None else self._rows([number])[0]
        return self._made(row, index)

    def __getitems__(self, indices: list[int | Piece]) -> list[Document]:
        """Reads the documents of a micro-batch at once, if the data set can; a `DataLoader` calls it."""
        together = self._rows or getattr(self.dataset, "__getitems__", None)
        if together is None:
            return [self[index] for index in indices]
        numbers = [index.document if isinstance(index, Piece) else index for index in indices]
        rows = together(numbers) if numbers else []
        return [self._made(row, index) for row, index in zip(rows, indices, strict=True)]

    def _made(self, row: Any, index: int | Piece) -> Document:
        if not isinstance(index, Piece):
            return as_document(row, index, "dataset")
        number, start, length = index
        document = as_document(row, number, "dataset")
        found = len(document.tokens)
        if found < start + length:
            message = f"has {found} tokens, but the plan wants those from {start} to {start + length}"
            raise error("dataset", message, index=number, value=found)
        if document.labels is not None and len(document.labels) != found:
            raise _not_as_many(len(document.labels), found, "dataset", number)
        return cut(document, start, length)


def measured(dataset: Any, lengths: ArrayLike | None, argument: str) -> tuple[Documents, ArrayLike]:
    """Documents to plan for, and their lengths: as given, or read.

    Args:
        dataset: As `Documents` takes it.
        lengths: int [documents], or None.
        argument: What a user calls `dataset`.

    Raises:
        wlb.WlbError: The data set has no length, as streams have none, or is empty; there are not as many lengths.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        kind = type(dataset).__name__
        message = f"is a {kind} without a length: give it as streams, which BalancedStream takes"
        raise error(argument, message, value=kind)
    if not len(dataset):
        raise error(argument, "is empty", value=0)
    documents = Documents(dataset)
    found = documents.lengths() if lengths is None else lengths
    if np.shape(found) != (len(dataset),):
        message = f"have shape {np.shape(found)}, but there are {len(dataset)} documents"
        raise error("lengths", message, value=np.shape(found))
    return documents, found


def cut(document: Document, start: int, length: int) -> Document:
    """The piece of `length` tokens from `start` on, with what follows."""
    end, labels = start + length, document.labels
    predicted = document.tokens if labels is None else labels
    next_token = int(predicted[end]) if end < len(predicted) else document.next_token
    if labels is not None:
        labels = labels[start:end]
        if next_token == IGNORE:
            next_token = None
    return Document(document.tokens[start:end], document.id, document.start + start, next_token, labels)


def num_labels(document: Document) -> int:
    """Predictions of a document of arrays that count in the loss."""
    of_others = document.tokens.size if document.labels is None else np.count_nonzero(document.labels[1:] != IGNORE) + 1
    return int(of_others) - (document.next_token is None)


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


def label_array(labels: Any, num_tokens: int, argument: str, index: int) -> NDArray[Any]:
    """The labels of a document, not copied where that can be.

    Raises:
        wlb.WlbError: They are no integers, not as many as tokens, or negative without being IGNORE.
    """
    array = token_array(labels, f"{argument}.labels", index)
    if array.size != num_tokens:
        raise _not_as_many(array.size, num_tokens, argument, index)
    if (bad := array[(array < 0) & (array != IGNORE)]).size:
        message = f"has label {bad[0]}: must be a token, or {IGNORE} where there is nothing to predict"
        raise error(argument, message, index=index, value=int(bad[0]))
    return array


def _not_as_many(labels: int, tokens: int, argument: str, index: int) -> wlb.WlbError:
    return error(argument, f"has {labels} labels for {tokens} tokens", index=index, value=labels)


def integer(value: Any, argument: str, name: str, index: int) -> int:
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


def integers(values: Sequence[Any], argument: str, name: str) -> NDArray[np.int64]:
    """Reads the integer `name` of each document: int64[documents]. Raises if one is no integer."""
    try:
        numbers = np.fromiter(map(operator.index, values), np.int64, len(values))
    except (TypeError, OverflowError):
        numbers = None
    if numbers is None or numbers.min(initial=0) < 0:  # some number is bad: which?
        numbers = np.array([integer(value, argument, name, at) for at, value in enumerate(values)], np.int64)
    return numbers


def as_document(document: Document | Any, number: int, argument: str) -> Document:
    """`document` itself; bare tokens, or a mapping with labels, under the name `number`.

    Raises:
        wlb.WlbError: It is a mapping without `"input_ids"`.
    """
    if isinstance(document, Document):
        return document
    if not isinstance(document, Mapping):
        return Document(document, number)
    if "input_ids" not in document:
        message = f"has no 'input_ids', but {', '.join(map(repr, document)) or 'nothing'}"
        raise error(argument, message, index=number, value=list(document))
    return Document(document["input_ids"], number, labels=document.get("labels"))


def as_arrays(document: Document | Any, number: int, argument: str) -> Document:
    """A document with its tokens and labels as arrays; see `as_document`.

    Raises:
        wlb.WlbError: As `as_document`, `token_array` and `label_array`.
    """
    named = as_document(document, number, argument)
    tokens, labels = token_array(named.tokens, argument, number), named.labels
    if labels is not None:
        labels = label_array(labels, tokens.size, argument, number)
    return Document(tokens, named.id, named.start, named.next_token, labels)
