"""Tokens between two cuts of a micro-batch, on real process groups: each one arrives where the other cut has it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # optimizers do, in each process that has not
import torch.distributed as dist
import torch.distributed.nn

import wlb
import wlb.torch as wt
from examples import hybrid
from tests.torch import processes as forked

LENGTHS = [[37, 1, 12, 5, 1, 64], [3], [1, 1], [200]]  # fewer tokens than ranks, too
CUTS: list[dict[str, Any]] = [
    {"strategy": "contiguous"},
    {"strategy": "auto"},
    {"strategy": "per_document"},
    {"strategy": "hybrid", "hybrid_threshold": 10},
]


def every_pair(rank: int) -> None:
    size, group = dist.get_world_size(), dist.group.WORLD
    for lengths in LENGTHS:
        shards = [wlb.shard(lengths, cp_size=size, **cut) for cut in CUTS]
        for before, after in itertools.product(shards, repeat=2):
            source, target = (
                torch.from_numpy(shard.rank(rank).token_indices.astype(np.int64)) for shard in (before, after)
            )
            x = torch.stack([source, -source], dim=1).double().requires_grad_()
            out = wt.recut(x, before, after, group=group)
            assert torch.equal(out, torch.stack([target, -target], dim=1).double())
            weight = torch.rand(sum(lengths), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            (out * weight[target]).sum().backward()
            assert x.grad is not None
            assert torch.equal(x.grad, weight[source])


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_token_arrives_and_its_gradient_returns(size: int) -> None:
    forked.run(size, every_pair)


def recurrence(x: torch.Tensor, starts: list[bool], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A state along each document: `state = 0.9 state + x`, from nothing where a document starts."""
    out = []
    for row, start in zip(x, starts, strict=True):
        state = row if start else 0.9 * state + row
        out.append(state)
    return torch.stack(out) if out else x, state


