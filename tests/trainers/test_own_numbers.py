"""The numbers that trainers report by themselves, under `balance`; what it says, and where."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.trainers.small_corpus import CONTEXT, LENGTHS, documents, llama
from tests.trainers.test_balance import arguments, balanced, together
from wlb.integrations.huggingface import balance
from wlb.integrations.huggingface.figures import learnt_alone


def test_samples_per_second_counts_documents(tmp_path: Path) -> None:
    trainer = balanced(tmp_path, num_train_epochs=2)
    found = trainer.train()
    documents_per_second = 2 * len(LENGTHS) / found.metrics["train_runtime"]
    assert found.metrics["train_samples_per_second"] == pytest.approx(documents_per_second, rel=0.01)
    logged = trainer.state.log_history[-1]
    assert logged["train_samples_per_second"] == found.metrics["train_samples_per_second"]


def test_samples_per_second_is_of_this_call(tmp_path: Path) -> None:
    """A training that ended early, and one that goes on."""

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 6

    first = balanced(tmp_path, callbacks=[Stop()], save_strategy="steps", save_steps=6)
    begun = first.train().metrics
    rest = balanced(tmp_path).train(resume_from_checkpoint=True).metrics
    counted = [round(of["train_samples_per_second"] * of["train_runtime"]) for of in (begun, rest)]
    assert sum(counted) == pytest.approx(2 * len(LENGTHS), abs=2)
    assert min(counted) > 10


def made(folder: Path, data: Any = None, **options: Any) -> Trainer:
    data = documents() if data is None else data
    return Trainer(llama(), arguments(folder, **options), train_dataset=data, data_collator=together)


def test_documents_that_are_cut_are_said_once(tmp_path: Path) -> None:
    """With how many; not where the context is the user's own, and not by the plan that training makes anew."""
    limit = 32
    longer = int((limit < LENGTHS).sum())
    for oversize, what in (("split", "split into pieces"), ("truncate", "truncated")):
        with pytest.warns(UserWarning, match=rf"{longer} of 90 documents .* max_tokens = {limit} .* {what}") as said:
            trainer = balance(made(tmp_path, max_steps=1), max_tokens=limit, oversize=oversize)  # type: ignore[arg-type]
        assert len(said) == 1
        assert said[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            warnings.filterwarnings("ignore", message=".* begin with a prompt without labels, and are split")
            trainer.get_train_dataloader()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        balance(made(tmp_path, max_steps=1), max_tokens=limit, max_document_tokens=limit)
        balance(made(tmp_path, max_steps=1), max_tokens=64)  # the model's context cuts, as without wlb


def test_a_rank_by_itself_has_nothing_to_balance(tmp_path: Path) -> None:
    few = [row for row in documents() if len(row["input_ids"]) <= CONTEXT]
    options: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 1}
    with pytest.warns(UserWarning, match="there is nothing to balance: one rank trains one micro-batch a step") as said:
        balance(made(tmp_path, few, **options), max_tokens=64)
    assert [each.filename for each in said] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        balance(made(tmp_path, few, **options | {"gradient_accumulation_steps": 8}), max_tokens=64)


def test_warnings_while_it_trains_point_at_the_users_line(tmp_path: Path) -> None:
    """A step without a label is found out deep inside the Trainer."""
    data = [{"input_ids": [1, 2, 3], "labels": [-100] * 3} for _ in range(6)]
    data += [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]} for _ in range(6)]
    sequential = (
        made(tmp_path, data, train_sampling_strategy="sequential", per_device_train_batch_size=2, max_steps=2)
        if "train_sampling_strategy" in TrainingArguments.__dataclass_fields__
        else made(tmp_path, data, max_steps=2)
    )
    trainer = balance(sequential, max_tokens=4, max_delay=0, verify=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.train()
    passed = [each for each in said if "no label that counts" in str(each.message)]
    assert {each.filename for each in passed} <= {__file__}
    assert passed


class Accelerator:
    """As accelerate's, of ranks whose values are given."""

    def __init__(self, labels: list[int], values: list[float]) -> None:
        self.labels, self.values = labels, values

    def gather(self, _: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.labels)

    def gather_for_metrics(self, _: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.values)


@pytest.mark.parametrize(("labels", "noted"), [([3, 5], [[1.0], [2.0]]), ([3, 0], [[1.0], [1.0]]), ([0, 0], [[1.0]])])
def test_figures_are_of_ranks_that_learn(labels: list[int], noted: list[list[float]]) -> None:
    """As TRL notes them: the mean over ranks, or a mean over sums of ranks."""
    trainer = SimpleNamespace(
        _metrics={"train": defaultdict(list, entropy=[1.0])},
        accelerator=Accelerator(labels, [1.0, 3.0]),
        args=SimpleNamespace(device="cpu"),
    )
    rows = {"labels": torch.tensor([[1, 2, 3, 4]] if labels[0] else [[-100] * 4])}
    with learnt_alone(trainer, rows, True):
        value = trainer.accelerator.gather_for_metrics(torch.tensor(1.0)).mean().item()
        trainer._metrics["train"]["entropy"].append(value)
    assert trainer._metrics["train"]["entropy"] == [value for (value,) in noted]
    assert trainer.accelerator.gather_for_metrics(torch.tensor(1.0)).shape == (2,)
    trainer._metrics["train"].clear()
    with learnt_alone(trainer, rows, True):
        trainer._metrics["train"]["mean_token_accuracy"].append(0.0)
    assert ("mean_token_accuracy" in trainer._metrics["train"]) == (max(labels) > 0)
    assert math.isfinite(sum(labels))
