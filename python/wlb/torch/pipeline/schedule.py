"""torch's schedules: by name, the stages of a rank under each, and one object for each number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, ScheduleDualPipeV

from wlb._errors import error
from wlb.torch.pipeline.stage import VarlenPipelineStage

Schedule = PipelineScheduleSingle | PipelineScheduleMulti

_BY_NAME: dict[str, type[Schedule]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


def schedule_class(schedule: str | type[Schedule]) -> type[Schedule]:
    """The class of a schedule's name; a class is returned unchanged.

    Raises:
        WlbError: it is neither.
    """
    if isinstance(schedule, str) and schedule in _BY_NAME:
        return _BY_NAME[schedule]
    if isinstance(schedule, type) and issubclass(schedule, (PipelineScheduleSingle, PipelineScheduleMulti)):
        return schedule
    raise error("schedule", f"is {schedule!r}; known are {', '.join(_BY_NAME)}, and torch's classes", value=schedule)


def stages_of_rank(
    pp_rank: int, *, pp_size: int, num_stages: int, schedule: str | type[Schedule] = "1f1b"
) -> tuple[int, ...]:
    """The indices of the stages that a rank holds under a schedule, ascending.

    One for GPipe and 1F1B; every `pp_size`-th for interleaved schedules; for V schedules (ZBV, DualPipeV) one on the
    way down and one on the way up, so that rank 0 has the first and the last.

    Raises:
        WlbError: `num_stages` does not suit the schedule, or `pp_rank` is out of range.
    """
    if not 0 <= pp_rank < pp_size:
        raise error("pp_rank", f"is {pp_rank}, with pp_size={pp_size}", value=pp_rank)
    cls = schedule_class(schedule)
    if issubclass(cls, PipelineScheduleSingle):
        if num_stages == pp_size:
            return (pp_rank,)
        wanted = "one stage a rank"
    elif issubclass(cls, (ScheduleZBVZeroBubble, ScheduleDualPipeV)):
        if num_stages == 2 * pp_size:
            return (pp_rank, num_stages - 1 - pp_rank)
        wanted = "two stages a rank"
    else:
        if num_stages > 0 and num_stages % pp_size == 0:
            return tuple(range(pp_rank, num_stages, pp_size))
        wanted = "as many stages on every rank"
    raise error("num_stages", f"is {num_stages} on {pp_size} ranks; {cls.__name__} takes {wanted}", value=num_stages)


def schedule_for(
    stages: Sequence[VarlenPipelineStage], cls: type[Schedule], num_micro_batches: int, *, backward: bool
) -> Schedule:
    """The schedule object for this number of micro-batches; made at the first use, kept with the first stage.

    Its loss function calls the target, which is a function of the last stage's output.

    Raises:
        WlbError: the schedule does not take this number of micro-batches.
    """
    key = (cls, num_micro_batches, backward, tuple(map(id, stages)))
    known: dict[Any, Schedule] = stages[0].schedules
    if key not in known:
        mapping = stages[0].stage_index_to_group_rank
        make: Callable[..., Schedule] = cls
        local = stages[0] if issubclass(cls, PipelineScheduleSingle) else list(stages)
        try:
            known[key] = make(local, num_micro_batches, loss_fn=_loss, scale_grads=False)
        except ValueError as reason:
            for stage in stages:
                stage.stage_index_to_group_rank = mapping
            message = f"has {num_micro_batches} micro-batches on {stages[0].num_stages} stages: {reason}"
            raise error("micro_batches", message, value=num_micro_batches) from reason
        known[key]._has_backward = backward
    return known[key]


def forget(stages: Sequence[VarlenPipelineStage]) -> None:
    """Cleans up after a step that failed: its schedule object still holds losses and messages, its stages tensors."""
    stages[0].schedules.clear()
    for stage in stages:
        stage.forget(failed=True)


def _loss(output: Any, target: Callable[[Any], Tensor]) -> Tensor:
    return target(output)
