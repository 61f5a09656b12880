"""`collate` against the plainest possible reading of what it promises."""

import dataclasses
import functools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.utils.data import DataLoader

import wlb
from wlb.torch.data import IGNORE, Document, Documents, PackedBatch, Piece, collate

LENGTHS = st.lists(st.integers(1, 40), max_size=12)
STRATEGIES = st.sampled_from(["per_document", "per_sequence"])


def make(lengths: list[int], seed: int = 0) -> list[NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 50_000, length) for length in lengths]


def unshard(batches: list[PackedBatch], name: str) -> list[int]:
    """What all ranks hold, in packed order."""
    rank_major = torch.cat([getattr(batch, name) for batch in batches]).numpy()
    values: list[int] = rank_major[batches[0].shard.restore_indices].tolist()
    return values


@settings(max_examples=60)
@given(LENGTHS, st.sampled_from([1, 2, 4, 8]), STRATEGIES)
def test_all_ranks_together_hold_the_packed_sequence(lengths: list[int], cp_size: int, strategy: str) -> None:
    documents = make(lengths)
    batches = [collate(documents, cp_rank=rank, cp_size=cp_size, strategy=strategy) for rank in range(cp_size)]
    tokens, labels, positions = [], [], []
    for document in map(np.ndarray.tolist, documents):
        for position, token in enumerate(document):
            tokens.append(token)
            labels.append(document[position + 1] if position + 1 < len(document) else IGNORE)
            positions.append(position)
    assert unshard(batches, "tokens") == tokens
    assert unshard(batches, "labels") == labels
    assert unshard(batches, "position_ids") == positions
    for rank, batch in enumerate(batches):
        assert batch.tokens.dtype == batch.labels.dtype == batch.position_ids.dtype == torch.int64
        assert batch.tokens.numel() == batch.shard.tokens_per_rank[rank]
        assert batch.cu_seqlens.tolist() == np.cumsum([0, *lengths]).tolist()
        assert batch.cu_seqlens.dtype == torch.int32
        assert batch.max_seqlen == max(lengths, default=0)
        assert batch.document_ids.tolist() == list(range(len(lengths)))
    assert batches[0].num_valid_tokens == sum(int((batch.labels != IGNORE).sum()) for batch in batches)


def test_a_kernel_model_chooses_the_strategy() -> None:
    """The choice is that of `wlb.shard`, the same on every rank."""
    model = wlb.KernelModel.analytic("h100", num_heads=32, head_dim=128)
    for lengths in ([20_000], [9_000, 9_000], [60_000, *[500] * 64]):
        chosen = wlb.shard(lengths, cp_size=4, strategy="adaptive", kernel_model=model)
        for rank in range(4):
            batch = collate(make(lengths), cp_rank=rank, cp_size=4, strategy="adaptive", kernel_model=model)
            assert batch.shard == chosen
            assert batch.tokens.numel() == chosen.tokens_per_rank[rank]


@settings(max_examples=40)
@given(LENGTHS.filter(bool), st.integers(1, 15), st.sampled_from([1, 4]))
def test_cutting_documents_drops_no_prediction(lengths: list[int], longest: int, cp_size: int) -> None:
    """Every token but the first of its document is a label once, however the document is cut."""
    documents = make(lengths)
    numbers, starts, cuts = wlb.split_documents(lengths, max_document_tokens=longest)
    pieces = [
        Piece(int(number), int(start), int(length)) for number, start, length in zip(numbers, starts, cuts, strict=True)
    ]
    dataset = Documents(documents)
    batches = [collate([dataset[piece] for piece in pieces], cp_rank=r, cp_size=cp_size) for r in range(cp_size)]
    found = [label for label in unshard(batches, "labels") if label != IGNORE]
    assert found == [token for document in documents for token in document[1:].tolist()]
    assert unshard(batches, "position_ids") == [position for piece in pieces for position in range(piece.length)]
    assert batches[0].num_valid_tokens == len(found)
    assert batches[0].document_ids.tolist() == [piece.document for piece in pieces]


