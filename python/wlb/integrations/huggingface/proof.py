"""The proof before a trainer's first step: compares its own training step with each document alone."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerControl, TrainerState

from wlb.integrations.huggingface.loader import MicroBatchCallback, MicroBatchLoader, row_of
from wlb.integrations.huggingface.plans import KnownLengths
from wlb.torch.data import IGNORE, PackedBatch, Step, StepLoader
from wlb.torch.proof import verify
from wlb.torch.training import meeting_place


def prove(trainer: Any, step: Step[PackedBatch], *, plain: bool) -> None:
    """Runs `wlb.torch.verify` on the trainer's own training step and evaluation, with all wrappers.

    If lengths are known, it also checks the state that a checkpoint after the first step would hold. If the trainer has
    a loss of its own, the reference is the same loss on rows of single documents.

    Raises:
        wlb.WlbError: as `wlb.torch.verify`.
    """
    own_loss = trainer.label_smoother is not None or trainer.compute_loss_func is not None
    own_loss |= getattr(trainer.args, "loss_type", "nll") != "nll"
    accelerator, model, device = trainer.accelerator, trainer.model_wrapped, trainer.args.device

    def train(of: Step[PackedBatch]) -> float:
        rows = [row_of(batch, plain=plain) for batch in of.micro_batches]
        items = trainer._get_num_items_in_batch(rows, device)
        if not float(items):
            return 0.0  # steps without labels are not trained
        total = torch.zeros((), device=device)
        for index, row in enumerate(rows):
            with accelerator.no_sync(model) if index + 1 < len(rows) else nullcontext():
                total += trainer.training_step(model, row, items)
        return mean_over_ranks(total)

    def evaluate(of: Step[PackedBatch]) -> float:
        rows = [row_of(batch, plain=plain) for batch in of.micro_batches]
        return float(trainer.evaluation_loop(rows, "Proof", prediction_loss_only=True).metrics["eval_loss"])

    def mean_over_ranks(loss: torch.Tensor) -> float:
        """The mean of a loss over all ranks, as the trainer logs it."""
        if not dist.is_initialized():
            return float(loss)
        mean = loss.to(meeting_place(dist.group.WORLD, device))
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()

    if plain:
        step = replace(step, micro_batches=[_without_ends(batch) for batch in step.micro_batches])
    report = print if trainer.is_world_process_zero() else None
    known = isinstance(trainer._wlb_plan, KnownLengths)
    with _as_it_was(trainer):
        verify(
            model,
            step,
            train=train,
            evaluate=None if own_loss else evaluate,
            alone="rows" if own_loss else None,
            accelerator=accelerator,
            loader=(lambda: _Steps(trainer)) if known else None,
            save=lambda steps, _: steps.state_after_the_first(),
            report=report,
        )


class _Steps:
    """The steps that the trainer would take from a new loader, fetched and saved as the trainer does it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._steps: StepLoader[PackedBatch] = trainer._wlb_plan.steps()
        self._loader = MicroBatchLoader(self._steps)
        self._callback = MicroBatchCallback()

    def __iter__(self) -> Iterator[Step[Any]]:
        args = self._trainer.args
        self._callback.on_train_begin(args, TrainerState(), TrainerControl(), train_dataloader=self._loader)
        each = args.gradient_accumulation_steps
        while not self._steps.ended:  # each iteration is an epoch, which may have only one step
            batches = iter(self._loader)
            while self._trainer.get_batch_samples(batches, each, args.device)[0]:
                assert self._loader.untrained is not None
                yield self._loader.untrained[-1][0]

    def state_after_the_first(self) -> Any:
        """The state in a checkpoint after the optimizer's first step."""
        self._callback.on_step_end(self._trainer.args, TrainerState(), TrainerControl())
        return self._callback.state()["steps"]

    def load_state_dict(self, state: Any) -> None:
        """Continues with the step after the one that has this state."""
        self._steps.load_state_dict(state)


def _without_ends(batch: PackedBatch) -> PackedBatch:
    """Without labels that follow the last tokens of pieces: a plain row has no place for them."""
    labels = batch.labels.clone()
    labels[batch.cu_seqlens[1:].long() - 1] = IGNORE
    return replace(batch, labels=labels, num_valid_tokens=int((labels != IGNORE).sum()))


@contextmanager
def _as_it_was(trainer: Any) -> Iterator[None]:
    """Switches off the auxiliary loss of experts, which depends on the other documents of a row; restores counts."""
    counted = [(vars(owner), copy.deepcopy(_plain(owner))) for owner in (trainer, trainer.state)]
    if getattr(trainer, "aux_loss_enabled", False):
        trainer.aux_loss_enabled = False
    try:
        yield
    finally:
        for values, before in counted:
            values.update(before)


def _plain(owner: Any) -> dict[str, Any]:
    """Attributes that are numbers, texts or containers of them: metrics, counts of tokens and steps, flags."""
    return {name: value for name, value in vars(owner).items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | deque):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)
