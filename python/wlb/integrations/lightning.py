"""Lightning's `Trainer` on wlb's plans: a data module.

    data = BalancedDataModule(documents, max_tokens=65536, tokens_per_batch=2**20, config=model.config)
    lightning.Trainer(max_epochs=3).fit(module, data)

The module's `training_step` gets a row of documents at a time, as Hugging Face's causal models take it, and returns
their loss: `self.model(**row).loss`. Each row brings `num_items_in_batch`, by which these models divide the sum of its
losses: such a number that the gradient of a step is that of the mean over all its labels, though Lightning divides by
`accumulate_grad_batches`, and DDP by the ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import lightning
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

import wlb
from wlb._errors import check_integer, error
from wlb.integrations.labelled import labelled_steps
from wlb.integrations.lightning_proof import prove
from wlb.integrations.versions import check_version
from wlb.torch.data import BalancedBatchSampler, Documents, PackedBatch, Step, StepLoader
from wlb.torch.data.loading import Loading, micro_batches
from wlb.torch.data.state import field
from wlb.torch.loss import count_valid_tokens
from wlb.torch.metrics import StepMetrics
from wlb.torch.routers import has_router_loss

__all__ = ["BalancedDataModule"]

Row = Callable[[PackedBatch, float], Any]


def _hugging_face(batch: PackedBatch, num_items: float) -> dict[str, Any]:
    return batch.as_hf() | {"num_items_in_batch": num_items}


class BalancedDataModule(LightningDataModule):
    """Micro-batches of equal work for Lightning, which trains, accumulates, checkpoints and resumes them as its own.

    `accumulate_grad_batches` becomes the micro-batches of a rank in a step. An epoch of Lightning is one of the data.
    The loggers get each step's figures (:class:`wlb.torch.StepMetrics`).
    A checkpoint holds the documents that wait after the last step that the optimizer took, whatever Lightning has
    fetched since; on another number of ranks it goes on with the next one.

    Args:
        dataset: `dataset[i]` gives row `i`: its tokens, or a mapping with `input_ids` and maybe `labels` (-100 where
            nothing is learnt), `attention_mask`, `position_ids` and others (:class:`wlb.torch.RowReader`). Weights are
            refused by the default `row`: losses of Hugging Face's models take none.
        max_tokens: most tokens of a micro-batch: what the memory of a rank holds.
        tokens_per_batch: tokens of a step on all ranks.
        config: that of a Hugging Face model, for what documents cost; or give `cost_model`.
        validation: documents of an evaluation, all in every one; the mean over batches and ranks of their losses
            (`self.log("val_loss", loss, sync_dist=True, batch_size=1)`) is then that over labels.
        row: makes what `training_step` gets of a micro-batch and the number that the sum of its losses is to be divided
            by; by default `batch.as_hf()` and `num_items_in_batch`.
        verify: prove before the first step of a `fit` that rows train what their documents do, by the module's own
            `training_step` (:func:`wlb.torch.verify`); seconds.
        **loading: of :class:`wlb.torch.Loading`: `max_document_tokens`, `oversize`, `max_delay`, `lengths`,
            `num_epochs` (as the Trainer's `max_epochs`), ...

    Raises:
        wlb.WlbError: an argument makes no sense, or is unknown; or Lightning is older or newer than what this knows.
            In `fit`: `accumulate_grad_batches` was given, and is another; `limit_train_batches` cuts a global batch;
            dataloaders are reloaded; what :func:`wlb.torch.verify` finds.
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
        self._verify = verify

    def setup(self, stage: str) -> None:
        """Sets the Trainer's `accumulate_grad_batches`.

        Raises:
            wlb.WlbError: it is another already, the Trainer would leave documents out, or its strategy is DeepSpeed.
        """
        trainer: Any = self.trainer
        if stage != "fit" or trainer is None:
            return
        _check_strategy(trainer.strategy)
        needed = self._micro_batches(trainer.world_size) // trainer.world_size
        _check_epochs(trainer, needed)
        if trainer.lightning_module.automatic_optimization:
            if trainer.accumulate_grad_batches not in (1, needed):
                found = trainer.accumulate_grad_batches
                message = f"= {found}: a rank has {needed} micro-batches in every global batch; leave it out"
                raise error("accumulate_grad_batches", message, value=found)
            trainer.accumulate_grad_batches = needed

    def total_steps(self) -> int:
        """Steps of the whole run, for a learning rate schedule; those without a label are counted too."""
        trainer: Any = self.trainer
        ranks: int = 1 if trainer is None else trainer.world_size
        return self._sampler(0, ranks).total_steps()

    def train_dataloader(self) -> _MicroBatches:
        """The micro-batches of this rank."""
        trainer: Any = self.trainer
        sampler = self._sampler(trainer.global_rank, trainer.world_size)
        workers = self._loading.num_workers
        loader = DataLoader(
            self._documents, batch_sampler=sampler, collate_fn=self._loading.collate, num_workers=workers
        )
        divided = trainer.world_size
        if trainer.lightning_module.automatic_optimization:
            divided *= trainer.accumulate_grad_batches
        return _MicroBatches(StepLoader(loader), trainer, divided, self._row, verify=self._verify)

    def val_dataloader(self) -> Any:
        """Rows of all documents of the evaluation, as many on every rank."""
        if self._validation is None:
            return []
        trainer: Any = self.trainer
        packer = replace(self._loading, max_delay=0).packer(4 * trainer.world_size, **self._limits)
        columns, ahead = self._loading.columns, self._loading.labels_ahead
        documents = Documents(self._validation, columns=columns, labels_ahead=ahead, argument="validation")
        return _Validation(documents, self._loading.collate, packer, trainer, self._row)

    def _micro_batches(self, ranks: int) -> int:
        return ranks * micro_batches(self._tokens_per_batch, ranks=ranks, max_tokens=self._max_tokens)

    def _sampler(self, rank: int, ranks: int) -> BalancedBatchSampler:
        limits = {**self._limits, "tokens_per_batch": self._tokens_per_batch}
        packer = self._loading.packer(self._micro_batches(ranks), **limits)
        return self._loading.sampler(self._lengths, packer, rank=rank, ranks=ranks)


class _MicroBatches:
    """The iterable that Lightning reads, one epoch at a time; Lightning saves its state."""

    def __init__(self, steps: StepLoader[PackedBatch], trainer: Any, divided: int, row: Row, *, verify: bool) -> None:
        self._steps, self._trainer, self._divided, self._row = steps, trainer, divided, row
        self._unproved = verify
        # Steps, without their micro-batches, that were given and are not yet known to be trained.
        self._given: deque[Step[Any]] = deque()
        self._metrics = StepMetrics(steps)
        # Not beside that of an earlier run of the same trainer.
        trainer.callbacks[:] = [each for each in trainer.callbacks if not isinstance(each, _Figures)] + [_Figures(self)]
        self._done = 0  # optimizer steps before the first of them
        self._state: dict[str, Any] | None = None  # after the last one that was trained

    def __iter__(self) -> Iterator[Any]:
        self.note_trained()
        if not self._given:
            self._done, self._state = self._trainer.global_step, self._steps.state_dict()
        for step, labels in labelled_steps(self._steps):
            if self._unproved:
                self._unproved = False
                prove(self._trainer, step, self._divided, self._row)
            self._given.append(replace(step, micro_batches=[]))
            for batch in step.micro_batches:
                row = self._row(batch, (labels or 1) / self._divided)
                yield _without_routers(row, batch, self._trainer.lightning_module)

    def state_dict(self) -> dict[str, Any]:
        """State after the last step that the optimizer took, whatever was fetched since."""
        self.note_trained()
        return {"steps": self._steps.state_dict() if self._state is None else self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration begins there."""
        self._steps.load_state_dict(field(state, "steps", dict))

    def note_trained(self) -> dict[str, float]:
        """Figures of the last step that the optimizer took since this was asked, if it took any."""
        line: dict[str, float] = {}
        while self._given and self._done < self._trainer.global_step:
            step = self._given.popleft()
            self._state, line = step.state, self._metrics.end_step(step)
            self._done += 1
        return line


class _Figures(Callback):
    """Logs the figures of each step through the module, and so to whatever the Trainer's loggers are."""

    def __init__(self, micro_batches: _MicroBatches) -> None:
        self._micro_batches = micro_batches

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """After each micro-batch: the last of a step is the one after which the optimizer has taken it."""
        line = self._micro_batches.note_trained()
        if line:
            pl_module.log_dict(line, batch_size=1)


class _Validation:
    """Every document once; the plain mean over all batches of all ranks is that over labels."""

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
        self._row, self._trainer = row, trainer

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield _without_routers(self._row(batch, self._num_items), batch, self._trainer.lightning_module)


def _without_routers(row: Any, batch: PackedBatch, module: Any) -> Any:
    """A row without documents teaches routers nothing: its one token is none."""
    if batch.tokens.numel() or not isinstance(row, dict) or "input_ids" not in row or not has_router_loss(module):
        return row
    return row | {"output_router_logits": False}


def _check_lightning() -> None:
    """Refuses a Lightning that is too old, and one that no longer asks loaders for states where this does."""
    check_version("lightning")
    for name in ("_state_dicts", "_load_state_dicts"):  # else a run that is resumed would begin anew, and not say so
        if not hasattr(CombinedLoader, name):
            message = (
                f"{lightning.__version__} has no CombinedLoader.{name}: it is newer than this version of wlb knows"
            )
            raise error("lightning", message, value=lightning.__version__)


def _check_strategy(strategy: Any) -> None:
    """Refuses an engine that scales losses and keeps gradients of its own, and ranks that share their documents."""
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


def _check_epochs(trainer: Any, needed: int) -> None:
    """Refuses what cuts global batches, or reads documents again."""
    limit = trainer.limit_train_batches
    if isinstance(limit, int) and limit % needed and not trainer.fast_dev_run:
        message = f"= {limit}: would end an epoch inside of a global batch, whose other documents would be lost; "
        message += f"make it a multiple of {needed}, the micro-batches of a rank"
        raise error("limit_train_batches", message, value=limit)
    every = trainer.reload_dataloaders_every_n_epochs
    if every:
        message = f"= {every}: would begin the data anew, without what waits; leave it out"
        raise error("reload_dataloaders_every_n_epochs", message, value=every)
