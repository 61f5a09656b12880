"""Groups on the host in real processes: beside gloo's, with ranks that are late, killed, or start again."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.torch import processes
from tests.torch.test_subgroup import RANKS, collectives
from wlb.torch.host import HostGroup
from wlb.torch.mailbox import Mailbox, runs
from wlb.torch.tree import Tree, children_of, parent_of

MINUTE = timedelta(seconds=60)


@pytest.mark.parametrize("size", [1, 2, 8, 9, 64, 65, 513, 8192])
def test_every_rank_but_the_first_hears_from_one_that_tells_few(size: int) -> None:
    told = [children_of(rank, size) for rank in range(size)]
    assert sorted(child for children in told for child in children) == list(range(1, size))
    assert all(parent_of(child) == rank for rank, children in enumerate(told) for child in children)
    assert max(map(len, told)) <= 15


def beside_gloo(rank: int) -> bool:
    theirs = dist.new_group(RANKS)
    everyone = HostGroup(dist.group.WORLD, description="all", timeout=MINUTE)
    calls = [dist.get_world_size(everyone), everyone.gather_objects(rank)]
    assert calls == [10, list(range(10))]
    total = torch.tensor([rank, 1])
    dist.all_reduce(total, group=everyone)
    assert total.tolist() == [45, 10]
    found: list[Any] = [None]
    dist.scatter_object_list(found, [f"for {to}" for to in range(10)] if rank == 3 else None, src=3, group=everyone)
    assert found == [f"for {rank}"]
    box = [f"of {rank}"]
    dist.broadcast_object_list(box, src=9, group=everyone)
    assert box == ["of 9"]
    everyone.close()
    if rank in RANKS:
        assert isinstance(theirs, dist.ProcessGroup)
        for _ in range(2):  # another of the same name
            mine = HostGroup(theirs, description="some", timeout=MINUTE)
            torch.testing.assert_close(collectives(rank, mine), collectives(rank, theirs))
            mine.close()
    return True


def test_collectives_give_what_gloos_give() -> None:
    assert processes.run(10, beside_gloo) == [True] * 10


def large(rank: int) -> bool:
    group = HostGroup(dist.group.WORLD, description="large", timeout=MINUTE)
    mine = np.full(3 << 20, rank)  # 24 MiB: more than torch's store takes at once
    return all((part == source).all() for source, part in enumerate(group.gather_objects(mine)))


def test_a_message_may_be_larger_than_a_value_of_the_store() -> None:
    assert processes.run(2, large) == [True, True]


def exchanges(rank: int, source: int) -> dict[str, Callable[[Any], object]]:
    """What ranks may wait in for another one."""
    values = [f"for {to}" for to in range(10)] if rank == source else None
    return {
        "all_gather_object": lambda group: dist.all_gather_object([None] * 10, rank, group=group),
        "barrier": lambda group: dist.barrier(group=group),
        "broadcast": lambda group: dist.broadcast(torch.zeros(3), 5, group=group),
        "all_reduce": lambda group: dist.all_reduce(torch.zeros(3), group=group),
        "all_to_all_single": lambda group: dist.all_to_all_single(torch.zeros(10), torch.zeros(10), group=group),
        "scatter": lambda group: dist.scatter_object_list([None], values, src=source, group=group),
    }


def without(rank: int, lost: list[int], how: str, exchange: str) -> tuple[str, float]:
    """What a rank raises if others are lost while it waits, and after how many seconds."""
    group = HostGroup(
        dist.group.WORLD, description="test", timeout=timedelta(seconds=3) if how == "stopped" else MINUTE
    )
    call = exchanges(rank, lost[0])[exchange]
    group.gather_objects(None)
    if rank in lost:
        if how != "killed":  # that ends as soon as it has what others still send
            time.sleep(0.3)
        if how == "killed beside a worker" and not os.fork():  # which has its sockets
            time.sleep(20)
            os._exit(0)
        if how == "raises":
            raise ValueError("outside of the group")
        os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        call(group)
    took = time.monotonic() - begun
    with pytest.raises(RuntimeError, match=re.escape(str(caught.value))):
        call(group)
    assert time.monotonic() - begun < took + 1
    time.sleep(2)  # a survivor that ends would be missed, too
    return str(caught.value), took


LOST = [(exchange, how, lost) for exchange in exchanges(0, 0) for how, lost in (("killed", [8]), ("raises", [3]))]
MORE = [("barrier", "killed", [2, 3]), ("barrier", "killed beside a worker", [0]), ("broadcast", "stopped", [0])]


@pytest.mark.parametrize(("exchange", "how", "lost"), [*LOST, *MORE, ("all_to_all_single", "stopped", [9])])
def test_all_ranks_soon_name_those_that_are_lost(exchange: str, how: str, lost: list[int]) -> None:
    found = [each for each in processes.run(10, without, lost, how, exchange, lost=lost) if each is not None]
    ranks = f"rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"
    fate = "did not come within 3 s: late, stopped, or failed" if how == "stopped" else "ended"
    assert len(found) == 10 - len(lost)
    assert {text for text, _ in found} == {f"test: {ranks} {fate}"}
    assert max(took for _, took in found) < 15


def unequal(rank: int) -> str:
    group = HostGroup(dist.group.WORLD, description="test", timeout=MINUTE)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.zeros(3 if rank == 9 else 2), group=group)
    return str(caught.value)


def test_what_a_rank_raises_inside_is_told_to_all() -> None:
    found = processes.run(10, unequal)
    assert all("stack expects each tensor to be equal size" in text for text in found)
    assert sum(text.startswith("test: rank 8 raised RuntimeError") for text in found) == 9


def to_one_that_is_stopped(rank: int) -> tuple[str, float]:
    group = HostGroup(dist.group.WORLD, description="test", timeout=timedelta(seconds=3))
    group.gather_objects(None)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5)
    begun = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        group._tree.exchange({1: np.zeros(8 << 20)}, [])  # 64 MiB: more than what the sockets hold
    return str(caught.value), time.monotonic() - begun


def test_a_large_message_to_a_stopped_rank_ends_in_time() -> None:
    found, _ = processes.run(2, to_one_that_is_stopped, lost=[1])
    assert found[0] == "test: rank 1 did not come within 3 s: late, stopped, or failed"
    assert found[1] < 6


class Counted:
    """The launcher's store, which counts requests."""

    def __init__(self, store: Any) -> None:
        self.store, self.requests = store, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.requests[name] += 1
        return (lambda: self) if name == "clone" else getattr(self.store, name)


