"""Context-parallel attention on real gloo processes, against dense attention of every document in float64."""

from __future__ import annotations

import functools
import itertools
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import wlb
from benches import attention as bench
from tests.torch import processes, test_attention_scores
from tests.torch.upstream import UPSTREAM, bound
from wlb import _core
from wlb.torch import attention
from wlb.torch.attention import (
    arguments,
    context_parallel_attention,
    kernels,
    keys,
    merge,
    plan,
    prepare_attention,
    ring,
)
from wlb.torch.attention.plan import Call
from wlb.torch.data import DynamicCpLoader, PackedBatch
from wlb.torch.groups import ContextParallelGroups, build_mesh

HEAD_DIM = 8
STRATEGIES: dict[str, dict[str, Any]] = {
    "auto": {"strategy": "auto"},
    "per_sequence": {"strategy": "per_sequence"},
    "per_document": {"strategy": "per_document"},
    "hybrid": {"strategy": "hybrid", "hybrid_threshold": 24},
}
TRANSPORTS = ["all_gather", "fetch", "ring", "ulysses", "usp"]
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
        return torch.exp2(-torch.arange(1, HEADS[self.heads][0] + 1, dtype=torch.float64)) if self.alibi else None


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
    out.backward(d_out.mT.contiguous().mT)  # as a layer that follows may give it
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


OPTIONS = list(itertools.product(TRANSPORTS, [True, False], [None, 1, 5, 40], [False, True]))


def matrix(rng: np.random.Generator, sampled: Iterable[int]) -> list[Case]:
    """Every transport with every strategy and every number of key heads; then these options, with lengths at random."""
    full = [Case(strategy=s, transport=t, heads=h) for s, t, h in itertools.product(STRATEGIES, TRANSPORTS, HEADS)]
    for i in sampled:
        transport, causal, window, alibi = OPTIONS[i]
        lengths = LENGTHS[rng.integers(len(LENGTHS))]
        if rng.random() < 0.5:
            lengths = tuple(np.exp(rng.uniform(0, np.log(120), rng.integers(1, 12))).astype(int).tolist())
        strategy, heads = rng.choice(list(STRATEGIES)), rng.choice(list(HEADS))
        full.append(Case(lengths, str(strategy), transport, str(heads), causal, window, alibi))
    return full


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_equals_dense_attention(cp_size: int) -> None:
    """All options on 1 and 2 ranks together, and on 4 and 8."""
    half = np.random.default_rng(0).permutation(len(OPTIONS))[cp_size.bit_length() % 2 :: 2]
    check(cp_size, matrix(np.random.default_rng(cp_size), half.tolist()))


@pytest.mark.parametrize("cp_size", [2, 4])
def test_heads_may_come_in_parts(cp_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "GATHERED", 1)
    check(
        cp_size,
        [
            Case(strategy=strategy, transport=transport, heads=heads, window=window)
            for strategy, transport, heads, window in itertools.product(
                ["auto", "per_document"], ["all_gather", "fetch"], ["MHA", "GQA"], [None, 5]
            )
        ],
    )


def test_as_many_heads_come_together_as_memory_has_room_for() -> None:
    whole = keys_plan(wlb.shard([1 << 17], cp_size=4, strategy="per_document"), 1)

    def parts(kv_heads: int, dtype: torch.dtype = torch.bfloat16) -> int:
        return keys.head_parts(whole, kv_heads, 2 * 128 * dtype.itemsize)

    assert [parts(8), parts(32), parts(24), parts(8, torch.float32)] == [2, 8, 6, 4]


def test_as_many_heads_of_a_forest_come_together_as_memory_has_room_for() -> None:
    """Each long completion has a copy of its prompt's keys; alone on a rank, documents need none."""
    forest = wlb.PrefixForest.from_prompts([1 << 13], 16, [1 << 12] * 16)
    for size in (1, 2, 4):
        shard = wlb.shard(forest, cp_size=size)
        plans = [keys_plan(shard, rank) for rank in range(size)]
        copied = max(sum(call.num_keys for call in (*plan.local, *plan.remote)) for plan in plans)
        assert len({plan.gathered for plan in plans}) == 1
        assert (16 << 13) / size <= copied <= plans[0].gathered <= forest.raw_tokens
    assert keys.head_parts(keys_plan(wlb.shard(forest, cp_size=1), 0), 8, 2 * 128 * 2) == 4
    assert keys.head_parts(keys_plan(wlb.shard([1 << 17], cp_size=1), 0), 8, 2 * 128 * 2) == 1


PLANNED = (90, 60, 20, 9, 1)
"""On three ranks of 32 tokens the first needs three, the second two."""


def planned(rank: int) -> list[tuple[Case, int, list[float]]]:
    """Attention over the groups that a loader's micro-batches have: of each its documents, size and deviations."""
    groups = ContextParallelGroups(build_mesh(dp=3, device_type="cpu"))
    loader: DynamicCpLoader[PackedBatch] = DynamicCpLoader(
        [[np.zeros(length, np.int64) for length in PLANNED[rank::3]]],
        plan=functools.partial(
            wlb.plan_dynamic_cp,
            world_size=3,
            num_stages=1,
            max_tokens_per_rank=32,
            cost_model=wlb.CostModel(attention=1.0, linear=100.0),
            exchange=wlb.Exchange(seconds_per_token=200.0),
            group_sizes="any",
            num_micro_batches=2,
        ),
        group=dist.group.WORLD,
    )
    (step,) = loader
    loader.close()
    found = []
    for batch, of_all in zip(step.micro_batches, step.plan, strict=True):
        case = Case(tuple(of_all.group_of(rank).lengths.tolist()), "per_document", "all_gather", "GQA")
        found.append((case, batch.cp_size, deviations(case, batch.cp_rank, groups.of(batch))))
    return found


