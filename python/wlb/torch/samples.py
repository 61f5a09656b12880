"""Sums over the tokens of each sample, wherever context parallelism has put them.

Losses of whole samples need them: ratios of sequences (GSPO), means of samples (GRPO), sums of log-probabilities (DPO).
Under context parallelism every rank has only a part of a sample's tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from wlb._errors import error
from wlb.reading.documents import IGNORE
from wlb.torch.data.batch import PackedBatch
from wlb.torch.data.forest import ForestBatch


def sample_sums(values: Tensor, batch: PackedBatch | ForestBatch, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum of each sample's values over its tokens, on all context-parallel ranks together. Differentiable.

    Every rank gets the same sums. The loss of a step is the sum of what all ranks return, as everywhere in
    `wlb.torch`; so a loss of these sums is divided by `batch.cp_size` on each rank, or counted on the first alone.

    Args:
        values: [tokens_of_this_rank, ...] of a `PackedBatch`: one for each token; make those of tokens that predict
            nothing 0. [predictions_of_this_rank, ...] of a `ForestBatch`: what `to_samples` gives.
        batch: the micro-batch. Of documents that were cut, each piece is a sample here.
        group: its context-parallel ranks: `mesh["cp"].get_group()`, or `ContextParallelGroups.of(batch)` if the plan
            chose them. Not needed for one rank.

    Returns:
        [samples, ...], in the order of `document_ids`; padding is in none.

    Raises:
        WlbError: another number of values; a group of another size.

    Complexity:
        O(tokens of this rank), and an all-reduce of a number for each sample, forward and backward.

    Examples:
        >>> import torch, wlb.torch as wt
        >>> batch = wt.collate([[5, 6, 7], [8, 9]], multiple_of_tokens=8)
        >>> wt.sample_sums(torch.ones(8), batch)
        tensor([3., 2.])
    """
    of, samples = _samples(batch)
    if values.ndim < 1 or values.shape[0] != of.numel():
        shape = tuple(values.shape)
        what = "each prediction: what to_samples gives" if isinstance(batch, ForestBatch) else "each token of this rank"
        raise error("values", f"has shape {shape}: must be [{of.numel()}, ...], one for {what}", value=shape)
    # One place more, for padding.
    sums = values.new_zeros((samples + 1, *values.shape[1:])).index_add(0, of.to(values.device), values)[:samples]
    group = _checked(batch, group)
    return sums if group is None else _Sum.apply(sums, group)


def sample_predictions(batch: PackedBatch | ForestBatch, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Number of predictions of each sample that count, on all context-parallel ranks together.

    `sample_sums` over these numbers is the mean of each sample, in which one without predictions is 0 / 0: clamp them.

    Args:
        batch: as for `sample_sums`.
        group: as for `sample_sums`.

    Returns:
        int64 [samples], in the order of `document_ids`.

    Raises:
        WlbError: a group of another size.

    Complexity:
        O(tokens of this rank), and an all-reduce of a number for each sample.

    Examples:
        >>> import wlb.torch as wt
        >>> wt.sample_predictions(wt.collate([[5, 6, 7], [8, 9]]))
        tensor([2, 1])
    """
    of, samples = _samples(batch)
    if isinstance(batch, PackedBatch):
        of = of[batch.labels != IGNORE]
    counts = torch.bincount(of, minlength=samples + 1)[:samples]
    group = _checked(batch, group)
    if group is not None:
        dist.all_reduce(counts, group=group)
    return counts


def _samples(batch: PackedBatch | ForestBatch) -> tuple[Tensor, int]:
    """Sample of each value of this rank, int64; the number of samples, which is also the place of padding."""
    samples = batch.document_ids.numel()
    if isinstance(batch, ForestBatch):
        return batch.sample_of, samples
    ends = np.cumsum(batch.shard.lengths[:samples], dtype=np.int64)
    of = ends.searchsorted(batch.shard.rank(batch.cp_rank).token_indices, side="right")
    return torch.from_numpy(of).to(batch.tokens.device), samples


def _checked(batch: PackedBatch | ForestBatch, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group to sum over; None if this rank has all tokens."""
    if batch.cp_size == 1:
        return None
    found = dist.get_world_size(group)
    if found != batch.cp_size:
        message = f"has {found} ranks, and the batch is divided over {batch.cp_size}: give its context-parallel group"
        raise error("group", message, value=found)
    return group or dist.group.WORLD


class _Sum(torch.autograd.Function):
    """Sums a tensor over a group. The gradient is the sum, too: the loss is that of all ranks together."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        values = values.contiguous().clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
