"""Ranks of a pipeline that were given different micro-batches say so before they send any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import wlb
from tests.torch import processes
from wlb.torch.pipeline import PipelineMicroBatch, VarlenPipelineStage, pipeline_step
from wlb.torch.pipeline.agreement import check_same

HIDDEN = 4


def micro_batches(sizes: Sequence[int]) -> list[PipelineMicroBatch]:
    return [
        PipelineMicroBatch(tokens=size, args=(torch.ones(size, HIDDEN),), target=torch.zeros(size, HIDDEN))
        for size in sizes
    ]


def summed(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def refusal(sizes: Sequence[Sequence[int]], losses: Sequence[Callable[..., Tensor] | None]) -> str | None:
    """What this rank says of a step; the one that came first waits for the other in vain."""
    rank = dist.get_rank()
    group = dist.new_group()
    stage = VarlenPipelineStage(nn.Linear(HIDDEN, HIDDEN), rank, 2, "cpu", group=group, hidden_size=HIDDEN)
    step = [micro_batches(each) for each in sizes]
    if rank == 1:
        dist.barrier()  # rank 0 came first
        with pytest.raises(wlb.WlbError) as caught:
            pipeline_step([stage], step[1], loss_fn=losses[1])
        return str(caught.value)
    # What rank 0 does before it sends.
    backward = "with" if losses[0] is not None else "without"
    check_same(group, step[0], f"Schedule1F1B {backward} backward")
    dist.barrier()
    return None


def differ(rank: int) -> list[str | None]:
    return [
        refusal([[3, 1, 5, 2], [3, 1, 5, 1]], [summed, summed]),
        refusal([[3, 1], [3, 1]], [summed, None]),
    ]


def test_other_micro_batches_are_refused_before_they_are_sent() -> None:
    _, (lengths, kinds) = processes.run(2, differ)
    assert lengths == (
        "micro_batches differ from those of rank 0: here 4 of 10 tokens by Schedule1F1B with backward, "
        "there 4 of 11 tokens by Schedule1F1B with backward"
    )
    assert kinds == (
        "micro_batches differ from those of rank 0: here 2 of 4 tokens by Schedule1F1B without backward, "
        "there 2 of 4 tokens by Schedule1F1B with backward"
    )


def far_apart(rank: int) -> None:
    """Nobody waits in the check, so one rank may be far ahead; only the same step is compared."""
    same = micro_batches([3, 1])
    for turn in range(2):
        if rank == turn:
            for step in range(150):
                check_same(None, micro_batches([3, step]), "some schedule")
        dist.barrier()
    for _ in range(150):
        check_same(None, same, "some schedule")
    dist.barrier()
    if rank == 1:
        dist.barrier()
    with pytest.raises(wlb.WlbError, match="micro_batches differ") if rank == 1 else nullcontext():
        check_same(None, micro_batches([rank]), "some schedule")
    if rank == 0:
        dist.barrier()


def test_ranks_far_apart_are_not_taken_for_others() -> None:
    processes.run(2, far_apart)
