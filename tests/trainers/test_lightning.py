"""`BalancedDataModule` in the real Lightning, against a plain loop, one document at a time."""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import os
import re
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import wlb
from tests.torch import processes
from tests.trainers.reads import reads
from tests.trainers.small_corpus import (
    CONTEXT,
    LENGTHS,
    VOCABULARY,
    alone,
    documents,
    flat,
    llama,
    mean_over_tokens,
    rows_of_steps,
    train_alone,
)
from wlb.integrations.lightning import BalancedDataModule

STEPS = 20
EPOCHS = 2


class Module(lightning.LightningModule):
    """As people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.losses: list[float] = []

    def on_train_start(self) -> None:
        self.losses = []  # but for those of the proof

    def training_step(self, row: dict[str, Any], index: int) -> Tensor:
        loss: Tensor = self.model(**row).loss
        self.log("loss_of_row", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, row: dict[str, Any], index: int) -> None:
        self.log("val_loss", self.model(**row).loss, sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(**options: Any) -> BalancedDataModule:
    defaults: dict[str, Any] = {"num_epochs": EPOCHS, "max_document_tokens": CONTEXT, "tokens_per_batch": 160}
    return BalancedDataModule(documents(), max_tokens=64, config=llama().config, **defaults | options)


def quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def fit(
    folder: Path,
    *,
    stop: int = STEPS,
    resume: bool = False,
    callbacks: Any = (),
    module: Any = None,
    fitted: bool = False,
    own: Any = None,
    **options: Any,
) -> Any:
    quiet()
    strategy = DDPStrategy(cluster_environment=LightningEnvironment()) if dist.is_initialized() else "auto"
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        strategy=strategy,
        max_epochs=EPOCHS,
        max_steps=stop,
        logger=options.pop("logger", False),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=7, save_top_k=-1, filename="{step}"), *callbacks],
        **options,
    )
    module = module or Module()
    checkpoint = str(folder / "step=7.ckpt") if resume else None
    own = data(validation=documents()[::3]) if own is None else own
    trainer.fit(module, own, ckpt_path=checkpoint, weights_only=False)
    assert trainer.world_size == (dist.get_world_size() if dist.is_initialized() else 1)
    if fitted:
        return module, trainer
    size = trainer.accumulate_grad_batches
    losses = torch.tensor(module.losses).reshape(-1, size).mean(1)
    if dist.is_initialized():
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    return losses.tolist(), flat(module.model), trainer.current_epoch


def train(rank: int, folder: Path, resume: bool = False) -> Any:
    return fit(folder, resume=resume)


def waits(rank: int, folder: Path) -> dict[str, int]:
    with reads() as found:
        fit(folder, stop=6)
    return dict(found)


def test_no_step_waits_for_a_device(tmp_path: Path) -> None:
    assert processes.run(2, waits, tmp_path) == [{}, {}]


def reference() -> tuple[list[float], np.ndarray]:
    model, sampler = llama(), data()._sampler(0, 1)
    micro_batches = [batch for _ in range(EPOCHS) for batch in sampler]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train_alone(model, optimizer, rows_of_steps(micro_batches, sampler.num_micro_batches_per_rank, STEPS))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_lightning_takes_the_steps_of_one_document_at_a_time(ranks: int, tmp_path: Path) -> None:
    losses, weights = reference()
    for found, found_weights, epoch in processes.run(ranks, train, tmp_path):
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        np.testing.assert_allclose(found_weights, weights, rtol=0, atol=1e-5 * np.abs(weights).max())
        assert epoch >= 1


def test_its_loggers_get_a_line_a_step(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    fit(tmp_path, stop=5, logger=logger)
    lines = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()))
    lines = [line for line in lines if line["wlb/imbalance"]]
    assert len(lines) == 5
    assert all(float(line["wlb/imbalance"]) >= 1 and float(line["wlb/tokens"]) > 0 for line in lines)


class Convolved(Module):
    """A layer that looks at the tokens before, whosever they are."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv1d(VOCABULARY, VOCABULARY, 4)

    def training_step(self, row: dict[str, Any], index: int) -> Tensor:
        logits = self.model(input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False).logits
        mixed = self.convolution(torch.nn.functional.pad(logits.transpose(1, 2), (3, 0)))
        total = torch.nn.functional.cross_entropy(mixed, row["shift_labels"], reduction="sum")
        return total / row["num_items_in_batch"]


