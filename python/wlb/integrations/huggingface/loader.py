"""Micro-batches of a plan for a trainer that takes one batch after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import torch
from accelerate.utils import send_to_device
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from wlb._core import MicroBatch
from wlb._errors import error
from wlb.integrations.schedules import Pace
from wlb.integrations.with_labels import steps_with_labels
from wlb.reading.state import Snapshot, field
from wlb.torch.data import BalancedStream, PackedBatch, Step, StepLoader
from wlb.torch.metrics import StepMetrics

REAL: Final = "wlb_real_tokens"
"""Key of a row with padding: how many of its tokens belong to documents. They come first."""


def row_of(batch: PackedBatch, *, plain: bool) -> dict[str, Any]:
    """A micro-batch as a Hugging Face model takes it. If it has padding, it says how many tokens are real."""
    row = batch.as_hf(plain=plain)
    real = batch.tokens.numel() - batch.num_padding
    return row if real == row["input_ids"].numel() else row | {REAL: real}


class MicroBatchLoader:
    """Gives the Trainer one micro-batch at a time of the steps that a `StepLoader` or a `BalancedStream` gives.

    This is no `DataLoader`, and has neither a length nor `set_epoch`: the sampler counts epochs by itself and continues
    where it was after a resume, whatever the Trainer's epochs are. Do not give it to `accelerator.prepare`, which would
    divide the micro-batches of this rank among all ranks.

    Args:
        steps: source of micro-batches. A `PackedBatch` is given as Hugging Face's models take it (`PackedBatch.as_hf`).
        plain: as in `row_of`.
        before_first: called with the first step before it is given.
        dataset: the data set that is read, for callbacks that look at it.
        device: where rows are put without waiting for the copy; None: the Trainer moves them.

    Attributes:
        steps: as above.
        dataset: as above.
        untrained: steps that were given and may not have been trained yet, without their micro-batches, and for each
            the epochs done after it. None if nobody needs them.
    """

    def __init__(
        self,
        steps: StepLoader[Any] | BalancedStream[Any],
        *,
        plain: bool = False,
        before_first: Callable[[Step[Any]], None] | None = None,
        dataset: Any = None,
        device: torch.device | None = None,
    ) -> None:
        self.steps = steps
        self.dataset = dataset
        self.untrained: deque[tuple[Step[Any], float | None]] | None = None
        self._plain = plain
        self._before_first = before_first
        self._device = device
        self._documents: int | None = steps.describe()["documents"]

    @property
    def batch_size(self) -> None:
        """None, as of a `DataLoader` with a batch sampler: a micro-batch has a number of tokens, not of rows."""
        return None

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches of the rest of the epoch, without those of steps without a label (`steps_with_labels`)."""
        for step, _ in steps_with_labels(self.steps):
            if self._before_first is not None:
                self._before_first(step)
                self._before_first = None
            if self.untrained is not None and step.snapshot is not None:
                self.untrained.append((replace(step, micro_batches=[]), self._epochs_after(step)))
            for batch in step.micro_batches:
                row = row_of(batch, plain=self._plain) if isinstance(batch, PackedBatch) else batch
                yield row if self._device is None else send_to_device(row, self._device, non_blocking=True)

    def _epochs_after(self, step: Step[Any]) -> float | None:
        """Epochs done once a step is trained; None for a stream, which has no epochs."""
        if self._documents is None or step.snapshot is None or step.snapshot.progress.documents is None:
            return None
        return step.epoch + step.snapshot.progress.documents / self._documents


class MicroBatchCallback(TrainerCallback, ExportableState):
    """Saves the state of the last trained step in the Trainer's checkpoints, and resumes after it.

    A step counts as trained once the optimizer has taken it, even if the Trainer has fetched further micro-batches
    since. The Trainer asks only one rank for the state, so the state needs no communication.

    Attributes:
        line: figures of the last trained step (`wlb.torch.StepMetrics`).
        documents: documents of which training began since this call, on all ranks; pieces of one count once.
        pace: of the learning-rate schedule, saved in checkpoints too; None: every step moves it by one.
        anew: whether the data begin anew after a resume, because the checkpoint was saved without this callback.
    """

    def __init__(self) -> None:
        self.line: dict[str, float] = {}
        self.documents = 0
        self.pace: Pace | None = None
        self.anew = False
        self._metrics = StepMetrics()
        self._untrained: deque[tuple[Step[Any], float | None]] = deque()
        self._trained: Snapshot | None = None  # after the last step since training began
        self._steps_done = 0  # optimizer steps, as the Trainer counts them
        self._began: dict[str, Any] | None = None  # the state in which training began
        self._steps: StepLoader[Any] | BalancedStream[Any] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restores the loader if training resumes.

        Raises:
            wlb.WlbError: the Trainer has another loader, or arguments with which it would train other documents; or the
                checkpoint was saved without this callback, or is of other documents.
        """
        loader = kwargs["train_dataloader"]
        if not isinstance(loader, MicroBatchLoader):
            found = type(loader).__name__
            raise error("train_dataloader", f"is a {found}, not a MicroBatchLoader", value=found)
        if not args.ignore_data_skip:
            message = "= False: must be True, or the Trainer skips micro-batches after a resume"
            raise error("ignore_data_skip", message, value=False)
        own, planned = args.gradient_accumulation_steps, loader.steps.num_micro_batches_per_rank
        if own != planned:
            message = f"= {own}: a rank has {planned} micro-batches in every global batch"
            raise error("gradient_accumulation_steps", message, value=own)
        if state.global_step:
            callbacks: Any = state.stateful_callbacks  # in a checkpoint a dict
            if not self.anew:
                saved = field(callbacks, type(self).__name__, dict)
                loader.steps.load_state_dict(field(saved, "steps", dict))
        self._untrained, self._trained, self._began = deque(), None, loader.steps.state_dict()
        self._steps_done, self.documents = state.global_step, 0
        loader.untrained = self._untrained
        self._steps = loader.steps
        self._metrics = StepMetrics(loader.steps)
        if isinstance(loader.steps, StepLoader):
            state.num_train_epochs = loader.steps.num_epochs

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The optimizer has taken a step: the oldest one that was given and not yet trained."""
        step, epochs = self._untrained.popleft()
        self._trained, self.line = step.snapshot, self._metrics.end_step(step)
        self._steps_done = state.global_step
        documents = (each for each in step.packing if isinstance(each, MicroBatch))  # no forests: balance plans none
        self.documents += sum(int((each.starts == 0).sum()) for each in documents)
        if epochs is not None:
            state.epoch = epochs  # the Trainer counts all steps as one epoch

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Ends training with the last epoch, even if a larger `max_steps` was given.

        If a callback stopped the epoch (`control.should_epoch_stop`), the rest of it is not trained.

        Raises:
            wlb.WlbError: a callback stopped the epoch of a stream, which has none.
        """
        if control.should_epoch_stop:
            if not isinstance(self._steps, StepLoader):
                message = "= True: a stream has no epochs and cannot begin again; set should_training_stop"
                raise error("should_epoch_stop", message, value=True)
            self._untrained.clear()
            self._steps.skip_epoch()
            self._trained, self._began = None, self._steps.state_dict()
        if isinstance(self._steps, StepLoader) and self._steps.ended:
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        """The state that the Trainer writes into `trainer_state.json`: plain JSON values, the same on every rank.

        Read by one rank alone, without communication.
        """
        steps = self._began if self._trained is None else self._trained.state
        pace = {} if self.pace is None else self.pace.state_dict()
        return {"args": {}, "attributes": {}, "trained": self._steps_done, "steps": steps, "pace": pace}
