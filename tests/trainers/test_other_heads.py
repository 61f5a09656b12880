"""Models whose labels are no next tokens are refused by name wherever a row would be their input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForTokenClassification, Trainer
from transformers.models.auto import modeling_auto

import wlb
import wlb.torch as wt
from tests.trainers import test_lightning
from tests.trainers.small_corpus import CONTEXT, documents, llama
from tests.trainers.test_balance import arguments, together
from wlb.integrations.huggingface import balance
from wlb.torch.layers import against_labels

KINDS = 9
MESSAGE = "is a LlamaForTokenClassification: labels of a packed row are next tokens"


def names(*tasks: str) -> set[str]:
    """Names of transformers' classes for tasks, as its auto classes know them."""
    found: set[str] = set()
    for task in tasks:
        for value in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values():
            found |= {value} if isinstance(value, str) else {*value}
    return found


NEXT_TOKENS = names("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ")
OTHERS = names(
    "TOKEN_CLASSIFICATION", "SEQUENCE_CLASSIFICATION", "QUESTION_ANSWERING", "MULTIPLE_CHOICE", "MASKED_LM",
    "NEXT_SENTENCE_PREDICTION",
)  # fmt: skip


def named(name: str) -> str:
    return against_labels(type(name, (nn.Linear,), {})(1, 1))


def test_all_heads_of_transformers_are_known() -> None:
    assert [name for name in sorted(NEXT_TOKENS) if named(name)] == []
    # Masked models of XLM and FlauBERT share their class with the causal ones.
    assert {name for name in OTHERS - NEXT_TOKENS if not named(name)} <= {
        "FlaubertWithLMHeadModel",
        "XLMWithLMHeadModel",
    }


class Tagger(LlamaForTokenClassification):
    """A head of a user's own: transformers looks at the name of the class, and this one says nothing."""


def tagged() -> list[dict[str, Any]]:
    """Documents with a label of its own for each token."""
    return [row | {"labels": [token % KINDS for token in row["input_ids"]]} for row in documents()]


def head(kind: type[Any] = Tagger) -> Any:
    torch.manual_seed(0)
    config = llama().config
    config.num_labels = KINDS
    return kind(config)


@pytest.mark.parametrize("kind", [LlamaForTokenClassification, Tagger])
@pytest.mark.parametrize("verify", [False, True])
def test_a_trainer_is_not_balanced(verify: bool, kind: type[Any], tmp_path: Path) -> None:
    trainer = Trainer(head(kind), arguments(tmp_path), train_dataset=tagged(), data_collator=together)
    with pytest.raises(wlb.WlbError, match=MESSAGE):
        balance(trainer, max_tokens=64, verify=verify)


def test_a_loop_of_ones_own_is_refused_unless_its_loss_is_too() -> None:
    model = head()
    rows = [{name: torch.tensor(values) for name, values in row.items()} for row in tagged()]
    sizes = {"max_tokens": 64, "tokens_per_batch": 100, "max_document_tokens": CONTEXT}
    step = next(iter(wt.balanced_loader(rows, config=model.config, **sizes)))
    with pytest.raises(wlb.WlbError, match=MESSAGE):
        wt.train_step(model, step, verify=False)
    with pytest.raises(wlb.WlbError, match=MESSAGE):
        wt.verify(model, step, report=None)
    assert all(parameter.grad is None for parameter in model.parameters())
    loss = wt.train_step(model, step, loss=lambda of, batch, valid: of(batch.tokens[None]).logits.sum() / valid)
    assert float(loss) != 0.0


class Module(test_lightning.Module):
    def __init__(self, *, learns: bool) -> None:
        super().__init__()
        other = head()
        if learns:
            self.model = other
        else:
            self.judge = other.requires_grad_(False)


def test_a_module_of_lightning_is_refused_if_its_head_learns(tmp_path: Path) -> None:
    own = test_lightning.data(verify=False)
    with pytest.raises(wlb.WlbError, match=MESSAGE):
        test_lightning.fit(tmp_path, stop=2, module=Module(learns=True), fitted=True, own=own)
    _, trainer = test_lightning.fit(tmp_path, stop=2, module=Module(learns=False), fitted=True)
    assert trainer.global_step == 2