@settings(max_examples=40)
@given(
    LENGTHS.filter(bool), st.integers(1, 15), st.sampled_from([1, 4]), st.sampled_from([np.asarray, np.ndarray.tolist])
)
def test_only_what_has_a_label_is_learnt(lengths: list[int], longest: int, cp_size: int, kind: Any) -> None:
    """Labels are those given, not shifted; tokens without are seen all the same, and cuts change neither."""
    documents = make(lengths)
    labels = [np.where(document % 3, document + 1, IGNORE) for document in documents]
    rows: list[Any] = [
        {"input_ids": document, "labels": kind(label)} if number % 3 else document
        for number, (document, label) in enumerate(zip(documents, labels, strict=True))
    ]
    pieces = [Piece(*row) for row in np.stack(wlb.split_documents(lengths, max_document_tokens=longest), 1).tolist()]
    batches = [
        collate([Documents(rows)[piece] for piece in pieces], cp_rank=r, cp_size=cp_size) for r in range(cp_size)
    ]
    expected = []
    for number, (document, label) in enumerate(zip(documents, labels, strict=True)):
        expected += [*(label if number % 3 else document)[1:].tolist(), IGNORE]
    assert unshard(batches, "tokens") == [token for document in documents for token in document.tolist()]
    assert unshard(batches, "labels") == expected
    assert batches[0].num_valid_tokens == sum(label != IGNORE for label in expected)


@pytest.mark.parametrize(
    "document",
    [
        [1, 2, 3],
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]},
        {"input_ids": [1, 2, 3], "labels": torch.tensor([IGNORE, 2, 3])},
        (1, 2, 3),
        bytes([1, 2, 3]),
        np.array([1, 2, 3], np.uint16),
        torch.tensor([1, 2, 3]),
        torch.tensor([1, 2, 3], dtype=torch.int32),
        Document([1, 2, 3], id=7),
        Document([1, 2, 3], id=7, labels=(IGNORE, 2, 3)),
    ],
)
def test_tokens_of_any_kind(document: object) -> None:
    batch = collate([document, document])
    assert batch.tokens.tolist() == [1, 2, 3, 1, 2, 3]
    assert batch.labels.tolist() == [2, 3, IGNORE, 2, 3, IGNORE]


def test_the_batch_is_not_the_document() -> None:
    document = np.arange(5)
    collate([document]).tokens.zero_()
    assert document.tolist() == [0, 1, 2, 3, 4]


def test_no_documents_are_an_empty_batch() -> None:
    batch = collate([], cp_rank=1, cp_size=2)
    assert batch.tokens.shape == batch.labels.shape == batch.position_ids.shape == (0,)
    assert batch.cu_seqlens.tolist() == [0]
    assert (batch.max_seqlen, batch.num_valid_tokens, batch.shard.num_tokens) == (0, 0, 0)


def test_to_and_pickle_keep_everything() -> None:
    batch = collate(make([5, 1, 9]), cp_rank=1, cp_size=2, document_ids=[4, 5, 6])
    copy = pickle.loads(pickle.dumps(batch))
    for other in (copy, batch.to("cpu", non_blocking=True)):
        for name in ("tokens", "labels", "position_ids", "cu_seqlens", "document_ids"):
            assert torch.equal(getattr(other, name), getattr(batch, name))
        assert other.shard == batch.shard
        assert (other.max_seqlen, other.cp_rank, other.num_valid_tokens) == (9, 1, 12)
    # A device without memory: every tensor goes there, and nothing else is touched.
    there = batch.to("meta")
    tensors = [there.tokens, there.labels, there.position_ids, there.cu_seqlens, there.document_ids]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def handed_over(documents: list[Any]) -> tuple[PackedBatch, bool, bool]:
    """A batch of a worker, and whether it lies in memory that the trainer sees, and is handed over from there."""
    batch = collate(documents, cp_rank=1, cp_size=2)
    rows = batch.__reduce__()[1][0]
    return batch, rows.is_shared(), rows.data_ptr() == batch.tokens.data_ptr()


