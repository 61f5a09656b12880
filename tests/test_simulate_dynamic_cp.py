"""Dynamic-CP in the simulator: runs as the planner says, priced by what it did not know, nothing lost."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wlb
from wlb.simulation.dynamic import collect_dynamic, dynamic_steps, group_waits
from wlb.simulation.plans import GlobalBatches
from wlb.testing import strategies
from wlb.testing.dynamic_cp import step_seconds

BOTH = ("dynamic_cp", "wlb_dynamic_cp")
LAYOUT = wlb.ParallelLayout(dp=3, pp=2, cp=2, tp=4)


@settings(max_examples=30)
@given(
    strategies.document_lengths(max_length=200, min_size=1, max_size=30),
    strategies.costs(),
    st.integers(1, 9),
    st.sampled_from([(1, 1), (3, 1), (2, 2)]),
    st.floats(0.0, 1e4),
)
def test_ranks_wait_for_their_groups_as_the_planner_says(
    lengths: list[int], cost: Any, world_size: int, stages: tuple[int, int], p2p: float
) -> None:
    """With the planner's own costs, a step takes what it says."""
    pp, virtual = stages
    options = {
        "world_size": world_size,
        "num_stages": pp,
        "num_virtual_stages": virtual,
        "max_tokens_per_rank": 200,
        "cost_model": cost.model(),
        "p2p_seconds": p2p,
    }
    stream = GlobalBatches(np.array(lengths), np.array([0, len(lengths)]))
    plan = collect_dynamic("", dynamic_steps(stream, options), stream)
    planned = wlb.plan_dynamic_cp(lengths, **options)
    groups = plan.groups(np.array([0]))
    whole = np.array([group.seconds for batch in planned.micro_batches for group in batch.groups])
    seconds = np.broadcast_to((whole / (3 * pp * virtual))[:, None, None], (*whole.shape, pp * virtual, 3))
    seconds = seconds[groups.swapaxes(1, 2)]
    transfers = np.full(seconds.shape[:3], p2p)
    schedule = "1f1b" if virtual == 1 else "interleaved_1f1b"
    pipeline: dict[str, Any] = {"schedule": schedule, "num_stages": pp, "num_virtual_stages": virtual}
    waits = group_waits(groups, seconds, transfers, **pipeline)
    assert (waits >= 0).all()
    steps = wlb.simulate_steps(seconds + waits, p2p_seconds=transfers, **pipeline)
    assert steps.seconds[0] == pytest.approx(planned.seconds, rel=1e-9)
    if virtual == 1:
        assert steps.seconds[0] == pytest.approx(step_seconds(planned, p2p), rel=1e-9)
