"""Data are known by content: ranks and resumed runs that read other documents of equal lengths are refused."""

from __future__ import annotations

import contextlib
import random
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

import wlb
import wlb.torch as wt
from tests.torch import processes
from tests.torch.test_training import Network
from wlb.torch.data.content import fingerprint

LENGTH, COUNT = 20, 36  # all documents are equally long


def rows(seed: int = 0, order: int | None = None) -> list[torch.Tensor]:
    made = [torch.randint(13, (LENGTH,), generator=torch.Generator().manual_seed(100 * seed + n)) for n in range(COUNT)]
    if order is not None:
        random.Random(order).shuffle(made)
    return made


class Unlike(list[torch.Tensor]):
    """Gives another document each time."""

    def __getitem__(self, number: Any) -> Any:
        return torch.randint(13, (LENGTH,))


def loader(data: Any, rank: int = 0, size: int = 1, collate: Any = wt.collate) -> wt.StepLoader[Any]:
    cost = wlb.CostModel(attention=1.0, linear=50.0)
    packer = wlb.Packer(num_micro_batches=2 * size, max_tokens=60, cost_model=cost, release="fifo")
    sampler = wt.BalancedBatchSampler([LENGTH] * COUNT, packer=packer, dp_rank=rank, dp_size=size)
    return wt.StepLoader(DataLoader(wt.Documents(data), batch_sampler=sampler, collate_fn=collate))


def refused(call: Any, step: Any) -> str:
    try:
        call(step)
    except wlb.WlbError as wrong:
        return str(wrong)
    return ""


def on_ranks(rank: int) -> list[str]:
    found = []
    for data in (rows(), rows(order=rank), rows(seed=rank), Unlike(rows())):
        step = next(iter(loader(data, rank, dist.get_world_size())))
        found.append(refused(partial(wt.train_step, Network()), step))
        found.append(refused(partial(wt.verify, Network(), report=None), step))
    return found


def test_ranks_that_read_unlike_documents_of_equal_lengths_are_refused() -> None:
    ranks = processes.run(2, on_ranks)
    assert ranks[0] == ranks[1]
    right, proved, shuffled, shuffled_proof, split, split_proof, unlike, unlike_proof = ranks[0]
    assert right == proved == unlike == unlike_proof == ""
    for text in (shuffled, split):
        assert "documents have other tokens, though the plan and all lengths are equal" in text
    for text in (shuffled_proof, split_proof):
        assert "other" in text


def test_a_run_resumes_with_the_same_documents_only() -> None:
    first = loader(rows())
    state = next(iter(first)).state
    assert len(state["content"]) == 32
    loader(rows()).load_state_dict(state)
    with pytest.raises(wlb.WlbError, match=r"state was saved with documents of the same lengths and other tokens"):
        loader(rows(order=1)).load_state_dict(state)
    loader(Unlike(rows())).load_state_dict(state)  # known by its indices


def test_a_data_set_that_gives_another_row_each_time_is_known_by_its_indices() -> None:
    assert "content" not in next(iter(loader(Unlike(rows())))).state


def test_what_was_collated_is_compared_with_the_plan() -> None:
    def other(documents: Any) -> Any:
        return wt.collate(documents[::-1])

    with pytest.raises(wlb.WlbError, match=r"gives another document of 20 tokens where the plan has document \d+"):
        next(iter(loader(rows(), collate=other)))


def test_reading_leaves_random_states() -> None:
    data = wt.Documents(Unlike(rows()))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    assert fingerprint(data) is None
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # type: ignore[index]  # noqa: NPY002


# --- streams ----------------------------------------------------------------------------------------------------------


def stream(data: Any, group: Any = None) -> wt.BalancedStream[Any]:
    cost = wlb.CostModel(attention=1.0, linear=50.0)
    packer = wlb.Packer(num_micro_batches=2, max_tokens=60, cost_model=cost, release="fifo")
    return wt.BalancedStream(data, packer=packer, collate_fn=wt.collate, weights=[1.0] * len(data), group=group)


class Positioned(IterableDataset[Any]):
    """A stream that restores itself, and gives other tokens each time."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < COUNT:
            self.at += 1
            yield torch.randint(13, (LENGTH,))

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("order", [1, 2])
def test_a_stream_resumes_with_the_same_documents_only(order: int) -> None:
    with contextlib.closing(stream([rows()])) as whole:
        states = [step.state for step in whole]
    for number, state in enumerate(states, start=1):
        with contextlib.closing(stream([rows()])) as again:
            again.load_state_dict(state)
            assert len(list(again)) == len(states) - number
        with contextlib.closing(stream([rows(order=order)])) as other:
            other.load_state_dict(state)
            if not state["streams"][0]["ended"]:  # nothing is read of a stream that has ended
                with pytest.raises(wlb.WlbError, match="begins with other documents than when its state was saved"):
                    list(other)


def test_a_stream_that_restores_itself_is_known_by_its_position() -> None:
    with contextlib.closing(stream([Positioned()])) as first:
        state = next(first).state
    with contextlib.closing(stream([Positioned()])) as again:
        again.load_state_dict(state)
        assert sum(batch.tokens.numel() for step in again for batch in step.micro_batches) == LENGTH * (COUNT - 6)


def in_other_orders(rank: int) -> tuple[list[str], list[int]]:
    """Ranks that have the same four streams, as an unsorted folder has them on two hosts."""
    own = [rows(seed) for seed in range(4)]
    given = own if rank == 0 else [own[1], own[0], own[3], own[2]]
    with warnings.catch_warnings(record=True) as said, contextlib.closing(stream(given, dist.group.WORLD)) as of:
        warnings.simplefilter("always")
        step = next(of)
    return [str(each.message) for each in said], [batch.tokens.numel() for batch in step.micro_batches]


def test_ranks_that_list_streams_in_another_order_are_warned() -> None:
    for said, _ in processes.run(2, in_other_orders):
        (message,) = [each for each in said if "begin with the same documents" in each]
        assert message.startswith("streams[0] and streams[1]")


def test_streams_that_give_one_document_a_step_are_compared_too() -> None:
    data = [rows(0), rows(1), rows(0)]
    cost = wlb.CostModel(attention=1.0, linear=50.0)
    packer = wlb.Packer(num_micro_batches=2, max_tokens=60, cost_model=cost, release="fifo")
    options: dict[str, Any] = {"weights": [1.0] * 3, "tokens_per_batch": 3 * LENGTH, "collate_fn": wt.collate}
    said = r"streams\[0\] and streams\[2\] begin with the same documents"
    with (
        pytest.warns(UserWarning, match=said),
        contextlib.closing(wt.BalancedStream(data, packer=packer, **options)) as of,
    ):
        list(of)


def test_streams_of_one_kind_are_no_duplicates() -> None:
    with warnings.catch_warnings(), contextlib.closing(stream([rows(seed) for seed in range(4)])) as of:
        warnings.simplefilter("error")
        next(of)
