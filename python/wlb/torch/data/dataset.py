"""Data sets of documents, which are read whole or in the pieces of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset

from wlb._errors import error
from wlb.reading.documents import Document, Piece, cut
from wlb.reading.joined_rows import RowIndex
from wlb.reading.rows import RowReader
from wlb.reading.values import not_as_many
from wlb.torch.data.arrow import ArrowRows, arrow_lengths


class Documents(Dataset[Document]):
    """A map-style data set of token sequences that takes the indices and pieces of a `BalancedBatchSampler`.

    Each document in a row with `seq_lengths` has a number of its own here.

    Args:
        dataset: `dataset[i]` gives row `i`: a one-dimensional array, tensor or sequence of token ids; or a mapping with
            these as `"input_ids"`, and maybe `"labels"` and other columns (`wlb.torch.RowReader` says what they mean),
            such as a row of Hugging Face's datasets. Those are read from their Arrow tables as arrays, whatever format
            they are set to, unless a function of your own (`set_transform`) makes the rows.
        columns: names of further columns to carry.
        labels_ahead: how many tokens ahead every token predicts (`collate`).
        argument: name of `dataset` in errors.

    Raises:
        wlb.WlbError: `columns` or `labels_ahead` are invalid. When a row is read: as `wlb.torch.RowReader`.
    """

    def __init__(
        self, dataset: Any, *, columns: Sequence[str] = (), labels_ahead: int = 1, argument: str = "dataset"
    ) -> None:
        self.dataset = dataset
        self._reader = RowReader(columns, labels_ahead)
        self._argument = argument
        self._rows = ArrowRows.of(dataset, self._reader, argument)
        self._index: RowIndex | None = None
        self._indexed = False

    def check(self) -> None:
        """Reads the first row, whose columns are most likely those of all, so that a run fails before it begins.

        Raises:
            wlb.WlbError: as `wlb.torch.RowReader`.
        """
        if len(self.dataset):
            self[0]

    def lengths(self) -> NDArray[np.int64]:
        """int64 [documents], tokens of each. Documents in Arrow tables are not read for it; others are read once.

        If Arrow tables have an `attention_mask`, it is read, and padding is not counted.
        """
        index = self._documents_of_rows()
        if index is not None:
            return index.lengths
        found = arrow_lengths(self.dataset, self._argument)
        if found is not None:
            return found
        return np.array([len(self[number].tokens) for number in range(len(self.dataset))], np.int64)

    def __len__(self) -> int:
        index = self._documents_of_rows()
        return len(self.dataset) if index is None else index.rows.size

    def __getitem__(self, index: int | Piece) -> Document:
        """The document, or the piece of it.

        Raises:
            wlb.WlbError: the document ends before the piece does, so the plan had another length. Or it has not as many
                labels as tokens, or as `wlb.torch.RowReader`.
        """
        [row] = self._rows_of([index])
        return self._made(self.dataset[row] if self._rows is None else self._rows([row])[0], index)

    def __getitems__(self, indices: list[int | Piece]) -> list[Document]:
        """The documents of a micro-batch, read at once if the data set supports it; `DataLoader` calls this."""
        together = self._rows or getattr(self.dataset, "__getitems__", None)
        if together is None:
            return [self[index] for index in indices]
        numbers = self._rows_of(indices)
        rows = together(numbers) if numbers else []
        return [self._made(row, index) for row, index in zip(rows, indices, strict=True)]

    def _rows_of(self, indices: Sequence[int | Piece]) -> list[int]:
        """The rows that have these documents."""
        numbers = [index.document if isinstance(index, Piece) else index for index in indices]
        found = self._documents_of_rows()
        return numbers if found is None else [int(found.rows[number]) for number in numbers]

    def _documents_of_rows(self) -> RowIndex | None:
        """Index of documents by row; None if every row is one document."""
        if not self._indexed:
            if self._rows is None:
                self._index = RowIndex.of_rows(self.dataset, self._argument)
            else:
                per_row = self._rows.sequence_lengths()
                self._index = None if per_row is None else RowIndex.of(per_row)
            self._indexed = True
        return self._index

    def _made(self, row: Any, index: int | Piece) -> Document:
        number = index.document if isinstance(index, Piece) else index
        known = self._documents_of_rows()
        if known is None:
            parts = self._reader.documents(row, number, self._argument)
            if len(parts) != 1:
                message = (
                    f"has {len(parts)} documents by its seq_lengths, but the first row has none: give all rows some"
                )
                raise error(self._argument, message, index=number, value=len(parts))
            document = parts[0]
        else:
            part = int(known.parts[number])
            document = self._reader.documents(row, int(known.rows[number]), self._argument, first_id=number - part)[
                part
            ]
        if not isinstance(index, Piece):
            return document
        _, start, length = index
        found = len(document.tokens)
        if found < start + length:
            message = f"has {found} tokens, but the plan wants those from {start} to {start + length}"
            raise error(self._argument, message, index=number, value=found)
        if document.labels is not None and len(document.labels) != found:
            raise not_as_many(len(document.labels), found, self._argument, number)
        return cut(document, start, length)


def measured(
    dataset: Any,
    lengths: ArrayLike | None,
    argument: str,
    *,
    columns: Sequence[str] = (),
    labels_ahead: int = 1,
) -> tuple[Documents, ArrayLike]:
    """Documents to plan for, and their lengths, given or read.

    Args:
        dataset: as `Documents` takes it.
        lengths: int [documents], or None.
        argument: name of `dataset` in errors.
        columns: as `Documents` takes them.
        labels_ahead: as `Documents` takes it.

    Raises:
        wlb.WlbError: the data set has no length, like a stream, or is empty; the number of lengths is not that of
            documents; its first row cannot be read.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        kind = type(dataset).__name__
        message = f"is a {kind} without a length: give it as streams, which BalancedStream takes"
        raise error(argument, message, value=kind)
    if not len(dataset):
        raise error(argument, "is empty", value=0)
    if isinstance(dataset, Documents):
        documents = dataset
    else:
        documents = Documents(dataset, columns=columns, labels_ahead=labels_ahead, argument=argument)
    documents.check()
    found = documents.lengths() if lengths is None else lengths
    if np.shape(found) != (len(documents),):
        message = f"have shape {np.shape(found)}, but there are {len(documents)} documents"
        raise error("lengths", message, value=np.shape(found))
    return documents, found
