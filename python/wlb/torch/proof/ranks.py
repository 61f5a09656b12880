"""Collectives of a proof."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.torch.training import meeting_place


class Ranks:
    """The ranks that share a step, and the ranks that share a model.

    Args:
        share: the data- and context-parallel ranks, which share the step; None for one process.
        whole: the ranks that hold parts of one model, such as the stages of a pipeline; None if each holds all of it.
        device: the device of the model.
    """

    def __init__(self, share: dist.ProcessGroup | None, whole: dist.ProcessGroup | None, device: torch.device) -> None:
        self.share, self.whole, self.device = share, whole, device
        self.size = 1 if share is None else dist.get_world_size(share)
        self.rank = 0 if share is None else dist.get_rank(share)

    def sums(self, *values: float) -> list[float]:
        """Sums over the ranks that share the step."""
        return self._reduced(values, dist.ReduceOp.SUM, self.share)

    def sums_of_parts(self, *values: float) -> list[float]:
        """Sums over the ranks that share the model."""
        return self._reduced(values, dist.ReduceOp.SUM, self.whole)

    def largest(self, *values: float) -> list[float]:
        """Maxima over all ranks; NaN counts as infinity, since a maximum may lose it."""
        numbers = [math.inf if math.isnan(value) else value for value in values]
        of_step = self._reduced(numbers, dist.ReduceOp.MAX, self.share)
        return self._reduced(of_step, dist.ReduceOp.MAX, self.whole)

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Sums over the ranks that share the step, in place."""
        if self.size > 1:
            works = [dist.all_reduce(tensor, group=self.share, async_op=True) for tensor in tensors]
            for work in works:
                if work is not None:
                    work.wait()

    def gathered(self, mine: Any) -> list[Any]:
        """Objects of all ranks that share the step."""
        return _gathered(mine, self.share)

    def gathered_of_parts(self, mine: Any) -> list[Any]:
        """Objects of all ranks that share the model."""
        return _gathered(mine, self.whole)

    def handed(self, value: Any, source: int) -> Any:
        """Hands an object of one rank to all ranks that share the model."""
        if self.whole is None:
            return value
        given = [value.cpu() if isinstance(value, Tensor) else value]
        dist.broadcast_object_list(given, group=self.whole, group_src=source)
        return given[0].to(self.device) if isinstance(given[0], Tensor) else given[0]

    def _reduced(self, values: Sequence[float], how: Any, group: dist.ProcessGroup | None) -> list[float]:
        if group is None or dist.get_world_size(group) == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=meeting_place(group, self.device))
        dist.all_reduce(tensor, how, group=group)
        return tensor.tolist()


def _gathered(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    if group is None:
        return [mine]
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    return every
