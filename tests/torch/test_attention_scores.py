"""Capped scores, sinks and values of another width than keys, on real gloo processes: against a dense softmax, float64.

Documents and forests on every transport, forward and backward, with windows, biases and log-sum-exps.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import wlb
import wlb.torch as wt
from tests.torch import processes
from wlb.torch.attention import keys, merge

HEADS, KV_HEADS, KEY_DIM = 8, 2, 16
LENGTHS = (1, 37, 2, 50, 3, 24)
TRANSPORTS = ("all_gather", "fetch", "ring", "ulysses", "usp")


@dataclass(frozen=True)
class Case:
    """The options under test."""

    transport: str = "all_gather"
    softcap: float | None = None
    sinks: bool = True
    value_dim: int = KEY_DIM
    window: int | None = None
    causal: bool = True
    alibi: bool = False
    forest: bool = False
    trunk: bool = False  # a forest whose siblings see their long prompt in one span
    return_lse: bool = False
    prepared: bool = False

    @property
    def problem(self) -> Case:
        """What the right answer depends on."""
        return replace(self, transport="", prepared=False)


def shard_of(case: Case, size: int) -> wlb.Shard:
    if case.trunk:
        return wlb.shard(wlb.PrefixForest.from_prompts([150, 70], 3, [2, 1, 4, 2, 1, 1]), cp_size=size)
    if case.forest:
        return wlb.shard(wlb.PrefixForest.from_prompts([30, 7], 3, [20, 1, 9, 2, 13, 5]), cp_size=size)
    return wlb.shard(LENGTHS, cp_size=size, causal=case.causal, strategy="per_document")


def mask(case: Case) -> tuple[Tensor, Tensor]:
    """For every token the keys that it sees, and how many positions before it they are."""
    shard = shard_of(case, 1)
    seen = torch.zeros(shard.num_tokens, shard.num_tokens, dtype=torch.bool)
    position = torch.zeros(shard.num_tokens, dtype=torch.int64)
    forest = shard.forest
    if forest is None:
        begin = 0
        for length in LENGTHS:
            rows = slice(begin, begin + length)
            seen[rows, rows] = True
            position[rows] = torch.arange(length)
            begin += length
    else:
        begins = np.cumsum([0, *forest.lengths]).tolist()
        paths: list[list[int]] = []
        for node, parent in enumerate(forest.parents.tolist()):
            own = list(range(begins[node], begins[node + 1]))
            before = paths[parent] if parent >= 0 else []
            paths.append(before + own)
            for token in own:
                seen[token, paths[node]] = True
            position[own] = torch.arange(len(before), len(before) + len(own))
    distance = position[:, None] - position[None, :]
    if case.causal:
        seen &= distance >= 0
    if case.window is not None:
        seen &= distance.abs() < case.window
    return seen, distance


def inputs(case: Case) -> list[Tensor]:
    """q, k, v, sinks `[heads]`, and the gradients of the output and of the log-sum-exp."""
    generator = torch.Generator().manual_seed(3)
    tokens = shard_of(case, 1).num_tokens
    shapes = [
        (tokens, HEADS, KEY_DIM),
        (tokens, KV_HEADS, KEY_DIM),
        (tokens, KV_HEADS, case.value_dim),
        (HEADS,),
        (tokens, HEADS, case.value_dim),
        (tokens, HEADS),
    ]
    return [3 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def slopes() -> Tensor:
    return torch.exp2(-torch.arange(1, HEADS + 1, dtype=torch.float64))


@functools.cache
def right_answer(case: Case) -> list[Tensor]:
    """Output, log-sum-exp, gradients of queries, keys, values and sinks: of a dense softmax, by autograd."""
    *given, d_out, d_lse = inputs(case)
    q, k, v, sinks = (x.requires_grad_() for x in given)
    seen, distance = mask(case)
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * KEY_DIM**-0.5
    if case.softcap is not None:
        scores = case.softcap * (scores / case.softcap).tanh()
    if case.alibi:
        scores = scores - slopes()[:, None, None] * distance.abs()
    scores = scores.masked_fill(~seen, -torch.inf)
    if case.sinks:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(q), 1)], dim=2)
    weights = scores.softmax(-1)
    out = torch.einsum("hqk,khd->qhd", weights[..., : len(q)], values)
    lse = scores.logsumexp(-1).t()
    loss = (out * d_out).sum() + ((lse * d_lse).sum() if case.return_lse else 0.0)
    loss.backward()
    return [out.detach(), lse.detach(), *(x.grad if x.grad is not None else torch.zeros_like(x) for x in given)]


def deviation(case: Case, rank: int, group: dist.ProcessGroup | None) -> float:
    """Largest difference from the right answer, over its largest value."""
    size = 1 if group is None else dist.get_world_size(group)
    shard = shard_of(case, size)
    held = torch.from_numpy(shard.rank(rank).token_indices.astype(np.int64))
    *given, sinks, d_out, d_lse = inputs(case)
    q, k, v = (x[held].requires_grad_() for x in given)
    sinks.requires_grad_(case.sinks)
    options: dict[str, Any] = {"transport": case.transport}
    if case.transport == "usp":
        options["ulysses_size"] = min(2, size)
    stands_for: Any = shard
    if case.prepared:
        stands_for = wt.prepare_attention(
            shard, rank=rank, device="cpu", window=case.window, alibi=case.alibi, **options
        )
    found: Any = wt.context_parallel_attention(
        q,
        k,
        v,
        stands_for,
        group=group,
        softcap=case.softcap,
        sinks=sinks if case.sinks else None,
        window=case.window,
        alibi_slopes=slopes() if case.alibi else None,
        return_lse=case.return_lse,
        **options,
    )
    out, lse = found if case.return_lse else (found, None)
    loss = (out * d_out[held]).sum() + (0.0 if lse is None else (lse * d_lse[held]).sum())
    loss.backward()
    d_sinks = torch.zeros_like(sinks) if sinks.grad is None else sinks.grad
    if group is not None:
        dist.all_reduce(d_sinks, group=group)
    right_out, right_lse, *gradients, right_sinks = right_answer(case.problem)
    pairs = [(out, right_out[held]), (d_sinks, right_sinks)]
    pairs += [(x.grad, right[held]) for x, right in zip((q, k, v), gradients, strict=True)]
    pairs += [] if lse is None else [(lse, right_lse[held])]
    assert all(ours.shape == right.shape for ours, right in pairs)
    largest = [max(1.0, float(right.abs().max())) if right.numel() else 1.0 for _, right in pairs]
    return max(
        float((ours - right).detach().abs().max()) / most
        for (ours, right), most in zip(pairs, largest, strict=True)
        if ours.numel()
    )


def deviations(rank: int, cases: list[Case]) -> list[float]:
    return [deviation(case, rank, dist.group.WORLD) for case in cases]


CASES = [Case(*options) for options in itertools.product(TRANSPORTS, [None, 2.0], [True], [8, 24], [None, 9], [True])]
CASES += [Case(transport, 2.0, sinks=False, value_dim=7) for transport in TRANSPORTS]
CASES += [Case(transport, 1.5, causal=False, window=6, alibi=True, return_lse=True) for transport in TRANSPORTS]
CASES += [Case(transport, 3.0, value_dim=5, forest=True, return_lse=True) for transport in TRANSPORTS]
CASES += [Case(transport, forest=True, window=6) for transport in TRANSPORTS]
CASES += [Case(transport, 2.0, value_dim=8, trunk=True, return_lse=True) for transport in TRANSPORTS]
CASES += [Case(t, 2.0, value_dim=5, prepared=True, return_lse=lse) for t, lse in zip(TRANSPORTS, [True, False] * 3)]  # noqa: B905


def hold(size: int, cases: list[Case]) -> None:
    """All of them are right on so many ranks."""
    cases = [case for case in cases if not (size == 1 and case.transport == "usp")]
    for case in cases:
        right_answer(case.problem)  # before the fork: once for all processes
    results = [[deviation(case, 0, None) for case in cases]] if size == 1 else processes.run(size, deviations, cases)
    for found in results:
        for deviated, case in zip(found, cases, strict=True):
            assert deviated < 1e-12, case


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_score_on_every_transport(size: int) -> None:
    hold(size, CASES)


def test_heads_that_come_in_parts_have_their_own_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "GATHERED", 1)
    monkeypatch.setattr(merge, "_ROWS_OF_SINKS", 7)
    hold(2, [case for case in CASES if case.transport in ("all_gather", "fetch")])
