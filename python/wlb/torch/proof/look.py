"""Finds layers that look along the row before the first step, in a training loop that nobody has proved."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wlb._errors import error
from wlb.torch.loss import count_valid_tokens
from wlb.torch.proof.alone import Model, logits_alone
from wlb.torch.proof.checks import configuration
from wlb.torch.proof.experiments import Experiments
from wlb.torch.proof.precision import Precision
from wlb.torch.proof.ranks import Ranks
from wlb.torch.proof.short_forest import shortened
from wlb.torch.proof.still import still
from wlb.torch.training import AnyStep, LossOf, looks, train_step


def look(
    model: nn.Module, step: AnyStep, loss_of: LossOf, *, group: dist.ProcessGroup | None, accelerator: Any
) -> None:
    """Refuses a model whose documents see each other in a row.

    Args:
        model: the outermost wrapper.
        step: the first one.
        loss_of: as `train_step` takes it.
        group: the ranks that share the step; None for all.
        accelerator: as `train_step` takes it.

    Raises:
        wlb.WlbError: it names the layer, or the setting, and the way out.

    Complexity:
        Up to eight forward passes of short documents. Only if a loss changes: as many with backward, and a copy of the
        weights that learn.
    """
    device = next(model.parameters()).device
    ranks = Ranks(group, None, device)
    configuration([model], step, ranks)
    short = shortened(step, ranks, [model])
    if not short.count():
        return

    @torch.no_grad()
    def forward(of: AnyStep) -> Tensor:
        valid = count_valid_tokens(of, group=group)
        total = torch.zeros((), device=device)
        for batch in of.micro_batches:
            total += loss_of(model, batch.to(device), valid).float()
        return total

    parts = Model(model, ranks, logits_alone)
    precision = Precision(model, (), None)
    with still(model, weights=False) as kept:
        if Experiments(parts, forward, short, ranks, kept, precision, losses_only=True).is_exact():
            return
    if any(parameter.grad is not None for parameter in model.parameters()):
        return  # gradients of an earlier call would be lost: the next call looks again

    def train(of: AnyStep) -> Tensor:
        return train_step(model, of, group=group, accelerator=accelerator, loss=loss_of, verify=False)

    with still(model) as kept:
        check = Experiments(parts, train, short, ranks, kept, precision, getattr(accelerator, "scaler", None)).others()
    if not check.passed:
        raise error("model", check.fix, value=check.error)


looks.append(look)
