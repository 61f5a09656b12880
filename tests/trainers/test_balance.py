"""`balance(trainer, max_tokens=...)` in the real `Trainer`, against a plain loop, one document at a time."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

import wlb
from wlb.integrations.huggingface import balance
from wlb.torch.data import Piece

VOCABULARY = 64
CONTEXT = 48
LENGTHS = np.random.default_rng(5).lognormal(2.8, 1.0, size=90).astype(int).clip(1, 150)
STEPS = 20


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            attn_implementation="sdpa",
        )
    )


def documents() -> list[dict[str, list[int]]]:
    """Every second one with a prompt that is not learnt."""
    random = np.random.default_rng(0)
    result = []
    for number, length in enumerate(LENGTHS.tolist()):
        tokens = random.integers(1, VOCABULARY, length).tolist()
        prompt = length // 3 if number % 2 else 0
        result.append({"input_ids": tokens, "labels": [-100] * prompt + tokens[prompt:]})
    return result


def together(features: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A collator as people have them: pads on the right."""
    longest = max(len(feature["input_ids"]) for feature in features) + 3
    padded: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for feature in features:
        short = longest - len(feature["input_ids"])
        padded["input_ids"].append([*feature["input_ids"], *[0] * short])
        padded["labels"].append([*feature["labels"], *[-100] * short])
        padded["attention_mask"].append([1] * (longest - short) + [0] * short)
    return {name: torch.tensor(rows) for name, rows in padded.items()}


def arguments(folder: Path, dp_size: int = 1, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "use_cpu": True,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4 // dp_size,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **defaults | options)


def balanced(folder: Path, dp_size: int = 1, *, callbacks: Any = (), data: Any = None, **options: Any) -> Any:
    # accelerate asks for an address though it uses the group there is, and for more threads unless told otherwise:
    # matrix products hang in a forked process whose parent had several.
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    data = documents() if data is None else data
    trainer = Trainer(
        llama(),
        arguments(folder, dp_size, **options),
        train_dataset=data,
        eval_dataset=documents()[::3],
        data_collator=together,
        callbacks=list(callbacks),
    )
    return balance(trainer, max_tokens=64)


def outcome(trainer: Any) -> tuple[list[float], np.ndarray]:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]).numpy()


def loss_of_one(model: LlamaForCausalLM, tokens: list[int], predicted: list[int]) -> Tensor:
    """Sum over a document alone, nothing packed; `predicted` stands where it is predicted."""
    logits = model(input_ids=torch.tensor(tokens)[None], use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(predicted), reduction="sum")


def alone(element: int | Piece) -> tuple[list[int], list[int]]:
    """Tokens of a document or a piece, and what each predicts: that of a piece's last one is in the next piece."""
    number, start, length = element if isinstance(element, Piece) else (element, 0, int(LENGTHS[element]))
    row = documents()[number]
    following = [*row["labels"][1:], -100]
    return row["input_ids"][start : start + length], following[start : start + length]


def reference(plan: Any, max_steps: int, steps: int = STEPS) -> tuple[list[float], np.ndarray]:
    """The steps of the same plan in a plain loop."""
    model, losses = llama(), []
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, max_steps)
    sampler = plan.sampler()
    micro_batches = [batch for _ in range(plan.num_epochs) for batch in sampler]
    size = plan.packer.num_micro_batches
    for first in range(0, steps * size, size):
        rows = [alone(element) for batch in micro_batches[first : first + size] for element in batch]
        valid = sum(label != -100 for _, predicted in rows for label in predicted)
        loss = torch.stack([loss_of_one(model, *row) for row in rows]).sum() / valid
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()


def train(rank: int, folder: Path, stop: int = STEPS, resume: bool = False, **options: Any) -> Any:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step >= stop

    trainer = balanced(folder, dist.get_world_size(), callbacks=[Stop()], **options)
    trainer.train(resume_from_checkpoint=resume)
    return *outcome(trainer), trainer.args.max_steps, trainer.state.epoch, trainer.state.num_train_epochs


def test_documents_are_what_they_are_meant_to_be(tmp_path: Path) -> None:
    """Some longer than the context, steps enough, pieces and empty micro-batches among them."""
    plan = balanced(tmp_path)._wlb_plan
    assert (LENGTHS > CONTEXT).sum() >= 5
    sampler = plan.sampler()
    batches = [*sampler, *sampler]  # two epochs
    assert any(isinstance(element, Piece) for batch in batches for element in batch)
    assert plan.sampler().total_steps() >= STEPS
    assert plan.packer.num_micro_batches == 4
    assert not all(batches)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainer_takes_the_steps_of_one_document_at_a_time(ranks: int, tmp_path: Path) -> None:
    found = processes.run(ranks, train, tmp_path)
    losses, parameters = reference(balanced(tmp_path)._wlb_plan, found[0][2])
    for rank in range(ranks):
        np.testing.assert_allclose(found[rank][0], losses, rtol=1e-5)
        np.testing.assert_allclose(found[rank][1], parameters, rtol=0, atol=1e-4 * np.abs(parameters).max())
    assert found[0][4] == 2


def killed(rank: int, folder: Path) -> None:
    """Saves at step 7 and dies in step 11."""

    class Die(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 10:
                os.kill(os.getpid(), signal.SIGKILL)

    balanced(folder, dist.get_world_size(), callbacks=[Die()], save_strategy="steps", save_steps=7).train()


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1)])
def test_a_killed_run_goes_on_bit_for_bit(before: int, after: int, tmp_path: Path) -> None:
    with pytest.raises(processes.RankFailed, match="died"):
        processes.run(before, killed, tmp_path)
    assert (tmp_path / "checkpoint-7").exists()
    found = processes.run(after, train, tmp_path, STEPS, True)[0]
    whole = processes.run(after, train, tmp_path / "whole")[0]
    np.testing.assert_allclose(found[0], whole[0], rtol=0 if before == after else 1e-5)
    if before == after:
        np.testing.assert_array_equal(found[1], whole[1])
