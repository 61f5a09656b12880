"""A program: trains tiny hybrid models on packed rows, with stand-ins for their kernels.

    python -m tests.torch.hybrid_rows '{"calls": {"measure": ["bamba", "lfm2"]}, "options": {}}'

It prints what each call gives for each family, as JSON. It is a process of its own, because stand-ins have to be there
before transformers looks for kernels.
"""

from __future__ import annotations

import json
import sys

from tests.oracles import row_kernels

if __name__ == "__main__":
    row_kernels.install()

import contextlib
import tempfile
import warnings
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments

import wlb
import wlb.torch as wt
from tests.oracles.hybrid_models import FAMILIES, VARLEN, tiny
from tests.oracles.transformers_models import build
from tests.trainers.small_corpus import CONTEXT, documents, loss_of_one, outcome, rows_of_steps
from wlb.integrations.huggingface import balance
from wlb.torch.boundaries import against_rows, row_layer, row_layers
from wlb.torch.layers import against_forests

LENGTHS = [7, 12, 4, 9, 3, 10, 5, 8]
STEPS = 2


def rows() -> list[dict[str, list[int]]]:
    """Documents, of which every second one has a prompt that teaches nothing."""
    random = np.random.default_rng(0)
    found = []
    for number, length in enumerate(LENGTHS):
        tokens, prompt = random.integers(3, 200, length).tolist(), length // 3 * (number % 2)
        found.append({"input_ids": tokens, "labels": [-100] * prompt + tokens[prompt:]})
    return found


def step() -> Any:
    costs = wlb.CostModel(attention=1.0, linear=9.0)
    return next(iter(wt.balanced_loader(rows(), max_tokens=32, tokens_per_batch=48, cost_model=costs)))


def known(family: str) -> dict[str, Any]:
    """What is known of a family without a run: what its layers need, their packages, and why it is refused.

    `forest` is why its layers cannot run a forest.
    """
    with torch.device("meta"):
        model = build(FAMILIES[family].tiny_config())
    layers = row_layers(model)
    along = [module for module in model.modules() if row_layer(type(module))] or [model]
    return {
        "forest": [against_forests(module) for module in along],
        "needs": sorted({need for layer in layers for need in layer.needs}),
        "packages": sorted({kernel.package for layer in layers for kernel in layer.kernels}),
        "wrong": against_rows(model),
    }


def measure(family: str, **options: Any) -> dict[str, Any]:
    """What `train_step` says before its first step, and how far its gradients are from those of documents alone.

    The distance is relative. It is None if the model cannot run, because a kernel is missing.
    """
    model, first = tiny(family, **options), step()
    try:
        refused = ""
        wt.train_step(model, first)
    except wlb.WlbError as wrong:
        refused = str(wrong)
    model.zero_grad()
    try:
        wt.train_step(model, first, verify=False)
    except ValueError as wrong:
        return {"refused": refused, "apart": None, "raised": str(wrong)}
    packed = gradient(model)
    model.zero_grad()
    for batch in first.micro_batches:
        sizes = batch.cu_seqlens.diff().tolist()
        for tokens, labels in zip(batch.tokens.split(sizes), batch.labels.split(sizes), strict=True):
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
            (cross_entropy(logits, labels, reduction="sum") / wt.count_valid_tokens(first)).backward()
    alone = gradient(model)
    return {"refused": refused, "apart": float((packed - alone).norm() / alone.norm())}


def measured_by_lengths(family: str) -> dict[str, Any]:
    """What `measure` gives with attention that is told `cu_seq_lens_q` and gets no mask."""
    return measure(family, attn_implementation=VARLEN)


