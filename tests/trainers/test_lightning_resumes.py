"""Lightning resumes from any of its checkpoints: every document once an epoch, and schedules of the right length."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from torch import Tensor

import wlb
from tests.torch import processes
from tests.trainers.small_corpus import llama
from tests.trainers.test_lightning import quiet
from wlb.integrations.lightning import BalancedDataModule

EPOCHS = 2
LENGTHS = np.random.default_rng(2).integers(4, 60, 26).tolist()
ROWS = [{"input_ids": [number + 1] * length, "labels": [number + 1] * length} for number, length in enumerate(LENGTHS)]
EACH = Counter({number + 1: length for number, length in enumerate(LENGTHS)})


class Module(lightning.LightningModule):
    """Writes down the tokens of each step that it trains, and its learning rates."""

    def __init__(self, *, read: bool = False) -> None:
        super().__init__()
        self.model = llama(num_hidden_layers=1, max_position_embeddings=64)
        self.read = read
        self.total: float = -1
        self.tokens: list[tuple[int, Counter[int]]] = []  # optimizer steps before, and tokens of a micro-batch
        self.rates: list[float] = []

    def training_step(self, row: dict[str, Any], index: int) -> Tensor:
        real = row["input_ids"][0] if row["shift_labels"].max() >= 0 else row["input_ids"][0][:0]
        self.tokens.append((self.trainer.global_step, Counter(real.tolist())))
        loss: Tensor = self.model(**row).loss
        return loss

    def validation_step(self, row: dict[str, Any], index: int) -> None:
        self.log("val_loss", self.model(**row).loss, sync_dist=True, batch_size=1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if not self.read:
            return optimizer
        self.total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, int(self.total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Killed(Exception):
    """A run that ends after it has saved."""


class SaveAt(Callback):
    """Saves after a micro-batch, and ends the run then or at a later one."""

    def __init__(self, path: Path, step: int, *, inside: bool = False) -> None:
        self.path, self.step, self.inside = path, step, inside
        self.saved = False

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        inside = ready % trainer.accumulate_grad_batches != 0
        if trainer.global_step == self.step and inside == self.inside and not self.saved:
            trainer.save_checkpoint(self.path)
            self.saved = True
        elif self.saved and trainer.global_step > self.step:
            raise Killed


class KillAfterEpoch(Callback):
    """Ends a run in the epoch after a checkpoint of Lightning's own was saved."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.current_epoch == 1:
            raise Killed


def data(**options: Any) -> BalancedDataModule:
    defaults: dict[str, Any] = {"tokens_per_batch": 160, "num_epochs": EPOCHS, "verify": False, "seed": 3}
    rows = options.pop("rows", ROWS)
    return BalancedDataModule(
        rows, max_tokens=64, config=llama(max_position_embeddings=64).config, **defaults | options
    )


def trainer_of(folder: Path, callbacks: Any = (), **options: Any) -> lightning.Trainer:
    quiet()
    defaults: dict[str, Any] = {"max_epochs": EPOCHS, "logger": False, "num_sanity_val_steps": 0}
    return lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        strategy=DDPStrategy(cluster_environment=LightningEnvironment()) if dist.is_initialized() else "auto",
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **defaults | options,
    )


def fit(
    folder: Path,
    callbacks: Any = (),
    *,
    checkpoint: Any = None,
    read: bool = False,
    of: Any = None,
    max_steps: int = -1,
    **options: Any,
) -> tuple[Module, lightning.Trainer]:
    module, trainer = Module(read=read), trainer_of(folder, callbacks, max_steps=max_steps)
    with contextlib.suppress(Killed):
        trainer.fit(module, of or data(**options), ckpt_path=checkpoint, weights_only=False)
    return module, trainer


def tokens_of(module: Module, until: int = 10**9) -> Counter[int]:
    return sum((tokens for before, tokens in module.tokens if before < until), Counter[int]())


def first_part(folder: Path, kind: str, read: bool) -> tuple[Path, Module]:
    """A run that is ended after it has saved: its checkpoint, and what it trained."""
    if kind == "end of an epoch":  # as Lightning saves unless told otherwise
        module, _ = fit(folder, [ModelCheckpoint(folder, filename="{epoch}"), KillAfterEpoch()], read=read)
        return folder / "epoch=0.ckpt", module
    if kind == "last step of an epoch":
        saving = ModelCheckpoint(folder, filename="{step}", save_on_train_epoch_end=False, every_n_train_steps=1)
        saving.save_top_k = -1
        module, _ = fit(folder, [saving, KillAfterEpoch()], read=read)
        return folder / f"step={max(before for before, _ in module.tokens)}.ckpt", module
    module, _ = fit(folder, [SaveAt(folder / "saved.ckpt", 2, inside=kind == "inside a step")], read=read)
    return folder / "saved.ckpt", module


