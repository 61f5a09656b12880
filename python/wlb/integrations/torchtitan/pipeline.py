"""torchtitan's pipelines over micro-batches of unequal length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torchtitan.config import TORCH_DTYPE_MAP

from wlb._errors import error
from wlb.torch.pipeline import PipelineMicroBatch, VarlenPipelineStage
from wlb.torch.pipeline.agreement import check_same


def over_unequal_micro_batches(pipelining_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A `pipelining_fn` for a model's `ModelSpec` whose schedule takes rows of any length.

    The model's own function still splits, shards and compiles layers. Its stages, which use the shape of the first
    micro-batch for all, are replaced by wlb's, and its schedule is made again with these.
    """

    def pipeline(model: Any, **arguments: Any) -> tuple[PlannedSchedule, list[Any], bool, bool]:
        schedule, parts, has_first, has_last = pipelining_fn(model, **arguments)
        single = isinstance(schedule, PipelineScheduleSingle)
        shares = token_shares(arguments["parallel_dims"], arguments["parallelism"])
        stages = [
            VarlenPipelineStage(
                stage.submod,
                stage.stage_index,
                stage.num_stages,
                stage.device,
                group=stage.group,
                activation_shape=lambda tokens: (1, tokens // shares, arguments["model_config"].dim),
                dtype=TORCH_DTYPE_MAP[arguments["training"].mixed_precision_param],
            )
            for stage in ([schedule._stage] if single else schedule._stages)
        ]
        again = type(schedule)(
            stages[0] if single else stages,
            n_microbatches=schedule._n_microbatches,
            loss_fn=_detachable(schedule._loss_fn),
            scale_grads=False,
        )
        return PlannedSchedule(again, stages), parts, has_first, has_last

    return pipeline


class PlannedSchedule:
    """A schedule whose stages get the lengths of a step before it runs.

    Args:
        schedule: of torch, with these stages.
        stages: of this rank.
    """

    def __init__(self, schedule: Any, stages: Sequence[VarlenPipelineStage]) -> None:
        self._schedule = schedule
        self._stages = stages

    def step(
        self,
        *,
        arg_mbs: list[tuple[Tensor, ...]] | None,
        kwarg_mbs: list[dict[str, Any]],
        target_mbs: list[Tensor] | None,
        **options: Any,
    ) -> Any:
        """Runs a pipeline step, as torch's schedules do, on micro-batches that torchtitan has split.

        Raises:
            wlb.WlbError: another rank of the pipeline has micro-batches of other lengths.
        """
        planned = [PipelineMicroBatch(tokens=row["positions"].shape[1], kwargs=row) for row in kwarg_mbs]
        check_same(self._stages[0].group, planned, type(self._schedule).__name__)
        for stage in self._stages:
            stage.begin(planned)
        try:
            return self._schedule.step(arg_mbs=arg_mbs, target_mbs=target_mbs, **options)
        except BaseException:
            for stage in self._stages:
                stage.forget(failed=True)
            raise

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported.

        Raises:
            wlb.WlbError: Always.
        """
        raise error("validator", "cannot run in wlb's pipeline stages, which need a plan for every step")


def token_shares(ranks: Any, parallelism: Any) -> int:
    """Number of tensor-parallel ranks among which the tokens of activations between stages are split."""
    return ranks.tp if parallelism.enable_sequence_parallel else 1


def _detachable(loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss whose result is no view: split backward passes detach it in place, which a view does not allow."""

    def loss(*args: Any, **kwargs: Any) -> Tensor:
        found = loss_fn(*args, **kwargs)
        return found.clone() if isinstance(found, torch.Tensor) and found._is_view() else found

    return loss