def test_groups_of_any_size_attend_as_one() -> None:
    results = processes.run(3, planned)
    sizes = sorted(sorted(sizes) for sizes in zip(*([size for _, size, _ in ranks] for ranks in results), strict=True))
    assert sizes == [[1, 2, 2], [3, 3, 3]]
    for case, _, (out, *gradients) in itertools.chain(*results):
        assert out < 1e-6, case
        assert max(gradients) < 1e-5, case


@pytest.mark.parametrize("cp_size", [2, 4])
def test_long_documents(cp_size: int) -> None:
    lengths = (1, 1500, 20, 1, 600)
    check(
        cp_size,
        [
            Case(lengths, strategy, transport, "MQA")
            for strategy, transport in zip(itertools.cycle(STRATEGIES), TRANSPORTS)
        ],
    )


@pytest.mark.long
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
def test_equals_dense_attention_at_length(cp_size: int) -> None:
    rng = np.random.default_rng(100 + cp_size)
    sampled = np.resize(np.arange(len(OPTIONS)), 300).tolist()
    cases = [case for case in matrix(rng, sampled) if cp_size != 3 or case.transport in ("all_gather", "fetch", "ring")]
    long = [(3000, 1, 17, 900, 2), (1, 1, 4096)]
    products = itertools.product(long, STRATEGIES, ["all_gather", "ring"], ["GQA"], [True, False], [None, 700])
    check(cp_size, cases + [Case(*options) for options in products], timeout=550)


# --- what a rank does -------------------------------------------------------------------------------------------------


def keys_plan(shard: wlb.Shard, rank: int, *, fetch: bool = False, window: int | None = None) -> plan.KeysPlan:
    return plan.keys_plan(shard, rank, fetch=fetch, window=window, biased=False, device=torch.device("cpu"))


def ring_plan(shard: wlb.Shard, rank: int, *, degree: int = 1, window: int | None = None) -> Any:
    return plan.ring_plan(shard, rank, degree=degree, window=window, biased=False, device=torch.device("cpu"))


def calls_of(shard: wlb.Shard, transport: str, rank: int, window: int | None = None) -> list[list[Call]]:
    if transport in ("all_gather", "fetch"):
        made = keys_plan(shard, rank, fetch=transport == "fetch", window=window)
        return [made.local, made.remote]
    steps: list[list[Call]] = ring_plan(shard, rank, window=window)[1].steps
    return steps


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
    for rank, transport in itertools.product(range(4), ["all_gather", "fetch", "ring"]):
        calls = calls_of(shard, transport, rank)
        assert scores(calls) == shard.rank(rank).pairs
        assert all(len(step) <= 1 for step in calls)


def test_only_keys_that_some_rank_lacks_are_gathered() -> None:
    whole = wlb.shard([8] * 16, cp_size=4, strategy="hybrid", hybrid_threshold=100)
    apart = wlb.shard([64, *[8] * 8], cp_size=4, strategy="hybrid", hybrid_threshold=64)
    assert not keys_plan(whole, 0).moves
    assert keys_plan(apart, 0).arriving_rows == [16] * 4  # of 32 on each rank
    assert not keys_plan(apart, 0, window=1).moves
    # A window of 5 needs the last 4 tokens of a run, not all of it.
    assert keys_plan(apart, 0, window=5).arriving_rows == [8] * 4


def rows_of(rows: plan.Rows, total: int) -> int:
    if isinstance(rows, Tensor):
        return rows.numel()
    return total if rows is None else rows.stop - rows.start


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [*LENGTHS, (40,) * 7])
def test_ranks_gather_the_keys_that_their_shard_says(strategy: str, causal: bool, lengths: tuple[int, ...]) -> None:
    shard = wlb.shard(lengths, cp_size=4, causal=causal, **STRATEGIES[strategy])
    for rank, gathered in enumerate(shard.keys_gathered.tolist()):
        made = keys_plan(shard, rank)
        assert made.arriving_rows == [shard.keys_gathered.max()] * 4
        assert gathered <= sum(made.coming_rows)  # a gradient from every rank that sees the key
        split = sum(int(call.cu_seqlens_q[-1] - call.cu_seqlens_q[0]) for call in (*made.local, *made.remote))
        assert shard.tokens_split[rank] == (split if made.local and made.remote else 0)
        assert shard.keys_picked[rank] == sum(call.cu_seqlens_k[-1].item() for call in made.remote)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("causal", [True, False])
