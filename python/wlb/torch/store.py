"""What ranks tell each other through the store that the launcher keeps, without a process group."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_MEETINGS: Final[Counter[str]] = Counter()


def meet(what: str, *, timeout: timedelta) -> None:
    """Waits until every rank of the world has called it.

    Args:
        what: what the ranks meet for: the same on all ranks, which meet for each thing equally often.
        timeout: how long a rank waits.

    Raises:
        RuntimeError: some ranks did not come in time; the message has their numbers.

    Complexity:
        Four requests to the store a rank, and one more for each rank of the world if some did not come.
    """
    store, ranks = _get_default_store(), dist.get_world_size()
    _MEETINGS[what] += 1
    place = f"wlb/{what}/{_MEETINGS[what]}"
    store.set(f"{place}/{dist.get_rank()}", "")
    if store.add(place, 1) == ranks:
        store.set(f"{place}/all", "")
    try:
        store.wait([f"{place}/all"], timeout)
    except RuntimeError as cause:
        absent = [rank for rank in range(ranks) if not store.check([f"{place}/{rank}"])]
        message = (
            f"{what}: ranks {absent} did not come within {timeout.total_seconds():.0f} s: they failed, or are late"
        )
        raise RuntimeError(message) from cause
