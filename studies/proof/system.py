"""What the system does beside the work that is timed: memory that it takes back, and other programs."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
# Of malloc.h: how many blocks may be mapped by themselves, and what is free before memory goes back (-1: never).
_MMAP_MAX, _TRIM_THRESHOLD = -4, -1


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
