"""The process groups that the other tests here stand on, and what is asked of a group."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.torch import processes
from wlb.torch.collectives import device_of
from wlb.torch.data.peers import Peers


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


def _waits(rank: int) -> list[timedelta]:
    patient = dist.new_group(timeout=timedelta(hours=2))
    hasty = dist.new_group(timeout=timedelta(seconds=30))
    peers = [Peers(group, description="test") for group in (patient, hasty)]
    found = [each._group.timeout for each in peers if each._group is not None]
    for each in peers:
        each.close()
    return found


def test_ranks_that_read_together_wait_as_long_as_their_group_and_at_least_as_gloo() -> None:
    assert processes.run(2, _waits) == [[timedelta(hours=2), timedelta(minutes=30)]] * 2


@pytest.mark.parametrize(
    ("backend", "device"), [("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl", "cuda"), ("xpu:xccl", "xpu")]
)
def test_collectives_run_where_their_backend_can(monkeypatch: pytest.MonkeyPatch, backend: str, device: str) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backend)
    assert device_of() == torch.device(device)
