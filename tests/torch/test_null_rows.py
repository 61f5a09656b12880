"""A row without tokens (null) is named, with its column, by everything that reads rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import wlb
import wlb.torch as wt

COST = wlb.CostModel(attention=1.0, linear=1.0)
SIZES: dict[str, Any] = {"max_tokens": 8, "tokens_per_batch": 8, "cost_model": COST}
MAPPINGS: list[Any] = [{"input_ids": [1, 2, 3]}, {"input_ids": None}, {"input_ids": [4, 5]}]
DATA: dict[str, list[Any]] = {
    "mappings": MAPPINGS,
    "columns": [row | {"length": 3, "attention_mask": None} for row in MAPPINGS],
    "bare": [[1, 2, 3], None, [4, 5]],
    "rows": [MAPPINGS[0], None, MAPPINGS[2]],
}


class Stream:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def streamed(rows: list[Any]) -> list[Any]:
    packer = wlb.Packer(num_micro_batches=1, max_tokens=8, cost_model=COST)
    return list(wt.BalancedStream([Stream(rows)], packer=packer, collate_fn=wt.collate))


READERS: dict[str, Callable[[list[Any]], Any]] = {
    "dataset": lambda rows: wt.balanced_loader(rows, **SIZES),
    "dataset, lengths given": lambda rows: list(wt.balanced_loader(rows, lengths=[3, 3, 2], **SIZES)),
    "dataset, one after the other": lambda rows: wt.Documents(rows).lengths(),
    "dataset, by RowReader": lambda rows: [wt.RowReader().documents(row, at, "dataset") for at, row in enumerate(rows)],
    "streams[0]": streamed,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", DATA)
def test_a_row_that_is_nothing_is_named(kind: str, reader: str) -> None:
    with pytest.raises(wlb.WlbError) as raised:
        READERS[reader](DATA[kind])
    column = "" if kind in ("bare", "rows") else "has nothing in column 'input_ids' (null)"
    assert f"{reader.partition(',')[0]}[1] {column or 'is nothing (null)'}: filter such rows out" in str(raised.value)


def test_a_row_of_several_documents_that_is_nothing_is_named() -> None:
    rows = [{"input_ids": [1, 2, 3], "seq_lengths": [1, 2]}, {"input_ids": None}]
    with pytest.raises(wlb.WlbError, match=r"dataset\[1\] has nothing in column 'input_ids' \(null\)"):
        wt.Documents(rows).lengths()


@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_a_token_that_is_nothing_is_named(name: str) -> None:
    row = {"input_ids": [1, 2, 3], "labels": [1, 2, 3]} | {name: [1, None, 3]}
    with pytest.raises(wlb.WlbError, match=r"\[0\] has nothing at place 1 \(null\) of 3"):
        next(iter(wt.balanced_loader([row], **SIZES)))


def test_a_document_that_is_nothing_is_named_by_collate() -> None:
    with pytest.raises(wlb.WlbError, match=r"documents\[1\] is nothing \(null\)"):
        wt.collate([[1, 2], None])
