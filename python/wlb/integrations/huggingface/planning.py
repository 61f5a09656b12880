"""Plans from the data set, collator, model and arguments that a trainer has at that moment."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import has_length

import wlb
from wlb._choices import Oversize
from wlb._errors import error
from wlb.integrations.counting import steps_with_labels_left
from wlb.integrations.huggingface.plans import KnownLengths, Limits, Streamed
from wlb.integrations.huggingface.refusals import check_longest, check_trainer, shuffles
from wlb.integrations.rows import Rows
from wlb.integrations.schedules import Pace
from wlb.reading.sizes import step_tokens
from wlb.reading.state import field as field_of
from wlb.torch.data import Documents
from wlb.torch.data.loading import Loading
from wlb.torch.routers import check_told
from wlb.torch.training import takes_keywords


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """Arguments of `wlb.integrations.huggingface.balance`; `dataset` is the one that `lengths` are of."""

    max_tokens: int
    max_document_tokens: int | None
    oversize: Oversize
    max_delay: int
    tokens_per_batch: int | None
    lengths: ArrayLike | None
    cost_model: wlb.CostModel | None
    columns: Sequence[str]
    verify: bool
    packer: Mapping[str, Any]
    dataset: Any


@dataclass(frozen=True)
class Resumed:
    """A checkpoint from which training resumes: its optimizer steps, and the states of data and schedules.

    The state of the data is None if they begin anew.
    """

    step: int
    state: dict[str, Any] | None
    pace: dict[str, Any]

    @classmethod
    def of(cls, folder: str | None, callback: str, *, anew: bool) -> Resumed | None:
        """Reads the state of a checkpoint folder; None if there is none, or if nothing was trained.

        Args:
            folder: `resume_from_checkpoint`.
            callback: the name under which the Trainer saves the state of the data.
            anew: whether the data of a checkpoint without such a state begin anew (`ignore_data_skip`).

        Raises:
            wlb.WlbError: the checkpoint has no state of the data, or one after another step.
        """
        path = os.path.join(folder or "", TRAINER_STATE_NAME)
        if folder is None or not os.path.isfile(path):
            return None
        state = TrainerState.load_from_json(path)
        if not state.global_step:
            return None
        callbacks: Any = state.stateful_callbacks  # in a checkpoint a dict
        if callback not in callbacks:
            if anew:
                return cls(state.global_step, None, {})
            message = (
                f"{folder!r} was saved by a trainer without wlb, and does not say which documents are trained: give "
                "TrainingArguments(ignore_data_skip=True) to keep its model and optimizer and begin the data anew"
            )
            raise error("resume_from_checkpoint", message, value=folder)
        saved = field_of(callbacks, callback, dict)
        trained = field_of(saved, "trained", int)
        if trained != state.global_step:
            message = f"holds the data after {trained} steps, but the Trainer's state after {state.global_step}"
            raise error("resume_from_checkpoint", message, value=trained)
        return cls(state.global_step, field_of(saved, "steps", dict), field_of(saved, "pace", dict))


@dataclass(frozen=True, eq=False)
class Planned:
    """The loader to train with, and the training arguments that belong to it.

    Attributes:
        plan: source of micro-batches.
        plain: whether the model takes no keyword arguments.
        arguments: training arguments that the plan changes.
        pace: of the learning-rate schedule.
        anew: whether the data begin anew after a resume.
    """

    plan: KnownLengths | Streamed
    plain: bool
    arguments: dict[str, Any]
    pace: Pace
    anew: bool


@dataclass
class Planner:
    """Plans for one trainer, from what it has at that moment.

    It remembers which training arguments a plan has set, so the next plan starts from the values that the user gave,
    before or since. A value equal to the plan's own counts as unchanged.
    """

    options: Options
    _set: tuple[Any, dict[str, tuple[Any, Any]]] = (None, {})  # arguments; by name the user's value and ours
    _measured: tuple[tuple[Any, ...], NDArray[np.int64]] | None = None  # data set and lengths

    def plan(self, trainer: Any, resumed: Resumed | None = None) -> Planned:
        """Reads data set, collator, model and arguments, and changes nothing.

        Raises:
            wlb.WlbError: as `wlb.integrations.huggingface.balance`; or the checkpoint is of other data.
        """
        check_trainer(trainer)
        limits = limits_of(trainer, self.options)
        for name in ("multiple_of_tokens", "token_buckets"):
            if limits.others.get(name):
                check_told(trainer.model, name, limits.others[name])
        plain = not takes_keywords(trainer.model)
        own = {name: self.given(trainer, name) for name in ("max_steps", "gradient_accumulation_steps")}
        plan: KnownLengths | Streamed
        max_steps = own["max_steps"]
        if has_length(trainer.train_dataset) and not isinstance(trainer.train_dataset, IterableDataset):
            plan = self._known(trainer, limits, own, resumed)
            if resumed is not None and self._begins_anew(trainer, plan, resumed):
                resumed = replace(resumed, state=None)
                plan = self._known(trainer, limits, own, resumed)
            split = limits.loading.oversize == "split" and int(plan.lengths.max()) > limits.context
        else:
            plan = self._streamed(trainer, limits, own)
            split = limits.loading.oversize == "split"
        if plain and split:
            name = type(trainer.model).__name__
            message = (
                f'= "split": {name} takes no shift_labels, so what follows a piece could not be learnt; "truncate"'
            )
            raise error("oversize", message, value=limits.loading.oversize)
        each = plan.packer.tokens_per_batch
        pace = Pace(each, each)
        if resumed is not None and resumed.pace:
            pace = Pace.resumed(resumed.pace, resumed.step, each, counted=max_steps > 0)
        if isinstance(plan, KnownLengths) and max_steps <= 0:
            max_steps = self._steps(plan, trainer.args.num_train_epochs, resumed)
        return Planned(
            plan,
            plain,
            {
                "max_steps": max_steps,
                "gradient_accumulation_steps": plan.packer.num_micro_batches // trainer.args.world_size,
                "ignore_data_skip": True,
            },
            pace,
            resumed is not None and resumed.state is None,
        )

    def _begins_anew(self, trainer: Any, plan: KnownLengths, resumed: Resumed) -> bool:
        """Whether a checkpoint is of other documents, and `ignore_data_skip` says that the data begin anew.

        Raises:
            wlb.WlbError: it is of other documents, and `ignore_data_skip` does not say so.
        """
        wrong = "" if resumed.state is None else plan.sampler().other_documents(resumed.state)
        if wrong and not self.given(trainer, "ignore_data_skip"):
            message = f"{wrong}; or give TrainingArguments(ignore_data_skip=True), with which the data begin anew"
            raise error("resume_from_checkpoint", message)
        return bool(wrong)

    def remarks(self, planned: Planned, world_size: int) -> Iterator[str]:
        """Notes for the user: documents that `max_tokens` cuts, and plans in which there is nothing to balance.

        Args:
            planned: of this planner.
            world_size: ranks that train.
        """
        plan, options = planned.plan, self.options
        if isinstance(plan, KnownLengths) and options.max_document_tokens is None:
            context = plan.limits.context
            longer = int((plan.lengths > context).sum())
            if longer and context == options.max_tokens:
                cut = "split into pieces" if options.oversize == "split" else "truncated"
                yield (
                    f"{longer:,} of {plan.lengths.size:,} documents have more than max_tokens = {context:,} tokens and"
                    f" are {cut}; raise max_tokens, or say so by max_document_tokens={context}"
                )
        if world_size == 1 and plan.packer.num_micro_batches == 1:
            yield (
                "there is nothing to balance: one rank trains one micro-batch a step. Documents are packed without"
                " padding, and nothing more; balance gains with several ranks or gradient_accumulation_steps"
            )

    def set_arguments(self, trainer: Trainer, arguments: Mapping[str, Any]) -> None:
        """Sets the trainer's arguments to those of a plan."""
        self._set = (
            trainer.args,
            {name: (self.given(trainer, name), value) for name, value in arguments.items()},
        )
        for name, value in arguments.items():
            setattr(trainer.args, name, value)

    def given(self, trainer: Trainer, name: str) -> Any:
        """The value that the user gave for a training argument."""
        args, values = self._set
        found = getattr(trainer.args, name)
        if args is trainer.args and name in values and values[name][1] == found:
            return values[name][0]
        return found

    def _known(self, trainer: Trainer, limits: Limits, own: Mapping[str, int], resumed: Resumed | None) -> KnownLengths:
        args, options = trainer.args, self.options
        rows = Rows(*documents_of(trainer, trainer.train_dataset, "training"), limits.reader)
        if not len(rows):
            raise error("train_dataset", "is empty")
        shuffle = shuffles(trainer)
        measured = self._lengths(trainer, rows)
        trained = measured.clip(max=limits.context) if limits.loading.oversize == "truncate" else measured
        tokens_per_batch = options.tokens_per_batch
        if tokens_per_batch is None:
            documents = args.per_device_train_batch_size * own["gradient_accumulation_steps"] * args.world_size
            tokens_per_batch = max(1, round(float(trained.mean()) * documents))
        packer = limits.packer(limits.micro_batches(tokens_per_batch), tokens_per_batch)
        num_epochs = max(1, math.ceil(args.num_train_epochs))
        if own["max_steps"] > 0:  # as many epochs as these steps need: waiting documents are trained after the last
            done = 0 if resumed is None else resumed.step
            begun = 0 if resumed is None or resumed.state is None else field_of(resumed.state, "epoch", int)
            num_epochs = begun + 2 + math.ceil((own["max_steps"] - done) * tokens_per_batch / int(trained.sum()))
        return KnownLengths(rows, measured, packer, max(num_epochs, 1), shuffle, args, limits)

    def _lengths(self, trainer: Trainer, rows: Rows) -> NDArray[np.int64]:
        dataset, options = trainer.train_dataset, self.options
        if options.lengths is not None:
            if dataset is not options.dataset:
                message = (
                    "are those of the data set that the trainer had: it has another one now; balance a new trainer"
                )
                raise error("lengths", message)
            measured = np.asarray(options.lengths)
            if measured.shape != (len(rows),):
                message = f"has shape {measured.shape}, but there are {len(rows)} documents"
                raise error("lengths", message, value=measured.shape)
            rows.planned_by(measured, "by lengths=")
            return measured
        key = (dataset, trainer.data_collator)
        known = self._measured
        if known is None or (known[0][0] is not key[0] or known[0][1] is not key[1] or known[1].size != len(rows)):
            self._measured = known = key, rows.lengths()
        rows.planned_by(known[1], "when its length was read")
        return known[1]

    def _streamed(self, trainer: Trainer, limits: Limits, own: Mapping[str, int]) -> Streamed:
        world_size = trainer.args.world_size
        if own["max_steps"] <= 0:
            message = (
                "is not given, and a data set that is read as a stream does not say how many steps it has: give it"
            )
            raise error("max_steps", message, value=own["max_steps"])
        dataset, collator = documents_of(trainer, trainer.train_dataset, "training")
        tokens_per_batch = self.options.tokens_per_batch
        if tokens_per_batch is None:
            num_micro_batches = world_size * own["gradient_accumulation_steps"]
            tokens_per_batch = step_tokens(num_micro_batches * limits.max_tokens)
        else:
            num_micro_batches = limits.micro_batches(tokens_per_batch)
        return Streamed(dataset, collator, limits.packer(num_micro_batches, tokens_per_batch), limits)

    def _steps(self, plan: KnownLengths, num_train_epochs: float, resumed: Resumed | None) -> int:
        """Optimizer steps of the whole run, with those already done."""
        sampler = plan.sampler()
        if resumed is not None and resumed.state is not None:
            sampler.load_state_dict(resumed.state)
        state = sampler.state_dict()
        # Counted for each plan: a collator may have been changed in place, so that it masks other labels.
        loading = plan.limits.loading
        documents = Documents(plan.rows, columns=loading.columns)
        epochs = steps_with_labels_left(sampler, documents, loading.collate, plan.num_epochs)
        done = 0 if resumed is None else resumed.step
        if not epochs:
            return max(done, 1)
        # The last epoch may be incomplete, because of a fraction in `num_train_epochs` or because part of it is
        # trained.
        begun = field_of(state, "position", int) / len(plan.rows) if len(epochs) == 1 else 0.0
        wanted = num_train_epochs - (plan.num_epochs - 1)
        last = epochs[-1] if wanted >= 1 else math.ceil(epochs[-1] * max(wanted - begun, 0.0) / max(1 - begun, 1e-9))
        return max(done + sum(epochs[:-1]) + last, 1)


