"""Context-parallel attention on real gloo processes, against dense attention of every document in float64."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import processes
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import wlb
from wlb.torch.attention import context_parallel_attention, kernels, plans
from wlb.torch.attention.segments import Call

HEAD_DIM = 8
STRATEGIES: dict[str, dict[str, Any]] = {
    "per_sequence": {"strategy": "per_sequence"},
    "per_document": {"strategy": "per_document"},
    "per_document by token": {"strategy": "per_document", "remainder": "token"},
    "hybrid": {"strategy": "hybrid", "hybrid_threshold": 24},
}
TRANSPORTS = ["all_gather", "ring", "ulysses", "usp"]
HEADS = {"MHA": (8, 8), "GQA": (8, 2), "MQA": (8, 1)}
MIXED = (1, 37, 2, 90, 1, 3, 24, 7)  # 1-token documents, documents shorter than 2 * cp, empty chunks
LENGTHS = [MIXED, (1,), (1, 1, 2), (61,), tuple([1] * 19)]  # ranks without tokens, ranks with whole documents only


@dataclass(frozen=True)
class Case:
    """One micro-batch and the options under test."""

    lengths: tuple[int, ...] = MIXED
    strategy: str = "per_document"
    transport: str = "all_gather"
    heads: str = "GQA"
    causal: bool = True
    window: int | None = None
    alibi: bool = False

    @property
    def problem(self) -> Case:
        """What the right answer depends on."""
        return replace(self, strategy="", transport="")

    def slopes(self) -> Tensor | None:
        return torch.exp2(-torch.arange(1.0, HEADS[self.heads][0] + 1)) if self.alibi else None


def inputs(case: Case) -> list[Tensor]:
    """q, k, v and the gradient of the output, of the whole micro-batch, float32."""
    generator = torch.Generator().manual_seed(sum(case.lengths) + HEADS[case.heads][1])
    heads, kv_heads = HEADS[case.heads]
    shapes = [(sum(case.lengths), h, HEAD_DIM) for h in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


@functools.cache
def right_answer(problem: Case) -> list[Tensor]:
    """Output and gradients of q, k, v: by document and head softmax of a dense matrix, by autograd, in float64."""
    q, k, v, d_out = (x.double().requires_grad_() for x in inputs(problem))
    slopes = problem.slopes()
    heads, kv_heads = HEADS[problem.heads]
    documents = []
    for begin, length in zip(np.cumsum((0, *problem.lengths)), problem.lengths, strict=False):
        rows = slice(int(begin), int(begin) + length)
        position = torch.arange(length)
        distance = position[:, None] - position[None, :]
        seen = torch.ones(length, length, dtype=torch.bool)
        if problem.causal:
            seen &= distance >= 0
        if problem.window is not None:
            seen &= distance.abs() < problem.window
        outputs = []
        for h in range(heads):
            g = h * kv_heads // heads
            scores = q[rows, h] @ k[rows, g].T / HEAD_DIM**0.5
            if slopes is not None:
                scores = scores - slopes[h].double() * distance.abs()
            outputs.append(torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=1) @ v[rows, g])
        documents.append(torch.stack(outputs, dim=1))
    out = torch.cat(documents)
    out.backward(d_out)
    return [x.detach() for x in (out, q.grad, k.grad, v.grad)]  # type: ignore[union-attr]


def shard_of(case: Case, cp_size: int) -> wlb.Shard:
    return wlb.shard(case.lengths, cp_size=cp_size, causal=case.causal, **STRATEGIES[case.strategy])


def deviations(case: Case, rank: int, group: dist.ProcessGroup | None) -> list[float]:
    """Largest deviation of this rank's output, dq, dk, dv from the right answer, relative to its largest value."""
    cp_size = 1 if group is None else dist.get_world_size(group)
    shard = shard_of(case, cp_size)
    held = torch.from_numpy(shard.rank(rank).token_indices.astype(np.int64))
    q, k, v, d_out = (x[held] for x in inputs(case))
    for x in (q, k, v):
        x.requires_grad_()
    out = context_parallel_attention(
        q,
        k,
        v,
        shard,
        group=group,
        transport=case.transport,  # type: ignore[arg-type]
        ulysses_size=min(4 if case.heads == "GQA" else 2, cp_size) if case.transport == "usp" else None,
        window=case.window,
        alibi_slopes=case.slopes(),
    )
    out.backward(d_out)
    result = []
    for got, right in zip((out, q.grad, k.grad, v.grad), right_answer(case.problem), strict=True):
        assert got is not None
        largest = right.abs().max()
        if largest < 1e-9:  # a softmax over one key has no gradient: compare with the inputs, which are about 1
            largest = torch.ones(())
        difference = (got.detach().double() - right[held]).abs()
        result.append(float(difference.max() / largest) if held.numel() else 0.0)
    return result


