"""Hugging Face's data sets are read from their tables: the same documents as item by item."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Trainer

import wlb
import wlb.torch as wt
from tests.trainers.small_corpus import LENGTHS, documents, llama
from tests.trainers.test_balance import arguments, together
from wlb.integrations.huggingface import balance
from wlb.integrations.rows import Rows
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
    with pytest.raises(wlb.WlbError, match=r"dataset\[1\] has nothing in column 'input_ids'"):
        documents[1]
    with pytest.raises(wlb.WlbError, match=r"documents\[0\] has nothing at place 1"):
        wt.collate([documents[2]])


def test_lengths_are_read_without_documents() -> None:
    dataset = datasets.Dataset.from_list(ROWS)
    np.testing.assert_array_equal(arrow_lengths(dataset), [3, 1, 70, 5, 9])
    assert arrow_lengths(ROWS) is None
    assert arrow_lengths(dataset.with_transform(lambda rows: rows)) is None


# --- collators of trainers ------------------------------------------------------------------------------------------


def truncating(features: list[dict[str, Any]]) -> dict[str, Tensor]:
    """As a collator that tokenises with max_length=20 does."""
    return together([{name: row[name][:20] for name in ("input_ids", "labels")} for row in features])


def test_a_collator_that_truncates_is_planned_for(tmp_path: Path) -> None:
    """The first document is short: tables would say lengths that no later document has."""
    rows = sorted(documents(), key=lambda row: len(row["input_ids"]))
    data: Any = datasets.Dataset.from_list(rows)
    kept = Rows(data, truncating)
    np.testing.assert_array_equal(kept.lengths(), np.sort(LENGTHS).clip(max=20))
    np.testing.assert_array_equal(Rows(data, together).lengths(), np.sort(LENGTHS))
    trainer = Trainer(llama(), arguments(tmp_path, max_steps=2), train_dataset=data, data_collator=truncating)
    balance(trainer, max_tokens=64).train()
    assert trainer.state.global_step == 2


def test_a_collator_that_gives_other_tokens_is_named_when_it_is_read() -> None:
    rows = documents()
    odd = int(np.argsort(LENGTHS)[len(rows) // 2])

    def shortened(features: list[dict[str, Any]]) -> dict[str, Tensor]:
        is_odd = features[0]["input_ids"] == rows[odd]["input_ids"]
        return together([{name: row[name][:-1] for name in row} for row in features] if is_odd else features)

    kept = Rows(datasets.Dataset.from_list(rows), shortened)
    kept.lengths()
    for read in (lambda: kept[odd], lambda: kept.__getitems__([0, odd])):
        with pytest.raises(wlb.WlbError, match=r"document \d+, which had .* max_length and truncation") as raised:
            read()
        assert (raised.value.argument, raised.value.index) == ("data_collator", odd)


def test_tables_of_preferences_are_refused(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    trainer = Trainer(llama(), arguments(tmp_path), train_dataset=data, data_collator=together)
    with pytest.raises(
        wlb.WlbError, match=r"trains examples of chosen, rejected: several sequences.*rl\.plan.*micro_batch"
    ) as refused:
        balance(trainer, max_tokens=64)
    assert refused.value.argument == "trainer"


def test_a_row_that_is_nothing_is_named() -> None:
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}, {"input_ids": None}]
    dataset = datasets.concatenate_datasets([datasets.Dataset.from_list(rows[:2]), datasets.Dataset.from_list(rows)])
    with pytest.raises(wlb.WlbError, match=r"dataset\[4\] has nothing in column 'input_ids' \(null\)"):
        Documents(dataset).lengths()
    with pytest.raises(wlb.WlbError, match=r"train_dataset\[4\] has nothing in column 'input_ids' \(null\)"):
        Rows(dataset, lambda features: features[0]).lengths()


def test_a_row_without_a_mask_has_no_padding() -> None:
    masks = [[1, 1, 0], None, [0, 1]]
    rows = [{"input_ids": [1] * size, "attention_mask": mask} for size, mask in zip([3, 4, 2], masks, strict=True)]
    dataset = datasets.Dataset.from_list(rows)
    lengths = arrow_lengths(dataset)
    assert lengths is not None
    assert lengths.tolist() == [2, 4, 1] == [len(Documents(dataset)[at].tokens) for at in range(3)]
