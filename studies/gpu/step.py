"""A whole model on one GPU: each rank's part of every micro-batch of several plans, one after another.

The ranks are emulated: what a rank computes runs alone, on keys that stand for those of the others, and what it would
send takes nothing. A step of data-parallel ranks that meet once takes as long as its slowest rank.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wlb
from studies.gpu import echo
from studies.gpu.attention import Lengths
from studies.gpu.items import Item, Row
from studies.trainer.llama import LlamaConfig, LlamaStage
from wlb.torch.attention import prepare_attention
from wlb.torch.loss import token_normalized_loss

RANKS = 4
STEPS = 3
REPEATS = (2, 1, 1)
"""Of every part, by step: the first step shows what a repetition changes."""
PUSHED = 12
"""Global batches before those that are measured: the packer then holds what it holds in a long run."""
ROOM = 1.25
"""Most tokens of a micro-batch, in contexts."""
FLOPS_PER_SECOND = 3.5e14
"""What planning assumes of a GPU: only Dynamic-CP's price of an exchange depends on it."""
EXCHANGE_SECONDS = 2e-3
"""What planning assumes that a rank more in a group takes, in all layers."""


@dataclass(frozen=True)
class Part:
    """A micro-batch as one rank of a context-parallel group computes it."""

    lengths: tuple[int, ...]
    first_rank: int
    cp_size: int
    rank: int