@pytest.mark.parametrize("size", [2, 64, 130])
def test_a_rank_asks_the_launchers_store_five_times_and_leaves_nothing(size: int) -> None:
    real = dist.HashStore()  # of threads: each connection to a TCPStore asks for the name of a host
    keys = real.num_keys()
    with ThreadPoolExecutor(size) as threads:
        for _ in range(2):
            stores: list[Any] = [Counted(real) for _ in range(size)]
            make = functools.partial(Tree, ranks=range(size), what="test", timeout=MINUTE)
            trees = list(threads.map(lambda store, place: make(store, place=place), stores, range(size)))  # noqa: B023
            assert real.num_keys() == keys
            assert max(store.requests.total() for store in stores) <= 5
            assert sum(store.requests["set"] for store in stores) == sum(
                bool(children_of(at, size)) for at in range(size)
            )
            for _ in range(3):
                found = list(threads.map(lambda tree: tree.gather(tree.place), trees))
                assert found == [list(range(size))] * size
            assert not any(messages for tree in trees for messages in tree._mailbox._messages.values())
            for tree in trees:
                tree.close()


def test_a_stranger_is_not_read() -> None:
    mailbox = Mailbox("localhost", 0)
    until = time.monotonic() + 10
    for stranger in (mailbox.address._replace(token=bytes(16)), mailbox.address):
        known = stranger == mailbox.address
        with contextlib.nullcontext() if known else pytest.raises(ConnectionError):
            mailbox.put(stranger, b"known" if known else b"strange", until=until)
    assert mailbox.take([0], 1) == {0: b"known"}
    mailbox.close()
    assert not runs(mailbox.address)


ELASTIC = """
import os, signal, sys, time
import torch.testing._internal.distributed.fake_pg
from datetime import timedelta
import torch.distributed as dist
from wlb.torch.host import HostGroup
from wlb.torch.mailbox import Mailbox
# gloo of torch 2.15 reads addresses of killed ranks here: the store outlives the restart.
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
dist.init_process_group("fake", store=store, rank=int(os.environ["RANK"]), world_size=3)
attempt, when = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), sys.argv[2]
if when == "while it is made" and dist.get_rank() == 0:
    if attempt == 0:  # its key stays in the store
        Mailbox.take = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2 * attempt)  # the others read that key first
group = HostGroup(dist.group.WORLD, description="test", timeout=timedelta(seconds=60))
found = group.gather_objects((attempt, dist.get_rank()))
if attempt == 0 and dist.get_rank() == 0:
    os.kill(os.getpid(), signal.SIGKILL)
found = group.gather_objects((attempt, dist.get_rank()))
assert found == [(1, rank) for rank in range(3)], found
open(f"{sys.argv[1]}/{dist.get_rank()}", "w").write("done")
"""


@pytest.mark.parametrize("when", ["later", "while it is made"])
def test_a_restart_by_torchrun_meets_no_former_mailbox(when: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ELASTIC)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    done = subprocess.run(
        [*command, "--max-restarts=1", str(script), str(tmp_path), when], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["0", "1", "2"]
