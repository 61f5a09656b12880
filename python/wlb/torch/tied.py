"""Weights that several pipeline stages share, such as an embedding and a head: one weight, a copy on each stage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from wlb._errors import error
from wlb.torch.lazy import local
from wlb.torch.subgroup import Subgroup

_TIED: dict[str, WeakSet[TiedWeights]] = {}


class TiedWeights:
    """One weight of which several pipeline stages hold a copy: keeps the copies equal.

    Each stage computes the gradient of its own copy, but the gradient of the weight is the sum of these. Without the
    sum the copies drift apart, unnoticed. Every rank of the pipeline makes one, after wrapping, and calls it after the
    backward pass of each step::

        first, last = stage.is_first, stage.is_last
        tied = wt.TiedWeights(
            model.embedding.weight if first else model.head.weight if last else None, group=mesh["pp"].get_group()
        )
        for step in loader:
            wt.pipeline_step(...)
            tied.all_reduce_gradients()  # before clipping and the optimizer
            optimizer.step()

    The constructor copies the weight of the first stage that has it to the others. A norm over all stages counts the
    weight once for each copy: leave it out on all stages but `is_first`.

    Args:
        parameter: this rank's copy, plain or sharded by `fully_shard`, which has to be the same on all stages; None on
            stages without one. A rank with two stages that hold it gives both modules the same parameter.
        group: the ranks of the pipeline; None for all.

    Attributes:
        is_first: whether this rank's copy is the first.

    Raises:
        WlbError: copies have other shapes, types or shards; or no rank has one. The same on every rank.

    Complexity:
        Collective: every rank of the group makes it once, at the same point. In each step the ranks that have a copy
        send each other their gradients, over the communicator of the group.
    """

    def __init__(self, parameter: nn.Parameter | None, *, group: dist.ProcessGroup | None = None) -> None:
        group = group or dist.group.WORLD
        assert group is not None
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, None if parameter is None else _described(parameter), group=group)
        found = [(rank, text) for rank, text in enumerate(every) if text is not None]
        if not found:
            raise error("parameter", "is None on every rank of the pipeline: give each stage its copy of the weight")
        first, expected = found[0]
        other = next(((rank, text) for rank, text in found if text != expected), None)
        if other is not None:
            message = f"is {expected} on rank {first} of the pipeline, but {other[1]} on rank {other[0]}"
            raise error("parameter", message, value=other[1])
        self._parameter = parameter
        self._holders: dist.ProcessGroup | None = None
        ranks = [dist.get_global_rank(group, rank) for rank, _ in found]
        self.is_first = dist.get_rank() == ranks[0]
        if len(ranks) > 1 and parameter is not None:
            self._holders = Subgroup(group, ranks)
            with torch.no_grad():
                dist.broadcast(local(parameter), src=ranks[0], group=self._holders)
        _TIED.setdefault(group.group_name, WeakSet()).add(self)

    def all_reduce_gradients(self) -> None:
        """Adds up the gradients of all copies; once after all backward passes of a step, on every rank.

        A copy without a gradient counts as 0.
        """
        parameter = self._parameter
        if parameter is None or self._holders is None:
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(local(parameter.grad), group=self._holders)


def is_tied(group: dist.ProcessGroup | None, stages: Iterable[nn.Module]) -> bool:
    """Whether a living `TiedWeights` says that a weight of this rank's stages is shared in the pipeline.

    Always True on a rank without a copy, which cannot know.
    """
    ours = {id(parameter) for stage in stages for parameter in stage.parameters()}
    said = [tied._parameter for tied in of_pipeline(group)]
    return any(parameter is None or id(parameter) in ours for parameter in said)


def of_pipeline(group: dist.ProcessGroup | None) -> Iterable[TiedWeights]:
    """The weights that stages of this pipeline share."""
    group = group or dist.group.WORLD
    return () if group is None else list(_TIED.get(group.group_name, ()))


def _described(parameter: nn.Parameter) -> str:
    mine = tuple(local(parameter).shape)
    return f"{parameter.dtype}{list(parameter.shape)}, {list(mine)} of it on a rank"
