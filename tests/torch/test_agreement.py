"""Ranks with different plans are told, all of them, before anything hangs."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import wlb
import wlb.torch as wt
from tests.torch import processes
from wlb.torch.agreement import check_agreement

COST = wlb.CostModel(attention=1.0, linear=1.0)


def plan_of(lengths: list[int]) -> wlb.Packing:
    return wlb.pack(lengths, num_micro_batches=2, max_tokens=100, cost_model=COST)


def agree(rank: int) -> None:
    check_agreement(plan_of([5, 6, 7]), step=3 if rank else np.int64(3))  # type: ignore[arg-type]
    check_agreement(wlb.shard([5, 6], cp_size=2))


def disagree(rank: int, plans: list[list[int]], steps: list[int]) -> str:
    with pytest.raises(wlb.WlbError) as raised:
        check_agreement(plan_of(plans[rank]), step=steps[rank])
    assert raised.value.argument == "plan"
    return str(raised.value)


def disagree_in_a_group(rank: int) -> str:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    plan = plan_of([5, 6, 7 + (rank == 3)])
    if rank % 2 == 0:
        check_agreement(plan, group=groups[0])
        return ""
    with pytest.raises(wlb.WlbError) as raised:
        check_agreement(plan, group=groups[1])
    return str(raised.value)


def test_equal_plans() -> None:
    processes.run(3, agree)


def test_the_ranks_are_named() -> None:
    messages = processes.run(3, disagree, [[5, 6], [5, 7], [5, 6]], [0, 0, 0])
    assert len(set(messages)) == 1
    assert "ranks [0, 2] hold" in messages[0]
    assert "ranks [1] hold" in messages[0]


def test_a_plan_of_another_step() -> None:
    messages = processes.run(2, disagree, [[5, 6], [5, 6]], [4, 5])
    assert "of step 4" in messages[0]
    assert "of step 5" in messages[0]


def test_global_ranks_are_named() -> None:
    messages = processes.run(4, disagree_in_a_group)
    assert messages[0] == messages[2] == ""
    assert "ranks [1] hold" in messages[1]
    assert "ranks [3] hold" in messages[3]


LENGTHS = [9, 40, 3, 21, 14, 33, 8, 27]


def step_of(rank: int, *, dp: int, cp: int, strategy: str) -> Any:
    """The first step of a loader whose context-parallel ranks cut their documents so."""
    packer = wlb.Packer(num_micro_batches=2 * dp, max_tokens=100, cost_model=COST)
    sampler = wt.BalancedBatchSampler(LENGTHS, packer=packer, dp_rank=rank // cp, dp_size=dp)
    collate = functools.partial(wt.collate, cp_size=cp, cp_rank=rank % cp, strategy=strategy)
    documents = [np.arange(length) for length in LENGTHS]
    loader: Any = DataLoader(wt.Documents(documents), batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
    return next(iter(wt.StepLoader(loader)))


class Meeting(torch.nn.Module):
    """Its context-parallel ranks meet in it, as they would in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(50))

    def forward(self, batch: wt.PackedBatch) -> torch.Tensor:
        group = dist.distributed_c10d._get_default_group()
        q = torch.zeros(batch.tokens.numel(), 1, 8)
        wt.context_parallel_attention(q, q, q, batch.shard, group=group)
        return self.weight.expand(batch.tokens.numel(), 50)


def cut_otherwise(rank: int, cp: int, dp: int, odd: int) -> str:
    for step in (step_of(rank, dp=dp, cp=cp, strategy="per_document"),):
        check_agreement(step)
    step = step_of(rank, dp=dp, cp=cp, strategy="per_sequence" if rank == odd else "per_document")
    check_agreement(step.plan, step=step.number)  # the plan is the same
    with pytest.raises(wlb.WlbError) as raised:
        check_agreement(step)
    assert raised.value.argument == "shard"
    if dp == 1:
        with pytest.raises(wlb.WlbError) as trained:
            wt.train_step(Meeting(), step)
        assert str(trained.value) == str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(("cp", "dp", "odd"), [(2, 1, 1), (2, 2, 3)])
def test_ranks_that_cut_otherwise_are_told_before_they_meet(cp: int, dp: int, odd: int) -> None:
    messages = processes.run(cp * dp, cut_otherwise, cp, dp, odd)
    assert len(set(messages)) == 1
    assert f"ranks [{odd - 1}] cut it as" in messages[0]
    assert f"ranks [{odd}] cut it as" in messages[0]
    assert "kernel_model" in messages[0]


def other_layout(rank: int) -> str:
    """Rank 1 believes that it is alone in its context-parallel group."""
    step = step_of(rank, dp=1, cp=2, strategy="auto") if rank == 0 else step_of(0, dp=1, cp=1, strategy="auto")
    with pytest.raises(wlb.WlbError, match="of the same mesh") as raised:
        check_agreement(step)
    return str(raised.value)


def test_ranks_of_another_layout_are_told() -> None:
    messages = processes.run(2, other_layout)
    assert len(set(messages)) == 1


def dynamic(rank: int, odd: bool) -> str:
    plan = functools.partial(
        wlb.plan_dynamic_cp, world_size=2, num_stages=1, max_tokens_per_rank=60, cost_model=COST, num_micro_batches=2
    )
    documents = [np.arange(length) for length in LENGTHS[rank::2]]
    loader = wt.DynamicCpLoader([documents], plan=plan, group=dist.group.WORLD)
    step = next(iter(loader))
    loader.close()
    if odd and rank:
        other = [
            replace(batch, shard=wlb.shard(batch.shard.lengths, cp_size=batch.cp_size, strategy="per_sequence"))
            for batch in step.micro_batches
        ]
        step = replace(step, micro_batches=other)
    if not odd:
        check_agreement(step)
        return ""
    with pytest.raises(wlb.WlbError, match="cut it as") as raised:
        check_agreement(step)
    return str(raised.value)


@pytest.mark.parametrize("odd", [False, True])
def test_groups_of_dynamic_plans_are_compared(odd: bool) -> None:
    messages = processes.run(2, dynamic, odd)
    assert len(set(messages)) == 1


def test_one_process_agrees_with_itself_and_its_steps_have_no_other_ranks() -> None:
    plan = plan_of([5, 6, 7])
    check_agreement(plan)
    check_agreement(wt.Step(0, 0, plan, np.arange(2), [None, None]))
    with pytest.raises(wlb.WlbError) as raised:
        check_agreement(wt.Step(0, 0, plan, np.arange(1), [None]))
    assert raised.value.argument == "group"


def test_a_step_prints_alike_in_every_process() -> None:
    packer = wlb.Packer(num_micro_batches=2, max_tokens=100, cost_model=COST, release="fifo")
    sampler = wt.BalancedBatchSampler([5, 6, 7], packer=packer, dp_rank=0, dp_size=1, tokens_per_batch=18)
    (step,) = wt.StepLoader(
        DataLoader(wt.Documents([[1] * n for n in (5, 6, 7)]), batch_sampler=sampler, collate_fn=len)
    )
    assert step.snapshot is not None
    assert " at 0x" not in repr(step)
