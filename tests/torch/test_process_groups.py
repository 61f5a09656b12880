"""The process groups that the other tests here stand on."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.torch import processes


def add_up(rank: int) -> float:
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return total.item()


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("the reason")
    dist.barrier()  # waits for a rank that never comes


def die(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()


def test_all_answer() -> None:
    assert processes.run(3, add_up) == [3.0, 3.0, 3.0]


def test_a_failure_ends_all_and_tells_why() -> None:
    with pytest.raises(processes.RankFailed, match="the reason"):
        processes.run(2, fail_on_one)


def test_a_death_ends_all() -> None:
    with pytest.raises(processes.RankFailed):
        processes.run(2, die)
