"""Ninety documents and a small Llama, for the tests of trainers, and the model's loss on a document by itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from wlb.torch.data import Piece

VOCABULARY = 64
CONTEXT = 48
LENGTHS = np.random.default_rng(5).lognormal(2.8, 1.0, size=90).astype(int).clip(1, 150)


def llama(**changes: Any) -> LlamaForCausalLM:
    """The same weights in every process."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "attn_implementation": "sdpa",
    }
    return LlamaForCausalLM(LlamaConfig(**shape | changes))


def documents(vocabulary: int = VOCABULARY) -> list[dict[str, list[int]]]:
    """Every second one with a prompt that is not learnt."""
    random = np.random.default_rng(0)
    result = []
    for number, length in enumerate(LENGTHS.tolist()):
        tokens = random.integers(1, vocabulary, length).tolist()
        prompt = length // 3 if number % 2 else 0
        result.append({"input_ids": tokens, "labels": [-100] * prompt + tokens[prompt:]})
    return result


def loss_of_one(model: LlamaForCausalLM, tokens: list[int], predicted: list[int]) -> Tensor:
    """Sum over a document alone, nothing packed; `predicted` stands where it is predicted."""
    logits = model(input_ids=torch.tensor(tokens)[None], use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(predicted), reduction="sum")


def train_alone(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[Sequence[tuple[list[int], list[int]]]],
    *,
    schedule: Any = None,
    max_norm: float = float("inf"),
) -> tuple[list[float], NDArray[np.float32]]:
    """Steps over tokens and what they predict, one document at a time: their losses, and the weights after them."""
    losses = []
    for rows in steps:
        valid = sum(label != -100 for _, predicted in rows for label in predicted)
        loss = torch.stack([loss_of_one(model, *row) for row in rows]).sum() / valid
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses, flat(model)


def rows_of_steps(micro_batches: Sequence[Iterable[int | Piece]], size: int, steps: int) -> list[list[Any]]:
    """The rows of so many steps of `size` micro-batches each."""
    return [
        [alone(element) for batch in micro_batches[first : first + size] for element in batch]
        for first in range(0, steps * size, size)
    ]


def outcome(trainer: Any) -> tuple[list[float], Any]:
    """The losses that a Hugging Face trainer logged, and the weights."""
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, flat(trainer.model)


class StopAt(TrainerCallback):
    """Ends a training after a step, with the schedule of the whole; or kills its process."""

    def __init__(self, step: int, *, killed: bool = False) -> None:
        self.step, self.killed = step, killed

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step
        if self.killed and control.should_training_stop:
            os.kill(os.getpid(), signal.SIGKILL)


def flat(model: Any) -> Any:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()


def alone(element: int | Piece) -> tuple[list[int], list[int]]:
    """Tokens of a document or a piece, and what each predicts: that of a piece's last one is in the next piece."""
    number, start, length = element if isinstance(element, Piece) else (element, 0, int(LENGTHS[element]))
    row = documents()[number]
    following = [*row["labels"][1:], -100]
    return row["input_ids"][start : start + length], following[start : start + length]


def mean_over_tokens(model: LlamaForCausalLM, numbers: list[int]) -> float:
    """The loss of documents, cut where the context ends, over the tokens that count."""
    total, count = 0.0, 0
    for number in numbers:
        for start in range(0, int(LENGTHS[number]), CONTEXT):
            tokens, predicted = alone(Piece(number, start, min(CONTEXT, int(LENGTHS[number]) - start)))
            total += loss_of_one(model, tokens, predicted).item() if max(predicted) >= 0 else 0.0
            count += sum(label != -100 for label in predicted)
    return total / count
