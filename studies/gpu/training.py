"""Training steps on the GPU beside the CPU: the loader, the loss, timers, and Hugging Face's Trainer if it is there."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import wlb
import wlb.torch as wt
from studies.gpu.items import Item, Row
from studies.trainer.llama import LlamaConfig, LlamaStage

LENGTHS = (900, 1, 130, 5, 260, 37, 700, 64, 3, 512, 90, 77)
VOCABULARY = 257
STEPS = 3
COST = wlb.CostModel(attention=1.0, linear=300.0)


def items(device: torch.device) -> Iterator[Item]:
    """A loop of one's own, and a trainer's."""
    yield "a loop with StepLoader and StepTimer", functools.partial(own_loop, device)
    if importlib.util.find_spec("transformers") is not None and importlib.util.find_spec("accelerate") is not None:
        yield "balance(trainer) of Hugging Face", functools.partial(hugging_face, device)


def own_loop(device: torch.device) -> Row:
    """Losses and gradients of steps in bfloat16 beside the same in float32 on the CPU."""
    timer = wt.StepTimer(device)
    mine, gradient = _own_loop(device, torch.bfloat16 if device.type == "cuda" else torch.float32, timer)
    right, expected = _own_loop(torch.device("cpu"), torch.float32, None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = np.concatenate([step.seconds for step in timer.read()])
    found = {
        "losses": mine,
        "losses_off": float(np.abs(np.array(mine) / np.array(right) - 1).max()),
        "gradient_off": float((gradient - expected).norm() / expected.norm()),
        "timed": int(np.isfinite(seconds).sum()),
    }
    return {**found, "ok": found["losses_off"] < 1e-2 and found["gradient_off"] < 5e-2 and bool((seconds > 0).all())}


def _own_loop(device: torch.device, dtype: torch.dtype, timer: Any) -> tuple[list[float], torch.Tensor]:
    model = LlamaStage(LlamaConfig(hidden_size=256, ffn_hidden_size=512, num_layers=2, num_heads=4, num_kv_heads=2))
    model.initialize(0)
    model.to(device, dtype)
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS * STEPS]
    packer = wlb.Packer(num_micro_batches=2, max_tokens=2048, cost_model=COST, release="adaptive", max_delay=0)
    lengths = [len(document) for document in documents]
    sampler = wt.BalancedBatchSampler(
        lengths, packer=packer, dp_rank=0, dp_size=1, tokens_per_batch=sum(LENGTHS), shuffle=False
    )
    keep = functools.partial(wt.collate, cp_rank=0, cp_size=1)
    loader = wt.StepLoader(DataLoader(wt.Documents(documents), batch_sampler=sampler, collate_fn=keep))
    losses = []
    for step in loader:
        valid = sum(batch.num_valid_tokens for batch in step.micro_batches)
        total = 0.0
        for index, batch in enumerate(step.micro_batches):
            batch = batch.to(device, non_blocking=True)
            with timer.micro_batch(index) if timer is not None else torch.enable_grad():
                logits = model(batch.tokens, position_ids=batch.position_ids, shard=batch.shard)
                loss = wt.token_normalized_loss(logits, batch.labels, num_valid_tokens=valid)
                loss.backward()
            total += float(loss.detach())
        losses.append(total)
        if timer is not None:
            timer.end_step(step)
    gradients = [parameter.grad.float().flatten().cpu() for parameter in model.parameters()]
    return losses, torch.cat(gradients)


def hugging_face(device: torch.device) -> Row:
    """The logged losses of a small Llama under `balance`, on the GPU and on the CPU."""
    mine, right = (_hugging_face(cpu) for cpu in (device.type == "cpu", True))
    off = float(np.abs(np.array(mine) / np.array(right) - 1).max())
    return {"losses": mine, "losses_off": off, "ok": len(mine) == len(right) and off < 1e-2}


def _hugging_face(cpu: bool) -> list[float]:
    import transformers

    from wlb.integrations.huggingface import balance

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=2048,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    data = [{"input_ids": row, "labels": row} for row in (rng.integers(0, VOCABULARY, n).tolist() for n in LENGTHS * 4)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, use_cpu=cpu, num_train_epochs=1, per_device_train_batch_size=4, gradient_accumulation_steps=3,
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, learning_rate=1e-3,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        balance(trainer, max_tokens=2048).train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]
