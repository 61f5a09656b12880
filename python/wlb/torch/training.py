"""One global batch: forward and backward of its micro-batches, under any wrapper."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wlb._errors import error
from wlb._warned import warn
from wlb.reading.documents import AHEAD, IGNORE, WEIGHTS
from wlb.torch.agreement import check_agreement
from wlb.torch.data.batch import PackedBatch
from wlb.torch.data.dynamic_cp import DynamicCpStep
from wlb.torch.data.forest import ForestBatch
from wlb.torch.data.step import Step
from wlb.torch.gradients import all_reduce_gradients, exchanges_gradients, sum_gradients, unchanged, unwrapped
from wlb.torch.groups import ranks_of_step
from wlb.torch.layers import against_labels, check_forest
from wlb.torch.loss import count_valid_tokens, token_normalized_loss
from wlb.torch.routers import real_tokens

AnyStep = Step[PackedBatch] | Step[ForestBatch] | DynamicCpStep[PackedBatch]
LossOf = Callable[[nn.Module, Any, int], Tensor]

# Models whose wrappers were set to sum: looking through all modules in every step would take too long.
_summing: WeakSet[nn.Module] = WeakSet()
_bare: WeakSet[nn.Module] = WeakSet()
_looked: WeakSet[nn.Module] = WeakSet()
looks: Final[list[Callable[..., None]]] = []
"""Checks of a model before its first step. `wlb.torch.proof` adds one: it calls `train_step`."""


def train_step(
    model: nn.Module,
    step: AnyStep,
    *,
    group: dist.ProcessGroup | None = None,
    accelerator: Any = None,
    loss: LossOf | None = None,
    verify: bool = True,
) -> Tensor:
    """Forward and backward of a global batch: gradients are those of the mean loss over all its labels.

    This holds over all micro-batches and ranks, however unequal they are, and under any wrapper of the model. The
    optimizer is the caller's::

        for step in loader:
            loss = wt.train_step(model, step)
            optimizer.step()
            optimizer.zero_grad()

    - No wrapper: gradients are added up over `group` after the last micro-batch (`all_reduce_gradients`).
    - `DistributedDataParallel`, the result of `accelerator.prepare`, `fully_shard`, `FullyShardedDataParallel`:
      wrappers that average are made to add up (`sum_gradients`). DDP exchanges gradients only with the last
      micro-batch. Sharded models exchange them with each: holding them back would keep them whole, at the memory of the
      model.

    A step without a label that counts on any rank is not run: `train_step` warns and leaves gradients as they are.
    After `zero_grad()` they are None, so the optimizer changes nothing, not even by weight decay or momentum.

    Args:
        model: the outermost wrapper. A model whose `forward` takes `input_ids`, like those of Hugging Face, is called
            with `batch.as_hf(model)` without labels and returns `.logits` (float[1, tokens, vocabulary]). If it also
            returns `aux_loss`, that is added with `config.router_aux_loss_coef`, weighted by labels and without padding
            (`real_tokens`). Any other model is called with the batch and returns logits, float[tokens, vocabulary];
            `batch.real` says which tokens are no padding. If documents bring weights, losses are multiplied by them.
            Only models of the second kind take a `ForestBatch`: they run attention on `batch.shard`.
        step: a step from a loader or `Step.of`, with equally many micro-batches on every rank. It is moved to the
            model's device.
        group: the ranks that share the step, data- and context-parallel; None for all.
        accelerator: accelerate's, if `model` is from its `prepare`: its `backward` scales for mixed precision.
        loss: replaces all of that: a function of model, batch (a `PackedBatch` or `ForestBatch`) and the number of
            labels of the global batch, which returns the micro-batch's part of the mean, for example
            `token_normalized_loss`.
        verify: before the first step of a model in this process, check that its documents do not see each other:
            other tokens in some documents of a short step must leave the loss of the others as it is, bit for bit. Not
            with `loss`, which may know the documents of this step alone: `wlb.torch.verify` proves such a loop.

    Returns:
        The mean loss of the global batch, float32 scalar, equal on all ranks, without a graph; 0 if no label counts.

    Raises:
        WlbError: ranks have different plans, or cut a micro-batch differently (`check_agreement`, raised on all ranks);
            other ranks than `group` share the step, or a wrapper exchanges gradients between other ranks; there are
            gradients already; a wrapper is unknown (`sum_gradients`); the model returns no logits; or it cannot run a
            forest: it has recurrent layers, convolutions, dropout, BatchNorm, experts with a capacity, or predicts
            several tokens ahead. Without `loss` also: its head learns no next tokens, as those that classify. With
            `verify` also: a layer looks along the row, so that documents see each other; or a document is longer than
            dynamic or LongRoPE allows in a row (`max_document_tokens`).

    Complexity:
        Besides the model's own work: for each part of the step one all-reduce of a number before, one of a number
        after, and the cost of `check_agreement`. With `verify`, once for each model: at most eight forward passes of
        short documents.
    """
    group = ranks_of_step(step, group)
    several = step.num_ranks > 1
    device = next(model.parameters()).device
    where = meeting_place(group, device)
    if several:
        check_agreement(step, group=group)
    if any(isinstance(batch, ForestBatch) for batch in step.micro_batches):
        check_forest(model)
    if loss is None and model not in _summing and model not in _bare and (wrong := against_labels(model)):
        raise error("model", wrong)
    _prepare(model, group, several)
    valid = count_valid_tokens(step, group=group)
    total = torch.zeros((), device=device)
    if valid == 0:
        warn(f"step {step.number} has no label that counts on any rank: it is skipped")
        return total
    loss_of = loss or _loss
    if verify and loss is None:
        _look(model, step, loss_of, group, accelerator)
    batches: list[Any] = list(step.micro_batches)
    for index, batch in enumerate(batches):
        with ExitStack() as held_back:
            if index < len(batches) - 1:
                _hold_back(model, held_back)
            part = loss_of(model, batch.to(device, non_blocking=True), valid)
            if accelerator is None:
                part.backward()  # type: ignore[no-untyped-call]
            else:
                accelerator.backward(part)
        total += part.detach().float()
    if several and model in _bare:
        all_reduce_gradients(model, step, group=group)
    if several:
        meeting = total.to(where)
        dist.all_reduce(meeting, group=group)
        total = meeting.to(device)
    return total


def _look(model: nn.Module, step: AnyStep, loss_of: LossOf, group: dist.ProcessGroup | None, accelerator: Any) -> None:
    """Refuses layers that look along the row, once for each model."""
    if model in _looked:
        return
    for look in looks:
        look(model, step, loss_of, group=group, accelerator=accelerator)
    _looked.add(model)


@contextmanager
def untrained(model: nn.Module) -> Iterator[None]:
    """Undoes the changes that `train_step` makes to a model and its wrappers, except gradients."""
    known = [models for models in (_summing, _bare, _looked) if model in models]
    _looked.add(model)  # what runs inside proves more
    try:
        with unchanged(model):
            yield
    finally:
        for models in (_summing, _bare, _looked):
            if models not in known:
                models.discard(model)


def logits_of(model: nn.Module, batch: PackedBatch | ForestBatch) -> tuple[Tensor, Tensor | None]:
    """Logits of a micro-batch, float[tokens, vocabulary], and the auxiliary loss if the model has one.

    Raises:
        WlbError: the model returns something else.
    """
    if not takes_input_ids(model):
        output = model(batch)
        found, auxiliary = output, None
    elif isinstance(batch, ForestBatch):
        batch.as_hf()
    else:
        row = without_weights(batch).as_hf(model, plain=not takes_keywords(model))
        given = {name: value for name, value in row.items() if name not in ("labels", "shift_labels", AHEAD)}
        with real_tokens(model, batch):
            output = model(**given)
        found, auxiliary = hf_logits(output), getattr(output, "aux_loss", None)
        if isinstance(found, Tensor) and found.ndim == 3:
            found = found[0, : batch.tokens.numel()]  # an empty micro-batch was one token
    if not isinstance(found, Tensor) or found.ndim != 2:
        what = list(found.shape) if isinstance(found, Tensor) else type(output).__name__
        message = f"gives {what} for {batch.tokens.numel()} tokens, not logits: give train_step a `loss`"
        raise error("model", message, value=what)
    return found, auxiliary


def without_weights(batch: PackedBatch) -> PackedBatch:
    """The batch without weights, for a model that only returns logits: the loss is computed here."""
    if WEIGHTS not in batch.columns:
        return batch
    return replace(batch, columns={name: values for name, values in batch.columns.items() if name != WEIGHTS})


def hf_logits(output: Any) -> Any:
    """The logits in the output of a Hugging Face model."""
    if isinstance(output, Mapping):
        return output.get("logits")
    return getattr(output, "logits", output[0] if isinstance(output, tuple) else None)


def takes_input_ids(model: nn.Module) -> bool:
    """Whether a model is called like those of Hugging Face."""
    return "input_ids" in inspect.signature(unwrapped(model).forward).parameters


def takes_keywords(model: nn.Module) -> bool:
    """Whether its forward takes further keyword arguments and passes them to its attention and its loss."""
    kinds = (parameter.kind for parameter in inspect.signature(unwrapped(model).forward).parameters.values())
    return inspect.Parameter.VAR_KEYWORD in kinds


def _loss(model: nn.Module, batch: PackedBatch | ForestBatch, num_valid_tokens: int) -> Tensor:
    logits, auxiliary = logits_of(model, batch)
    if isinstance(batch, ForestBatch):
        return token_normalized_loss(logits, batch, num_valid_tokens=num_valid_tokens)
    weights = batch.columns.get(WEIGHTS)
    result = token_normalized_loss(logits, batch.labels, num_valid_tokens=num_valid_tokens, weights=weights)
    if auxiliary is not None:
        coefficient = getattr(unwrapped(model).config, "router_aux_loss_coef", 0.0)
        result = result + coefficient * auxiliary * (_labels(batch) / num_valid_tokens)
    return result


def _labels(batch: PackedBatch) -> int:
    """Number of labels that count on this rank."""
    return batch.num_valid_tokens if batch.cp_size == 1 else int((batch.labels != IGNORE).sum())


def _prepare(model: nn.Module, group: dist.ProcessGroup | None, several: bool) -> None:
    if model not in _summing and model not in _bare:
        sum_gradients(model, group=group)
        (_summing if exchanges_gradients(model) else _bare).add(model)
    if several and model in _bare and any(parameter.grad is not None for parameter in model.parameters()):
        message = "has gradients already, which would be added up over ranks again: call zero_grad() before train_step"
        raise error("model", message)


def _hold_back(model: nn.Module, stack: ExitStack) -> None:
    """Accumulates the gradients of what follows, and exchanges them with a later backward pass.

    With a static graph DDP must exchange gradients in the first pass, in which it learns the graph; it exchanges in
    each.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and not module.static_graph:
            stack.enter_context(module.no_sync())


def meeting_place(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Device for numbers that ranks exchange: NCCL needs its own device."""
    if group is None or "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    return device