class Trained:
    """The model, and how long it takes: a 1B Llama at 64K, whose backward computes each layer again; on a CPU a toy."""

    def __init__(self, device: torch.device) -> None:
        gpu = device.type == "cuda"
        self.context = 65536 if gpu else 256
        self.config = (
            LlamaConfig(
                hidden_size=2048, ffn_hidden_size=8192, num_layers=16, num_heads=32, num_kv_heads=8, vocab_size=32000
            )
            if gpu
            else LlamaConfig(hidden_size=64, ffn_hidden_size=128, num_layers=1, num_heads=1, num_kv_heads=1)
        )
        self._device = device

    @functools.cached_property
    def stage(self) -> LlamaStage:
        """Made when it is first needed: not by a run that has nothing left to do."""
        with self._device:  # weights as torch makes them: only their time matters
            made = LlamaStage(self.config, checkpoint_activations=self._device.type == "cuda").bfloat16()
        self._once(made, Part((self.context // 4, self.context // 4), 0, 1, 0))  # libraries load, and memory is had
        return made

    def seconds(self, part: Part, repeats: int) -> Row:
        """The quickest of some repetitions of forward, loss and backward."""
        stage = self.stage
        took = [self._once(stage, part) for _ in range(repeats)]
        row = {"lengths": list(part.lengths), "first_rank": part.first_rank, "cp_size": part.cp_size}
        return {**row, "rank": part.rank, "seconds": min(took), "all_seconds": took}

    def _once(self, stage: LlamaStage, part: Part) -> float:
        shard = wlb.shard(part.lengths, cp_size=part.cp_size)
        mine = shard.rank(part.rank)
        prepare_attention(shard, rank=part.rank, device=self._device)
        generator = np.random.default_rng(0)
        tokens = torch.from_numpy(generator.integers(0, self.config.vocab_size, mine.token_indices.size))
        tokens, positions = tokens.to(self._device), torch.from_numpy(mine.position_ids).to(self._device)
        group = echo.group(part.rank, part.cp_size)
        began = self._now()
        logits = stage(tokens, position_ids=positions, shard=shard, group=group)
        token_normalized_loss(logits, tokens, num_valid_tokens=max(1, len(tokens))).backward()
        took = self._now() - began
        del logits
        stage.zero_grad()
        return took

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def plans(lengths: Lengths, context: int, cost: wlb.CostModel) -> dict[str, list[list[list[Part]]]]:
    """By method, the parts of every micro-batch of every step."""
    rng = np.random.default_rng(0)
    scaled = np.maximum(1, lengths * context // 131072)
    _, _, pieces = wlb.split_documents(rng.permutation(scaled), max_document_tokens=context)
    offsets = wlb.batch_offsets(pieces, tokens_per_batch=RANKS * context)[: PUSHED + STEPS + 1]
    batches = [pieces[start:end] for start, end in itertools.pairwise(offsets)]
    room = int(ROOM * context)
    options: Any = {"num_micro_batches": RANKS, "cost_model": cost}
    found: dict[str, list[list[list[Part]]]] = {}
    for method in ("original", "fixed_length"):
        steps = [
            wlb.pack(batch, method=method, max_tokens=context, leftover="return", **options)
            for batch in batches[PUSHED:]
        ]
        found[method] = [_whole(plan) for plan in steps]
    packer = wlb.Packer(max_tokens=room, release="adaptive", max_delay=16, **options)
    found["adaptive"] = [_whole(plan) for plan in [packer.push(batch) for batch in batches][PUSHED:]]
    dynamic = [
        wlb.plan_dynamic_cp(
            batch, world_size=RANKS, num_stages=1, max_tokens_per_rank=room, cost_model=cost,
            exchange=wlb.Exchange(seconds_per_exchange=EXCHANGE_SECONDS, overlap=0.0),
        )
        for batch in batches[PUSHED:]
    ]  # fmt: skip
    found["dynamic_cp"] = [
        [
            [
                Part(tuple(group.lengths.tolist()), group.first_rank, group.cp_size, rank)
                for group in batch
                for rank in range(group.cp_size)
                if len(group.lengths)
            ]
            for batch in plan.micro_batches
        ]
        for plan in dynamic
    ]
    return found


def _whole(plan: wlb.Packing) -> list[list[Part]]:
    """A rank for each micro-batch."""
    batches = enumerate(plan.micro_batches)
    return [[Part(tuple(batch.lengths.tolist()), rank, 1, 0) for rank, batch in batches if len(batch)]]


def assumed_cost(trained: Trained) -> wlb.CostModel:
    """What plans are made with: FLOPs, attention at 0.55 of the rate of matrices."""
    shape = trained.config.shape()
    return wlb.CostModel.from_flops(**shape, attention_efficiency=0.55, flops_per_second=FLOPS_PER_SECOND)


def items(trained: Trained, lengths: Lengths) -> Iterator[Item]:
    """Methods in turn, step by step."""
    made = plans(lengths, trained.context, assumed_cost(trained))
    with echo.ranks(RANKS):
        for step, (method, steps) in itertools.product(range(STEPS), made.items()):
            for index, parts in enumerate(steps[step]):
                for part in parts:
                    name = f"{method}, step {step}, {index}, rank {part.first_rank + part.rank}"
                    yield name, functools.partial(trained.seconds, part, REPEATS[step])


def step_seconds(rows: Sequence[Row]) -> float:
    """How long the ranks take together for one step: those of a group wait for each other in every micro-batch."""
    free = np.zeros(RANKS)
    for _, parts in itertools.groupby(rows, key=lambda row: row["item"].split(", ")[2]):
        groups: dict[tuple[int, int], list[float]] = {}
        for row in parts:
            groups.setdefault((row["first_rank"], row["cp_size"]), []).append(row["seconds"])
        for (first, size), seconds in groups.items():
            free[first : first + size] = free[first : first + size].max() + max(seconds)
    return float(free.max())


def rates(rows: Sequence[Row]) -> dict[str, float]:
    """Tokens per second of all ranks together, by method."""
    return {
        method: sum(sum(row["lengths"]) / row["cp_size"] for found in steps for row in found)
        / sum(step_seconds(found) for found in steps)
        for method, steps in _steps(rows).items()
    }


def _steps(rows: Sequence[Row]) -> dict[str, list[list[Row]]]:
    """The parts of every step of every method."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        method, step, *_ = row["item"].split(", ")
        found.setdefault(method, {}).setdefault(step, []).append(row)
    return {method: list(steps.values()) for method, steps in found.items()}


def summary(rows: Sequence[Row], profile: Path | None) -> Iterator[str]:
    """Steps by method, and the errors of the fit and of the profile on micro-batches that the fit has not seen."""
    yield "| packing | tokens per second | over the first | step over one with equal ranks |"
    yield "| --- | ---: | ---: | ---: |"
    found = rates(rows)
    first = next(iter(found.values()))
    for method, steps in _steps(rows).items():
        even = sum(sum(row["seconds"] for row in parts) / RANKS for parts in steps)
        over = sum(map(step_seconds, steps)) / even
        yield f"| {method} | {found[method]:,.0f} | {found[method] / first:.2f} | {over:.3f} |"
    again = [max(row["all_seconds"]) / min(row["all_seconds"]) - 1 for row in rows if len(row["all_seconds"]) > 1]
    if again:
        yield ""
        yield f"A second repetition differs by {np.median(again):.2%} in the median, by {max(again):.2%} at most."
    whole = [row for row in rows if row["cp_size"] == 1]
    seen, unseen = whole[::2], whole[1::2]
    if len(seen) < 8:
        return
    fitted = wlb.CostModel.fit([row["lengths"] for row in seen], [row["seconds"] for row in seen]).cost_model
    once = fitted.terms.get("micro_batches", 0.0)
    yield ""
    yield "| cost model | micro-batches predicted | median error | largest error |"
    yield "| --- | ---: | ---: | ---: |"
    yield f"| `CostModel.fit` on the other half | {len(unseen)} | {_error(fitted, unseen, once=once)} |"
    if profile is not None:
        measured = wlb.CostModel.from_profile(profile)
        # The profile is of one layer's passes, and the backward here computes each layer again.
        factor = float(np.median([row["seconds"] / measured.cost(row["lengths"]).sum() for row in seen]))
        error = _error(measured, unseen, factor=factor)
        yield f"| `CostModel.from_profile`, times {factor:.3g} | {len(unseen)} | {error} |"


def _error(
    cost: wlb.CostModel, rows: Sequence[Mapping[str, list[int]]], *, once: float = 0.0, factor: float = 1.0
) -> str:
    predicted = np.array([once + factor * cost.cost(row["lengths"]).sum() for row in rows])
    took = np.array([row["seconds"] for row in rows], dtype=float)
    errors = np.abs(predicted / took - 1)
    return f"{np.median(errors):.1%} | {errors.max():.1%}"