class Counting(Module):
    """Counts its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torchmetrics.SumMetric()

    def training_step(self, row: dict[str, Any], index: int) -> dict[str, Tensor]:  # type: ignore[override]
        self.tokens.update(row["input_ids"].numel())
        return {"loss": super().training_step(row, index)}


def proved(rank: int, folder: Path) -> tuple[str, str, int, float]:
    """What it prints, what it says of a module that mixes documents, and what of a step is left behind."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        module, *_ = fit(folder, stop=1, module=Counting(), fitted=True)
    with pytest.raises(wlb.WlbError) as refused:
        fit(folder, stop=1, module=Convolved())
    return printed.getvalue(), str(refused.value), len(module.losses), float(module.tokens.compute())


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_step_is_proved(ranks: int, tmp_path: Path) -> None:
    sampler = data()._sampler(0, 1)
    batches = [batch for batch, _ in zip(sampler, range(sampler.num_micro_batches_per_rank), strict=False)]
    size = sum(len(alone(element)[0]) for batch in batches for element in batch) + sum(not batch for batch in batches)
    found = processes.run(ranks, proved, tmp_path)
    lines = [line.split()[0] for line in found[0][0].splitlines() if line.strip()]
    replicas = ["weights"] if ranks > 1 else []
    checks = ["mode", "others", "halves", "company", "ranks"]
    assert lines[: 7 + len(replicas)] == ["found", "documents", *replicas, *checks]
    assert [printed for printed, *_ in found[1:]] == [""] * (ranks - 1)
    for _, message, losses, _ in found:
        assert re.search(r"see each other.*Conv1d.*look along the row", message), message
        assert losses == len(batches) // ranks
    assert found[0][3] == size, "counted over all ranks, once"


def killed(rank: int, folder: Path) -> None:
    class Die(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 10:
                os.kill(os.getpid(), signal.SIGKILL)

    fit(folder, callbacks=[Die()])


@pytest.mark.long
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    with pytest.raises(processes.RankFailed, match="died"):
        processes.run(2, killed, tmp_path)
    found = processes.run(2, train, tmp_path, True)[0]
    whole = processes.run(2, train, tmp_path / "whole")[0]
    assert found[0] == whole[0][7:]
    np.testing.assert_array_equal(found[1], whole[1])


def validate(rank: int) -> float:
    quiet()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(cluster_environment=LightningEnvironment()),
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    found: Any = trainer.validate(Module(), data(validation=documents()[::3]), verbose=False)
    loss: float = found[0]["val_loss"]
    return loss


def test_evaluation_weighs_tokens_alike() -> None:
    expected = mean_over_tokens(llama(), list(range(0, len(LENGTHS), 3)))
    assert processes.run(2, validate) == [pytest.approx(expected, rel=1e-5)] * 2


def test_versions_that_are_not_known_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr("wlb.integrations.versions.version", lambda package: "2.4.0")
        with pytest.raises(wlb.WlbError, match=r"lightning is 2.4.0: 2.5 or newer is needed"):
            data()
    monkeypatch.delattr(_CheckpointConnector, "restore_datamodule")
    with pytest.raises(wlb.WlbError, match=r"restores no data module: it is newer than this version of wlb knows"):
        data()


def test_another_accumulation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(wlb.WlbError, match="has 4 micro-batches in every global batch"):
        fit(tmp_path, accumulate_grad_batches=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_train_batches": 10}, "limit_train_batches = 10: would end an epoch inside of a global batch"),
        ({"overfit_batches": 2}, "overfit_batches = 2: every epoch would have other documents"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs = 1: would begin"),
    ],
)
def test_what_would_lose_documents_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(wlb.WlbError, match=message):
        fit(tmp_path, stop=2, **options)


def of_two_tensor_parallel_ranks(rank: int) -> str:
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    strategy._device_mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    module = data()
    module.trainer = SimpleNamespace(strategy=strategy)  # type: ignore[assignment]
    with pytest.raises(wlb.WlbError) as refused:
        module.setup("fit")
    return str(refused.value)


def test_ranks_that_share_their_documents_are_refused() -> None:
    """Each of them would get documents of its own, and be taken for a data-parallel rank."""
    for text in processes.run(2, of_two_tensor_parallel_ranks):
        assert "strategy has 2 tensor-parallel ranks, which must have the same documents" in text


def test_deepspeed_is_refused() -> None:
    module = data()
    module.trainer = SimpleNamespace(strategy=object.__new__(DeepSpeedStrategy))  # made in full only with its package
    with pytest.raises(wlb.WlbError, match="strategy is DeepSpeed's"):
        module.setup("fit")


def test_costs_have_to_be_said() -> None:
    with pytest.raises(wlb.WlbError, match="give one of them"):
        BalancedDataModule(documents(), max_tokens=64, tokens_per_batch=100)


def test_steps_are_known_beforehand() -> None:
    assert data().total_steps() >= STEPS
