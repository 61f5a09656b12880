"""The documents of a step of dynamic context parallelism: the data that ranks exchange about them, and their costs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._errors import error
from wlb.reading.documents import Document
from wlb.reading.rows import RowReader
from wlb.reading.values import as_arrays, integer

Costs = Callable[[Document], Any]
"""Function that returns the costs of a document as its rank reads it."""


def checked(row: Document | Any, index: int, reader: RowReader) -> list[Document]:
    """The documents of a row, checked so that no later step can fail on only one rank.

    Documents of rows get the id -1.

    Raises:
        wlb.WlbError: it has no tokens, labels that do not fit, or a value that is no number, below 0, or beyond int64.
    """
    found = [as_arrays(document, "batches", index) for document in reader.documents(row, index, "batches")]
    if not isinstance(row, Document):
        return [replace(document, id=-1) for document in found]
    [named] = found
    numbers: dict[str, Any] = {"id": named.id, "start": named.start}
    if named.next_token is not None:
        numbers["next_token"] = named.next_token
    checked_numbers: dict[str, Any] = {name: integer(value, "batches", name, index) for name, value in numbers.items()}
    return [replace(named, **checked_numbers)]


def costs_by(name: str, costs: Costs | ArrayLike) -> Costs:
    """A function of a document, made from an array of costs by ids if one is given.

    Raises:
        wlb.WlbError: it is neither, or a number is negative or not finite, or all costs are 0.
    """
    if callable(costs):
        return costs
    try:
        array = np.asarray(costs)
    except (TypeError, ValueError, RuntimeError) as reason:  # rows of unequal length; a tensor that numpy cannot hold
        raise error(name, f"is no array of numbers: {reason}") from None
    if array.dtype.kind not in "fiu" or array.ndim != 1 or not array.size:
        message = f"is {array.dtype} of shape {array.shape}: must be numbers [documents], or a function of a document"
        raise error(name, message, value=array.shape)
    if not (legal := (array >= 0) & (array < math.inf)).all():
        index = int(legal.argmin())
        message = f"has {array[index]}: must be a finite number, 0 or above"
        raise error(name, message, index=index, value=array[index])
    if name == "costs" and not array.any():  # zeros in attention_costs are allowed: nothing can be hidden
        raise error(name, "has nothing but 0: documents that cost nothing are planned in any way")

    def of_document(document: Document) -> Any:
        if not 0 <= document.id < len(array):
            message = f"has {len(array)} numbers, and none of document {document.id}: number documents from 0"
            raise error(name, message, value=document.id)
        if document.start or document.next_token is not None:
            message = f"is of whole documents, and this is a piece of document {document.id}: give a function"
            raise error(name, message, value=document.id)
        return array[document.id]

    return of_document


def costs_of(documents: list[Document], name: str, of_document: Costs) -> NDArray[np.float64]:
    """float64 [documents].

    Raises:
        wlb.WlbError: one is no number, negative, or not finite.
    """
    costs = []
    for index, document in enumerate(documents):
        cost = of_document(document)
        if (
            isinstance(cost, bool)
            or not isinstance(cost, int | float | np.integer | np.floating)
            or not 0 <= cost <= sys.float_info.max
        ):
            message = f"is {cost!r} for document {document.id}: must be a finite number, 0 or above"
            raise error(name, message, index=index, value=cost)
        costs.append(cost)
    return np.array(costs, np.float64)


@dataclass(frozen=True, eq=False)
class Table:
    """The documents of a step, by id and start, so that the plan does not depend on which rank read them.

    Attributes:
        lengths: int64 [documents], tokens of each.
        starts: int64 [documents], first token of each in the document of which it is a piece.
        names: int64 [documents], a packer's ids; -1 without one.
        ids: int64 [documents]; for bare tokens, their index among all that were read for the step.
        labels: int64 [documents]: number of its predictions that count.
        ranks: int64 [documents]: the rank that read it.
        positions: int64 [documents]: its index among the documents that this rank read.
        costs: float64 [documents] each, by the planner's name for them.
        ended: whether the iterators of all ranks have ended.
    """

    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
    names: NDArray[np.int64]
    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    ranks: NDArray[np.int64]
    positions: NDArray[np.int64]
    costs: dict[str, NDArray[np.float64]]
    ended: bool

    @classmethod
    def of(cls, parts: list[NDArray[np.int64]], costs: Mapping[str, NDArray[np.float64]], *, ended: bool) -> Table:
        """From what each rank tells: length, id, start, labels, name; int64 [documents of the rank, 5]. And costs."""
        counts = [len(part) for part in parts]
        lengths, ids, starts, labels, names = np.concatenate(parts).T
        ids = np.where(ids < 0, np.arange(ids.size), ids)
        order = np.lexsort((starts, ids))
        ranks = np.repeat(np.arange(len(parts)), counts)
        positions = np.concatenate([np.arange(count) for count in counts])
        of_read = (lengths[order], starts[order], names[order], ids[order], labels[order])
        of_order = {name: values[order] for name, values in costs.items()}
        return cls(*of_read, ranks[order], positions[order], of_order, ended)

    @property
    def num_valid_tokens(self) -> int:
        """Predictions that count in the loss."""
        return int(self.labels.sum())
