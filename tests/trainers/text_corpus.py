"""Prompts and completions as text, and a plain loop over them, for trainers that tokenise by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.trainers.small_corpus import CONTEXT, llama, train_alone
from wlb.torch.data import Piece

WORDS = [f"w{number}" for number in range(60)]
LENGTHS = np.random.default_rng(5).lognormal(2.8, 1.0, size=60).astype(int).clip(1, 150)

Row = tuple[list[int], list[int]]  # tokens and labels
Plan = list[list[int | Piece]]  # documents and pieces of each step, over all ranks


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["<eos>", "<pad>", "<unk>", *WORDS])}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", model_max_length=CONTEXT
    )


def texts() -> list[dict[str, str]]:
    """Prompts, which are not learnt, and completions."""
    random = np.random.default_rng(0)
    documents = [random.choice(WORDS, length).tolist() for length in LENGTHS.tolist()]
    return [
        {"prompt": " ".join(words[: len(words) // 3]) + " ", "completion": " ".join(words[len(words) // 3 :]) + " "}
        for words in documents
    ]


def tokenised(text: dict[str, str], *, end: Sequence[int] = ()) -> Row:
    prompt, completion = (tokenizer()(text[name])["input_ids"] for name in ("prompt", "completion"))
    completion = [*completion, *end]
    return prompt + completion, [-100] * len(prompt) + completion


def reference(plan: Plan, rows: list[Row], lr: float = 0.1) -> tuple[list[float], LlamaForCausalLM]:
    """The losses of the plan's steps, one document at a time, and the model after them."""

    def row(element: int | Piece) -> Row:
        number, start, length = element if isinstance(element, Piece) else (element, 0, len(rows[element][0]))
        tokens, labels = rows[number]
        return tokens[start : start + length], [*labels[1:], -100][start : start + length]

    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses, _ = train_alone(model, optimizer, [[row(element) for element in elements] for elements in plan])
    return losses, model


def planned(trainer: Any) -> Plan:
    """What a balanced trainer trains in each step; of a rank of several its part."""
    plan = trainer._wlb_plan
    sampler, size = plan.sampler(), plan.packer.num_micro_batches // trainer.args.world_size
    batches = [batch for _ in range(plan.num_epochs) for batch in sampler]
    return [list(chain(*batches[first : first + size])) for first in range(0, len(batches), size)]
