"""Rows that hold several documents (`seq_lengths`): split, joined, and found by the number of a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb._errors import error
from wlb.reading.documents import WEIGHTS
from wlb.reading.rows import Part
from wlb.reading.values import sequence_lengths, tokens_of


def num_documents(row: Any, index: int) -> int:
    """Documents of a row."""
    if not _has_several(row):
        return 1
    return sequence_lengths(row["seq_lengths"], "row", index).size


def _has_several(row: Any) -> bool:
    return isinstance(row, Mapping) and row.get("seq_lengths") is not None


def split_row(row: Mapping[str, Any], argument: str, index: int) -> list[Mapping[str, Any]]:
    """A row of several documents (`seq_lengths`) as rows of one document each, with all columns of one value a token.

    Raises:
        wlb.WlbError: its lengths are not those of its tokens.
    """
    if row.get("seq_lengths") is None:
        return [row]
    lengths, size = sequence_lengths(row["seq_lengths"], argument, index), len(tokens_of(row, argument, index))
    if int(lengths.sum()) != size:
        message = f"has seq_lengths of {int(lengths.sum())} tokens for {size}"
        raise error(argument, message, index=index, value="seq_lengths")
    ends = np.cumsum(lengths).tolist()
    others = {name: value for name, value in row.items() if name != "seq_lengths"}
    return [
        {name: _cut_value(value, start, end, size) for name, value in others.items()}
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


def _cut_value(value: Any, start: int, end: int, size: int) -> Any:
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__"):
        return value
    shape = getattr(value, "shape", None)
    if shape is not None:
        return value[..., start:end] if len(shape) and shape[-1] == size else value
    if len(value) == size:
        return value[start:end]
    if value and all(hasattr(part, "__len__") and len(part) == size for part in value):
        return [part[start:end] for part in value]
    return value


def joined_row(parts: Sequence[Part]) -> Part:
    """Documents of `RowReader.parts` as one row with `seq_lengths`."""
    sizes = [part["input_ids"].size for part in parts]

    def column(name: str, part: Part) -> NDArray[Any]:
        if name in part:
            return part[name]
        if name == "labels":
            return part["input_ids"]
        size = part["input_ids"].size
        usual = np.ones(size, np.float32) if name == WEIGHTS else np.arange(size)
        shape = next(other[name].shape[:-1] for other in parts if name in other)
        return np.broadcast_to(usual, (*shape, size))

    names = dict.fromkeys(name for part in parts for name in part)
    row = {name: np.concatenate([column(name, part) for part in parts], axis=-1) for name in names}
    return row | {"seq_lengths": np.array(sizes, np.int64)}


@dataclass(frozen=True, eq=False)
class RowIndex:
    """Index of documents by row, for rows with several documents.

    Attributes:
        rows: int64 [documents].
        parts: int64 [documents]: index among the documents of the row.
        lengths: int64 [documents], tokens.
    """

    rows: NDArray[np.int64]
    parts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def of_rows(cls, dataset: Any, argument: str) -> RowIndex | None:
        """Index of a data set whose first row has `seq_lengths`; None for others, where each row is a document.

        Complexity:
            Every row is read; of Hugging Face's data sets that column alone, if all rows have it.

        Raises:
            wlb.WlbError: the `seq_lengths` of a row are no integers from 1 on.
        """
        if not len(dataset) or not _has_several(dataset[0]):
            return None
        read = dataset.select_columns(["seq_lengths"]) if hasattr(dataset, "select_columns") else dataset
        per_row = []
        for number in range(len(dataset)):
            row = read[number]
            if not _has_several(row):
                row = {"seq_lengths": [len(tokens_of(dataset[number], argument, number))]}
            per_row.append(sequence_lengths(row["seq_lengths"], argument, number))
        return cls.of(per_row)

    @classmethod
    def of(cls, per_row: Sequence[NDArray[np.int64]]) -> RowIndex:
        """Index from the lengths of the documents of each row."""
        counts = np.array([lengths.size for lengths in per_row], np.int64)
        rows = np.repeat(np.arange(len(per_row)), counts)
        parts = np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts)
        return cls(rows, parts, np.concatenate([np.empty(0, np.int64), *per_row]).astype(np.int64))