def test_a_rank_fetches_what_its_shard_says(strategy: str, causal: bool) -> None:
    shard = wlb.shard(MIXED, cp_size=4, causal=causal, **STRATEGIES[strategy])
    plans = [keys_plan(shard, rank, fetch=True) for rank in range(4)]
    for rank, made in enumerate(plans):
        assert made.arriving_rows[rank] == 0  # its own are read where they are
        assert made.buffer[2] == shard.keys_moved[rank]
        assert made.arriving_rows == [other.sent_rows[rank] for other in plans]
        assert rows_of(made.sent, int(shard.tokens_per_rank[rank])) == sum(made.sent_rows)
        assert (made.sent_rows, made.arriving_rows) == (made.coming_rows, made.going_rows)
        assert made.going.count == made.buffer[2]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("causal", [True, False])
def test_rows_that_attend_alone_and_rows_that_others_need_are_slices(strategy: str, causal: bool) -> None:
    for lengths in (*LENGTHS, (300, 90, 40, 40, 40, 30, 30, 30, 20, 20)):
        shard = wlb.shard(lengths, cp_size=4, causal=causal, **STRATEGIES[strategy])
        for rank in range(4):
            made = keys_plan(shard, rank)
            assert all(not isinstance(call.q_rows, Tensor) for call in (*made.local, *made.remote))
            assert all(not isinstance(call.k_rows, Tensor) for call in made.local)
            assert all(call.cu_seqlens_q[0] == 0 for call in made.local)
            assert not isinstance(made.sent, Tensor)


def test_rings_have_no_hop_that_serves_nobody() -> None:
    shard = wlb.shard([64, *[8] * 8], cp_size=4, strategy="contiguous")
    assert ring_plan(shard, 0)[1].last == [1, 0, 0, 0]
    assert ring_plan(shard, 0, window=1)[1].last == [0] * 4


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_hop_sends_is_what_it_receives(strategy: str, window: int | None, degree: int) -> None:
    shard = wlb.shard((*MIXED, 64), cp_size=8, **STRATEGIES[strategy])
    rings = [
        ring.Ring(ring_plan(shard, rank, degree=degree, window=window)[1], range(rank % degree, 8, degree), 8)
        for rank in range(8)
    ]
    for of in (lambda one: one.hops, lambda one: one.returns):
        for hops in zip(*map(of, rings), strict=True):  # the same number on all ranks, which all have to make
            for rank, other in itertools.product(range(8), repeat=2):
                assert hops[rank].sent[other] == hops[other].received[rank]
                assert not hops[rank].sent[rank]
    for hops in zip(*(one.hops for one in rings), strict=True):
        assert any(hop.sends for hop in hops)  # else it would serve nobody


def test_layers_share_a_plan() -> None:
    shard, same = (wlb.shard(MIXED, cp_size=2) for _ in range(2))
    assert keys_plan(shard, 1) is keys_plan(same, 1)
    assert keys_plan(shard, 1) is not keys_plan(shard, 0)


def index_tensors(part: Any) -> list[Tensor]:
    if isinstance(part, Tensor):
        return [part]
    if isinstance(part, (list, tuple)):
        return [tensor for item in part for tensor in index_tensors(item)]
    if is_dataclass(part):
        return [tensor for value in vars(part).values() for tensor in index_tensors(value)]
    return []


def test_index_arrays_of_a_plan_are_one_buffer_of_each_dtype() -> None:
    shard = wlb.shard(MIXED, cp_size=4)
    for made in (keys_plan(shard, 2), keys_plan(shard, 2, fetch=True, window=5), ring_plan(shard, 2)[1]):
        tensors = index_tensors(made)
        assert len(tensors) >= 3
        assert {tensor.dtype for tensor in tensors} <= {torch.int32, torch.int64}
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) <= 2


@pytest.mark.parametrize("kind", ["gather", "ring", "usp"])
def test_planning_holds_little_more_than_the_plan(kind: str) -> None:
    # In the core: a few arrays with an entry for each token of the micro-batch, not only those of the plan, would show.
    shard = wlb.shard([1 << 19, 5, 1 << 18, 1, 70_000], cp_size=8)
    before = peak_kib()
    if kind == "gather":
        made: Any = keys_plan(shard, 3)
    else:
        made = ring_plan(shard, 3, degree=1 if kind == "ring" else 2)
    held = sum(tensor.numel() * tensor.element_size() for tensor in index_tensors(made))
    assert (peak_kib() - before) * 1024 < 4 * held + 16 * shard.num_tokens


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_planning_leaves_the_gil_to_others() -> None:
    shard = wlb.shard([3_000_000, 2_000_000, *[40] * 50_000], cp_size=32, strategy="per_document")
    ticks: list[float] = []
    planning = threading.Event()
    done = threading.Event()

    def tick() -> None:
        planning.wait()
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0)

    other = threading.Thread(target=tick)
    other.start()
    planning.set()
    started = time.perf_counter()
    _core.keys_plan(shard, 3, fetch=False, window=None, biased=False)
    ended = time.perf_counter()
    done.set()
    other.join()
    inside = [moment for moment in ticks if started < moment < ended]
    assert ended - started > 0.01  # else it shows nothing
    assert max(np.diff([started, *inside, ended])) < 0.7 * (ended - started)


PREPARED: list[dict[str, Any]] = [
    *({"transport": transport} for transport in ("all_gather", "fetch", "ring", "ulysses")),
    {"transport": "usp", "ulysses_size": 2, "window": 7},  # without: the plan of ulysses
    {"transport": "ring", "window": 5},
    {"window": 5, "alibi": True},
]