def all_deviations(rank: int, cases: list[Case]) -> list[list[float]]:
    return [deviations(case, rank, dist.group.WORLD) for case in cases]


def check(cp_size: int, cases: list[Case], timeout: float = processes.TIMEOUT) -> None:
    for case in cases:
        right_answer(case.problem)  # before the fork: once for all processes
    if cp_size == 1:
        results = [[deviations(case, 0, None) for case in cases]]
    else:
        results = processes.run(cp_size, all_deviations, cases, timeout=timeout)
    for i, case in enumerate(cases):
        out, *gradients = np.max([result[i] for result in results], axis=0)
        assert out < 1e-6, (case, out)
        assert max(gradients) < 1e-5, (case, gradients)


def matrix(rng: np.random.Generator, sampled: int) -> list[Case]:
    """Every transport with every strategy and every number of key heads; then options and lengths at random."""
    full = [Case(strategy=s, transport=t, heads=h) for s, t, h in itertools.product(STRATEGIES, TRANSPORTS, HEADS)]
    options = list(itertools.product(TRANSPORTS, [True, False], [None, 1, 5, 40], [False, True]))
    for i in range(sampled):
        transport, causal, window, alibi = options[i % len(options)]
        lengths = LENGTHS[rng.integers(len(LENGTHS))]
        if rng.random() < 0.5:
            lengths = tuple(np.exp(rng.uniform(0, np.log(120), rng.integers(1, 12))).astype(int).tolist())
        strategy, heads = rng.choice(list(STRATEGIES)), rng.choice(list(HEADS))
        full.append(Case(lengths, str(strategy), transport, str(heads), causal, window, alibi))
    return full


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_equals_dense_attention(cp_size: int) -> None:
    check(cp_size, matrix(np.random.default_rng(cp_size), 64))


@pytest.mark.parametrize("cp_size", [2, 4])
def test_long_documents(cp_size: int) -> None:
    lengths = (1, 1500, 20, 1, 600)
    check(
        cp_size,
        [Case(lengths, strategy, transport, "MQA") for strategy, transport in zip(STRATEGIES, TRANSPORTS, strict=True)],
    )


@pytest.mark.long
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
def test_equals_dense_attention_at_length(cp_size: int) -> None:
    rng = np.random.default_rng(100 + cp_size)
    cases = [case for case in matrix(rng, 300) if cp_size != 3 or case.transport in ("all_gather", "ring")]
    long = [(3000, 1, 17, 900, 2), (1, 1, 4096)]
    products = itertools.product(long, STRATEGIES, ["all_gather", "ring"], ["GQA"], [True, False], [None, 700])
    check(cp_size, cases + [Case(*options) for options in products], timeout=550)


# --- what a rank does -------------------------------------------------------------------------------------------------


def calls_of(shard: wlb.Shard, transport: str, rank: int, window: int | None = None) -> list[list[Call]]:
    device = torch.device("cpu")
    if transport == "all_gather":
        gather = plans.gather_plan(shard, rank, window=window, biased=False, device=device)
        return [gather.local, gather.remote]
    return plans.ring_plan(shard, rank, degree=1, window=window, biased=False, device=device)[1].steps


