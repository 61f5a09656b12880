"""The schedules that wlb simulates are the ones that torch runs."""

from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

import wlb
from tests.plain import Op, orders_of
from wlb.torch.pipeline import stages_of_rank

KINDS = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}
CALLS = {"forward_one_chunk": "forward", "backward_one_chunk": "backward"}
LOOPS: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
LISTS: dict[str, Any] = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


def fake_stage(index: int, rank: int, p: int, v: int) -> MagicMock:
    """Computes and sends nothing, and remembers what it was asked for."""
    stage = MagicMock(stage_index=index, num_stages=p * v, group_size=p, group_rank=rank, is_last=False)
    for messages in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, messages).return_value = []
    return stage


def order_of_torch(name: str, rank: int, p: int, v: int, m: int) -> list[Op]:
    """What torch computes on a rank, in order."""
    indices = stages_of_rank(rank, pp_size=p, num_stages=p * v, schedule=name)
    stages = [fake_stage(index, rank, p, v) for index in indices]
    if name in LOOPS:  # a loop over the micro-batches: watch it run
        schedule = LOOPS[name](stages[0], m)
        with patch.object(schedule, "_initialize_stage"):
            schedule._step_microbatches([()] * m, [{}] * m)
        calls = [(call[0], call.args[0]) for call in stages[0].mock_calls if call[0] in CALLS]
        return [(CALLS[call], j, rank) for call, j in calls]
    order = LISTS[name](stages, m).pipeline_order[rank]
    apart = [part for action in order if action for part in action.sub_actions or (action,)]  # of overlapped pairs
    actions = [(action.computation_type.value, action.microbatch_index, action.stage_index) for action in apart]
    return [(KINDS[kind], j, stage) for kind, j, stage in actions]


@pytest.mark.parametrize(
    ("name", "p", "v", "m"),
    [
        ("gpipe", 4, 1, 6),
        ("1f1b", 1, 1, 3),
        ("1f1b", 4, 1, 4),
        ("1f1b", 4, 1, 9),
        ("interleaved_1f1b", 2, 1, 4),
        ("interleaved_1f1b", 4, 2, 3),
        ("interleaved_1f1b", 4, 2, 8),
        ("interleaved_1f1b", 4, 3, 10),
        ("interleaved_1f1b", 3, 4, 12),
        ("interleaved_zero_bubble", 4, 1, 8),
        ("interleaved_zero_bubble", 4, 2, 8),
        ("interleaved_zero_bubble", 3, 3, 6),
        ("zbv", 1, 2, 3),
        ("zbv", 2, 2, 2),
        ("zbv", 4, 2, 3),
        ("zbv", 4, 2, 9),
        ("dualpipev", 1, 2, 2),
        ("dualpipev", 2, 2, 5),
        ("dualpipev", 4, 2, 8),
        ("dualpipev", 5, 2, 17),
    ],
)
def test_the_orders_are_torchs(name: Any, p: int, v: int, m: int) -> None:
    timeline = wlb.simulate_pipeline(np.ones(m), schedule=name, num_stages=p, num_virtual_stages=v)
    assert orders_of(timeline) == [order_of_torch(name, rank, p, v, m) for rank in range(p)]


def test_zb_h1_is_torchs_interleaved_zero_bubble_with_one_stage() -> None:
    ours = wlb.simulate_pipeline(np.ones(8), schedule="zb_h1", num_stages=4)
    assert orders_of(ours) == [order_of_torch("interleaved_zero_bubble", rank, 4, 1, 8) for rank in range(4)]