def test_workers_hand_batches_over_without_a_copy() -> None:
    documents = make([5, 1, 9, 3])
    loader: DataLoader[Any] = DataLoader(
        Documents(documents), batch_sampler=[[0, 2, 3]], collate_fn=handed_over, num_workers=1, timeout=500
    )
    ((batch, shared, same),) = list(loader)
    assert (shared, same) == (True, True)
    alone, shared, same = handed_over([documents[0], documents[2], documents[3]])
    assert (shared, same) == (False, True)  # nothing is shared where there is no worker
    for name in ("tokens", "labels", "position_ids"):
        assert torch.equal(getattr(batch, name), getattr(alone, name))
    # Tensors that were replaced, moved or sliced are put together.
    other = alone.to("cpu")
    for changed in (other, dataclasses.replace(alone, labels=alone.labels.clone()), alone._map(torch.clone)):
        rows = changed.__reduce__()[1][0]
        assert torch.equal(rows, torch.stack([changed.tokens, changed.labels, changed.position_ids]))


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_as_collate_fn_in_workers(start_method: str) -> None:
    documents = make([5, 1, 9, 3])
    loader: DataLoader[PackedBatch] = DataLoader(
        Documents(documents),
        batch_sampler=[[0, Piece(2, 3, 4)], [], [3, 1]],
        collate_fn=functools.partial(collate, cp_rank=1, cp_size=2),
        num_workers=1,
        multiprocessing_context=start_method,
        timeout=500,
    )
    first, empty, last = list(loader)
    assert first.document_ids.tolist() == [0, 2]
    assert first.shard.lengths.tolist() == [5, 4]
    assert empty.tokens.numel() == 0
    assert torch.equal(last.tokens, collate([documents[3], documents[1]], cp_rank=1, cp_size=2).tokens)


@pytest.mark.parametrize(
    ("documents", "options", "argument", "index"),
    [
        ([[1], [[1, 2]]], {}, "documents", 1),
        ([[1], []], {}, "documents", 1),
        ([[1], [1.5]], {}, "documents", 1),
        ([["a"]], {}, "documents", 0),
        ([[1], {"text": "a"}], {}, "documents", 1),
        ([[1], {"input_ids": [1, 2], "labels": [1]}], {}, "documents", 1),
        ([[1], {"input_ids": [1, 2], "labels": [-1, 1]}], {}, "documents", 1),
        ([[1], {"input_ids": [1, 2], "labels": [0.5, 1]}], {}, "documents.labels", 1),
        ([[1]], {"cp_rank": 2, "cp_size": 2}, "cp_rank", None),
        ([[1]], {"cp_rank": -1, "cp_size": 2}, "cp_rank", None),
        ([[1]], {"cp_rank": None}, "cp_rank", None),
        ([[1], np.array([2**63 + 5], np.uint64)], {}, "documents", 1),
        ([[1], Document([1, 2], "a")], {}, "documents", 1),  # type: ignore[arg-type]
        ([[1], Document([1, 2], -1)], {}, "documents", 1),
        ([[1], Document([1, 2], 0, next_token="x")], {}, "documents", 1),  # type: ignore[arg-type]
        ([[1], Document([1, 2], 0, next_token=1.5)], {}, "documents", 1),  # type: ignore[arg-type]
        ([[1], [2]], {"document_ids": [3, 2**63]}, "document_ids", 1),
        ([[1], [2]], {"document_ids": [3, 1.7]}, "document_ids", 1),
        ([[1]], {"document_ids": ["q"]}, "document_ids", 0),
        ([[1]], {"cp_size": 0}, "cp_size", None),
        ([[1]], {"document_ids": [1, 2]}, "document_ids", None),
        ([[1]], {"strategy": "best"}, "strategy", None),
    ],
)
def test_bad_input_is_named(documents: list[object], options: dict[str, object], argument: str, index: object) -> None:
    with pytest.raises(wlb.WlbError) as caught:
        collate(documents, **options)  # type: ignore[arg-type]
    assert (caught.value.argument, caught.value.index) == (argument, index)


def test_a_data_set_that_is_shorter_than_its_lengths_is_named() -> None:
    with pytest.raises(wlb.WlbError, match=r"dataset\[1\] has 3 tokens, but the plan wants those from 2 to 6"):
        Documents([[1], [1, 2, 3]])[Piece(1, 2, 4)]
    with pytest.raises(wlb.WlbError, match=r"dataset\[1\] has 2 labels for 3 tokens"):
        Documents([[1], {"input_ids": [1, 2, 3], "labels": [1, 2]}])[Piece(1, 0, 2)]
    with pytest.raises(wlb.WlbError, match=r"dataset\[0\] has no 'input_ids', but 'text'"):
        Documents([{"text": "a"}])[0]
