"""Documents of a trainer's data set as its own collator makes them: their lengths, tokens and labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from wlb._errors import error
from wlb.reading.joined_rows import RowIndex, split_row
from wlb.reading.row_kinds import advice
from wlb.reading.rows import KNOWN, RowReader
from wlb.reading.values import tokens_of
from wlb.torch.data.arrow import arrow_lengths

Collator = Callable[[list[Any]], Mapping[str, Any]]


class Rows(Dataset[dict[str, NDArray[Any]]]):
    """Document `i` of a data set, collated alone: its `input_ids` and other known columns.

    Each document in a row with `seq_lengths` has a number of its own here.

    Args:
        dataset: the trainer's.
        collator: the trainer's; called with one document at a time.
        reader: knows the columns to carry.
    """

    def __init__(self, dataset: Any, collator: Collator, reader: RowReader | None = None) -> None:
        self.dataset = dataset
        self._collator = collator
        self._reader = RowReader() if reader is None else reader
        self._index = RowIndex.of_rows(dataset, "train_dataset")
        self._planned: NDArray[np.int64] | None = None  # tokens of each document, by the plan
        self._said_by = ""

    def __len__(self) -> int:
        return len(self.dataset) if self._index is None else self._index.rows.size

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        """Raises `wlb.WlbError` as `row_of`, or if the document has another length than in the plan."""
        return self._as_planned(self._made(self.dataset[self._row_of(index)], index), index)

    def __getitems__(self, indices: list[int]) -> list[dict[str, NDArray[Any]]]:
        """Several documents at once, because data sets of Hugging Face read them in one query."""
        together = getattr(self.dataset, "__getitems__", None)
        rows = [self._row_of(index) for index in indices]
        features = [self.dataset[number] for number in rows] if together is None else together(rows)
        made = (self._made(feature, index) for feature, index in zip(features, indices, strict=True))
        return [self._as_planned(document, index) for document, index in zip(made, indices, strict=True)]

    def lengths(self) -> NDArray[np.int64]:
        """int64 [documents], tokens of each, as the collator makes them. Documents read later must have these lengths.

        Lengths are taken from a table if the collator does not change the lengths of the first and the longest
        document: a collator that adds tokens changes every document, and one that truncates changes the longest.

        Complexity:
            O(documents) for a data set in Arrow tables; for others every document is made once.
        """
        found = arrow_lengths(self.dataset, "train_dataset") if self._index is None else self._index.lengths
        self._planned = None
        if found is None or not len(found) or any(found[at] != self._size(at) for at in (0, int(found.argmax()))):
            found = np.array([self._size(index) for index in range(len(self))], np.int64)
        self.planned_by(found, "when its length was read")
        if (empty := np.flatnonzero(found == 0)).size:
            index = int(empty[0])
            raise error("train_dataset", "has no tokens: filter such documents out", index=index, value=0)
        return found

    def planned_by(self, lengths: NDArray[np.int64], said_by: str) -> None:
        """Sets the lengths of the plan: a document that is read later with another length is an error.

        Args:
            lengths: int64 [documents].
            said_by: where they come from, for the error.
        """
        self._planned, self._said_by = lengths, said_by

    def _size(self, index: int) -> int:
        return int(self._made(self.dataset[self._row_of(index)], index)["input_ids"].size)

    def _as_planned(self, document: dict[str, NDArray[Any]], index: int) -> dict[str, NDArray[Any]]:
        """The document, after a check that its length is that of the plan.

        Raises:
            wlb.WlbError: it names the setting that changes lengths.
        """
        found = document["input_ids"].size
        if self._planned is None or found == self._planned[index]:
            return document
        message = (
            f"gives {found} tokens of document {index}, which had {self._planned[index]} {self._said_by}: leave "
            "max_length and truncation of the collator (or of its tokenizer) out, and give balance "
            'max_document_tokens= with oversize="truncate"; or give balance lengths= as the collator makes them'
        )
        raise error("data_collator", message, index=index, value=found)

    def _row_of(self, index: int) -> int:
        return index if self._index is None else int(self._index.rows[index])

    def _made(self, feature: Any, index: int) -> dict[str, NDArray[Any]]:
        if self._index is not None:
            row = int(self._index.rows[index])
            feature = split_row(feature, "train_dataset", row)[int(self._index.parts[index])]
        return row_of(feature, index, self._collator, self._reader)


def as_it_is(features: list[Any]) -> Mapping[str, Any]:
    """All columns of a single row: the collator for data sets that have none."""
    found: Mapping[str, Any] = features[0] if isinstance(features[0], Mapping) else {"input_ids": features[0]}
    return found


def row_of(feature: Any, index: int, collator: Collator, reader: RowReader) -> dict[str, NDArray[Any]]:
    """One document, collated alone and without padding.

    Raises:
        wlb.WlbError: it has no `input_ids`, or something that a packed row cannot express.
    """
    if isinstance(feature, Mapping) and "input_ids" not in feature:
        columns = ", ".join(map(repr, feature)) or "nothing"
        message = f"has no 'input_ids', but {columns}: {_way_out(feature)}"
        raise error("train_dataset", message, index=index, value=list(feature))
    tokens_of(feature, "train_dataset", index)  # a collator would raise without the row's number
    batch = collator([dict(feature) if isinstance(feature, Mapping) else feature])
    if "input_ids" not in batch:
        given = ", ".join(map(repr, batch)) or "nothing"
        raise error("data_collator", f"gives no 'input_ids', but {given}", index=index, value=list(batch))
    found = {name: _alone(name, value) for name, value in batch.items()}
    parts = reader.parts(found, index, "data_collator")
    if len(parts) != 1:
        message = f"gives {len(parts)} documents for one row: give rows their seq_lengths in the data set"
        raise error("data_collator", message, index=index, value=len(parts))
    return parts[0]


def _way_out(feature: Mapping[str, Any]) -> str:
    """Advice in the error for a document without `input_ids`."""
    if any(name.startswith(("chosen", "rejected", "completion_input_ids", "KL_")) for name in feature):
        return (
            "several sequences are one example (DPO, KTO, reward models), whose loss is no sum over tokens, and this "
            "trainer's packed rows do not keep them together. Plan micro-batches that do with "
            'wlb.rl.plan(groups=, together="micro_batch")'
        )
    return f"{advice([*feature])}, or give it to a trainer that does"


def _alone(name: str, value: Any) -> Any:
    """A column of a batch with one row, as an array."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    if not isinstance(value, np.ndarray | list | tuple):
        return value
    array = value if isinstance(value, np.ndarray) else _array(value)
    if array is not None and array.shape == (1,) and name not in KNOWN:
        return array[0]  # a number for each row
    if array is None or array.ndim < 2:
        return value
    if name == "position_ids" and array.ndim == 3 and array.shape[1] == 1:  # of mRoPE, [3, rows, tokens]
        return array[:, 0]
    return array[0] if array.shape[0] == 1 else array


def _array(value: Any) -> NDArray[Any] | None:
    try:
        return np.asarray(value)
    except ValueError:  # ragged
        return None
