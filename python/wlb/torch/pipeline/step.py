"""One training step of a pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from wlb._errors import error
from wlb.torch.layers import check_forest
from wlb.torch.pipeline.agreement import check_same
from wlb.torch.pipeline.escape import escaped, escaping
from wlb.torch.pipeline.micro_batch import PipelineMicroBatch, check, has_forest
from wlb.torch.pipeline.schedule import Schedule, forget, schedule_class, schedule_for, stages_of_rank
from wlb.torch.pipeline.stage import VarlenPipelineStage
from wlb.torch.tied import is_tied


def pipeline_step(
    stages: Sequence[VarlenPipelineStage],
    micro_batches: Sequence[PipelineMicroBatch],
    *,
    schedule: str | type[Schedule] = "1f1b",
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
) -> list[Any]:
    """Runs the micro-batches of a step forward and backward; gradients add up in the parameters.

    All ranks of the pipeline call it with the same micro-batches, in the same order. Their lengths are free, and their
    number may change from step to step. Gradients are not divided by that number: let `loss_fn` be a sum over tokens,
    divided by the valid tokens of the whole global batch.

    A step that failed leaves a part of its gradients. A pipeline of one rank can continue once they are zeroed. In a
    longer one messages are under way, and FSDP holds gradients that are not reduced yet: such stages refuse to
    continue. Make new ones, on a new process group and with newly sharded modules.

    Under `torch.no_grad()`, or without `loss_fn`, it runs forward only.

    Args:
        stages: this rank's stages, ascending, as `stages_of_rank` gives them.
        micro_batches: at least one. 1F1B and DualPipeV need at least as many as stages; interleaved schedules a
            multiple of `max(1, len(micro_batches) // pp_size)`.
        schedule: `"gpipe"`, `"1f1b"`, `"interleaved_1f1b"`, `"interleaved_zero_bubble"`, `"zbv"`, `"dualpipev"`, or a
            schedule class of torch.
        loss_fn: `loss_fn(output of the last stage, target)`, a scalar.

    Returns:
        On the rank that holds the last stage, the loss of each micro-batch, or its output if there is no `loss_fn`. An
        empty list on the others.

    Raises:
        WlbError: the configuration of stages has `tie_word_embeddings` and the pipeline no `TiedWeights`; stages do not
            fit the schedule, or a failed step left them unusable; a number of micro-batches that the schedule cannot
            run; a micro-batch without args, or whose tensors or shards have other token counts; micro-batches of a
            forest, and a module that cannot run one (see `train_step`); micro-batches, a schedule or a `loss_fn` that
            differ from another rank's. All of this is checked before any communication but one round trip to the store.
        BaseException: the exception of this rank's module or loss function itself, at once, so that
            `except torch.OutOfMemoryError` works. The other ranks wait for this one until its process ends or their
            group times out.
    """
    cls = schedule_class(schedule)
    _check_stages(stages, cls)
    check(micro_batches)
    if has_forest(micro_batches):
        for stage in stages:
            check_forest(stage.submod, "stages")
    backward = loss_fn is not None and torch.is_grad_enabled()
    if backward:
        _check_tied(stages)
        _check_split(stages, cls)
    check_same(stages[0].group, micro_batches, f"{cls.__name__} {'with' if backward else 'without'} backward")
    first, last = stages[0].is_first, stages[-1].is_last
    runner = schedule_for(stages, cls, len(micro_batches), backward=backward)
    for stage in stages:
        stage.begin(micro_batches)
    args = [micro_batch.args for micro_batch in micro_batches] if first else None
    targets: list[Callable[[Any], Any]] | None = None
    if last:
        targets = [
            partial(_evaluate, loss_fn, micro_batch.target, partial(stages[-1].timed, index))
            for index, micro_batch in enumerate(micro_batches)
        ]
    losses: list[Any] = []
    try:
        with escaped(), torch.set_grad_enabled(backward):
            _run(runner, stages, args, targets, losses, backward=backward)
    except BaseException:
        forget(stages)
        raise
    return [loss.detach() for loss in losses] if backward else losses


def _check_stages(stages: Sequence[VarlenPipelineStage], cls: type[Schedule]) -> None:
    if not stages:
        raise error("stages", "is empty", value=0)
    for index, stage in enumerate(stages):
        if not isinstance(stage, VarlenPipelineStage):
            raise error("stages", f"is a {type(stage).__name__}, not a VarlenPipelineStage", index=index, value=stage)
        if stage.unusable:
            message = f"has failed in an earlier step: {stage.unusable}"
            raise error("stages", message, index=index, value=stage.stage_index)
    group = stages[0].group
    placed = stages_of_rank(
        dist.get_rank(group), pp_size=dist.get_world_size(group), num_stages=stages[0].num_stages, schedule=cls
    )
    found = tuple(stage.stage_index for stage in stages)
    if found != placed or any(s.group is not group or s.num_stages != stages[0].num_stages for s in stages):
        message = f"are {list(found)}; {cls.__name__} puts {list(placed)} on this rank, all of one group and pipeline"
        raise error("stages", message, value=found)


def _check_tied(stages: Sequence[VarlenPipelineStage]) -> None:
    """Refuses a model whose configuration ties embedding and head while each stage would train its own copy."""
    for index, stage in enumerate(stages):
        config = getattr(stage.submod, "config", None)
        says_so = getattr(config, "tie_word_embeddings", False) and stage.group_size > 1
        if says_so and not is_tied(stage.group, [each.submod for each in stages]):
            message = (
                "has tie_word_embeddings = True, but its first and last stage would train a copy each: make "
                "wt.TiedWeights on every rank of the pipeline, and call its all_reduce_gradients() after this"
            )
            raise error("stages", message, index=index, value=stage.stage_index)


def _check_split(stages: Sequence[VarlenPipelineStage], cls: type[Schedule]) -> None:
    """Refuses DistributedDataParallel under schedules that compute gradients of weights apart from those of inputs.

    DDP exchanges gradients in hooks that such a backward pass does not call, so each rank would keep its own.
    """
    if not _splits_backward(cls):
        return
    for index, stage in enumerate(stages):
        if any(isinstance(module, DistributedDataParallel) for module in stage.submod.modules()):
            message = (
                f"holds a DistributedDataParallel, and {cls.__name__} computes gradients of weights apart from those "
                "of inputs, where DDP would not exchange them: take fully_shard, or no wrapper and "
                'wt.all_reduce_gradients, or the schedule "1f1b" or "interleaved_1f1b"'
            )
            raise error("stages", message, index=index, value=stage.stage_index)


def _splits_backward(cls: type[Schedule]) -> bool:
    return issubclass(cls, ScheduleInterleavedZeroBubble | ScheduleZBVZeroBubble | ScheduleDualPipeV)


def _evaluate(
    loss_fn: Callable[[Any, Any], Tensor] | None,
    target: Any,
    timed: Callable[[], AbstractContextManager[None]],
    output: Any,
) -> Any:
    with escaping(), timed():
        loss = output if loss_fn is None else loss_fn(output, target)
    # Split backward passes detach the loss in place, which a view does not allow.
    return loss.clone() if isinstance(loss, Tensor) and loss._is_view() else loss


def _run(
    runner: Schedule,
    stages: Sequence[VarlenPipelineStage],
    args: list[tuple[Any, ...]] | None,
    targets: list[Callable[[Any], Any]] | None,
    losses: list[Any],
    *,
    backward: bool,
) -> None:
    if "arg_mbs" in inspect.signature(runner.step).parameters:
        runner.step(arg_mbs=args, target_mbs=targets, losses=losses, return_outputs=False)
        return
    for stage in stages:  # up to 2.13, `step` can only split a batch into equal parts; this is what it does around that
        stage.has_backward = backward
        stage.clear_runtime_states()
    runner._step_microbatches(args, None, targets, losses, return_outputs=False)
