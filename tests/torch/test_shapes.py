"""Steps for ranks and in shapes, from the packer to the batch: each rank trains its part of the plan, filled up."""

import functools
import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import wlb
import wlb.torch as wt
from tests.torch import processes
from wlb.torch.data import (
    IGNORE,
    BalancedBatchSampler,
    BalancedStream,
    Documents,
    PackedBatch,
    Step,
    StepLoader,
    collate,
)

COST = wlb.CostModel(attention=1e-3, linear=1e-2)
SIZES: dict[str, Any] = {"multiple_of_tokens": 8, "token_buckets": (48, 96), "max_documents": 6}
COLLATE = functools.partial(collate, **SIZES)
TEXTS = [[np.arange(1, length + 1) for length in np.random.default_rng(n).integers(1, 60, 40)] for n in range(4)]


def packer(dp_size: int, sync: Any = "step", **options: Any) -> wlb.Packer:
    defaults = {"num_micro_batches": 8, "max_tokens": 100, "max_document_tokens": 64, "release": "adaptive"}
    return wlb.Packer(**{**defaults, **SIZES, "cost_model": COST, "dp_size": dp_size, "sync": sync, **options})


def test_a_balanced_loader_makes_batches_of_the_shapes_that_it_plans_for() -> None:
    documents = Documents([{"input_ids": text} for text in TEXTS[0]])
    told: dict[str, Any] = {"tokens_per_batch": 400, "max_tokens": 100, "cost_model": COST}
    steps = list(wt.balanced_loader(documents, **told, **SIZES))
    for batch in (batch for step in steps for batch in step.micro_batches):
        assert batch.tokens.numel() in (0, 48, 96)
    assert sum(len(batch.document_ids) for step in steps for batch in step.micro_batches) == len(TEXTS[0])
    for waits in ({"release": "adaptive"}, {"outlier_thresholds": [50]}):
        packer = wt.balanced_loader(documents, **told, max_delay=0, **waits).packer
        assert packer is not None
        assert packer.max_delay == 0
    with pytest.raises(wlb.WlbError, match="shuffle"):
        wt.balanced_loader(documents, **told, shuffle="no")


def unshard(batches: list[PackedBatch], name: str) -> list[int]:
    rank_major = torch.cat([getattr(batch, name) for batch in batches]).numpy()
    values: list[int] = rank_major[batches[0].shard.restore_indices].tolist()
    return values


