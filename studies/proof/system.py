"""What the system does beside the work that is timed: memory and processors that it takes back, and other programs."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STAT = Path("/proc/stat")
# Of malloc.h: how many blocks may be mapped by themselves, and what is free before memory goes back (-1: never).
_MMAP_MAX, _TRIM_THRESHOLD = -4, -1
# Those that this program may use, before it takes one; none where the system does not tell.
_PROCESSORS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def keep_memory() -> None:
    """Lets this process keep what it frees, as a GPU's allocator does; nothing where the C library is not glibc.

    Else large blocks go back to the system and come anew, page by page, when the allocator thinks best: up to a quarter
    of the time of a micro-batch of two contexts, and none of the same one a minute later. No profile can know that.

    It holds for the thread that a program begins with. Others have arenas (glibc's word) of at most 64 MiB, beyond
    which each block is mapped by itself whatever was asked for; so has the first, too, once an allocation of it failed
    while there were others.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)


def has_processors(count: int) -> bool:
    """Whether so many processes can have one each."""
    return len(_PROCESSORS) >= max(count, 2)


def take_processor(index: int, *, of: int) -> None:
    """Keeps this thread, and what it starts from now on, on one processor, as a rank keeps to its GPU.

    Else a thread that brings what another rank sent may wait, beside an idle processor, until the slice of the thread
    that computes on its old one is over.

    Args:
        index: which of `of` processes this is.
        of: how many there are. With fewer processors than that nothing is done.
    """
    if has_processors(of):
        os.sched_setaffinity(0, {_PROCESSORS[index]})


def give_way() -> None:
    """Lets no thread that this one starts from now on take the processor from another in the middle of its work.

    Gloo's thread for incoming data spins while another thread of its rank has the lock of their connection. Where both
    have one processor, and it took that from the other in the middle of a send, nothing happens until the clock's next
    tick, for milliseconds. Nothing where the system has no such policy.
    """
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def compute_last() -> None:
    """Lets the threads that this one started take the processor from it whenever they have something to do.

    As a GPU copies beside what it computes: keys that are gathered beside attention to a rank's own would else be sent
    when that is computed, or at the next tick, and the rank that has nothing to compute meanwhile waits for them. After
    :func:`give_way`, once all groups of ranks are there; threads that are started later are as patient as this one.
    Not where this thread sends by itself, as a pipeline's does: it would be stopped in the middle of that.
    """
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def compute_first() -> None:
    """Lets this thread go on at once when what it waits for has come; those that it started still wait for their turn.

    After :func:`give_way`, once all groups of ranks are there, where this thread sends by itself, as a pipeline's does.
    """
    if hasattr(os, "SCHED_OTHER"):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@contextmanager
def on_a_processor(device: str) -> Iterator[None]:
    """The same for a while, on the first; where a GPU computes, its host's threads are left to the system."""
    taken = device == "cpu" and has_processors(1)
    if taken:
        take_processor(0, of=1)
    try:
        yield
    finally:
        if taken:
            os.sched_setaffinity(0, _PROCESSORS)


def busy_processors(seconds: float = 1.0) -> float | None:
    """Processors that other programs keep busy while this one waits; None where the system does not tell.

    The load does not say: for a minute it still counts what this program did before.
    """
    if not _STAT.exists():
        return None

    def used() -> float:
        # user, nice, system, idle, iowait, irq, softirq, steal: what another machine takes is missing here, too.
        ticks = [int(word) for word in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
        return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")

    began, before = time.perf_counter(), used()
    time.sleep(seconds)
    return (used() - before) / (time.perf_counter() - began)
