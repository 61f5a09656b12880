"""Hugging Face's data sets are read from their tables: the same documents as item by item."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

import wlb
import wlb.torch as wt
from wlb.torch.data import Documents, Piece
from wlb.torch.data.arrow import arrow_lengths

datasets = pytest.importorskip("datasets")
ROWS = [
    {"input_ids": list(range(n)), "labels": [-100 if i % 3 else i for i in range(n)], "text": "x" * n}
    for n in [3, 1, 70, 5, 9]
]
INDICES: list[Any] = [4, 0, Piece(2, 10, 30), 1, 4, Piece(2, 40, 30)]


def made(dataset: Any) -> wt.PackedBatch:
    return wt.collate(Documents(dataset).__getitems__(INDICES))


@pytest.mark.parametrize("kind", ["plain", "torch", "shuffled", "joined", "columns", "pickled", "transform", "fixed"])
def test_documents_are_those_of_lists(kind: str) -> None:
    dataset = datasets.Dataset.from_list(ROWS)
    order = list(range(len(ROWS)))
    if kind == "torch":
        dataset = dataset.with_format("torch")
    elif kind == "shuffled":
        dataset = dataset.select([4, 2, 0, 1, 3]).select([2, 3, 1, 4, 0])  # and back: with indices between
    elif kind == "joined":
        dataset = datasets.concatenate_datasets([dataset.select([0, 1]), dataset.select([2]), dataset.select([3, 4])])
    elif kind == "columns":
        dataset = dataset.with_format("numpy", columns=["input_ids"])
    elif kind == "pickled":
        found = pickle.loads(pickle.dumps(Documents(dataset))).__getitems__(INDICES)
        assert [document.tokens.tolist() for document in found[:2]] == [ROWS[4]["input_ids"], ROWS[0]["input_ids"]]
    elif kind == "transform":
        dataset = dataset.with_transform(lambda rows: {**rows, "input_ids": [[7, *row] for row in rows["input_ids"]]})
    elif kind == "fixed":
        dataset = dataset.cast_column("labels", datasets.LargeList(datasets.Value("int32")))
    expected: list[Any] = [dict(ROWS[number]) for number in order]
    if kind == "columns":
        expected = [row["input_ids"] for row in expected]
    if kind == "transform":
        with pytest.raises(wlb.WlbError, match="labels for"):
            made(dataset)
        return
    found, wanted = made(dataset), made(expected)
    assert torch.equal(found.tokens, wanted.tokens)
    assert torch.equal(found.labels, wanted.labels)
    assert found.num_valid_tokens == wanted.num_valid_tokens


def test_what_is_missing_is_named() -> None:
    dataset = datasets.Dataset.from_dict({"input_ids": [[1, 2], None, [3, None]]})
    documents = Documents(dataset)
    assert list(documents[0].tokens) == [1, 2]
    for index in (1, 2):
        with pytest.raises(wlb.WlbError, match="documents"):
            wt.collate([documents[index]])


def test_lengths_are_read_without_documents() -> None:
    dataset = datasets.Dataset.from_list(ROWS)
    np.testing.assert_array_equal(arrow_lengths(dataset), [3, 1, 70, 5, 9])
    assert arrow_lengths(ROWS) is None
    assert arrow_lengths(dataset.with_transform(lambda rows: rows)) is None
