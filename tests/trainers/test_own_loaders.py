"""What a trainer's own loader does still happens with wlb's: random numbers of workers, what callbacks read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import wlb
import wlb.torch as wt
from tests.torch import processes
from tests.trainers import test_lightning
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


# --- data sets that have grown ---------------------------------------------------------------------------------------

GROWN = "was saved with 90 documents, behind which this data set has 10 more"


def grown() -> list[Any]:
    return documents() + documents()[:10]


def test_a_resume_on_a_data_set_that_has_grown_names_the_ways_on() -> None:
    def loader(rows: list[Any]) -> Any:
        sizes: dict[str, Any] = {"max_tokens": 160, "tokens_per_batch": 300, "config": llama().config}
        return wt.balanced_loader([row["input_ids"] for row in rows], **sizes)

    steps = list(loader(documents()))
    more = loader(grown())
    before = more.state_dict()
    with pytest.raises(wlb.WlbError, match=rf"state {GROWN}: resume with the first 90 alone") as raised:
        more.load_state_dict(steps[2].state)
    assert raised.value.argument == "state"
    assert more.state_dict() == before
    first = loader(torch.utils.data.Subset(grown(), range(90)))  # type: ignore[arg-type]
    first.load_state_dict(steps[2].state)
    assert [step.plan.digest() for step in first] == [step.plan.digest() for step in steps[3:]]
    for others in (documents()[:80], [*documents()[1:], *documents()[:11]]):
        with pytest.raises(wlb.WlbError, match="resume with the documents that it was saved with"):
            loader(others).load_state_dict(steps[2].state)


def test_a_trainer_resumes_on_a_data_set_that_has_grown(tmp_path: Path) -> None:
    balanced(tmp_path, save_strategy="steps", save_steps=3, max_steps=3).train()
    folder = str(tmp_path / "checkpoint-3")
    with pytest.raises(wlb.WlbError, match=GROWN) as raised:
        balanced(tmp_path / "refused", data=grown()).train(resume_from_checkpoint=folder)
    assert raised.value.argument == "resume_from_checkpoint"
    assert "ignore_data_skip=True" in str(raised.value)
    fresh = balanced(tmp_path / "whole", data=grown())
    anew = balanced(tmp_path / "anew", data=grown(), ignore_data_skip=True)
    anew.train(resume_from_checkpoint=folder)
    assert anew.state.global_step == 3 + fresh.args.max_steps
    first = balanced(tmp_path / "first", data=grown()[:90], ignore_data_skip=True)  # goes on: the state is of these
    first.train(resume_from_checkpoint=folder)
    assert first.state.global_step == balanced(tmp_path / "known").args.max_steps


class Epochs(test_lightning.Module):
    """Notes where the data stand when an epoch begins."""

    def on_train_epoch_start(self) -> None:
        state = self.trainer.datamodule._given.state()["steps"]  # type: ignore[attr-defined]
        self.began = [*getattr(self, "began", []), (self.trainer.current_epoch, state["epoch"], state["position"])]


def test_lightning_resumes_on_a_data_set_that_has_grown_or_from_a_plain_checkpoint(tmp_path: Path) -> None:
    def data(rows: list[Any], **options: Any) -> BalancedDataModule:
        sizes: dict[str, Any] = {"max_tokens": 64, "tokens_per_batch": 160, "max_document_tokens": 48}
        return BalancedDataModule(rows, config=llama().config, num_epochs=2, verify=False, **sizes, **options)

    test_lightning.fit(tmp_path, stop=7, own=data(documents()), fitted=True)
    module = test_lightning.Module()
    saves = ModelCheckpoint(tmp_path / "plain", every_n_train_steps=7, save_top_k=-1, filename="{step}")
    plain = lightning.Trainer(
        accelerator="cpu", max_steps=9, logger=False, callbacks=[saves], enable_progress_bar=False
    )
    rows = [{name: torch.tensor(row[name])[None] for name in row} for row in documents() if len(row["input_ids"]) < 48]
    plain.fit(module, torch.utils.data.DataLoader(rows, batch_size=None))  # type: ignore[arg-type]
    for folder, message in ((tmp_path, GROWN), (tmp_path / "plain", "the checkpoint was saved without this data")):
        with pytest.raises(wlb.WlbError, match=message) as raised:
            test_lightning.fit(folder, stop=-1, resume=True, own=data(grown()), fitted=True)
        assert raised.value.argument == "ckpt_path"
        assert "BalancedDataModule(ignore_data_skip=True)" in str(raised.value)
        own = data(grown(), ignore_data_skip=True)
        found, trainer = test_lightning.fit(folder, stop=-1, resume=True, own=own, fitted=True, module=Epochs())
        assert found.began == [(1, 0, 100)]  # the epoch that goes on had begun; all of its documents came anew
        assert trainer.global_step == 7 + data(grown())._sampler(0, 1).total_steps()