def scores(calls: list[list[Call]]) -> int:
    """Scores under the masks of all calls, counted one by one."""
    total = 0
    for call in itertools.chain(*calls):
        left, right = (1 << 40 if side < 0 else side for side in call.window)
        for q_from, q_to, k_from, k_to in call.spans:
            distance = np.arange(q_to - q_from)[:, None] + (k_to - k_from) - (q_to - q_from) - np.arange(k_to - k_from)
            total += int(((distance <= left) & (distance >= -right)).sum())
    return total


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("causal", [True, False])
def test_each_pair_is_computed_once_in_few_calls(strategy: str, causal: bool) -> None:
    shard = wlb.shard(MIXED, cp_size=4, causal=causal, **STRATEGIES[strategy])
    for rank, transport in itertools.product(range(4), ["all_gather", "ring"]):
        calls = calls_of(shard, transport, rank)
        assert scores(calls) == shard.rank(rank).pairs
        assert all(len(step) <= 1 for step in calls)


def test_only_keys_that_some_rank_lacks_are_gathered() -> None:
    whole = wlb.shard([8] * 16, cp_size=4, strategy="hybrid", hybrid_threshold=100)
    apart = wlb.shard([64, *[8] * 8], cp_size=4, strategy="hybrid", hybrid_threshold=64)
    device = torch.device("cpu")
    assert plans.gather_plan(whole, 0, window=None, biased=False, device=device).rows == 0
    assert plans.gather_plan(apart, 0, window=None, biased=False, device=device).rows == 16  # of 32 on each rank
    assert plans.gather_plan(apart, 0, window=1, biased=False, device=device).rows == 0


def test_layers_share_a_plan() -> None:
    shard, same = (wlb.shard(MIXED, cp_size=2) for _ in range(2))
    options: dict[str, Any] = {"window": None, "biased": False, "device": torch.device("cpu")}
    assert plans.gather_plan(shard, 1, **options) is plans.gather_plan(same, 1, **options)
    assert plans.gather_plan(shard, 1, **options) is not plans.gather_plan(shard, 0, **options)


# --- kernels ----------------------------------------------------------------------------------------------------------


def test_tiles_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_SCORES", 64)  # a few queries, or one
    check(1, [Case(causal=c, window=w, alibi=a) for c in (True, False) for w in (None, 5) for a in (True, False)])


def test_varlen_kernel_fits_the_operators_of_torch() -> None:
    # No GPU here: on the meta device the operators check their arguments and tell the shapes they would give.
    calls = calls_of(wlb.shard(MIXED, cp_size=1), "all_gather", 0)
    (call,) = itertools.chain(*calls)
    tokens = sum(MIXED)
    q = torch.empty(tokens, 8, 16, dtype=torch.bfloat16, device="meta")
    k, v = (torch.empty(tokens, 2, 16, dtype=torch.bfloat16, device="meta") for _ in range(2))
    kernel = kernels.VarlenKernel(0.25)
    out, lse = kernel.forward(q, k, v, call)
    assert out.shape == q.shape
    assert lse.shape == (8, tokens)
    dq, dk, dv = kernel.backward(out, q, k, v, out, lse, call)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)


def test_half_precision() -> None:
    case = Case()
    shard = shard_of(case, 1)
    right = right_answer(case.problem)
    q, k, v, d_out = (x.bfloat16() for x in inputs(case))
    for x in (q, k, v):
        x.requires_grad_()
    out = context_parallel_attention(q, k, v, shard)
    out.backward(d_out)
    for got, expected in zip((out, q.grad, k.grad, v.grad), right, strict=True):
        assert got is not None
        assert got.dtype == torch.bfloat16
        assert (got.double() - expected).abs().max() < 1e-2 * expected.abs().max()


# --- bad input --------------------------------------------------------------------------------------------------------

SHARD = wlb.shard([8, 3, 5], cp_size=2)


