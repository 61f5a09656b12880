"""The proof before Lightning's first step: compares the module's own training step with each document alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric

from wlb._warned import warn
from wlb.torch.data import PackedBatch, Step
from wlb.torch.loss import count_valid_tokens
from wlb.torch.proof import verify
from wlb.torch.training import meeting_place


def prove(trainer: Any, step: Step[PackedBatch], divided: int, row: Callable[[PackedBatch, float], Any]) -> None:
    """Runs `wlb.torch.verify` on `training_step` and the strategy's backward, without hooks and callbacks.

    Whatever the step logs meanwhile is dropped, and metrics of torchmetrics are restored. If the module keeps anything
    else from its training steps, it sees a few more of them.

    Args:
        trainer: in `fit`, with its strategy set up.
        step: the first one.
        divided: the number by which Lightning and its wrappers divide gradients.
        row: makes the input of `training_step`, as in `BalancedDataModule`.

    Raises:
        wlb.WlbError: what `wlb.torch.verify` finds.

    Warns:
        UserWarning: the module steps its optimizers itself, so it cannot be verified before it does.
    """
    module, strategy = trainer.lightning_module, trainer.strategy
    if not module.automatic_optimization:
        message = "a module with automatic_optimization=False is not verified: call wlb.torch.verify with its model"
        warn(message)
        return
    group = dist.group.WORLD if dist.is_initialized() else None
    where = meeting_place(group, strategy.root_device)
    numbered = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def loss_of(call: Callable[..., Any], batch: PackedBatch, num_items: float, index: int) -> Tensor | None:
        output = call(strategy.batch_to_device(row(batch, num_items)), *([index] if numbered else []))
        loss: Tensor | None = output.get("loss") if isinstance(output, Mapping) else output
        return loss

    def alone(model: nn.Module, batch: PackedBatch) -> Tensor:
        """The sum of the losses, without wrappers if this rank has the whole module."""
        with strategy.precision_plugin.train_step_context():
            call = strategy.training_step if model is strategy.model else module.training_step
            loss = loss_of(call, batch, 1.0, 0)
        return torch.zeros((), requires_grad=True) if loss is None else loss

    def train(of: Step[PackedBatch]) -> float:
        labels = count_valid_tokens(of, group=group)
        total = torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(of.micro_batches):
            loss = loss_of(strategy.training_step, batch, (labels or 1) / divided, index)
            if loss is not None:
                strategy.backward(loss / trainer.accumulate_grad_batches, None)
                total += loss.detach().double().cpu()
        total = total.to(where, torch.float32)
        if group is not None:
            dist.all_reduce(total, group=group)
        return float(total) / divided

    report = print if trainer.is_global_zero else None
    precision = str(trainer.precision)
    dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float16 if precision.startswith("16") else None
    with torch.enable_grad(), _as_it_was(module):
        verify(strategy.model, step, train=train, alone=alone, dtype=dtype, report=report)


@contextmanager
def _as_it_was(module: Any) -> Iterator[None]:
    """Switches off logging, which Lightning allows only in its loops; restores metrics."""
    metrics = [each for each in module.modules() if isinstance(each, Metric)]
    states = [copy.deepcopy({name: getattr(metric, name) for name in _kept(metric)}) for metric in metrics]
    silent = {"log": lambda *args, **kwargs: None, "log_dict": lambda *args, **kwargs: None}
    vars(module).update(silent)
    try:
        yield
    finally:
        for name in silent:
            del vars(module)[name]
        for metric, state in zip(metrics, states, strict=True):
            for name, value in state.items():
                setattr(metric, name, value)


def _kept(metric: Metric) -> list[str]:
    return [*metric._defaults, "_update_count", "_computed"]
