"""A rank that fails, ends, hangs or gets other data is named by all others, in time."""

from __future__ import annotations

import functools
import itertools
import pickle
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import wlb
from tests.torch import faults, processes
from tests.torch.faults import KINDS, PLACES
from wlb.torch import heartbeat
from wlb.torch.data import PackedBatch, collate
from wlb.torch.gradients import all_reduce_gradients
from wlb.torch.pipeline import PeerFailed, agreement, failures_explained, pipeline_step
from wlb.torch.pipeline.agreement import check_same


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_every_failure_everywhere(place: str, kind: str) -> None:
    assert not faults.wrong(faults.endings(3, PLACES[place], kind, rank=1), kind, world_size=3, failed=1)


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("reading_a_stream", "SystemExit"),
        ("reading_a_stream", "killed"),
        ("reading_a_stream", "hangs"),
        ("collating", "KeyboardInterrupt"),
        ("reading_for_dynamic_cp", "os._exit"),
        ("preparing_dynamic_cp", "SystemExit"),
        ("planning_dynamic_cp", "hangs"),
        ("in_a_dynamic_cp_step", "raises"),
        ("in_a_dynamic_cp_step", "killed"),
        ("between_steps", "raises"),
        ("between_steps", "SystemExit"),
        ("training", "KeyboardInterrupt"),
        ("training", "killed"),
        ("training", "hangs"),
        ("in_the_pipeline", "SystemExit"),
        ("in_the_pipeline", "stopped"),
    ],
)
def test_a_failure_is_named_by_all_others(place: str, kind: str) -> None:
    assert not faults.wrong(faults.endings(3, PLACES[place], kind, rank=1), kind, world_size=3, failed=1)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("killed", "rank 0, which keeps the store, is gone or hangs"),
        ("raises", "rank 0 failed first, in step 3 of training:.*the reason"),
    ],
)
def test_the_rank_that_keeps_the_store(kind: str, text: str) -> None:
    found = faults.endings(3, PLACES["training"], kind, rank=0, tcp=True)
    for rank in (1, 2):
        assert found[rank].rank == 0
        assert re.search(text, found[rank].text, re.DOTALL), found[rank]
        assert found[rank].seconds < faults.TIMEOUT + faults.LOOKING


# --- other data ------------------------------------------------------------------------------------------------------


def other_micro_batches(_fault: Any) -> None:
    stage = faults.pipeline(lambda: None)
    for step in itertools.count():
        sizes = [3, 1, 5, 2] if step < 3 or dist.get_rank() != 1 else [3, 1, 5, 1]
        pipeline_step([stage], faults.micro_batches(sizes), loss_fn=faults.summed)


def without_a_loss(_fault: Any) -> None:
    stage = faults.pipeline(lambda: None)
    pipeline_step([stage], faults.micro_batches([3, 1]), loss_fn=None if dist.get_rank() == 1 else faults.summed)


@pytest.mark.parametrize(
    ("work", "there", "here"),
    [
        (other_micro_batches, "4 of 11 tokens by Schedule1F1B with", "4 of 10 tokens by Schedule1F1B with"),
        (without_a_loss, "2 of 4 tokens by Schedule1F1B with backward", "2 of 4 tokens by Schedule1F1B without"),
    ],
)
def test_other_micro_batches_are_refused_before_they_are_sent(work: Any, there: str, here: str) -> None:
    found = faults.endings(2, work)
    assert sorted(found) == [0, 1]
    refused = next(rank for rank in found if "PeerFailed" not in found[rank].names)  # who came second
    mine, theirs = (here, there) if refused == 1 else (there, here)
    assert f"micro_batches differ from those of rank {1 - refused}: here {mine}" in found[refused].text
    assert f"there {theirs}" in found[refused].text
    assert f"rank {refused} failed first" in found[1 - refused].text
    assert "micro_batches differ" in found[1 - refused].text