def good() -> dict[str, Any]:
    return {"q": torch.zeros(8, 6, 4), "k": torch.zeros(8, 3, 4), "v": torch.zeros(8, 3, 4), "shard": SHARD}


BAD: list[tuple[str, dict[str, Any]]] = [
    ("shard", {"shard": [8, 3, 5]}),
    ("group", {"group": None}),
    ("group", {"shard": wlb.shard([8, 3, 5], cp_size=4)}),
    ("transport", {"transport": "p2p"}),
    ("transport", {"transport": "ulysses", "k": torch.zeros(8, 3, 4), "v": torch.zeros(8, 3, 4)}),
    ("ulysses_size", {"transport": "ring", "ulysses_size": 2}),
    ("ulysses_size", {"transport": "usp"}),
    ("ulysses_size", {"transport": "usp", "ulysses_size": 3}),
    ("q", {"q": torch.zeros(8, 24)}),
    ("q", {"q": torch.zeros(8, 6, 4, dtype=torch.int64)}),
    ("k", {"k": torch.zeros(8, 3, 4, dtype=torch.float64)}),
    ("k", {"k": torch.zeros(8, 4, 4), "v": torch.zeros(8, 4, 4)}),
    ("k", {"k": torch.zeros(8, 3, 5)}),
    ("v", {"v": torch.zeros(8, 2, 4)}),
    ("v", {"v": torch.zeros(8, 3, 4, device="meta")}),
    ("k", {"k": torch.zeros(7, 3, 4)}),
    ("q", {"shard": wlb.shard([8, 3, 7], cp_size=2)}),
    ("softmax_scale", {"softmax_scale": 0.0}),
    ("softmax_scale", {"softmax_scale": float("nan")}),
    ("window", {"window": 0}),
    ("window", {"window": 2.5}),
    ("alibi_slopes", {"alibi_slopes": torch.zeros(3)}),
    ("alibi_slopes", {"alibi_slopes": torch.zeros(6, requires_grad=True)}),
    ("kernel", {"kernel": "flash_attn"}),
    ("kernel", {"kernel": "varlen"}),
    ("kernel", {"kernel": "cudnn"}),
]


def refusals(rank: int) -> list[str | None]:
    arguments = []
    for _, wrong in BAD:
        with pytest.raises(wlb.WlbError) as refused:
            context_parallel_attention(**(good() | {"group": dist.group.WORLD} | wrong))
        arguments.append(refused.value.argument)
    return arguments


def test_bad_input_is_refused_on_all_ranks_before_anything_is_sent() -> None:
    # Had one rank sent something, the barrier at the end of the process would not match.
    for found in processes.run(2, refusals, timeout=30):
        assert list(zip(found, BAD, strict=True)) == [(name, (name, wrong)) for name, wrong in BAD]


def parts_of_one_tensor(rank: int) -> float:
    """q, k, v as views of a fused projection, against contiguous ones."""
    case = Case(heads="MHA")
    shard = shard_of(case, 2)
    held = torch.from_numpy(shard.rank(rank).token_indices.astype(np.int64))
    q, k, v, d_out = (x[held] for x in inputs(case))
    worst = 0.0
    for transport in TRANSPORTS:
        fused = torch.cat((q, k, v), dim=1).requires_grad_()
        apart = [x.clone().requires_grad_() for x in (q, k, v)]
        for tensors in (fused.chunk(3, dim=1), apart):
            degree = 1 if transport == "usp" else None
            out = context_parallel_attention(
                *tensors,
                shard,
                group=dist.group.WORLD,
                transport=transport,  # type: ignore[arg-type]
                ulysses_size=degree,
            )
            out.backward(d_out.expand_as(out))
        gradients = [fused.grad, torch.cat([x.grad for x in apart], dim=1)]  # type: ignore[misc]
        worst = max(worst, float((gradients[0] - gradients[1]).abs().max()))  # type: ignore[operator]
    return worst


def test_views_of_a_fused_projection() -> None:
    assert max(processes.run(2, parts_of_one_tensor)) < 1e-6