def limits_of(trainer: Any, options: Options) -> Limits:
    """Limits of the packer, read from the trainer's model as it is now.

    Raises:
        wlb.WlbError: the costs of the model are not known.
    """
    config = trainer.model.config
    context = options.max_document_tokens
    if context is None:
        longest = getattr(config.get_text_config(), "max_position_embeddings", None) or options.max_tokens
        context = min(options.max_tokens, longest)
    check_longest(trainer, context)
    cost_model = options.cost_model
    if cost_model is None:
        cost_model = wlb.ModelConfig.from_hugging_face(config.to_dict()).cost_model()
    loading = Loading(
        max_document_tokens=context,
        oversize=options.oversize,
        max_delay=options.max_delay,
        cost_model=cost_model,
        columns=options.columns,
        sync=options.packer.get("sync"),
    )
    others = {name: value for name, value in options.packer.items() if name != "sync"}
    return Limits(options.max_tokens, loading, others, trainer.args.world_size, _ranks_meet(trainer))


def _ranks_meet(trainer: Any) -> bool:
    """Whether the ranks wait for each other in every micro-batch: each gathers parameters that FSDP has divided."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return plugin is not None and getattr(plugin, "sharding_strategy", None) != ShardingStrategy.NO_SHARD


def documents_of(trainer: Any, dataset: Any, description: str) -> tuple[Any, Any]:
    """A data set and its collator as the trainer reads them: without columns that the model does not take."""
    if hasattr(dataset, "remove_columns") and hasattr(dataset, "select_columns") and has_length(dataset):
        return trainer._remove_unused_columns(dataset, description=description), trainer.data_collator
    return dataset, trainer._get_collator_with_removed_columns(trainer.data_collator, description=description)
