"""Sizes of the largest machines."""

import numpy as np
import pytest

import wlb


@pytest.mark.parametrize("world_size", [65_537, 100_000, 1 << 17])
def test_a_plan_for_a_hundred_thousand_ranks(world_size: int) -> None:
    lengths = np.exp(np.random.default_rng(0).normal(8.0, 1.5, 100_000)).astype(np.int64).clip(16, 1 << 20)
    plan = wlb.plan_dynamic_cp(
        lengths,
        world_size=world_size,
        num_stages=8,
        max_tokens_per_rank=8192,
        cost_model=wlb.CostModel(attention=1e-9, linear=1e-5),
    )
    seen = []
    for micro_batch in plan:
        next_rank = 0
        for group in micro_batch:
            assert group.first_rank == next_rank
            assert group.first_rank % group.cp_size == 0
            next_rank += group.cp_size
            assert lengths[group.document_ids].sum() <= group.cp_size * 8192
            seen.append(group.document_ids)
        assert next_rank == world_size
    assert (np.sort(np.concatenate(seen)) == np.arange(len(lengths))).all()
    assert plan.lower_bound <= plan.seconds