def hybrid_model(rank: int, lengths: list[int], seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """A recurrent layer between two of attention, on this rank's part; what it gives, and the gradient of the input."""
    size, group = dist.get_world_size(), dist.group.WORLD
    even, runs = (wlb.shard(lengths, cp_size=size, **cut) for cut in ({}, {"strategy": "contiguous"}))
    whole = torch.rand(sum(lengths), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rows = torch.from_numpy(even.rank(rank).token_indices.astype(np.int64))
    x = whole[rows].requires_grad_()
    mixed = wt.recut(attend(x, even, group), even, runs, group=group)
    # The states that ranks hand on: every rank has the recurrence of all, and takes its own part of it.
    parts = [runs.rank(other).token_indices for other in range(size)]
    padded = torch.zeros(max(map(len, parts)), 4, dtype=torch.float64)
    gathered = torch.distributed.nn.functional.all_gather(torch.cat([mixed, padded[len(mixed) :]]), group)
    everything = torch.cat([gathered[other][: len(part)] for other, part in enumerate(parts)])
    positions = np.concatenate([np.arange(length) for length in lengths])
    out, _ = recurrence(everything, (positions == 0).tolist(), torch.zeros(4, dtype=torch.float64))
    mine = out[torch.from_numpy(parts[rank].astype(np.int64))]
    result = attend(wt.recut(mine, runs, even, group=group), even, group)
    result.pow(2).sum().backward()
    assert x.grad is not None
    return [(rows.numpy(), result.detach().numpy()), (rows.numpy(), x.grad.numpy())]


def attend(x: torch.Tensor, shard: wlb.Shard, group: Any) -> torch.Tensor:
    q = x[:, None, :]
    return x + wt.context_parallel_attention(q, q, q, shard, group=group, kernel="reference")[:, 0]


@pytest.mark.parametrize("size", [2, 4])
def test_attention_and_a_recurrence_are_those_of_one_process(size: int) -> None:
    lengths = [9, 1, 30, 4, 1]
    whole = forked.run(1, alone, lengths)[0]
    found = forked.run(size, hybrid_model, lengths, 3)
    for which, (_, expected) in enumerate(whole):
        together = np.empty_like(expected)
        for rank in found:
            rows, values = rank[which]
            together[rows] = values
        np.testing.assert_allclose(together, expected, rtol=1e-12, atol=1e-12)


def alone(rank: int, lengths: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    shard = wlb.shard(lengths, cp_size=1)
    whole = torch.rand(sum(lengths), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x = whole.requires_grad_()
    positions = np.concatenate([np.arange(length) for length in lengths])
    out, _ = recurrence(attend(x, shard, None), (positions == 0).tolist(), torch.zeros(4, dtype=torch.float64))
    result = attend(out, shard, None)
    result.pow(2).sum().backward()
    assert x.grad is not None
    rows = np.arange(sum(lengths))
    return [(rows, result.detach().numpy()), (rows, x.grad.numpy())]


def test_one_process_has_every_token() -> None:
    shard = wlb.shard([3, 4], cp_size=1)
    x = torch.rand(7, 2)
    assert wt.recut(x, shard, wlb.shard([3, 4], cp_size=1, strategy="contiguous")) is x


def test_what_does_not_fit_is_named() -> None:
    one, other = wlb.shard([3, 4], cp_size=1), wlb.shard([4, 3], cp_size=1)
    for name, arguments in {
        "before": (torch.rand(7), None, one),
        "after": (torch.rand(7), one, other),
        "x": (torch.rand(6), one, one),
    }.items():
        with pytest.raises(wlb.WlbError, match=name):
            wt.recut(*arguments)  # type: ignore[arg-type]
    with pytest.raises(wlb.WlbError, match="after"):
        wt.recut(torch.rand(7), one, wlb.shard([3, 4], cp_size=2))
    with pytest.raises(wlb.WlbError, match="after"):
        wt.recut(torch.rand(7), one, None)  # type: ignore[arg-type]
    with pytest.raises(wlb.WlbError, match="group"):
        wt.recut(torch.rand(4), wlb.shard([3, 4], cp_size=2), wlb.shard([3, 4], cp_size=2))


def convolved(x: torch.Tensor, positions: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """A causal convolution that stops at documents, over rows of which the first `taps - 1` are what stands before."""
    width = taps.numel()
    rows = x[width - 1 :]
    total = torch.zeros_like(rows)
    for back in range(width):
        shifted = x[width - 1 - back : x.shape[0] - back]
        total = total + taps[back] * shifted * (positions >= back).unsqueeze(1)
    return total


def halos(rank: int, width: int) -> None:
    size, group = dist.get_world_size(), dist.group.WORLD
    generator = torch.Generator().manual_seed(7)
    taps = torch.rand(width, dtype=torch.float64, generator=generator)
    for lengths in LENGTHS:
        whole = torch.rand(sum(lengths), 2, dtype=torch.float64, generator=generator).requires_grad_()
        weight = torch.rand(sum(lengths), 2, dtype=torch.float64, generator=generator)
        positions = torch.cat([torch.arange(length) for length in lengths])
        expected = convolved(torch.cat([whole.new_zeros(width - 1, 2), whole]), positions, taps)
        (expected * weight).sum().backward()
        runs = wlb.shard(lengths, cp_size=size, strategy="contiguous")
        mine = torch.from_numpy(runs.rank(rank).token_indices.astype(np.int64))
        x = whole.detach()[mine].requires_grad_()
        before = wt.halo(x, runs, tokens=np.int64(width - 1), group=group)  # type: ignore[arg-type]
        out = convolved(torch.cat([before, x]), positions[mine], taps)
        assert torch.allclose(out, expected[mine], rtol=1e-12, atol=1e-12)
        (out * weight[mine]).sum().backward()
        assert x.grad is not None
        assert whole.grad is not None
        assert torch.allclose(x.grad, whole.grad[mine], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("size", "width"), [(2, 4), (3, 1), (8, 30)])
def test_a_convolution_over_ranks_is_that_of_one_process(size: int, width: int) -> None:
    forked.run(size, halos, width)


def test_a_halo_needs_runs() -> None:
    even = wlb.shard([8, 8], cp_size=2, strategy="per_document")
    forked.run(2, refused_halo, even)
    one = wlb.shard([3], cp_size=1)
    assert torch.equal(wt.halo(torch.ones(3, 2), one, tokens=2), torch.zeros(2, 2))
    for arguments, named in (({"tokens": -1}, "tokens"), ({"tokens": 1.0}, "tokens")):
        with pytest.raises(wlb.WlbError, match=named):
            wt.halo(torch.ones(3, 2), one, **arguments)  # type: ignore[arg-type]
    with pytest.raises(wlb.WlbError, match="3 tokens"):
        wt.halo(torch.ones(4, 2), one, tokens=1)


def refused_halo(rank: int, shard: wlb.Shard) -> None:
    with pytest.raises(wlb.WlbError, match=r"more than one run.*contiguous"):
        wt.halo(torch.ones(8, 2), shard, tokens=1, group=dist.group.WORLD)


def losses_of_the_example(rank: int) -> list[float]:
    return hybrid.train(4)


def test_the_example_learns_the_same_on_any_number_of_ranks() -> None:
    (alone,) = forked.run(1, losses_of_the_example)
    assert alone[-1] < alone[0]
    for found in forked.run(3, losses_of_the_example):
        np.testing.assert_allclose(found, alone, rtol=1e-5)