def far_apart(rank: int) -> None:
    """Nobody waits in the check, so one rank may be far ahead; only the same step is compared."""
    faults.wait_for_the_store()
    same = faults.micro_batches([3, 1])
    for turn in range(2):
        if rank == turn:
            for step in range(150):
                check_same(None, faults.micro_batches([3, step]), "some schedule")
        dist.barrier()
    for _ in range(150):
        check_same(None, same, "some schedule")
    dist.barrier()
    if rank == 1:
        dist.barrier()
    with pytest.raises(wlb.WlbError, match="micro_batches differ") if rank == 1 else nullcontext():
        check_same(None, faults.micro_batches([rank]), "some schedule")
    if rank == 0:
        dist.barrier()


def test_ranks_far_apart_are_not_taken_for_others() -> None:
    processes.run(2, far_apart)


def without_a_heartbeat_once(rank: int, how: str) -> None:
    """One rank's heartbeat cannot begin in a step, or ends after it: the next one counts its steps on."""
    faults.wait_for_the_store()
    heart = heartbeat.heartbeat()
    for step in range(3):
        if rank == 1 and step == 1 and how == "ended":
            assert heart is not None
            heart._asked.put(None)
            heart._thread.join()
        if rank == 1 and step == 0 and how == "refused":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(agreement, "heartbeat", lambda: None)
                check_same(None, faults.micro_batches([3, step]), "some schedule")
        else:
            check_same(None, faults.micro_batches([3, step]), "some schedule")
        dist.barrier()
    with pytest.raises(wlb.WlbError, match="micro_batches differ") if rank == 1 else nullcontext():
        if rank == 1:
            dist.barrier()
        check_same(None, faults.micro_batches([rank]), "some schedule")
        if rank == 0:
            dist.barrier()


@pytest.mark.parametrize("how", ["ended", "refused"])
def test_steps_are_counted_whatever_heartbeat_there_is(how: str) -> None:
    processes.run(2, without_a_heartbeat_once, how)


def who_is_blamed(rank: int, how: str, told: Path) -> tuple[int | None, str] | None:
    """Rank 3 hangs until rank 0, which does not wait for long, has found out who does; ranks 1 and 2 wait for it."""
    few, many = (dist.new_group(ranks, timeout=timedelta(seconds=t)) for ranks, t in (([0, 3], 3), ([1, 2, 3], 100)))
    group = few if rank == 0 else many
    with pytest.MonkeyPatch.context() as patch:
        if how == "unseen":
            patch.setattr(heartbeat, "stacks", dict)
        if how == "a device":  # rank 3's has done all it was given
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=lambda: rank == 3))
        dist.barrier()
        try:
            with failures_explained(1):
                # With a device ranks 1 and 2 are as in loss.item(), in a line of their own, until rank 3 is there.
                while (rank == 3 or (how == "a device" and rank > 0)) and not told.exists():
                    time.sleep(0.05)
                if how == "gradients":
                    all_reduce_gradients(torch.nn.Linear(2, 2), group=group)
                else:
                    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
                    work.wait()
        except PeerFailed as failed:
            return failed.rank, str(failed)
        finally:
            if rank == 0:
                told.touch()
    return None


@pytest.mark.parametrize("how", ["gradients", "the users work", "a device", "unseen"])
def test_who_waits_is_not_taken_for_who_hangs(how: str, tmp_path: Path) -> None:
    found, *others = processes.run(4, who_is_blamed, how, tmp_path / "told")
    assert others == [None] * 3
    assert found is not None
    rank, text = found
    assert rank == (None if how == "unseen" else 3)
    assert ("could not be told" if how == "unseen" else "rank 3 hangs or is slow") in text


def a_beat_that_fails(rank: int) -> str:
    heart = heartbeat.heartbeat()
    assert heart is not None
    texts: list[str] = []
    with pytest.MonkeyPatch.context() as patch, faults.logged(texts):
        patch.setattr(heartbeat, "where", lambda lines: {}["not there"])
        for _ in range(3):
            heart._asked.put(heart._beat)
        heart.ask(lambda store: None)  # after them
    assert heart.alive
    assert heartbeat.heartbeat() is heart
    dist.barrier()
    return "\n".join(texts)


