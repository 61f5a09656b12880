"""Groups on the host in real processes: beside gloo's, with ranks that are late, killed, or start again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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
from wlb.torch.mailbox import children_of, parent_of

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
    calls = [dist.get_world_size(everyone), everyone.gather(rank)]
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
    return all((part == source).all() for source, part in enumerate(group.gather(mine)))


def test_a_message_may_be_larger_than_a_value_of_the_store() -> None:
    assert processes.run(2, large) == [True, True]


def without(rank: int, lost: int, how: str, folder: Path) -> None:
    """Writes down what each of the other ranks raises if one is killed, raises or is late, and after how long."""
    group = HostGroup(dist.group.WORLD, description="test", timeout=timedelta(seconds=60 if how != "late" else 3))
    group.gather(None)
    if rank == lost:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise ValueError("the reason")
        while len(list(folder.iterdir())) < 9:
            time.sleep(0.05)
        return
    begun = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        group.gather(rank)
    assert time.monotonic() - begun < 20
    with pytest.raises(RuntimeError):  # at once
        group.gather(rank)
    (folder / f"{rank}.part").write_text(str(caught.value))
    (folder / f"{rank}.part").rename(folder / str(rank))
    while len(list(folder.iterdir())) < 9:  # the first failure would end all
        time.sleep(0.05)


@pytest.mark.parametrize("lost", [0, 3, 8])
@pytest.mark.parametrize("how", ["killed", "raises", "late"])
def test_all_ranks_hear_of_a_rank_that_is_lost(lost: int, how: str, tmp_path: Path) -> None:
    if how == "late":
        processes.run(10, without, lost, how, tmp_path)
    else:
        with pytest.raises(processes.RankFailed, match="exit code -9" if how == "killed" else "the reason"):
            processes.run(10, _waits_for_all, lost, how, tmp_path)
    texts = {int(path.name): path.read_text() for path in tmp_path.iterdir() if path.name.isdigit()}
    if how == "late":
        assert len(texts) == 9
        assert all(f"rank {lost} did not come within 3 s" in text for text in texts.values())


def _waits_for_all(rank: int, lost: int, how: str, folder: Path) -> None:
    without(rank, lost, how, folder)


ELASTIC = """
import os, signal, sys
import torch.testing._internal.distributed.fake_pg
from datetime import timedelta
import torch.distributed as dist
from wlb.torch.host import HostGroup
# gloo of torch 2.15 reads addresses of killed ranks here: the store outlives the restart.
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
dist.init_process_group("fake", store=store, rank=int(os.environ["RANK"]), world_size=3)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
group = HostGroup(dist.group.WORLD, description="test", timeout=timedelta(seconds=60))
found = group.gather((attempt, dist.get_rank()))
if attempt == 0 and dist.get_rank() == 0:
    os.kill(os.getpid(), signal.SIGKILL)
found = group.gather((attempt, dist.get_rank()))
assert found == [(1, rank) for rank in range(3)], found
open(f"{sys.argv[1]}/{dist.get_rank()}", "w").write("done")
"""


def test_a_restart_by_torchrun_meets_no_former_mailbox(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ELASTIC)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    done = subprocess.run(
        [*command, "--max-restarts=1", str(script), str(tmp_path)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["0", "1", "2"]
