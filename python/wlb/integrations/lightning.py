"""wlb's plans for Lightning's `Trainer`: a data module.

    data = BalancedDataModule(documents, max_tokens=65536, tokens_per_batch=2**20, config=model.config)
    lightning.Trainer(max_epochs=3).fit(module, data)

The module's `training_step` gets one row of documents at a time, as keyword arguments of Hugging Face's causal models,
and returns the loss: `self.model(**row).loss`. These models divide the sum of their losses by `num_items_in_batch`,
which each row brings. It is chosen so that the gradient of a step is that of the mean over all its labels, after
Lightning's division by `accumulate_grad_batches` and DDP's by the number of ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import lightning
import numpy as np
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, GradientAccumulationScheduler
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.data import DataLoader

import wlb
from wlb._errors import check_integer, error
from wlb.integrations.counting import steps_with_labels_left
from wlb.integrations.lightning_proof import prove
from wlb.integrations.schedules import Pace
from wlb.integrations.versions import check_version
from wlb.integrations.with_labels import steps_with_labels
from wlb.reading.sizes import micro_batches
from wlb.reading.state import Snapshot, field
from wlb.torch.agreement import agree
from wlb.torch.boundaries import told
from wlb.torch.data import BalancedBatchSampler, Documents, PackedBatch, Step, StepLoader
from wlb.torch.data.loading import Loading
from wlb.torch.layers import against_labels
from wlb.torch.loss import count_valid_tokens
from wlb.torch.metrics import StepMetrics
from wlb.torch.routers import has_router_loss

__all__ = ["BalancedDataModule"]

Row = Callable[[PackedBatch, float], Any]


def _hugging_face(batch: PackedBatch, num_items: float) -> dict[str, Any]:
    return batch.as_hf() | {"num_items_in_batch": num_items}


class BalancedDataModule(LightningDataModule):
    """Micro-batches of equal work for Lightning, which trains, accumulates, saves and resumes them as usual.

    `accumulate_grad_batches` becomes the number of micro-batches of a rank in a step. An epoch of Lightning is an epoch
    of the data. If `on_train_batch_start` returns -1, the rest of the epoch is not trained. With `limit_train_batches`,
    the next epoch goes on where the last one ended, so that no document is left out. The loggers get each step's
    figures (`wlb.torch.StepMetrics`). `trainer.estimated_stepping_batches` is the number of steps of all `max_epochs`
    that have a label, so that schedules of the learning rate end with the training.

    A checkpoint holds the documents that wait after the last step of the optimizer, even if Lightning has fetched
    further ones. They are in the state of this data module, which Lightning restores from every checkpoint, saved
    inside an epoch or at its end, also on another number of ranks and with other `tokens_per_batch`. If the state
    belongs to another step than the one at which Lightning resumes, `fit` refuses it. With other `tokens_per_batch`,
    schedules with `interval="step"` follow the documents: a step of half as many tokens moves them by half a step, and
    `estimated_stepping_batches` counts steps of the first size. If `max_steps` was given, schedules count steps of any
    size.

    Args:
        dataset: `dataset[i]` gives row `i`: its tokens, or a mapping with `input_ids` and maybe `labels` (-100 where
            nothing is learnt), `attention_mask`, `position_ids` and others (`wlb.torch.RowReader`). The default `row`
            refuses weights, because the losses of Hugging Face's models take none.
        max_tokens: most tokens of a micro-batch, limited by the memory of a rank.
        tokens_per_batch: tokens of a step on all ranks.
        config: of a Hugging Face model, from which costs of documents are computed; or give `cost_model`.
        validation: documents of an evaluation, which takes all of them. The mean of their losses over batches and ranks
            (`self.log("val_loss", loss, sync_dist=True, batch_size=1)`) is then the mean over labels.
        row: makes the input of `training_step` from a micro-batch and the number by which to divide the sum of its
            losses; by default `batch.as_hf()` with this number as `num_items_in_batch`.
        ignore_data_skip: for a checkpoint that does not say which of these documents are trained (saved without this
            data module, or with other documents): keep its model, optimizer and epoch, and begin the data anew.
        verify: before the first step of a `fit`, prove with the module's own `training_step` that rows give the
            gradients of their documents alone (`wlb.torch.verify`). Takes some seconds.
        **loading: of `wlb.torch.Loading`: `max_document_tokens`, `oversize`, `max_delay`, `lengths`, `num_epochs` (as
            the Trainer's `max_epochs`), `sync` (by default "micro_batch" under FSDP), ...

    Raises:
        wlb.WlbError: an argument is invalid or unknown, or this version of Lightning is not supported. In `fit`:
            `accumulate_grad_batches` was given with another value, or changes; `limit_train_batches` cuts a global
            batch; `overfit_batches` is given; dataloaders are reloaded; there are several optimizers, or one takes a
            step inside a global batch; a checkpoint has no state of the data, or that of another step; what
            `wlb.torch.verify` finds.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        max_tokens: int,
        tokens_per_batch: int,
        config: Any = None,
        validation: Any = None,
        row: Row = _hugging_face,
        ignore_data_skip: bool = False,
        verify: bool = True,
        **loading: Any,
    ) -> None:
        super().__init__()
        _check_lightning()
        check_integer("max_tokens", max_tokens, minimum=1)
        check_integer("tokens_per_batch", tokens_per_batch, minimum=1)
        self._loading, _ = Loading.of(loading)
        self._limits = {"max_tokens": max_tokens, "cost_model": self._loading.costs(config)}
        self._documents, self._lengths = self._loading.measured(dataset)
        self._validation = validation
        self._max_tokens, self._tokens_per_batch = max_tokens, tokens_per_batch
        self._row = row
        self._ignore_data_skip = ignore_data_skip
        self._verify = verify
        self._given: _MicroBatches | None = None  # the loader of the latest `fit`
        self._arrived: dict[str, Any] | None = None  # the state from which the latest `fit` begins
        self._total: int | None = None  # the number of steps that a schedule was given
        self._pace = Pace(tokens_per_batch, tokens_per_batch)

    def setup(self, stage: str) -> None:
        """Sets the Trainer's `accumulate_grad_batches`.

        Raises:
            wlb.WlbError: it has another value already, the Trainer would leave documents out, or its strategy is
                DeepSpeed.
        """
        trainer: Any = self.trainer
        if stage != "fit" or trainer is None:
            return
        _check_strategy(trainer.strategy)
        # A second `fit` of the same trainer continues where the first ended.
        known, ended, self._given, self._arrived, self._total = self._given, self.state_dict(), None, None, None
        self._pace = Pace(self._tokens_per_batch, self._tokens_per_batch)
        if known is not None and known.trainer is trainer and known.trained == trainer.global_step:
            self._arrive(ended)
        if not isinstance(trainer, _Counted):
            own = type(trainer)
            trainer.__class__ = type(
                own.__name__, (_Counted, own), {"__doc__": own.__doc__, "__module__": own.__module__}
            )
        needed = self._micro_batches(trainer.world_size) // trainer.world_size
        _check_epochs(trainer, needed)
        if trainer.lightning_module.automatic_optimization:
            if trainer.accumulate_grad_batches not in (1, needed):
                found = trainer.accumulate_grad_batches
                message = f"= {found}: a rank has {needed} micro-batches in every global batch; leave it out"
                raise error("accumulate_grad_batches", message, value=found)
            trainer.accumulate_grad_batches = needed

    def total_steps(self) -> int:
        """Steps of the whole run, for a learning rate schedule: those done, and the further ones that have a label.

        Covers the Trainer's `max_epochs`, or `num_epochs` without a Trainer, in steps of the size that the run began
        with.

        Complexity:
            Plans all further steps, some milliseconds each, and reads one document of each; once for each `fit`.
        """
        if self._total is None:
            trainer: Any = self.trainer
            sampler = self._sampler(0, 1 if trainer is None else trainer.world_size)
            done = 0
            if self._arrived is not None:
                sampler.load_state_dict(field(self._arrived, "steps", dict))
                done = field(self._arrived, "trained", int)
            epochs = None if trainer is None else trainer.max_epochs
            num_epochs = self._loading.num_epochs if epochs in (None, -1) else epochs
            left = steps_with_labels_left(sampler, self._documents, self._loading.collate, num_epochs)
            self._total = self._pace.length(done + sum(left))
        return self._total

    def state_dict(self) -> dict[str, Any]:
        """The state of the data after the last step of the optimizer, for Lightning's checkpoints."""
        return {} if self._given is None else self._given.state() | {"pace": self._pace.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of a checkpoint from which Lightning resumes.

        Raises:
            wlb.WlbError: it is of other documents, without `ignore_data_skip`; or a schedule for another number of
                steps was made before the checkpoint was loaded.
        """
        if not state_dict:
            return  # the checkpoint was saved without training
        told, self._total = self._total, None
        if wrong := self._sampler(0, 1).other_documents(field(state_dict, "steps", dict)):
            if not self._ignore_data_skip:
                message = f"{wrong}; or give BalancedDataModule(ignore_data_skip=True), with which the data begin anew"
                raise error("ckpt_path", message)
            return
        self._arrive(state_dict)
        if self._given is not None:
            self._given.restore(state_dict)
        if told is not None and self.total_steps() != told:
            message = (
                f"= {told} was read before the strategy loaded the checkpoint, with which this run has {self._total} "
                "steps; go on with the ranks and the tokens_per_batch that it was saved with, or with another strategy"
            )
            raise error("estimated_stepping_batches", message, value=told)

    def _arrive(self, state: dict[str, Any]) -> None:
        trainer: Any = self.trainer
        self._arrived, trained, pace = state, field(state, "trained", int), field(state, "pace", dict)
        counted = trainer is not None and not (_is_whole(trainer) and trainer.max_steps == -1)
        self._pace = Pace.resumed(pace, trained, self._tokens_per_batch, counted=counted)

    def train_dataloader(self) -> _MicroBatches:
        """The micro-batches of this rank.

        Raises:
            wlb.WlbError: Lightning does not know this data module; the data set has grown; or the module's model learns
                no next tokens, as those that classify.
        """
        trainer: Any = self.trainer
        if trainer is None:
            raise error("trainer", "has not been given this data module: fit(module, datamodule=data)")
        if len(self._documents) != np.size(self._lengths):
            found, known = len(self._documents), np.size(self._lengths)
            message = f"has {found} documents, but had {known} when their lengths were read: make a new data module"
            raise error("dataset", message, value=found)
        module = trainer.lightning_module
        if self._row is _hugging_face and module is not None and (wrong := against_labels(module)):
            raise error("module", wrong)
        sampler = self._sampler(trainer.global_rank, trainer.world_size)
        loader = self._loading.loader(self._documents, sampler, self._loading.collate)
        _auto_add_worker_init_fn(loader, trainer.global_rank)  # Lightning sees no loader of torch
        self._given = _MicroBatches(StepLoader(loader), trainer, self._row, self._set_pace, verify=self._verify)
        self._given.begins_anew = self._ignore_data_skip
        if self._arrived is not None:
            self._given.restore(self._arrived)
        return self._given

    def val_dataloader(self) -> Any:
        """Rows of all documents of the evaluation, equally many on all ranks."""
        if self._validation is None:
            return []
        trainer: Any = self.trainer
        loading, meet = replace(self._loading, max_delay=0), _ranks_meet(trainer.strategy)
        packer = loading.packer(4 * trainer.world_size, ranks=trainer.world_size, meet=meet, **self._limits)
        columns, ahead = self._loading.columns, self._loading.labels_ahead
        documents = Documents(self._validation, columns=columns, labels_ahead=ahead, argument="validation")
        return _Validation(documents, self._loading.collate, packer, trainer, self._row)

    def _set_pace(self, trainer: Any) -> None:
        """Sets the pace of schedules; called after Lightning has restored them."""
        stepped = [config.scheduler for config in trainer.lr_scheduler_configs if config.interval == "step"]
        for scheduler in stepped if trainer.lightning_module.automatic_optimization else []:
            self._pace.set(scheduler, trainer.global_step)
        if trainer.lr_scheduler_configs and not trainer.lightning_module.automatic_optimization:
            self._pace.warn("a schedule of a module with automatic_optimization=False")

    def _micro_batches(self, ranks: int) -> int:
        return ranks * micro_batches(self._tokens_per_batch, ranks=ranks, max_tokens=self._max_tokens)

    def _sampler(self, rank: int, ranks: int) -> BalancedBatchSampler:
        limits = {**self._limits, "tokens_per_batch": self._tokens_per_batch}
        meet = self.trainer is not None and _ranks_meet(self.trainer.strategy)
        packer = self._loading.packer(self._micro_batches(ranks), ranks=ranks, meet=meet, **limits)
        return self._loading.sampler(self._lengths, packer, rank=rank, ranks=ranks)


class _Counted(Trainer):
    """Class in front of a trainer's own class, which knows the number of steps of the data."""

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of steps that have a label; Lightning itself gives -1 for data without a length."""
        data: Any = self.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, BalancedDataModule) or not _is_whole(self):
            found: int | float = super().estimated_stepping_batches
            return found
        total = data.total_steps()
        return total if self.max_steps == -1 else min(total, self.max_steps)


def _is_whole(trainer: Any) -> bool:
    """Whether epochs are trained to their end and their number is known."""
    return bool(trainer.limit_train_batches == 1.0 and trainer.max_epochs != -1)


class _MicroBatches:
    """The iterable that Lightning reads, one epoch at a time.

    It has no `state_dict`, because Lightning would restore that only in unfinished epochs; the data module saves its
    state.

    Attributes:
        trainer: Lightning's.
        trained: number of optimizer steps, as the trainer counts them, to which the state belongs.
        begins_anew: whether the data begin anew if they stand after another step than the trainer.
    """

    def __init__(
        self,
        steps: StepLoader[PackedBatch],
        trainer: Any,
        row: Row,
        set_pace: Callable[[Any], None],
        *,
        verify: bool,
    ) -> None:
        self._steps, self.trainer, self._row, self._set_pace = steps, trainer, row, set_pace
        self._accumulated = trainer.accumulate_grad_batches
        self.trained, self.begins_anew = 0, False
        self._state: dict[str, Any] | Snapshot = steps.state_dict()
        # Steps that were given and may not have been trained yet, without their micro-batches.
        self._given: deque[Step[Any]] = deque()
        self._stale = False  # whether Lightning holds batches from before the state was loaded
        self._unproved = verify
        self._agreed = verify  # a proof compares more
        self._metrics = StepMetrics(steps)
        # Remove the callback of an earlier run of the same trainer.
        trainer.callbacks[:] = [each for each in trainer.callbacks if not isinstance(each, _Following)]
        kinds = [isinstance(each, Checkpoint) for each in trainer.callbacks]  # a state that they save has to be right
        trainer.callbacks.insert(kinds.index(True) if True in kinds else len(kinds), _Following(self))

    def __iter__(self) -> Iterator[Any]:
        self.note_trained()
        if self._given:  # Lightning begins again: batches that it fetched and did not train are given again
            self._given.clear()
            self._steps.load_state_dict(self._steps_state())
        self._stale = False
        for step, labels in steps_with_labels(self._steps):
            divided = self._divided()
            if not self._agreed:
                self._agreed = True
                agree(step)
            if self._unproved:
                self._unproved = False
                prove(self.trainer, step, divided, _told(self._row, self.trainer.lightning_module))
            self._given.append(replace(step, micro_batches=[]))
            for batch in step.micro_batches:
                row = _told(self._row, self.trainer.lightning_module)(batch, (labels or 1) / divided)
                yield _without_routers(row, batch, self.trainer.lightning_module)

    def _divided(self) -> int:
        """The number by which Lightning and its strategy divide the sum of a step's losses.

        Raises:
            wlb.WlbError: `accumulate_grad_batches` has changed.
        """
        trainer = self.trainer
        if trainer.accumulate_grad_batches != self._accumulated:
            found = trainer.accumulate_grad_batches
            message = f"= {found} since step {trainer.global_step}: a rank has {self._accumulated} micro-batches in "
            raise error("accumulate_grad_batches", message + "every global batch; leave it as it is", value=found)
        automatic = trainer.lightning_module.automatic_optimization
        return int(trainer.world_size * (self._accumulated if automatic else 1))

    def _steps_state(self) -> dict[str, Any]:
        return self._state.state if isinstance(self._state, Snapshot) else self._state

    def state(self) -> dict[str, Any]:
        """State after the last step of the optimizer, even if further ones were fetched."""
        self.note_trained()
        return {"steps": self._steps_state(), "trained": self.trained}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The next iteration begins at this state."""
        steps, trained = field(state, "steps", dict), field(state, "trained", int)
        self._steps.load_state_dict(steps)
        self._stale = bool(self._given)
        self._given.clear()
        self._state, self.trained = steps, trained

    def skip_epoch(self, to: int | None = None) -> None:
        """Ends the epoch of the data after the last step of the optimizer; documents that wait are trained later.

        Args:
            to: the epoch that is next; None: the following one.
        """
        self.note_trained()
        self._given.clear()
        self._steps.load_state_dict(self._steps_state())
        self._steps.skip_epoch(to)
        self._state = self._steps.state_dict()

    def check_begin(self) -> None:
        """Checks that the data are at the step at which Lightning resumes, once everything is restored.

        Raises:
            wlb.WlbError: they are not; or the module has several optimizers, each of whose steps Lightning would count.
        """
        trainer = self.trainer
        if len(trainer.optimizers) > 1:
            count = len(trainer.optimizers)
            message = f"are {count}: Lightning counts each of their steps, so that nobody knows which step of the data "
            raise error("optimizers", message + "was trained; use one, with several parameter groups", value=count)
        if self.trained != trainer.global_step and self.begins_anew:
            self._given.clear()
            self._stale, self.trained = True, trainer.global_step
            self.skip_epoch(to=trainer.current_epoch)
        if self.trained != trainer.global_step:
            message = (
                f"goes on at step {trainer.global_step}, but the data stand after step {self.trained}: the checkpoint "
                "was saved without this data module, or with one whose class has another name; resume with the class "
                "that it was saved with, given as fit(module, datamodule=data), or give "
                "BalancedDataModule(ignore_data_skip=True), with which the data begin anew"
            )
            raise error("ckpt_path", message, value=trainer.global_step)
        self._set_pace(trainer)
        loop = trainer.fit_loop.epoch_loop
        # If it was saved inside a step, all micro-batches of that step come again, because no checkpoint has its
        # gradients.
        again = loop.batch_progress.current.ready % self._accumulated
        if again:
            for progress in (loop.batch_progress.current, loop.batch_progress.total):
                for name in ("ready", "started", "processed", "completed"):
                    setattr(progress, name, max(getattr(progress, name) - again, 0))
            loop._batches_that_stepped -= 1  # Lightning adds 1 at the beginning of a step
        # With max_steps Lightning enters an epoch that had ended once more, and would then count the next one as
        # trained.
        epoch = trainer.fit_loop.epoch_progress.current
        if loop.restarting and loop.batch_progress.is_last_batch and epoch.ready == epoch.processed:
            loop.restarting = False
        if self._stale:
            iter(trainer.fit_loop._data_fetcher)

    def note_trained(self) -> dict[str, float]:
        """Figures of the last step of the optimizer, if there was one since the last call.

        Raises:
            wlb.WlbError: the optimizer took more steps than there were global batches.
        """
        line: dict[str, float] = {}
        while self._given and self.trained < self.trainer.global_step:
            step = self._given.popleft()
            assert step.snapshot is not None
            self._state, line = step.snapshot, self._metrics.end_step(step)
            self.trained += 1
        if line and self.trained < self.trainer.global_step:
            message = (
                f"= {self.trainer.global_step}: the module's own optimization takes steps inside of a global batch; "
                f"let it take one after {len(step.indices)} micro-batches"
            )
            raise error("global_step", message, value=self.trainer.global_step)
        return line


class _Following(Callback):
    """Checks the position of the data when training begins, and logs the figures of each step through the module."""

    def __init__(self, micro_batches: _MicroBatches) -> None:
        self._micro_batches = micro_batches
        self._inside = False  # whether a micro-batch began and did not end

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning has restored everything now."""
        self._micro_batches.check_begin()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Before each micro-batch."""
        self._inside = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """If the module's `on_train_batch_start` returned -1, the rest of the epoch is not trained."""
        if self._inside:
            self._inside = False
            self._micro_batches.skip_epoch()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """After each micro-batch. The last one of a step is the one after which the optimizer has taken the step."""
        self._inside = False
        line = self._micro_batches.note_trained()
        if line:
            pl_module.log_dict(line, batch_size=1)


class _Validation:
    """Every document once. The plain mean over the batches of all ranks is the mean over labels."""

    def __init__(
        self, documents: Documents, work: Callable[..., PackedBatch], packer: wlb.Packer, trainer: Any, row: Row
    ) -> None:
        ranks = trainer.world_size
        sampler = BalancedBatchSampler(
            documents.lengths(), packer=packer, dp_rank=trainer.global_rank, dp_size=ranks, shuffle=False
        )
        loader = DataLoader(documents, batch_sampler=sampler, collate_fn=work)
        steps: StepLoader[PackedBatch] = StepLoader(loader)
        self._batches: list[PackedBatch] = []
        labels = 0
        for step in steps:
            self._batches += step.micro_batches
            labels += count_valid_tokens(step)
        self._num_items = max(labels, 1) / (len(self._batches) * ranks)
        self._row, self._trainer = _told(row, trainer.lightning_module), trainer

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield _without_routers(self._row(batch, self._num_items), batch, self._trainer.lightning_module)


def _told(row: Row, module: Any) -> Row:
    """What `row` makes, and what layers of the module take by another name."""

    def made(batch: PackedBatch, num_items: float) -> Any:
        given = row(batch, num_items)
        return told(module, given) if isinstance(given, dict) else given

    return made


def _without_routers(row: Any, batch: PackedBatch, module: Any) -> Any:
    """A row. If it has no documents, its one token is kept from routers."""
    if batch.tokens.numel() or not isinstance(row, dict) or "input_ids" not in row or not has_router_loss(module):
        return row
    return row | {"output_router_logits": False}


def _check_lightning() -> None:
    """Refuses a Lightning that is too old, or so new that it no longer restores data modules."""
    check_version("lightning")
    if not hasattr(_CheckpointConnector, "restore_datamodule"):
        message = f"{lightning.__version__} restores no data module: it is newer than this version of wlb knows"
        raise error("lightning", message, value=lightning.__version__)


def _check_strategy(strategy: Any) -> None:
    """Refuses DeepSpeed, whose engine scales losses and keeps gradients, and ranks that share their documents."""
    mesh: Any = getattr(strategy, "_device_mesh", None)
    if "tensor_parallel" in (getattr(mesh, "mesh_dim_names", None) or ()) and mesh["tensor_parallel"].size() > 1:
        size = mesh["tensor_parallel"].size()
        message = f"has {size} tensor-parallel ranks, which must have the same documents: only data-parallel ranks are "
        message += "balanced here; use a loop of your own (wt.train_step) with the ranks of a mesh"
        raise error("strategy", message, value=size)
    if any(kind.__name__ == "DeepSpeedStrategy" for kind in type(strategy).__mro__):
        message = "is DeepSpeed's: its engine would divide the loss once more, and keeps gradients of its own, so that "
        message += "the first step cannot be proved; take DDP or FSDP"
        raise error("strategy", message, value=type(strategy).__name__)


def _ranks_meet(strategy: Any) -> bool:
    """Whether the ranks wait for each other in every micro-batch: each gathers parameters that FSDP has divided."""
    if isinstance(strategy, FSDPStrategy):
        return strategy.sharding_strategy != ShardingStrategy.NO_SHARD
    return isinstance(strategy, ModelParallelStrategy)


def _check_epochs(trainer: Any, needed: int) -> None:
    """Refuses settings that cut global batches, or read documents again."""
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
        message = (
            f"changes accumulate_grad_batches: a rank has {needed} micro-batches in every global batch; leave it out"
        )
        raise error("GradientAccumulationScheduler", message)
    if trainer.overfit_batches:
        few = trainer.overfit_batches
        message = f"= {few}: every epoch would have other documents; give the data module a few documents instead"
        raise error("overfit_batches", message, value=few)
    limit = trainer.limit_train_batches
    if isinstance(limit, int) and limit % needed and not trainer.fast_dev_run:
        message = f"= {limit}: would end an epoch inside of a global batch, whose other documents would be lost; "
        message += f"make it a multiple of {needed}, the micro-batches of a rank"
        raise error("limit_train_batches", message, value=limit)
    every = trainer.reload_dataloaders_every_n_epochs
    if every:
        message = f"= {every}: would begin the data anew, without what waits; leave it out"
        raise error("reload_dataloaders_every_n_epochs", message, value=every)
