"""Micro-batches of a plan for a trainer that asks for one batch after the other, and knows of no queues."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from wlb._core import MicroBatch
from wlb._errors import error
from wlb.integrations.labelled import labelled_steps
from wlb.integrations.schedules import Pace
from wlb.torch.data import BalancedStream, PackedBatch, Step, StepLoader
from wlb.torch.data.state import Snapshot, field
from wlb.torch.metrics import StepMetrics

REAL: Final = "wlb_real_tokens"
"""In a row with padding: how many of its tokens are those of documents. They come first."""


def row_of(batch: PackedBatch, *, plain: bool) -> dict[str, Any]:
    """A micro-batch as a Hugging Face model takes it; one with padding says how many tokens are none."""
    row = batch.as_hf(plain=plain)
    real = batch.tokens.numel() - batch.num_padding
    return row if real == row["input_ids"].numel() else row | {REAL: real}


class MicroBatchLoader:
    """Gives the Trainer one micro-batch at a time of the steps that a `StepLoader` or a `BalancedStream` gives.

    No `DataLoader`, and without a length or `set_epoch`: the sampler goes from epoch to epoch by itself, and goes on
    where it stood after a resume, which the Trainer's epochs know nothing of. Not to be given to
    `accelerator.prepare`: the sampler yields this rank's part alone, and `accelerate` would share it out again.

    Args:
        steps: Where the micro-batches come from. Those that are a `PackedBatch` are given as Hugging Face's models take
            them (`PackedBatch.as_hf`).
        plain: As there.
        before_first: Gets the first step before it is given.

    Attributes:
        steps: As above.
        untrained: The steps, without their micro-batches, that were given and of which it is not known that they were
            trained, and the epochs done after them; None: nobody asks.
    """

    def __init__(
        self,
        steps: StepLoader[Any] | BalancedStream[Any],
        *,
        plain: bool = False,
        before_first: Callable[[Step[Any]], None] | None = None,
    ) -> None:
        self.steps = steps
        self.untrained: deque[tuple[Step[Any], float | None]] | None = None
        self._plain = plain
        self._before_first = before_first
        self._documents: int | None = steps.describe()["documents"]

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches of the rest of the epoch, but for steps without a label (`labelled_steps`)."""
        for step, _ in labelled_steps(self.steps):
            if self._before_first is not None:
                self._before_first(step)
                self._before_first = None
            if self.untrained is not None and step.snapshot is not None:
                self.untrained.append((replace(step, micro_batches=[]), self._epochs_after(step)))
            for batch in step.micro_batches:
                yield row_of(batch, plain=self._plain) if isinstance(batch, PackedBatch) else batch

    def _epochs_after(self, step: Step[Any]) -> float | None:
        """Passes over the documents that are read after a step; None of a stream, which has none."""
        if self._documents is None or step.snapshot is None or step.snapshot.progress.documents is None:
            return None
        return step.epoch + step.snapshot.progress.documents / self._documents


class MicroBatchCallback(TrainerCallback, ExportableState):
    """Keeps in the Trainer's checkpoints the state of the last step trained, and goes on after it.

    A step counts as trained once the optimizer has taken it, however many micro-batches the Trainer, or what stands
    between it and the `MicroBatchLoader`, has fetched since. The Trainer asks one rank alone for the state,
    which needs no communication.

    Attributes:
        line: Figures of the last step that was trained (`wlb.torch.StepMetrics`).
        documents: Documents of which training began since it was called, on all ranks; pieces count once.
        pace: Of the learning-rate schedule, which checkpoints hold, too; None: it takes a step with every step.
    """

    def __init__(self) -> None:
        self.line: dict[str, float] = {}
        self.documents = 0
        self.pace: Pace | None = None
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
            wlb.WlbError: The Trainer has another loader, or arguments with which it would train other documents, or
                the checkpoint was saved without this callback or is of other documents.
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
        """The optimizer has taken a step: that of the oldest batch that was handed out and not yet trained."""
        step, epochs = self._untrained.popleft()
        self._trained, self.line = step.snapshot, self._metrics.end_step(step)
        self._steps_done = state.global_step
        documents = (each for each in step.packing if isinstance(each, MicroBatch))  # no forests: balance plans none
        self.documents += sum(int((each.starts == 0).sum()) for each in documents)
        if epochs is not None:
            state.epoch = epochs  # the Trainer counts all steps as one epoch

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Training ends with the last epoch, though `max_steps` was given and says more."""
        if isinstance(self._steps, StepLoader) and self._steps.ended:
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        """The state that the Trainer writes into `trainer_state.json`: plain JSON values, the same on every rank.

        Read by one rank alone, without communication.
        """
        steps = self._began if self._trained is None else self._trained.state
        pace = {} if self.pace is None else self.pace.state_dict()
        return {"args": {}, "attributes": {}, "trained": self._steps_done, "steps": steps, "pace": pace}
