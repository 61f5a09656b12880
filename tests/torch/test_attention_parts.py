"""Values of another width than keys, log-sum-exps for sinks, numpy's integers: on real gloo processes, in float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import wlb
import wlb.torch as wt
from tests.torch import processes

LENGTHS = (1, 37, 2, 50, 3, 24)
HEADS, KV_HEADS, KEY_DIM = 8, 2, 12
TRANSPORTS: list[dict[str, Any]] = [
    {"transport": "all_gather"},
    {"transport": "fetch"},
    {"transport": "ring"},
    {"transport": "ulysses"},
    {"transport": "usp", "ulysses_size": np.int64(2)},
]


def inputs(value_dim: int) -> list[Tensor]:
    """q, k, v, sinks [heads], and the gradients of the output and of the log-sum-exp [tokens, heads]."""
    generator = torch.Generator().manual_seed(3)
    tokens = sum(LENGTHS)
    shapes = [
        (tokens, HEADS, KEY_DIM),
        (tokens, KV_HEADS, KEY_DIM),
        (tokens, KV_HEADS, value_dim),
        (HEADS,),
        (tokens, HEADS, value_dim),
        (tokens, HEADS),
    ]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def dense(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, output with sinks, and log-sum-exp, document by document."""
    outs, sunk, lses = [], [], []
    for begin, length in zip(np.cumsum((0, *LENGTHS)).tolist(), LENGTHS, strict=False):
        rows = slice(begin, begin + length)
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        keys, values = (x[rows].repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1) for x in (k, v))
        scores = (q[rows].transpose(0, 1) @ keys.mT * KEY_DIM**-0.5).masked_fill(hidden, -torch.inf)
        outs.append((scores.softmax(-1) @ values).transpose(0, 1))
        lses.append(scores.logsumexp(-1).t())
        with_sink = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, length, 1)], dim=2).softmax(-1)[..., :-1]
        sunk.append((with_sink @ values).transpose(0, 1))
    return torch.cat(outs), torch.cat(sunk), torch.cat(lses)


def deviation(rank: int, value_dim: int, options: dict[str, Any], sinks: bool, window: Any) -> float:
    """Largest difference from the dense answer: output, log-sum-exp, gradients of queries, keys, values and sinks."""
    group = dist.group.WORLD if dist.is_initialized() else None
    size = dist.get_world_size(group) if group is not None else 1
    whole = inputs(value_dim)
    leaves = [x.clone().requires_grad_() for x in whole[:4]]
    out, sunk, lse = dense(*leaves, window)
    loss = ((sunk if sinks else out) * whole[4]).sum() + ((lse * whole[5]).sum() if sinks else 0.0)
    loss.backward()  # type: ignore[no-untyped-call]

    shard = wlb.shard(LENGTHS, cp_size=size)
    held = torch.from_numpy(shard.rank(rank).token_indices.astype(np.int64))
    mine = [x[held].requires_grad_() for x in whole[:3]]
    sink = whole[3].clone().requires_grad_()
    common: dict[str, Any] = {"group": group, "window": window, **options}
    if sinks:
        got, got_lse = wt.context_parallel_attention(*mine, shard, return_lse=True, **common)
        total = ((got * torch.sigmoid(got_lse - sink).unsqueeze(-1)) * whole[4][held]).sum()
        total = total + (got_lse * whole[5][held]).sum()
        differences = [(got_lse - lse[held]).abs().max() if held.numel() else torch.zeros(())]
    else:
        got = wt.context_parallel_attention(*mine, shard, **common)
        total, differences = (got * whole[4][held]).sum(), []
    assert got.shape == (held.numel(), HEADS, value_dim)
    total.backward()
    pairs = [(got, out[held])] + [
        (x.grad, y.grad[held]) for x, y in zip(mine, leaves, strict=False) if y.grad is not None
    ]
    differences += [(ours - theirs).abs().max() for ours, theirs in pairs if held.numel() and ours is not None]
    if sinks:
        whole_sink = sink.grad if sink.grad is not None else torch.zeros_like(sink)
        if group is not None:
            dist.all_reduce(whole_sink, group=group)
        assert leaves[3].grad is not None
        differences.append((whole_sink - leaves[3].grad).abs().max())
    return float(torch.stack(differences).detach().max())


def all_deviations(rank: int, cases: list[Any]) -> list[float]:
    return [deviation(rank, *case) for case in cases]


CASES = [
    *itertools.product([5, 20], TRANSPORTS, [False], [None]),
    *itertools.product([5, 12, 20], TRANSPORTS, [True], [np.int64(7)]),
]


def test_values_of_any_width_and_sinks_on_every_transport() -> None:
    for found in processes.run(4, all_deviations, CASES):
        for deviated, case in zip(found, CASES, strict=True):
            assert deviated < 1e-12, case


def test_values_of_any_width_and_sinks_on_one_process() -> None:
    for case in CASES:
        if case[1]["transport"] != "usp":
            assert deviation(0, *case) < 1e-12, case


def test_the_gradient_of_the_log_sum_exp_is_not_rounded_to_half_precision() -> None:
    q, k, v, _, _, d_lse = (x.to(torch.bfloat16) for x in inputs(12))
    shard = wlb.shard(LENGTHS, cp_size=1)
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        leaf = q.to(dtype, copy=True).requires_grad_()
        _, lse = wt.context_parallel_attention(leaf, k.to(dtype), v.to(dtype), shard, return_lse=True)
        (lse * d_lse.to(lse.dtype) * 0.3).sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad.double())
    assert (gradients[0] - gradients[1]).abs().max() < 2**-7 * gradients[1].abs().max()


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
def test_integers_of_numpy_are_integers(integer: Any) -> None:
    shard = wlb.shard([8, 3], cp_size=2)
    wt.prepare_attention(shard, rank=integer(1), device="cpu", window=integer(4))
    wt.prepare_attention(
        shard, rank=integer(0), device="cpu", transport="usp", ulysses_size=integer(2), window=integer(4)
    )
    assert wt.cp_sizes("ulysses", num_heads=integer(6), num_kv_heads=integer(3)) == (1, 3, 6)
    micro_batch = wt.PipelineMicroBatch(tokens=integer(3), args=(torch.zeros(3),), target=torch.zeros(3))
    assert micro_batch.tokens == 3
    q = torch.zeros(3, 1, 8)
    one = wlb.shard([3], cp_size=1)
    wt.context_parallel_attention(q, q, q, one, window=integer(2), softmax_scale=np.float32(0.5))  # type: ignore[arg-type]
    for wrong in (True, 2.0, np.float64(2), "2", 0):
        with pytest.raises(wlb.WlbError, match="window"):
            wt.context_parallel_attention(q, q, q, one, window=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [1, None, "yes"])
def test_what_is_returned_is_true_or_false(wrong: Any) -> None:
    q = torch.zeros(3, 1, 8)
    with pytest.raises(wlb.WlbError, match="return_lse"):
        wt.context_parallel_attention(q, q, q, wlb.shard([3], cp_size=1), return_lse=wrong)
