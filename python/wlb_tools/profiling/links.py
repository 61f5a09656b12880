"""Measures the link between ranks: collectives of many sizes over a process group give latency and bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from wlb._errors import check_integer, error
from wlb._shown import explained
from wlb_tools.cluster.hardware import Link

BYTES = tuple(1 << power for power in range(10, 25, 2))
"""Sizes of timed messages: 1 KiB to 16 MiB."""

_WARM_UPS = 2


@explained
@dataclass(frozen=True)
class LinkTimes:
    """Seconds of an all-gather among all ranks of a group, by the bytes that each rank has afterwards.

    Attributes:
        size: number of ranks.
        num_bytes: int64 [sizes].
        seconds: float64 [sizes]: median over repetitions of the time of the slowest rank.
    """

    size: int
    num_bytes: NDArray[np.int64]
    seconds: NDArray[np.float64]

    @property
    def link(self) -> Link:
        """The latency of a hop and the bandwidth of a ring with these times.

        A ring of `n` ranks takes `(n - 1) * latency + (n - 1) / n * bytes / bandwidth`
        (`wlb_tools.cluster.collectives`, where the launch is separate; here it is in the latency). Fitted by least
        squares of relative errors, so that small and large messages count alike.
        """
        hops = self.size - 1
        terms = np.stack([np.full(self.seconds.size, float(hops)), hops / self.size * self.num_bytes], axis=1)
        latency, per_byte = np.linalg.lstsq(terms / self.seconds[:, None], np.ones(self.seconds.size), rcond=None)[0]
        if per_byte <= 0:  # no size took longer than the smallest one: the link is at least this fast
            per_byte = float((self.seconds / terms[:, 1]).min())
        return Link(latency=max(float(latency), 1e-9), bandwidth=1 / float(per_byte))


def probe_link(
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str = "cpu",
    num_bytes: Sequence[int] = BYTES,
    repeats: int = 15,
) -> LinkTimes:
    """Times all-gathers among the ranks of a group. All its ranks call this together, and get the same result.

    Run nothing else meanwhile. The links in a node and between nodes differ: probe a group of each.

    Args:
        group: two ranks or more; default: the whole world.
        device: device of the tensors, one that the group's backend takes.
        num_bytes: sizes of the gathered tensor, ascending, each at least one byte a rank; rounded down to a multiple of
            the number of ranks.
        repeats: repetitions of each size, after two that warm up.

    Raises:
        WlbError: there is only one rank; there is no size, or one that does not ascend; or no repetition.
    """
    size = dist.get_world_size(group)
    if size < 2:
        raise error("group", f"has {size} rank: a link joins two or more", value=size)
    check_integer("repeats", repeats, minimum=1)
    if not num_bytes:
        raise error("num_bytes", "is empty", value=num_bytes)
    for index, (before, value) in enumerate(zip((size - 1, *num_bytes), num_bytes, strict=False)):
        check_integer("num_bytes", value, minimum=before + 1, index=index)
    shares = np.array(num_bytes, dtype=np.int64) // size
    seconds = np.zeros((shares.size, repeats))
    for row, share in enumerate(shares.tolist()):
        sent = torch.zeros(share, dtype=torch.uint8, device=device)
        everything = torch.empty(share * size, dtype=torch.uint8, device=device)
        for repeat in range(-_WARM_UPS, repeats):
            elapsed = _timed(partial(dist.all_gather_into_tensor, everything, sent, group=group), group, device)
            if repeat >= 0:
                seconds[row, repeat] = elapsed
    slowest = torch.from_numpy(seconds).to(device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return LinkTimes(size, shares * size, np.median(slowest.cpu().numpy(), axis=1))


def _timed(call: Callable[[], Any], group: dist.ProcessGroup | None, device: torch.device | str) -> float:
    """Seconds of a collective from the moment when all ranks are ready for it."""
    dist.barrier(group=group)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