def misses(rank: int) -> list[tuple[int, int]]:
    """Plans made by preparing, then by two layers, for all of `PREPARED`."""

    def made() -> int:
        return sum(kind.cache_info().misses for kind in kinds)

    kinds = (plan.keys_plan, plan.ring_plan)
    shard = shard_of(Case(), 2)
    q, k, v, _ = (x[: int(shard.tokens_per_rank[rank])] for x in inputs(Case()))
    for kind in kinds:
        kind.cache_clear()  # of what the parent process has made
    counts = []
    for options in PREPARED:
        before = made()
        prepare_attention(shard, rank=rank, device="cpu", **options)
        prepared = made()
        slopes = torch.ones(q.shape[1]) if options.get("alibi") else None
        others = {name: value for name, value in options.items() if name != "alibi"}
        for _ in range(2):
            context_parallel_attention(q, k, v, shard, group=dist.group.WORLD, alibi_slopes=slopes, **others)
        counts.append((prepared - before, made() - prepared))
    return counts


def test_layers_find_what_was_prepared() -> None:
    for counts in processes.run(2, misses):
        assert counts == [(1, 0)] * len(PREPARED)


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("shard", {"shard": MIXED}),
        ("rank", {"rank": 2}),
        ("rank", {"rank": -1}),
        ("transport", {"transport": "p2p"}),
        ("ulysses_size", {"transport": "usp"}),
        ("window", {"window": 0}),
    ],
)
def test_bad_preparation_is_refused(argument: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(wlb.WlbError) as refused:
        prepare_attention(**({"shard": wlb.shard(MIXED, cp_size=2), "rank": 0, "device": "cpu"} | wrong))
    assert refused.value.argument == argument


def graphs_of_compiled_layers(rank: int) -> int:
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def layer(x: Tensor, shard: wlb.Shard) -> Tensor:
        return context_parallel_attention(*(2 * x).chunk(3, dim=1), shard).exp()

    compiled = torch.compile(layer, backend=keep)
    for lengths in ((5, 9), (7,), (1, 2, 50), (3,)):
        shard = wlb.shard(lengths, cp_size=1)
        x = torch.randn(sum(lengths), 6, HEAD_DIM, requires_grad=True)
        out = compiled(x, shard)
        assert torch.equal(out, layer(x, shard))
        out.sum().backward()
    return len(graphs)


def test_compilers_leave_plans_alone() -> None:
    # In a process of its own: torch does not fork after it has compiled.
    assert processes.run(1, graphs_of_compiled_layers) == [4]  # before and after attention, of one length and of any


# What a layer of each transport does beside its kernel, at most, of operations that a dispatch mode sees: forward and
# backward, on the rank with most. The bench writes what they cost: benches/attention.py.
OPERATIONS = {"all_gather": (10, 18), "fetch": (10, 18), "ring": (119, 105), "ulysses": (21, 25)}


@pytest.mark.parametrize("transport", OPERATIONS)
def test_a_layer_does_little_beside_its_kernel(transport: str) -> None:
    shard = wlb.shard([300, 90, 40, 40, 40, 30, 30, 30, 20, 20], cp_size=8)
    layer = bench.Layer(transport, heads=8, kv_heads=8, head_dim=8)
    counts = [bench.counted(layer, shard, rank) for rank in range(8)]
    most = [max(count[of]["operations"] for count in counts) for of in ("forward", "backward")]
    assert all(found <= allowed for found, allowed in zip(most, OPERATIONS[transport], strict=True)), most


# Bytes that a layer's slowest rank moves beside the kernel and the network, over packing its keys and adding up their
# gradients once: forward and backward; and the gigabytes that it holds meanwhile. 128K tokens.
BYTES = {
    "CP 8, kv 8, auto, all_gather": (0.8, 0.9, 0.9),
    "CP 8, kv 8, auto, fetch": (0.9, 0.9, 0.9),
    "CP 4, kv 32, per_document, all_gather": (5.6, 3.3, 2.6),
    "CP 4, kv 32, per_document, fetch": (8.1, 4.1, 2.6),
}


@pytest.mark.parametrize("name", BYTES)
def test_a_layer_moves_and_holds_little_beside_its_kernel(name: str) -> None:
    found = bench.moved(name, bench.context(1 << 17))
    of_passes = [found[of]["over_floor"] for of in ("forward", "backward")]
    peak = max(found[of]["peak_gigabytes"] for of in ("forward", "backward"))
    assert all(got <= allowed for got, allowed in zip((*of_passes, peak), BYTES[name], strict=True)), found


def test_documents_that_are_here_take_no_operation_but_the_kernel() -> None:
    shard = wlb.shard([40] * 8, cp_size=4)
    count = bench.counted(bench.Layer("fetch", heads=8, kv_heads=2, head_dim=8), shard, 1)
    assert count["forward"]["moving"] == 0
    assert count["backward"]["moving"] == 0


# --- kernels ----------------------------------------------------------------------------------------------------------


def test_tiles_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_SCORES_OF_CPU", 64)  # a few queries, or one
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
    dq, d_keys = kernel.backward(out, q, k, v, out, lse, call)
    assert dq.shape == q.shape
    assert d_keys.shape == (tokens, 2, 2, 16)


def over_world(q: Tensor, k: Tensor, v: Tensor, shard: wlb.Shard, transport: str, *, ulysses_size: int = 2) -> Tensor:
    """Attention over all ranks; `ulysses_size` is that of "usp"."""
    return context_parallel_attention(
        q,
        k,
        v,
        shard,
        group=dist.group.WORLD,
        transport=transport,  # type: ignore[arg-type]
        ulysses_size=ulysses_size if transport == "usp" else None,
    )


def half_precision(rank: int) -> None:
    case = Case()
    shard = shard_of(case, 2)
    held = torch.from_numpy(shard.rank(rank).token_indices.astype(np.int64))
    right = [x[held] for x in right_answer(case.problem)]
    for transport in TRANSPORTS:
        q, k, v, d_out = (x[held].bfloat16() for x in inputs(case))
        for x in (q, k, v):
            x.requires_grad_()
        out = over_world(q, k, v, shard, transport)
        out.backward(d_out)
        for got, expected in zip((out, q.grad, k.grad, v.grad), right, strict=True):
            assert got is not None
            assert got.dtype == torch.bfloat16
            assert (got.double() - expected).abs().max() < 1e-2 * expected.abs().max()


def test_half_precision() -> None:
    right_answer(Case().problem)
    processes.run(2, half_precision)


def test_many_partial_results_are_summed_in_float32() -> None:
    # 64 blocks of keys that count alike: the output is their mean.
    (call,) = keys_plan(wlb.shard([4], cp_size=1), 0).local
    q = torch.zeros(4, 1, HEAD_DIM, dtype=torch.bfloat16)
    parts = torch.randn(64, 4, 1, HEAD_DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
    output = merge._Merged(q, kernels.ReferenceKernel(1.0), q.shape[2])
    for i, part in enumerate(parts):
        output.add(replace(call, fresh=i == 0), part, torch.zeros(1, 4))
    out, lse = output.result()
    mean = parts.double().mean(0)
    assert torch.equal(out, mean.bfloat16())
    assert lse.allclose(torch.full((1, 4), 64.0).log())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    def results(autocast: bool) -> list[Tensor]:
        q, k, v, d_out = (x.to(dtype) for x in inputs(Case()))
        for x in (q, k, v):
            x.requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = context_parallel_attention(q, k, v, shard_of(Case(), 1))
            out.backward(d_out)
        return [out, q.grad, k.grad, v.grad]  # type: ignore[list-item]

    for plain, under_autocast in zip(results(False), results(True), strict=True):
        assert plain.dtype == under_autocast.dtype == dtype
        assert torch.equal(plain, under_autocast)


def test_slopes_are_as_exact_as_float64_queries() -> None:
    q, k, v = torch.randn(3, 100, 2, HEAD_DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    slopes = torch.tensor([1 / 3, 1 / 7], dtype=torch.float64)
    position = torch.arange(100)
    bias = -slopes[:, None, None] * (position[:, None] - position).abs()
    right = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), attn_mask=bias)
    out = context_parallel_attention(q, k, v, wlb.shard([100], cp_size=1, causal=False), alibi_slopes=slopes)
    assert (out - right.transpose(0, 1)).abs().max() < 1e-13


class FlashStandIn:
    """In place of flash-attn: its internal functions, with upstream's parameters, computed by the reference kernel.

    It shows that the adapters pass everything where it belongs, and no more: upstream's kernels do not run here, and
    that they do what their interface says is not tested. It knows what they are told, lengths and a window aligned
    bottom-right, not the true positions: ALiBi where the last query does not stand at the last key comes out wrong, as
    it would from them; and so does a window that they would take for another. It takes float32, so that the tolerances
    are those of the reference kernel.
    """

    def __init__(self, version: int | str) -> None:
        self.version = version
        self.calls: Counter[str] = Counter()
        self.widths: set[tuple[int, int]] = set()
        module, names, forward, backward = UPSTREAM[version]
        self.module = ModuleType(module)
        for name, parameters, compute in zip(names, (forward, backward), (self.forward, self.backward), strict=True):
            setattr(self.module, name, bound(parameters, compute))

    def forward(self, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        self.calls["forward"] += 1
        kernel, call = self.as_told(options)
        into = options.get("out" if self.version == 4 else "out_")
        assert options.get("return_lse", True)
        out, lse = kernel.forward(options["q"], options["k"], options["v"], call, into)
        return out, lse, torch.empty(0), torch.empty(0)

    def inplace(self, out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The forward of torch that writes where it is told."""
        function = getattr(self.module, UPSTREAM[self.version][1][0])
        found, lse, *_ = function(*args, **kwargs)
        rows = slice(int(args[3][0]), int(args[3][-1]))
        out[rows] = found[rows]
        return lse  # type: ignore[no-any-return]

    def backward(self, options: dict[str, Any]) -> Any:
        self.calls["backward"] += 1
        assert options["dout"].stride(-1) == 1
        kernel, call = self.as_told(options)
        names = ("dout", "q", "k", "v", "out", "lse" if self.version == 4 else "softmax_lse")
        dq, d_keys = kernel.backward(*(options[name] for name in names), call)
        gradients = (dq, d_keys[:, 0], d_keys[:, 1, :, : options["v"].shape[2]])
        if self.version == "torch":
            return gradients
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            assert options[name].shape == gradient.shape
            rows = call.q_rows if name == "dq" else slice(None)
            options[name][rows] = gradient[rows]
        return options[names[-1]]

    def as_told(self, options: dict[str, Any]) -> tuple[kernels.ReferenceKernel, Call]:
        edges = []
        for side in ("q", "k"):
            cu_seqlens = options[f"cu_seqlens_{side}"]
            assert cu_seqlens.dtype == torch.int32
            assert cu_seqlens.is_contiguous()
            edges.append(cu_seqlens.numpy().astype(np.int64))
        (q, k) = edges
        assert (k[0], k[-1]) == (0, len(options["k"]))
        assert 0 <= q[0] < q[-1] <= len(options["q"])  # rows beside these are another call's
        assert q.size == k.size
        longest_q, longest_k = np.diff(q).max(), np.diff(k).max()
        assert options["max_seqlen_q"] == max(longest_q, 2)  # 1: rows are as many as spans
        assert options["max_seqlen_k"] in (longest_k, max(longest_q, longest_k))
        widths = options["q"].shape[2], options["v"].shape[2]
        self.widths.add(widths)
        assert widths[0] == widths[1] or self.version in (3, 4)
        slopes = options.get("alibi_slopes")
        assert slopes is None or slopes.dtype == torch.float32
        call = Call(
            q_rows=slice(int(q[0]), int(q[-1])),
            k_rows=None,
            cu_seqlens_q=options["cu_seqlens_q"],
            cu_seqlens_k=options["cu_seqlens_k"],
            max_seqlen_q=options["max_seqlen_q"],
            max_seqlen_k=options["max_seqlen_k"],
            window=self.window(options),
            bounds=np.concatenate([q, k, np.zeros(q.size - 1)]).astype(np.int32),
            fresh=True,
        )
        scale = options.get("softmax_scale") or options["scale"]
        return kernels.ReferenceKernel(scale, slopes, options.get("softcap") or None), call

    def window(self, options: dict[str, Any]) -> tuple[int, int]:
        """What the kernels make of a window: they take a side that is as wide as a limit for open, and fill it in."""
        if self.version == 4:  # None is open, and nothing is cut
            given = (options["window_size_left"], options["window_size_right"])
            assert all(side is None or side >= 0 for side in given)
            left, right = (-1 if side is None else side for side in given)
            return left, 0 if options["causal"] else right
        q, k = options["max_seqlen_q"], options["max_seqlen_k"]
        limits = (k - 1, q - 1) if self.version == 3 else (k, k)
        sides = (options["window_size_left"], options["window_size_right"])
        left, right = (-1 if side >= limit else side for side, limit in zip(sides, limits, strict=True))
        if options["causal" if "causal" in options else "is_causal"]:
            right = 0
        if (left, right) in ((-1, -1), (-1, 0)):
            return left, right
        return limits[0] if left < 0 else left, limits[1] if right < 0 else right


def forget_installed() -> None:
    attention.forget()
    kernels._flash_attn_2.cache_clear()
    kernels._flash_attn_3.cache_clear()
    kernels._flash_attn_4.cache_clear()


@pytest.fixture
def flash_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What is installed; tensors and the device, an Ampere GPU as far as can be seen, suit every flash kernel."""
    monkeypatch.setattr(kernels, "_flash_refusal", lambda q, widths: None)
    monkeypatch.setattr(kernels, "_generation", lambda q: torch.cuda.get_device_capability()[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface", kernels.FLASH_ATTN_4):
        monkeypatch.setitem(sys.modules, name, None)  # None: importing it fails
    forget_installed()
    yield sys.modules  # type: ignore[misc]
    forget_installed()


@pytest.fixture(params=[2, 3, 4])
def flash(
    request: pytest.FixtureRequest, flash_modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> FlashStandIn:
    stand_in = FlashStandIn(request.param)
    if request.param == "torch":
        for name in ("_flash_attention_forward", "_flash_attention_backward"):
            monkeypatch.setattr(torch.ops.aten, name, getattr(stand_in.module, name))
        if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):  # torch 2.11 has none
            monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace", stand_in.inplace)
        return stand_in
    flash_modules[stand_in.module.__name__] = stand_in.module
    if request.param in (3, 4):
        capability = {3: (9, 0), 4: (10, 0)}[request.param]
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    return stand_in


@pytest.mark.parametrize("flash", [2, 3, 4, "torch"], indirect=True)
@pytest.mark.parametrize("cp_size", [1, 4])
def test_flash_adapters_pass_everything_where_it_belongs(flash: FlashStandIn, cp_size: int) -> None:
    # 40: in a ring it is wider than some spans of keys, and these have more queries.
    options = itertools.product(TRANSPORTS, [True, False], [("MHA", None), ("GQA", 5), ("GQA", 40)])
    check(cp_size, [Case(MIXED, "per_document", t, heads, causal, window) for t, causal, (heads, window) in options])
    assert cp_size > 1 or min(flash.calls["forward"], flash.calls["backward"]) >= 24


@pytest.mark.parametrize("cp_size", [1, 2])
def test_flash_adapters_pass_caps_sinks_and_widths(flash: FlashStandIn, cp_size: int) -> None:
    """A kernel that takes narrow values as they are gets them so; the others get them padded."""
    test_attention_scores.hold(
        cp_size, [replace(case, alibi=False) for case in test_attention_scores.CASES if case.value_dim != 5]
    )
    assert cp_size > 1 or min(flash.calls["forward"], flash.calls["backward"]) >= 24
    narrow = flash.version in (3, 4)
    # With the log-sum-exp 8 channels more; values of 8 with it are those of a forest.
    assert cp_size > 1 or flash.widths == {(16, 16), (24, 24)} | ({(16, 8), (24, 16)} if narrow else set())


LONG_BESIDE_SHORT = (*[3] * 30, *[2] * 30, 4096)
"""A backward starts 32 blocks of keys for each of these documents, if they are one call: 1,860 without work."""


@pytest.mark.parametrize("flash", [2, 3, 4], indirect=True)
def test_calls_are_divided_for_kernels_that_gain_by_it(flash: FlashStandIn) -> None:
    shard = wlb.shard(LONG_BESIDE_SHORT, cp_size=1)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(shard.num_tokens, heads, 8, generator=generator) for heads in (2, 1, 1))
    found = []
    for kernel in ("flash_attn", "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out: Any = context_parallel_attention(*leaves, shard, kernel=kernel)  # type: ignore[call-overload]
        found.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
        if kernel == "flash_attn":
            assert flash.calls == Counter(dict.fromkeys(("forward", "backward"), 1 if flash.version == 4 else 2))
    for ours, right in zip(*found, strict=True):
        assert (ours - right).abs().max() < 1e-5 * right.abs().max()


@pytest.mark.parametrize("transport", ["all_gather", "fetch", "ring"])
@pytest.mark.parametrize("cp_size", [1, 8])
def test_buckets_are_the_same_spans_in_few_calls(cp_size: int, transport: str) -> None:
    lengths = np.random.default_rng(0).permutation([60000, 9000, *[700] * 40, *[60] * 300])
    shard = wlb.shard(lengths, cp_size=cp_size, strategy="per_document")
    empty = [0, 0]
    for rank in range(cp_size):
        spans = []
        for index, buckets in enumerate((False, True)):
            options: dict[str, Any] = {"window": None, "biased": False, "device": torch.device("cpu")}
            if transport == "ring":
                calls = plan.ring_plan(shard, rank, degree=1, buckets=buckets, **options)[1].steps
            else:
                made = plan.keys_plan(shard, rank, fetch=transport == "fetch", buckets=buckets, **options)
                calls = [made.local, made.remote]
            sizes = [np.diff(call.spans.reshape(-1, 2, 2), axis=2)[..., 0] for of_keys in calls for call in of_keys]
            spans.append(np.concatenate(sizes))
            blocks = [-(-keys // 128) for _, keys in (size.T for size in sizes)]
            empty[index] += sum(int(len(of) * of.max() - of.sum()) for of in blocks)
            assert len(sizes) <= 5 * len(calls)
        assert np.array_equal(*spans)
    assert 4 * empty[1] < empty[0]


def test_what_has_no_softcap_is_refused_by_name(flash_modules: dict[str, Any]) -> None:
    q = torch.zeros(4, 2, 8)
    options: dict[str, Any] = {"scale": 1.0, "alibi_slopes": None, "alibi_aligned": True, "softcap": 2.0}
    with pytest.raises(wlb.WlbError, match=r"'varlen' caps no scores \(softcap\); kernel='reference' supports it"):
        kernels.choose("varlen", q, **options)
    assert kernels.choose("auto", q, **options) == kernels.ReferenceKernel(1.0, None, 2.0)
    with pytest.raises(wlb.WlbError, match="is not installed"):
        kernels.choose("flash_attn", q, **options)


@pytest.mark.parametrize("flash", [4], indirect=True)
def test_widths_that_a_gpu_cannot_are_refused_by_name(flash: FlashStandIn) -> None:
    options: dict[str, Any] = {"scale": 1.0, "alibi_slopes": None, "alibi_aligned": True}
    assert kernels.choose("auto", torch.zeros(4, 2, 192), value_dim=128, **options) == kernels.FlashAttention4(1.0)
    assert kernels.value_width(kernels.FlashAttention4(1.0), torch.zeros(4, 2, 192), 128) == 128
    # The backward of the log-sum-exp is wider than the forward: the kernel has to take both.
    assert kernels.value_width(kernels.FlashAttention3(1.0), torch.zeros(4, 2, 184), 120, more=8) == 120
    assert kernels.value_width(kernels.FlashAttention3(1.0), torch.zeros(4, 2, 128), 112, more=8) == 128
    wide = torch.zeros(4, 2, 256)
    assert isinstance(kernels.choose("auto", wide, **options), kernels.VarlenKernel)
    with pytest.raises(wlb.WlbError, match="'flash_attn' takes no heads of 256 with values of 256 on this GPU"):
        kernels.choose("flash_attn", wide, **options)


@pytest.mark.parametrize("cp_size", [1, 4])
def test_alibi_is_true_to_positions_whatever_is_installed(flash: FlashStandIn, cp_size: int) -> None:
    options = itertools.product(TRANSPORTS, ["GQA"], [True, False], [None, 5], [True])
    check(cp_size, [Case(MIXED, "per_document", *rest) for rest in options])
    assert cp_size > 1 or bool(flash.calls) == (flash.version == 2)


@pytest.mark.parametrize("name", ["flash", "SDPA", None])
def test_an_unknown_kernel_is_refused_where_all_can_run(name: Any, flash_modules: dict[str, Any]) -> None:
    with pytest.raises(wlb.WlbError, match="must be one of auto, flash_attn, varlen, reference") as refused:
        kernels.choose(name, torch.zeros(4, 2, 8), scale=1.0, alibi_slopes=None, alibi_aligned=True)
    assert refused.value.argument == "kernel"


def test_flash_attn_by_name_refuses_alibi_that_it_has_not(flash: FlashStandIn) -> None:
    q, slopes = torch.zeros(4, 2, 8), torch.ones(2)
    reason = "distances wrongly" if flash.version == 2 else "has no ALiBi"
    with pytest.raises(wlb.WlbError, match=reason):
        kernels.choose("flash_attn", q, scale=1.0, alibi_slopes=slopes, alibi_aligned=False)
    chosen = kernels.choose("auto", q, scale=1.0, alibi_slopes=slopes, alibi_aligned=False)
    assert isinstance(chosen, kernels.ReferenceKernel)


INTERFACES = {
    "flash-attn 4": ("cute/interface.py", ""),
    "an older flash-attn 4": ("cute/interface.py", "def _flash_attn_bwd(q, k, v, out, dout, lse): ..."),
    "flash-attn 4 without its compiler": ("cute/interface.py", "raise RuntimeError('no driver')"),
    "a build for another torch": ("flash_attn_interface.py", "raise ImportError('undefined symbol')"),
}


@pytest.mark.parametrize("installed", INTERFACES)
def test_flash_attn_without_a_usable_interface_is_not_chosen(
    installed: str, flash_modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, source = INTERFACES[installed]
    file = tmp_path / "flash_attn" / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.cute", kernels.FLASH_ATTN_4):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if "flash-attn 4" in installed:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    q = torch.zeros(4, 2, 8)
    chosen = kernels.choose("auto", q, scale=1.0, alibi_slopes=None, alibi_aligned=True)
    assert isinstance(chosen, kernels.VarlenKernel)
    with pytest.raises(wlb.WlbError, match="not installed"):
        kernels.choose("flash_attn", q, scale=1.0, alibi_slopes=None, alibi_aligned=True)


def test_flash_attn_is_looked_for_once(flash_modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    looked: Counter[str] = Counter()

    class Finder:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            looked[name] += 1

    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for _ in range(3):
        kernels.choose("auto", torch.zeros(4, 2, 8), scale=1.0, alibi_slopes=None, alibi_aligned=True)
    assert looked["flash_attn_interface"] == 1
    assert looked["flash_attn"] <= 1


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (12, 0)])
def test_flash_kernels_are_for_ampere_and_newer(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    with FakeTensorMode():
        q = torch.empty(4, 2, 8, dtype=torch.bfloat16, device="cuda")
    chosen = kernels.choose("auto", q, scale=1.0, alibi_slopes=None, alibi_aligned=True)
    old = capability < (8, 0)
    assert isinstance(chosen, kernels.ReferenceKernel) == old
    if old:
        with pytest.raises(wlb.WlbError, match=r"compute capability 8\.0, this GPU has 7\."):
            kernels.choose("varlen", q, scale=1.0, alibi_slopes=None, alibi_aligned=True)


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
    ("softcap", {"softcap": 0.0}),
    ("softcap", {"softcap": float("inf")}),
    ("sinks", {"sinks": torch.zeros(3)}),
    ("sinks", {"sinks": torch.zeros(6, dtype=torch.int64)}),
    ("sinks", {"sinks": torch.zeros(6, device="meta")}),
    ("sinks", {"sinks": [0.0] * 6}),
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
    for found in processes.run(2, refusals):
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
            out = over_world(*tensors, shard, transport, ulysses_size=1)
            out.backward(d_out.expand_as(out))
        gradients = [fused.grad, torch.cat([x.grad for x in apart], dim=1)]  # type: ignore[misc]
        worst = max(worst, float((gradients[0] - gradients[1]).abs().max()))  # type: ignore[operator]
    return worst


def test_views_of_a_fused_projection() -> None:
    assert max(processes.run(2, parts_of_one_tensor)) < 1e-6


def second_derivatives(rank: int) -> None:
    case = Case()
    shard = shard_of(case, 2)
    held = torch.from_numpy(shard.rank(rank).token_indices.astype(np.int64))
    for transport in TRANSPORTS:
        q, k, v = (x[held].requires_grad_() for x in inputs(case)[:3])
        out = over_world(q, k, v, shard, transport)
        (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            dq.square().sum().backward()


def test_there_is_no_second_derivative() -> None:
    processes.run(2, second_derivatives)


@pytest.mark.parametrize("window", [None, 2**31 - 1, 2**31, 2**63])
def test_a_window_that_no_sequence_fills_is_none(window: int | None) -> None:
    assert arguments.reach(window) is None
    assert arguments.reach(2**31 - 2) == 2**31 - 2