@functools.cache
def whole_run() -> tuple[list[Any], int]:
    """What a run that nobody ends trains, and its steps."""
    with tempfile.TemporaryDirectory() as folder:
        module, trainer = fit(Path(folder))
        return module.tokens, trainer.global_step


def step_of(checkpoint: Path) -> int:
    return int(torch.load(checkpoint, weights_only=False)["global_step"])


KINDS = ["inside an epoch", "inside a step", "last step of an epoch", "end of an epoch"]


@pytest.mark.parametrize(("read", "max_steps"), [(False, -1), (True, -1), (False, 99)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_document_comes_once_an_epoch_from_any_checkpoint(
    kind: str, read: bool, max_steps: int, tmp_path: Path
) -> None:
    """Whether or not the module has asked how many steps there are, for which Lightning makes the loader too early.

    With `max_steps`, Lightning took the epoch after one that had ended for trained.
    """
    checkpoint, first = first_part(tmp_path, kind, read)
    rest, trainer = fit(tmp_path, checkpoint=checkpoint, read=read, max_steps=max_steps)
    found = tokens_of(first, step_of(checkpoint)) + tokens_of(rest)
    assert found == Counter({token: EPOCHS * count for token, count in EACH.items()})
    assert trainer.current_epoch == EPOCHS
    whole, steps = whole_run()
    assert trainer.global_step == steps
    assert rest.tokens == [each for each in whole if each[0] >= step_of(checkpoint)]


def test_a_run_that_is_resumed_twice_before_it_reads_stands_where_it_stood(tmp_path: Path) -> None:
    """Saved again before any step, from a checkpoint of an epoch's end."""

    class SaveFirst(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "again.ckpt")
            raise Killed

    checkpoint, first = first_part(tmp_path, "end of an epoch", False)
    fit(tmp_path, [SaveFirst()], checkpoint=checkpoint)
    rest, _ = fit(tmp_path, checkpoint=tmp_path / "again.ckpt")
    whole, _ = whole_run()
    assert first.tokens == whole[: len(first.tokens)]
    assert rest.tokens == [each for each in whole if each[0] >= step_of(checkpoint)]


def resumed(rank: int, folder: Path, checkpoint: Path, options: dict[str, Any]) -> Any:
    module, trainer = fit(folder, checkpoint=checkpoint, read=True, **options)
    return tokens_of(module), trainer.global_step, module.total, trainer.current_epoch, module.rates


@pytest.mark.parametrize("kind", ["inside an epoch", "end of an epoch"])
def test_other_ranks_and_another_batch_go_on_to_the_end(kind: str, tmp_path: Path) -> None:
    checkpoint, first = first_part(tmp_path, kind, True)
    done = step_of(checkpoint)
    for ranks, options, pace in (
        (2, {}, 1.0),
        (1, {"tokens_per_batch": 320}, 2.0),
        (1, {"tokens_per_batch": 80}, 0.5),
        (1, {"tokens_per_batch": 80, "max_steps": done + 4}, 1.0),
    ):
        parts = processes.run(ranks, resumed, tmp_path, checkpoint, options)
        found = sum((part[0] for part in parts), tokens_of(first, done))
        given = "max_steps" in options
        assert given or found == Counter({token: EPOCHS * count for token, count in EACH.items()})
        for _, steps, total, epoch, rates in parts:
            assert total == int(done + (steps - done) * pace + 0.5)
            assert given or abs(total - first.total) <= 2
            assert given or epoch == EPOCHS
            places = [int(done + at * pace + 0.5) for at in range(steps - done)]
            # Its state has the length that it was made for.
            assert rates == pytest.approx([0.1 * max(0, 1 - at / first.total) for at in places], abs=1e-9)


class OneCycle(Module):
    """With a schedule that refuses a step beyond its end."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, int(self.total) + 3, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_a_schedule_that_ends_with_the_run_ends_with_it_on_another_batch(tmp_path: Path) -> None:
    """It raised after half of the rest. A few steps more than planned are nothing that a schedule has to bear."""
    module, saving = OneCycle(), SaveAt(tmp_path / "saved.ckpt", 2)
    with contextlib.suppress(Killed):
        trainer_of(tmp_path, [saving]).fit(module, data())
    rest, trainer = OneCycle(), trainer_of(tmp_path)
    trainer.fit(rest, data(tokens_per_batch=80), ckpt_path=tmp_path / "saved.ckpt", weights_only=False)
    assert trainer.current_epoch == EPOCHS
    assert trainer.global_step - 2 > 1.8 * (module.total - 2)
    assert abs(rest.total - module.total) <= 2
    assert rest.rates[-1] < 0.1 * max(rest.rates)


class Manual(Module):
    """Steps its schedule itself."""

    def __init__(self) -> None:
        super().__init__(read=True)
        self.automatic_optimization = False

    def training_step(self, row: dict[str, Any], index: int) -> Tensor:
        loss = super().training_step(row, index)
        self.manual_backward(loss)
        if (index + 1) % 4 == 0:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return loss


def test_a_schedule_that_a_module_steps_is_warned_of(tmp_path: Path) -> None:
    with contextlib.suppress(Killed):
        trainer_of(tmp_path, [SaveAt(tmp_path / "saved.ckpt", 2)]).fit(Manual(), data())
    trainer, of = trainer_of(tmp_path), data(tokens_per_batch=200)
    with pytest.warns(UserWarning, match="which read 200 tokens now; it was made for steps of 160"):
        trainer.fit(Manual(), of, ckpt_path=tmp_path / "saved.ckpt", weights_only=False)


def test_schedules_are_told_the_steps_that_have_a_label(tmp_path: Path) -> None:
    masked = [{**row, "labels": [-100] * len(row["input_ids"])} for row in ROWS[:20]] + ROWS[20:]
    module, trainer = fit(tmp_path, read=True, rows=masked, shuffle=False)
    assert module.total < data(rows=masked, shuffle=False)._sampler(0, 1).total_steps()
    assert module.total == trainer.global_step == len(module.rates)
    assert module.rates == pytest.approx([0.1 * (1 - at / module.total) for at in range(int(module.total))])
    limited = Module(read=True)
    of = trainer_of(tmp_path, max_steps=4)
    of.fit(limited, data())
    assert limited.total == of.global_step == 4


def test_a_further_fit_goes_on(tmp_path: Path) -> None:
    """Of the same trainer; another trainer begins anew with the same data module."""
    module, trainer, of = Module(), trainer_of(tmp_path, max_epochs=1), data()
    trainer.fit(module, of)
    trainer.fit_loop.max_epochs = EPOCHS
    trainer.fit(module, of)
    assert tokens_of(module) == Counter({token: EPOCHS * count for token, count in EACH.items()})
    again, other = Module(), trainer_of(tmp_path, max_epochs=1)
    other.fit(again, of)
    assert tokens_of(again) == EACH
    assert again.tokens == module.tokens[: len(again.tokens)]


def test_finding_a_learning_rate_trains_nothing(tmp_path: Path) -> None:
    module, trainer, of = Module(), trainer_of(tmp_path, max_epochs=1), data()
    module.lr = 0.1  # type: ignore[assignment]
    Tuner(trainer).lr_find(module, of, num_training=3, update_attr=False)
    module.tokens.clear()
    trainer.fit(module, of)
    assert tokens_of(module) == EACH


class OtherName(BalancedDataModule):
    """Under whose name Lightning finds no state in the checkpoint."""


class TwoOptimizers(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


class StepsInside(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, row: dict[str, Any], index: int) -> Tensor:
        loss = super().training_step(row, index)
        optimizer: Any = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss


def test_data_that_stand_elsewhere_are_refused(tmp_path: Path) -> None:
    checkpoint, _ = first_part(tmp_path, "inside an epoch", False)
    other = OtherName(
        ROWS, max_tokens=64, tokens_per_batch=160, config=llama(max_position_embeddings=64).config, seed=3
    )
    with pytest.raises(wlb.WlbError, match="goes on at step 2, but the data stand after step 0"):
        fit(tmp_path, checkpoint=checkpoint, of=other)
    with pytest.raises(wlb.WlbError, match="optimizers are 2: Lightning counts each of their steps"):
        trainer_of(tmp_path).fit(TwoOptimizers(), data())
    with pytest.raises(wlb.WlbError, match="takes steps inside of a global batch; let it take one after 4"):
        trainer_of(tmp_path).fit(StepsInside(), data())
    with pytest.raises(wlb.WlbError, match="GradientAccumulationScheduler changes accumulate_grad_batches"):
        trainer_of(tmp_path, [GradientAccumulationScheduler({0: 4, 1: 2})]).fit(Module(), data())

    class Change(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.accumulate_grad_batches = 2

    with pytest.raises(wlb.WlbError, match="accumulate_grad_batches = 2 since step"):
        trainer_of(tmp_path, [Change()]).fit(Module(), data())
    grown = data(rows=(rows := list(ROWS)))
    rows.append(ROWS[0])
    with pytest.raises(wlb.WlbError, match="dataset has 27 documents, but had 26 when their lengths were read"):
        trainer_of(tmp_path).fit(Module(), grown)
    with pytest.raises(wlb.WlbError, match="trainer has not been given this data module"):
        data().train_dataloader()