@given(
    st.lists(st.integers(1, 40), max_size=9),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["auto", "per_document", "per_sequence"]),
    st.sampled_from([{"multiple_of_tokens": 32}, {"token_buckets": (64, 400)}, {"max_documents": 9}]),
)
@settings(max_examples=60, deadline=None)
def test_padding_is_a_document_that_nobody_learns(
    lengths: list[int], cp_size: int, strategy: str, sizes: dict[str, Any]
) -> None:
    documents = [np.arange(1, length + 1) for length in lengths]
    plain = [collate(documents, cp_rank=r, cp_size=cp_size, strategy=strategy) for r in range(cp_size)]
    batches = [collate(documents, cp_rank=r, cp_size=cp_size, strategy=strategy, **sizes) for r in range(cp_size)]
    total, batch = sum(lengths), batches[0]
    if "token_buckets" in sizes:
        size = 64 if total <= 64 else 400
    else:
        multiple = sizes["multiple_of_tokens"] * cp_size if "multiple_of_tokens" in sizes else 1
        size = -(-total // multiple) * multiple
    padding = size - total
    assert (batch.num_padding, batch.shard.num_tokens) == (padding, size)
    # Every rank has as many tokens, where context-parallel ranks divide the size.
    assert {each.tokens.numel() for each in batches} == {size // cp_size} or "max_documents" in sizes
    assert unshard(batches, "tokens") == unshard(plain, "tokens") + [0] * padding
    assert unshard(batches, "labels") == unshard(plain, "labels") + [IGNORE] * padding
    longest = max(lengths, default=1)
    positions = [at % longest for at in range(padding)]
    assert unshard(batches, "position_ids") == unshard(plain, "position_ids") + positions
    assert batch.num_valid_tokens == plain[0].num_valid_tokens
    assert batch.document_ids.numel() == len(lengths)
    ends = [0, *np.cumsum(lengths).tolist(), *[size][: padding > 0]]
    if most := sizes.get("max_documents"):
        ends += [size] * (most + 2 - len(ends))
    assert batch.cu_seqlens.tolist() == ends
    copy = pickle.loads(pickle.dumps(batches[-1]))
    for name in ("tokens", "labels", "position_ids", "cu_seqlens", "document_ids"):
        assert torch.equal(getattr(copy, name), getattr(batches[-1], name))
    if cp_size == 1:
        row, before = batch.as_hf(), plain[0].as_hf()
        assert row["labels"][0, :total].tolist() == before["labels"][0, :total].tolist()
        assert (row["labels"][0, total:] == IGNORE).all()


def read(_rank: int, dp_size: int, sync: str, states: int, state: Any = None) -> list[Any]:
    """The documents of each step on this rank, and a state on the way."""
    group = dist.group.WORLD if dist.is_initialized() else None
    stream = BalancedStream(TEXTS, packer=packer(dp_size, sync), collate_fn=COLLATE, group=group)
    if state is not None:
        stream.load_state_dict(state)
    steps = []
    for number, step in enumerate(stream):
        rank = 0 if group is None else dist.get_rank()
        assert step.indices.tolist() == list(range(rank * 8 // dp_size, (rank + 1) * 8 // dp_size))
        for index, batch in zip(step.indices.tolist(), step.micro_batches, strict=True):
            assert batch.tokens.numel() == step.packing.padded_tokens[index] in (48, 96)
            assert batch.cu_seqlens.numel() == 8
        trained = [id for batch in step.micro_batches for id in batch.document_ids.tolist()]
        steps.append((trained, step.state if number == states else None))
    stream.close()
    return steps


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_ranks_of_a_stream_train_their_part_of_the_plan(sync: str) -> None:
    parts = processes.run(2, read, 2, sync, 3)
    assert len({len(steps) for steps in parts}) == 1
    trained = Counter(document for steps in parts for done, _ in steps for document in done)
    assert trained == Counter(range(sum(map(len, TEXTS))))
    # Saved on two ranks, and gone on with on one.
    state = parts[0][3][1]
    assert state == parts[1][3][1]
    before = Counter(document for steps in parts for done, _ in steps[:4] for document in done)
    rest = Counter(document for done, _ in read(0, 1, sync, -1, state) for document in done)
    assert before + rest == trained


def loader(dp_rank: int, dp_size: int, collate_fn: Any = COLLATE, **options: Any) -> StepLoader[PackedBatch]:
    documents = [document for text in TEXTS for document in text]
    sampler = BalancedBatchSampler(
        [len(document) for document in documents], packer=packer(dp_size, **options), dp_rank=dp_rank, dp_size=dp_size
    )
    return StepLoader(DataLoader(Documents(documents), batch_sampler=sampler, collate_fn=collate_fn))


def rest_of(of: StepLoader[PackedBatch]) -> Iterator[Step[PackedBatch]]:
    while not of.ended:
        yield from of


def test_ranks_of_a_sampler_train_their_part_of_the_plan() -> None:
    ranks = [list(rest_of(loader(rank, 4))) for rank in range(4)]
    assert [len(steps) for steps in ranks] == [len(ranks[0])] * 4
    trained = Counter(
        id for steps in ranks for step in steps for b in step.micro_batches for id in b.document_ids.tolist()
    )
    assert trained == Counter(range(sum(map(len, TEXTS))))
    for rank, steps in enumerate(ranks):
        assert all(step.indices.tolist() == [2 * rank, 2 * rank + 1] for step in steps)
    resumed = loader(0, 1)
    resumed.load_state_dict(ranks[2][1].state)
    again = Counter(id for step in rest_of(resumed) for b in step.micro_batches for id in b.document_ids.tolist())
    before = Counter(
        id for steps in ranks for step in steps[:2] for b in step.micro_batches for id in b.document_ids.tolist()
    )
    assert before + again == trained


def test_what_does_not_fit_together_is_named() -> None:
    with pytest.raises(wlb.WlbError, match=r"dp_size = 2: the packer plans for dp_size = 4"):
        BalancedBatchSampler([5, 6], packer=packer(4), dp_rank=0, dp_size=2)
    with pytest.raises(wlb.WlbError, match=r"group = 1: the packer plans for dp_size = 4"):
        BalancedStream(TEXTS, packer=packer(4), collate_fn=COLLATE)
    with pytest.raises(wlb.WlbError, match=r"loader gives .* padding included: collate needs"):
        next(iter(loader(0, 1, collate_fn=collate)))
    filled = functools.partial(collate, multiple_of_tokens=8, token_buckets=(48, 96))
    for unlike in (filled, functools.partial(filled, max_documents=7)):
        with pytest.raises(wlb.WlbError, match=r"loader gives cu_seqlens of .* max_documents = 6 promises 8 in every"):
            next(iter(loader(0, 1, collate_fn=unlike)))
        stream = BalancedStream(TEXTS, packer=packer(1), collate_fn=unlike)
        with pytest.raises(wlb.WlbError, match=r"collate_fn gives cu_seqlens of .* max_documents = 6 promises 8"):
            next(stream)
    stream = BalancedStream(TEXTS, packer=packer(1), collate_fn=collate)
    with pytest.raises(wlb.WlbError, match=r"collate_fn gives .* padding included: collate needs"):
        next(stream)
    with pytest.raises(wlb.WlbError, match=r"max_documents = 1: these are 2 documents"):
        collate([[1], [2]], max_documents=1)
    with pytest.raises(wlb.WlbError, match=r"token_buckets\[0\] = 2: this micro-batch has 3 tokens") as caught:
        collate([[1, 2, 3]], token_buckets=[2])
    assert (caught.value.argument, caught.value.index, caught.value.value) == ("token_buckets", 0, 2)
    with pytest.raises(wlb.WlbError, match=r"token_buckets\[1\] = 4: must be above 0, and above the size before it"):
        collate([[1]], token_buckets=[8, 4])
    with pytest.raises(wlb.WlbError, match=r"token_buckets\[0\] = 0: must be above 0"):
        collate([[1]], token_buckets=[0, 4])
    with pytest.raises(wlb.WlbError, match=r"token_buckets\[0\] = 12: must be a multiple of multiple_of_tokens"):
        collate([[1]], token_buckets=[12], multiple_of_tokens=8)
    with pytest.raises(wlb.WlbError, match=r"multiple_of_tokens = 0"):
        collate([[1]], multiple_of_tokens=0)
