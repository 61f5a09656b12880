"""Reads Hugging Face's data sets from their Arrow tables, without making Python integers of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.reading.row_kinds import WITHOUT_EFFECT, masked_lengths
from wlb.reading.rows import KNOWN, RowReader
from wlb.reading.values import nothing, sequence_lengths


@dataclass(frozen=True)
class ArrowRows:
    """Reads rows of a data set as arrays.

    Attributes:
        tables: the data set with only the columns that are read, in the format of tables.

    Complexity:
        One query, and a copy of the rows asked for.
    """

    tables: Any

    @classmethod
    def of(cls, dataset: Any, reader: RowReader, argument: str) -> ArrowRows | None:
        """The rows of a data set of Arrow tables; None for other data sets.

        Raises:
            wlb.WlbError: the data set has a column that `reader` refuses.
        """
        if not _is_tables(dataset):
            return None
        shown = dataset.format["columns"]  # the columns that `set_format(columns=...)` left
        names = [name for name in dataset.column_names if name in shown]
        names = [name for name in names if name in reader.columns or not _is_text(dataset, name)]
        reader.check_names(names, argument)
        taken = [name for name in names if name in reader.columns or name in KNOWN - WITHOUT_EFFECT]
        if not all(_holds_integers(dataset, name) for name in taken if name in ("input_ids", "labels")):
            return None
        return cls(dataset.select_columns(taken).with_format("arrow"))

    def __call__(self, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        """The columns of these rows."""
        table = self.tables[list(numbers)]
        columns = {name: _arrays(table[name]) for name in table.column_names}
        return [{name: arrays[at] for name, arrays in columns.items()} for at in range(len(numbers))]

    def sequence_lengths(self) -> list[NDArray[np.int64]] | None:
        """int64 [documents] of each row, the tokens of its documents; None if every row is one document.

        Raises:
            wlb.WlbError: some rows have none.
        """
        if "seq_lengths" not in self.tables.column_names:
            return None
        found: list[NDArray[np.int64]] = []
        for table in self.tables.select_columns(["seq_lengths"]).with_format("arrow").iter(batch_size=10_000):
            for lengths in _arrays(table["seq_lengths"]):
                found.append(sequence_lengths(lengths, "dataset", len(found)))
        return found


def arrow_lengths(dataset: Any, argument: str = "dataset") -> NDArray[np.int64] | None:
    """int64 [rows], tokens of each without padding, without making documents; None for other data sets.

    Tokens with 0 in `attention_mask`, if there is such a column, are padding.

    Raises:
        wlb.WlbError: a row has no tokens (null); the error names it, and `argument`.
    """
    if not _is_tables(dataset):
        return None
    compute = import_module("pyarrow.compute")  # comes with the data set
    masked = "attention_mask" in dataset.format["columns"] and _holds_integers(dataset, "attention_mask")
    names = ["input_ids", *(["attention_mask"] if masked else [])]
    found, before = [np.empty(0, np.int64)], 0
    for table in dataset.select_columns(names).with_format("arrow").iter(batch_size=10_000):
        lengths = compute.list_value_length(table["input_ids"])
        if lengths.null_count:
            first = int(np.flatnonzero(lengths.is_null().to_numpy())[0])
            raise nothing(argument, before + first, "input_ids")
        lengths = lengths.to_numpy()
        if masked:  # a row without a mask has no padding
            hidden = table["attention_mask"].is_null().to_numpy()
            lengths = np.where(hidden, lengths, masked_lengths(table["attention_mask"]))
        found.append(lengths.astype(np.int64))
        before += lengths.size
    return np.concatenate(found)


def _is_tables(dataset: Any) -> bool:
    """Whether it is a `Dataset` of documents whose rows no function of the user makes when they are read."""
    needed = ("with_format", "column_names", "select_columns", "format", "features")
    if not all(hasattr(dataset, name) for name in needed):
        return False
    return dataset.format["type"] != "custom" and "input_ids" in (dataset.column_names or ())


def _is_text(dataset: Any, name: str) -> bool:
    """Whether a column has only text or nothing, also inside lists and structures."""
    kinds = import_module("pyarrow.types")

    def text(kind: Any) -> bool:
        if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
            return text(kind.value_type)
        if kinds.is_struct(kind):
            return all(text(kind.field(at).type) for at in range(kind.num_fields))
        of_text = (kinds.is_string, kinds.is_large_string, kinds.is_binary, kinds.is_large_binary, kinds.is_null)
        return any(is_kind(kind) for is_kind in of_text)

    return text(dataset.features.arrow_schema.field(name).type)


def _holds_integers(dataset: Any, name: str) -> bool:
    """Lists of integers of any length, none of them missing."""
    kinds = import_module("pyarrow.types")
    kind = dataset.features.arrow_schema.field(name).type
    return (kinds.is_list(kind) or kinds.is_large_list(kind)) and bool(kinds.is_integer(kind.value_type))


def _arrays(column: Any) -> list[Any]:
    """Each document of a column as a view of its memory; a column with gaps is read item by item."""
    arrays: list[Any] = []
    # Scattered documents would be one chunk each, which is slower than one copy.
    for chunk in [column.combine_chunks()] if column.num_chunks > 1 and not column.null_count else column.chunks:
        if chunk.null_count or not _are_numbers(chunk) or chunk.values.null_count:
            arrays += chunk.to_pylist()
            continue
        values, ends = chunk.values.to_numpy(zero_copy_only=True), chunk.offsets.to_numpy().tolist()
        arrays += [values[start:end] for start, end in itertools.pairwise(ends)]
    return arrays


def _are_numbers(chunk: Any) -> bool:
    """Lists of integers or floats, which lie in memory as arrays do."""
    kinds = import_module("pyarrow.types")
    if not kinds.is_list(chunk.type) and not kinds.is_large_list(chunk.type):
        return False
    return bool(kinds.is_integer(chunk.type.value_type) or kinds.is_floating(chunk.type.value_type))
