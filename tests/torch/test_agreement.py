"""Ranks with different plans are told, all of them, before anything hangs."""

import numpy as np
import pytest
import torch.distributed as dist

import wlb
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
