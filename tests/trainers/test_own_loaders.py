"""What a trainer's own loader does still happens with wlb's: random numbers of workers, what callbacks read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import wlb
import wlb.torch as wt
from tests.torch import processes
from tests.trainers.small_corpus import documents, llama
from tests.trainers.test_balance import arguments, balanced, together
from wlb.integrations.huggingface import balance
from wlb.integrations.lightning import BalancedDataModule

ROWS, TOKENS = 48, 8


class Drawn(Dataset[dict[str, Any]]):
    """Rows that draw a random number, as augmentations do; their tokens are that number."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.randint(2**31, ()).repeat(TOKENS)}


def own(features: list[Any]) -> dict[str, Any]:
    """A collator of one document."""
    (row,) = features
    return {"input_ids": row["input_ids"][None]}


LENGTHS = np.full(ROWS, TOKENS)
COST = wlb.CostModel(attention=1.0, linear=1.0)


def draws(steps: Any) -> list[int]:
    """The random numbers of all documents of these steps."""
    batches = [batch for step in steps for batch in step.micro_batches]
    return [int(token) for batch in batches for token in batch.tokens[::TOKENS]]


def hugging_face(rank: int, folder: Path) -> list[int]:
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        dataloader_num_workers=1,
        report_to=[],
        use_cpu=True,
        seed=3,
        remove_unused_columns=False,
        dataloader_persistent_workers=True,
    )
    trainer = Trainer(llama(), arguments, train_dataset=Drawn(), data_collator=own)
    balance(trainer, max_tokens=4 * TOKENS, lengths=LENGTHS, verify=False)
    torch.manual_seed(3)  # as the Trainer seeds every rank
    return draws(trainer.get_train_dataloader().steps)


def pytorch_lightning(rank: int, folder: Path) -> list[int]:
    lightning.seed_everything(3, workers=True, verbose=False)
    data = BalancedDataModule(
        Drawn(),
        max_tokens=4 * TOKENS,
        tokens_per_batch=16 * TOKENS,
        lengths=LENGTHS,
        cost_model=COST,
        num_workers=1,
        verify=False,
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    found: list[int] = []
    data.trainer = trainer
    found += draws(data.train_dataloader()._steps)
    return found


def plain_torch(rank: int, folder: Path) -> list[int]:
    torch.manual_seed(3)
    loader = wt.balanced_loader(
        Drawn(),
        max_tokens=4 * TOKENS,
        tokens_per_batch=16 * TOKENS,
        lengths=LENGTHS,
        cost_model=COST,
        num_workers=1,
        worker_init_fn=lambda worker: torch.manual_seed(100 * rank + worker) and None,
    )
    return draws(loader)


@pytest.mark.parametrize("read", [hugging_face, pytorch_lightning, plain_torch])
def test_rows_draw_other_random_numbers_on_every_rank(read: Any, tmp_path: Path) -> None:
    found = [number for of_rank in processes.run(2, read, tmp_path) for number in of_rank]
    assert len(found) == len(set(found)) == ROWS


class EndEpoch(TrainerCallback):
    """Ends an epoch after every third step, and keeps what it reads of the loader."""

    def __init__(self) -> None:
        self.read: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loader = kwargs["train_dataloader"]
        self.read.append((len(loader.dataset), loader.batch_size))
        control.should_epoch_stop = state.global_step % 3 == 0


def test_a_callback_ends_an_epoch_and_reads_the_loader(tmp_path: Path) -> None:
    callback = EndEpoch()
    trainer = balanced(tmp_path, callbacks=[callback], save_strategy="epoch")
    planned = trainer.args.max_steps
    trainer.train()
    assert trainer.state.global_step == 6 < planned
    assert callback.read == [(len(trainer.train_dataset), None)] * 6
    again = balanced(tmp_path, callbacks=[EndEpoch()])
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))  # the second epoch, not the rest of the first
    assert again.state.global_step == 6
    assert again._wlb_callback.state()["steps"] == trainer._wlb_callback.state()["steps"]


def test_a_checkpoint_of_the_plain_trainer_is_refused_or_its_data_begin_anew(tmp_path: Path) -> None:
    plain = Trainer(
        llama(),
        arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=2),
        train_dataset=documents(),
        data_collator=together,
    )
    plain.train()
    folder = str(tmp_path / "checkpoint-2")
    with pytest.raises(wlb.WlbError, match="ignore_data_skip") as raised:
        balanced(tmp_path / "refused").train(resume_from_checkpoint=folder)
    assert raised.value.argument == "resume_from_checkpoint"
    fresh = balanced(tmp_path / "whole")
    trainer = balanced(tmp_path / "anew", ignore_data_skip=True)
    trainer.train(resume_from_checkpoint=folder)
    assert trainer.state.global_step == 2 + fresh.args.max_steps  # all documents, after the steps that were made
