"""A whole model on one GPU, micro-batch after micro-batch of several plans: its times beside the cost model.

A step of data-parallel ranks that wait for each other once takes as long as its slowest micro-batch: here one rank
after another trains its own.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

import wlb
from studies.gpu.attention import Lengths
from studies.gpu.items import Item, Row
from studies.trainer.llama import LlamaConfig, LlamaStage
from wlb.torch.attention import prepare_attention
from wlb.torch.loss import token_normalized_loss

RANKS = 4
STEPS = 4
ROOM = 1.25
"""Most tokens of a micro-batch, in contexts."""


class Trained:
    """The model, and how long it takes: a 1B Llama at 64K, whose backward computes each layer again; on a CPU a toy."""

    def __init__(self, device: torch.device) -> None:
        gpu = device.type == "cuda"
        self.context, self.repeats = (65536, 3) if gpu else (256, 1)
        self.config = (
            LlamaConfig(
                hidden_size=2048, ffn_hidden_size=8192, num_layers=16, num_heads=32, num_kv_heads=8, vocab_size=32000
            )
            if gpu
            else LlamaConfig(hidden_size=64, ffn_hidden_size=128, num_layers=1, num_heads=1, num_kv_heads=1)
        )
        self._device, self._stage = device, None

    @functools.cached_property
    def stage(self) -> LlamaStage:
        """Made when it is first needed: not by a run that has nothing left to do."""
        made = LlamaStage(self.config, checkpoint_activations=self._device.type == "cuda")
        made.initialize(0)
        return made.to(self._device, torch.bfloat16)

    def micro_batch(self, lengths: Sequence[int]) -> Row:
        """The median seconds of forward, loss and backward."""
        shard = wlb.shard(lengths, cp_size=1)
        mine = shard.rank(0)
        prepare_attention(shard, rank=0, device=self._device)
        generator = np.random.default_rng(0)
        tokens = torch.from_numpy(generator.integers(0, self.config.vocab_size, mine.token_indices.size))
        tokens, positions = tokens.to(self._device), torch.from_numpy(mine.position_ids).to(self._device)
        took = []
        for _ in range(self.repeats + 1):
            began = self._now()
            logits = self.stage(tokens, position_ids=positions, shard=shard)
            token_normalized_loss(logits, tokens, num_valid_tokens=max(1, len(tokens))).backward()
            took.append(self._now() - began)
            self.stage.zero_grad()
        return {"lengths": [int(length) for length in lengths], "seconds": statistics.median(took[1:])}

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def plans(lengths: Lengths, context: int, cost: wlb.CostModel) -> dict[str, list[list[list[int]]]]:
    """By method, the documents of every micro-batch of every step."""
    rng = np.random.default_rng(0)
    scaled = np.maximum(1, lengths * context // 131072)
    _, _, pieces = wlb.split_documents(rng.permutation(scaled), max_document_tokens=context)
    offsets = wlb.batch_offsets(pieces, tokens_per_batch=RANKS * context)[: STEPS + 1]
    batches = [pieces[start:end] for start, end in itertools.pairwise(offsets)]
    options = {"num_micro_batches": RANKS, "cost_model": cost, "leftover": "return"}
    found: dict[str, list[list[list[int]]]] = {}
    for method in ("original", "fixed_length", "var_length"):
        room = context if method != "var_length" else int(ROOM * context)
        steps = [wlb.pack(batch, method=method, max_tokens=room, **options) for batch in batches]  # type: ignore[arg-type, call-overload]
        found[method] = [[batch.lengths.tolist() for batch in plan.micro_batches if len(batch)] for plan in steps]
    packer = wlb.Packer(
        num_micro_batches=RANKS, max_tokens=int(ROOM * context), cost_model=cost, release="adaptive", max_delay=16
    )
    steps = [packer.push(batch) for batch in batches]
    found["adaptive"] = [[batch.lengths.tolist() for batch in plan.micro_batches if len(batch)] for plan in steps]
    return found


def items(trained: Trained, lengths: Lengths) -> Iterator[Item]:
    """Methods in turn, step by step."""
    shape = trained.config.shape()
    cost = wlb.CostModel.from_flops(**shape, attention_efficiency=0.55)
    made = plans(lengths, trained.context, cost)
    for step in range(STEPS):
        for method, steps in made.items():
            for index, documents in enumerate(steps[step]):
                yield f"{method}, step {step}, {index}", functools.partial(trained.micro_batch, documents)


def summary(rows: Sequence[Row], profile: Path | None) -> Iterator[str]:
    """Steps by method, and the errors of the fit and of the profile on micro-batches that the fit has not seen."""
    steps: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        method, step, _ = row["item"].split(", ")
        steps.setdefault(method, {}).setdefault(step, []).append(row)
    yield f"| method | tokens/s of {RANKS} ranks | slowest over mean micro-batch |"
    yield "| --- | ---: | ---: |"
    for method, of in steps.items():
        slowest = sum(max(row["seconds"] for row in found) for found in of.values())
        mean = sum(statistics.mean(row["seconds"] for row in found) for found in of.values())
        tokens = sum(sum(row["lengths"]) for found in of.values() for row in found)
        yield f"| {method} | {tokens / slowest:,.0f} | {slowest / mean:.3f} |"
    seen, unseen = rows[::2], rows[1::2]
    if len(seen) < 8:
        return
    fitted = wlb.CostModel.fit([row["lengths"] for row in seen], [row["seconds"] for row in seen]).cost_model
    once = fitted.terms.get("micro_batches", 0.0)
    yield ""
    yield f"Fitted to every second micro-batch, error on the others: {_error(fitted, unseen, once=once)}."
    if profile is not None:
        measured = wlb.CostModel.from_profile(profile)
        # The profile is of one layer's passes, and the backward here computes each layer again.
        factor = float(np.median([row["seconds"] / measured.cost(row["lengths"]).sum() for row in seen]))
        yield f"By the profile, times {factor:.3g}: {_error(measured, unseen, factor=factor)}."


def _error(
    cost: wlb.CostModel, rows: Sequence[Mapping[str, list[int]]], *, once: float = 0.0, factor: float = 1.0
) -> str:
    predicted = np.array([once + factor * cost.cost(row["lengths"]).sum() for row in rows])
    took = np.array([row["seconds"] for row in rows], dtype=float)
    errors = np.abs(predicted / took - 1)
    return f"{np.median(errors):.1%} in the median, {errors.max():.1%} at most"
