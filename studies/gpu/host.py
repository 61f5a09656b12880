"""Collectives between processes that share a GPU: through the host's memory.

NCCL refuses two ranks on one device, and gloo has not all collectives for tensors of a GPU. What is tested here is what
a rank does before and after a collective, so that its own way does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor


class _Over:
    """Of a collective that is over."""

    def wait(self) -> None:
        """Returns at once."""


def collectives_through_host() -> None:
    """From now on what attention calls of `torch.distributed` copies its tensors to the host, and back."""
    gather, scatter, exchange = dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.all_to_all_single
    point_to_point = dist.batch_isend_irecv

    def through(collective: Any) -> Any:
        def run(output: Tensor, given: Tensor, *sizes: Any, async_op: bool = False, **options: Any) -> _Over | None:
            received = output.cpu()
            collective(received, given.cpu(), *sizes, **options)
            output.copy_(received)
            return _Over() if async_op else None

        return run

    def batch(operations: Sequence[dist.P2POp]) -> list[_Over]:
        hosts = [operation.tensor.cpu() for operation in operations]
        staged = [
            dist.P2POp(operation.op, host, group=operation.group, group_peer=operation.group_peer)
            for operation, host in zip(operations, hosts, strict=True)
        ]
        for work in point_to_point(staged):
            work.wait()
        for operation, host in zip(operations, hosts, strict=True):
            if operation.op is dist.irecv:
                operation.tensor.copy_(host)
        return [_Over()]

    dist.all_gather_into_tensor, dist.reduce_scatter_tensor = through(gather), through(scatter)
    dist.all_to_all_single, dist.batch_isend_irecv = through(exchange), batch  # type: ignore[assignment]