def untold(family: str) -> list[str]:
    """What `train_step` says in both precisions where rows lack `seq_idx`, as every row did once."""
    found, own = [], wt.PackedBatch.as_hf

    def as_hf(batch: wt.PackedBatch, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: value for name, value in own(batch, *args, **kwargs).items() if name != "seq_idx"}

    for dtype in (torch.float32, torch.bfloat16):
        with mock.patch.object(wt.PackedBatch, "as_hf", as_hf):
            try:
                wt.train_step(tiny(family, dtype=dtype), step())
            except wlb.WlbError as wrong:
                found.append(str(wrong))
    return found


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def verified(family: str, **options: Any) -> dict[str, str]:
    """What `verify` says in both precisions; empty where it accuses nothing."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        found[str(dtype)] = ""
        try:
            wt.verify(tiny(family, dtype=dtype, **options), step(), report=None)
        except wlb.WlbError as wrong:
            found[str(dtype)] = str(wrong)
    return found


def logits(family: str) -> list[float]:
    """The logits of one document alone."""
    return tiny(family)(input_ids=torch.tensor(rows()[1]["input_ids"])[None], use_cache=False).logits.flatten().tolist()


def trained(family: str) -> dict[str, list[float]]:
    """The largest differences between a balanced `Trainer` and the same documents, one at a time."""
    seen: list[Tensor] = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(gradient(kwargs["model"]))

    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer: Any = Trainer(tiny(family), arguments, train_dataset=documents(), data_collator=one, callbacks=[Watch()])
    with contextlib.redirect_stdout(sys.stderr):
        balance(trainer, max_tokens=64, max_document_tokens=CONTEXT, cost_model=COSTS).train()
    plan = trainer._wlb_plan
    steps = rows_of_steps(list(plan.sampler()), plan.packer.num_micro_batches, STEPS)
    return differences(family, steps, outcome(trainer)[0], seen)


def differences(family: str, steps: Any, found_losses: list[float], found_gradients: list[Tensor]) -> Any:
    """How far losses and gradients are from those of documents alone, relative to these."""
    model = tiny(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, gradients = [], []
    for documents_of_step in steps:
        optimizer.zero_grad()
        valid = sum(label != -100 for _, labels in documents_of_step for label in labels)
        parts = [loss_of_one(model, *each) / valid for each in documents_of_step]
        for part in parts:
            part.backward()  # type: ignore[no-untyped-call]
        gradients.append(gradient(model))
        optimizer.step()
        losses.append(float(sum(parts)))
    pairs = zip(found_gradients, gradients, strict=True)
    return {
        "losses": [abs(found / loss - 1) for found, loss in zip(found_losses, losses, strict=False)],
        "gradients": [float((found - expected).norm() / expected.norm()) for found, expected in pairs],
    }


def trained_by_lightning(family: str) -> dict[str, list[float]]:
    """The largest differences between Lightning and the same documents, one at a time."""
    import lightning  # slow

    from wlb.integrations.lightning import BalancedDataModule

    seen: list[Tensor] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny(family)

        def training_step(self, row: dict[str, Any], index: int) -> Tensor:
            loss: Tensor = self.model(**row).loss
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(gradient(self.model))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    sizes: dict[str, Any] = {"max_tokens": 64, "tokens_per_batch": 160, "max_document_tokens": CONTEXT}
    data = BalancedDataModule(documents(), cost_model=COSTS, **sizes)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    fitted = lightning.Trainer(max_steps=STEPS, accelerator="cpu", enable_model_summary=False, **options)
    with contextlib.redirect_stdout(sys.stderr):
        fitted.fit(Module(), data)
    size = fitted.accumulate_grad_batches
    return differences(family, rows_of_steps(list(data._sampler(0, 1)), size, STEPS), [], seen)


def one(features: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A collator for one document, which is how `balance` calls it."""
    return {name: torch.tensor([feature[name] for feature in features]) for name in ("input_ids", "labels")}


COSTS = wlb.CostModel(attention=1.0, linear=9.0)


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    found = {
        call: {family: globals()[call](family, **order["options"]) for family in families}
        for call, families in order["calls"].items()
    }
    json.dump(found, sys.stdout)
