"""Hugging Face's data sets read from their Arrow tables: no list of Python integers is made for any token."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ArrowRows:
    """Reads documents of a data set as arrays.

    Attributes:
        tables: The data set, with its columns of tokens and labels alone, giving tables.

    Complexity:
        One query, and a copy of the documents asked for.
    """

    tables: Any

    @classmethod
    def of(cls, dataset: Any) -> ArrowRows | None:
        """None of what is no such data set."""
        if not _is_tables(dataset) or not all(_holds_integers(dataset, name) for name in _columns(dataset)):
            return None
        return cls(dataset.select_columns(_columns(dataset)).with_format("arrow"))

    def __call__(self, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        """The `input_ids`, and `labels` if there are any, of these documents."""
        table = self.tables[list(numbers)]
        columns = {name: _arrays(table[name]) for name in table.column_names}
        return [{name: arrays[at] for name, arrays in columns.items()} for at in range(len(numbers))]


def arrow_lengths(dataset: Any) -> NDArray[np.int64] | None:
    """int64 [documents], tokens of each, without making documents; None of what is no such data set."""
    if not _is_tables(dataset):
        return None
    compute = import_module("pyarrow.compute")  # comes with the data set
    tables = dataset.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=10_000)
    lengths = [compute.list_value_length(table["input_ids"]).to_numpy() for table in tables]
    return np.concatenate(lengths).astype(np.int64) if lengths else np.empty(0, np.int64)


def _is_tables(dataset: Any) -> bool:
    """Whether it is a `Dataset` with documents, and no function of the user's own makes them as they are read."""
    needed = ("with_format", "column_names", "select_columns", "format", "features")
    if not all(hasattr(dataset, name) for name in needed):
        return False
    return dataset.format["type"] != "custom" and "input_ids" in (dataset.column_names or ())


def _columns(dataset: Any) -> list[str]:
    shown = dataset.format["columns"]  # what `set_format(columns=...)` left
    return [name for name in ("input_ids", "labels") if name in dataset.column_names and name in shown]


def _holds_integers(dataset: Any, name: str) -> bool:
    """Lists of integers of any length, none of them missing."""
    kinds = import_module("pyarrow.types")
    kind = dataset.features.arrow_schema.field(name).type
    return (kinds.is_list(kind) or kinds.is_large_list(kind)) and bool(kinds.is_integer(kind.value_type))


def _arrays(column: Any) -> list[Any]:
    """Each document of a column, where its tokens lie in memory; what has gaps is read item by item."""
    arrays: list[Any] = []
    # Scattered documents are a chunk each, which takes longer to look at than to copy.
    for chunk in [column.combine_chunks()] if column.num_chunks > 1 and not column.null_count else column.chunks:
        if chunk.null_count or chunk.values.null_count:
            arrays += chunk.to_pylist()
            continue
        values, ends = chunk.values.to_numpy(zero_copy_only=True), chunk.offsets.to_numpy().tolist()
        arrays += [values[start:end] for start, end in itertools.pairwise(ends)]
    return arrays
