"""`wlb.attach` finds what it is given, by name alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate
import lightning
import numpy as np
import pytest
import torch
from transformers import Trainer

import wlb
from tests.torch.test_training import Network, flat, loader, reference
from tests.trainers.test_balance import arguments, documents, llama, together
from wlb.integrations.lightning import BalancedDataModule


def test_a_trainer_of_transformers(tmp_path: Path) -> None:
    data: Any = documents()
    trainer = Trainer(llama(), arguments(tmp_path, max_steps=1), train_dataset=data, data_collator=together)
    assert wlb.attach(trainer, max_tokens=64) is trainer
    trainer.train()
    assert trainer.args.gradient_accumulation_steps == 4


def test_a_trainer_of_lightning() -> None:
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    found = wlb.attach(
        trainer, dataset=documents(), max_tokens=64, tokens_per_batch=100, max_document_tokens=48, config=llama().config
    )
    assert isinstance(found, BalancedDataModule)
    with pytest.raises(wlb.WlbError, match="dataset is missing"):
        wlb.attach(trainer, max_tokens=64)


@pytest.mark.parametrize("through", ["module", "accelerate"])
def test_a_training_step(through: str) -> None:
    step, model = next(iter(loader(0, 1))), Network()
    if through == "module":
        wlb.attach(model)(step)
    else:
        wlb.attach(accelerate.Accelerator(cpu=True))(model, step)
    np.testing.assert_allclose(flat(model), reference()[0][1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("given", [None, 3, torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)])
def test_what_is_not_known_is_named(given: Any) -> None:
    with pytest.raises(wlb.WlbError, match=f"{type(given).__qualname__}, which is not known") as refused:
        wlb.attach(given)
    assert refused.value.argument == "trainer"


@pytest.mark.parametrize("kind", ["transformers", "lightning", "accelerate", "module"])
def test_an_unknown_option_is_named(kind: str, tmp_path: Path) -> None:
    data: Any = documents()
    given: dict[str, tuple[Any, dict[str, Any]]] = {
        "transformers": (
            Trainer(llama(), arguments(tmp_path), train_dataset=data, data_collator=together),
            {"max_tokens": 64},
        ),
        "lightning": (
            lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False),
            {"dataset": data, "max_tokens": 64, "tokens_per_batch": 100},
        ),
        "accelerate": (accelerate.Accelerator(cpu=True), {}),
        "module": (Network(), {}),
    }
    trainer, options = given[kind]
    with pytest.raises(wlb.WlbError, match="max_delais is no option here; known are") as refused:
        wlb.attach(trainer, **options, max_delais=3)
    assert refused.value.argument == "max_delais"
    if options:
        del options["max_tokens"]
        with pytest.raises(wlb.WlbError, match="max_tokens is missing"):
            wlb.attach(trainer, **options)


def test_nothing_is_imported_before() -> None:
    program = "import sys, wlb; wlb.attach; assert not {'torch', 'transformers', 'lightning'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=500)
