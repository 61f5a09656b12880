"""A process group of which one process is every rank in turn: collectives give back what the rank itself sent.

So one rank's part of a micro-batch runs alone, on the keys of a whole group: what it computes takes as long as with
the others' keys, and what it would send and wait for takes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

_NAME = "wlb_echo"


class _Done(dist.Work):
    """A collective that is over."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class Echo(dist.ProcessGroup):
    """The two collectives of attention's `all_gather` transport.

    Their names are those of torch 2.15, and before it those with an underscore.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)

    def all_gather_single(self, output: Tensor, sent: Tensor, options: Any = None) -> dist.Work:
        """What this rank sent stands for what each other one did."""
        output.view(-1, *sent.shape).copy_(sent)
        return _Done()

    def all_to_all_single(
        self, output: Tensor, sent: Tensor, arriving: list[int], leaving: list[int], options: Any = None
    ) -> dist.Work:
        """What this rank sent, as far as it goes, stands for what arrives; the rest of that is 0."""
        rows = min(output.shape[0], sent.shape[0])
        output[:rows].copy_(sent[:rows])
        output[rows:].zero_()
        return _Done()

    _allgather_base = all_gather_single
    alltoall_base = all_to_all_single

    def getBackendName(self) -> str:
        """For messages of torch."""
        return _NAME


@contextmanager
def ranks(largest: int) -> Iterator[None]:
    """Makes this process the middle one of enough ranks: it can be any rank of a group of up to `largest`."""
    if not hasattr(dist.Backend, _NAME.upper()):
        dist.Backend.register_backend(_NAME, _make, devices=["cpu", "cuda"])
    dist.init_process_group(_NAME, rank=largest - 1, world_size=2 * largest - 1, store=dist.HashStore())
    try:
        yield
    finally:
        group.cache_clear()
        dist.destroy_process_group()


@functools.cache
def group(rank: int, size: int) -> dist.ProcessGroup | None:
    """A group of `size` ranks of which this process is `rank`; None for one alone."""
    if size == 1:
        return None
    first = dist.get_rank() - rank
    return dist.new_group(list(range(first, first + size)), backend=_NAME)


def _make(store: Any, rank: int, size: int, timeout: Any) -> Echo:
    return Echo(rank, size)
