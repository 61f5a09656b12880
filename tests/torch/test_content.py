"""Data are known by content: ranks and resumed runs that read other documents of equal lengths are refused."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

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