def test_a_heart_goes_on_whatever_a_beat_raises_and_says_so_once() -> None:
    assert processes.run(2, a_beat_that_fails) == [f"a heartbeat of rank {rank} failed; it goes on" for rank in (0, 1)]


def another_plan(_fault: Any) -> None:
    longest = 128 if dist.get_rank() != 1 else 96
    next(faults.dynamic([[list(range(100))]], plan=functools.partial(faults.plan, max_tokens_per_rank=longest)))


def test_other_plans_of_dynamic_cp_name_the_rank() -> None:
    found = faults.endings(2, another_plan)
    assert {ending.text for ending in found.values()} == {"group has ranks [1] with another plan than rank 0"}


# --- when nothing fails ----------------------------------------------------------------------------------------------


def slow(rank: int) -> list[int]:
    """One rank is far behind the patience of those who wait, but not behind the timeout."""

    def collated(documents: Any) -> PackedBatch:
        time.sleep(1.5 * rank)
        return collate(documents)

    of = faults.stream(collate_fn=collated, timeout=100)
    numbers = [next(of).number, next(of).number]
    of.close()
    return numbers


def test_a_slow_rank_is_waited_for() -> None:
    assert processes.run(2, slow) == [[0, 1]] * 2


def beating(rank: int) -> float:
    """Seconds of a context, once it beats: of the one in the middle, for a busy machine stops any."""
    with failures_explained():
        heart = heartbeat.heartbeat()
        assert heart is not None
        assert heart is heartbeat.heartbeat()
    took = []
    for _ in range(1000):
        started = time.perf_counter()
        with failures_explained():
            pass
        took.append(time.perf_counter() - started)
    heart.ask(lambda store: None)  # after its beats
    dist.barrier()
    assert heart.read([0, 1])[1 - rank].does["training"].count >= 1
    return sorted(took)[500]


def test_a_context_costs_next_to_nothing() -> None:
    assert max(processes.run(2, beating)) < 1e-3


@failures_explained(7)
def train(group: dist.ProcessGroup | None) -> None:
    if dist.get_rank() == 1:
        raise LookupError("no document")
    dist.all_reduce(torch.ones(1), group=group)


class Said(list[str]):
    """What was logged; all ranks are told when."""

    def append(self, text: str) -> None:
        super().append(text)
        dist.distributed_c10d._get_default_store().set("said", "")


def left_alone(_fault: Any) -> None:
    """Rank 1 fails, and is there until rank 0, which waits for it, says that it waits in vain."""
    group = dist.new_group(timeout=timedelta(seconds=100))
    said = Said()
    with faults.logged(said):
        try:
            train(group)
        except LookupError:
            dist.distributed_c10d._get_default_store().wait(["said"], timedelta(seconds=60))
            raise
        except PeerFailed as failed:
            raise RuntimeError("".join(said)) from failed


def test_who_waits_for_a_failed_rank_says_so_before_the_timeout() -> None:
    said = faults.endings(2, left_alone)[0].text
    assert "rank 0 waits in step 7 of training in vain: rank 1 failed first, in step 7" in said
    assert "no document" in said


def test_a_peer_failed_may_be_pickled() -> None:
    error = PeerFailed("rank 3 ended")
    error.rank, error.step, error.reason = 3, 5, None
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.rank, again.step) == ("rank 3 ended", 3, 5)
    assert isinstance(again, wlb.WlbError)


MAIN = """
import sys, torch.distributed as dist
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from wlb.torch.failures import failures_explained
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=100))
with failures_explained(41):
    dist.barrier()
if rank == 1:
    raise SystemExit(3) if sys.argv[3] == "exit" else LookupError("no more")
with failures_explained(42):
    dist.barrier()
"""


@pytest.mark.long
@pytest.mark.parametrize(("how", "text"), [("exit", "ended after step 41, its program done"), ("raise", "no more")])
def test_a_program_that_ends(how: str, text: str, tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", MAIN, str(rank), str(tmp_path / "store"), how] for rank in range(2)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate(timeout=200)[1] for process in running]
    assert running[1].returncode == (3 if how == "exit" else 1)
    assert "PeerFailed: rank 1 ended after step 41" in errors[0]
    assert text in errors[0]
