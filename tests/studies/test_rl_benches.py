"""The benches of post-training count what they say: plans judged by hand, and the plain order that they begin with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wlb

pytest.importorskip("torch")
pytest.importorskip("rich")

from benches import rl, rl_clock
from benches.rl_planners import Round

TOKENS = wlb.CostModel(attention=0.0, linear=1.0)


def held(lengths: list[int], prompts: list[int], cap: int) -> Round:
    return Round(lengths=np.array(lengths), prompts=np.array(prompts), steps=2, cap=cap, cost=TOKENS)


def test_a_plan_is_judged_as_by_hand() -> None:
    """Two steps of two ranks; sample 4 is lost, sample 0 trained twice, prompt 1 in both steps."""
    plan = [[[[0, 1], [2]], [[3]]], [[[0]], [[5]]]]
    found = rl.judged(plan, held([4, 2, 3, 8, 9, 6], [0, 0, 1, 1, 2, 1], cap=7), ranks=2)
    # The first step has 9 and 8 tokens on its ranks, in rounds of 8 and 3; the second 4 and 6.
    even = (4 + 2 + 3 + 8) / 2 + (4 + 6) / 2
    assert found == {
        "once": pytest.approx((9 + 6) / even),
        "every": pytest.approx((8 + 3 + 6) / even),
        "micro_batches": 3,
        "over_cap": 1,
        "prompts_parted": 2,
        "lost_or_twice": 2,
    }


@given(st.lists(st.integers(1, 100), min_size=8, max_size=40), st.integers(1, 4))
def test_the_plain_order_keeps_samples_order_and_cap(lengths: list[int], ranks: int) -> None:
    (parts,) = rl_clock.in_order(held(lengths, [0] * len(lengths), cap=100), ranks)
    assert [sample for rank in parts for part in rank for sample in part] == [*range(len(lengths))]
    assert len({len(rank) for rank in parts}) == 1
    assert all(sum(lengths[sample] for sample in part) <= 100 for rank in parts for part in rank)


def test_ratios_are_of_sums_over_rounds() -> None:
    rows = [
        {"meet": sync, "plan": plan, "wall": [9.0, wall], "processor": wall / 2, "once": 1.0, "every": 2.0}
        | {"loss_apart": apart, "gradients_apart": 0.0}
        for sync, plans in rl_clock.PLANS.items()
        for plan in plans
        for wall, apart in ((1.0 if plan == "wlb" else 2.0, 0.0), (3.0, 1e-7))
    ]
    found = {(row["meet"], row["plan"]): row for row in rl_clock.summed(rows)}
    assert found["step", "verl"]["wall_over_wlb"] == pytest.approx(5 / 4)
    assert found["step", "verl"]["processor_over_wlb"] == pytest.approx(5 / 4)
    assert found["micro_batch", "wlb"]["wall_over_wlb"] == 1
    assert found["step", "plain order"]["loss_apart"] == 1e-7
    assert [found[sync, "wlb"]["over_even_by_costs"] for sync in ("step", "micro_batch")] == [1.0, 2.0]
