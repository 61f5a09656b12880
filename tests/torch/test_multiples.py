"""`multiple_of_tokens` on every rank: plans, shards and batches agree, and padding changes nothing that is learnt."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import wlb
import wlb.torch as wt
from tests.torch import processes
from wlb.torch.data import collate

COST = wlb.CostModel(attention=1e-3, linear=1e-2)
KERNEL = wlb.KernelModel.analytic("h100", num_heads=4, num_kv_heads=2, head_dim=16)
CUTS: dict[str, dict[str, Any]] = {
    "auto": {},
    "per_document": {},
    "per_sequence": {},
    "contiguous": {},
    "hybrid": {"hybrid_threshold": 30},
    "adaptive": {"kernel_model": KERNEL},
}
LENGTHS = st.lists(st.one_of(st.just(1), st.integers(1, 90)), max_size=12)


@given(LENGTHS, st.sampled_from([*CUTS]), st.integers(1, 5), st.sampled_from([1, 2, 7, 32]))
@settings(max_examples=200, deadline=None)
def test_every_rank_of_a_batch_has_a_multiple(lengths: list[int], strategy: str, cp_size: int, multiple: int) -> None:
    rows = [np.arange(1, length + 1) for length in lengths]
    options: dict[str, Any] = {
        "cp_size": cp_size,
        "strategy": strategy,
        "multiple_of_tokens": multiple,
        **CUTS[strategy],
    }
    batches = [collate(rows, cp_rank=rank, **options) for rank in range(cp_size)]
    assert all(batch.tokens.numel() % multiple == 0 for batch in batches)
    assert sum(int(batch.real.sum()) for batch in batches) == sum(lengths)
    sizes = {batch.tokens.numel() for batch in batches}
    assert multiple == 1 or len(sizes) == 1
    # The plan of the same documents has the same sizes.
    plan = wlb.pack(
        lengths, num_micro_batches=1, max_tokens=5000, cost_model=COST, multiple_of_tokens=multiple, cp_size=cp_size
    )
    assert plan.padded_tokens.tolist() == [sum(batch.tokens.numel() for batch in batches)]
    assert multiple == 1 or plan.padded_tokens[0] < sum(lengths) + multiple * cp_size


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 8), st.sampled_from([2, 16, 32]))
@settings(max_examples=60, deadline=None)
def test_every_rank_of_a_dynamic_plan_has_a_multiple(lengths: list[int], world_size: int, multiple: int) -> None:
    plan = wlb.plan_dynamic_cp(
        lengths,
        world_size=world_size,
        num_stages=1,
        max_tokens_per_rank=64,
        cost_model=COST,
        group_sizes="any",
        multiple_of_tokens=multiple,
    )
    for group in (group for micro_batch in plan.micro_batches for group in micro_batch.groups):
        rows = [np.arange(1, length + 1) for length in group.lengths]
        options: dict[str, Any] = {"cp_size": group.cp_size, "multiple_of_tokens": multiple, "strategy": "per_document"}
        sizes = [collate(rows, cp_rank=rank, **options).tokens.numel() for rank in range(group.cp_size)]
        assert sizes == [group.padded_tokens_per_rank] * group.cp_size
        assert group.padded_tokens_per_rank % multiple == 0


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1, max_size=4)), min_size=1, max_size=6
    ),
    st.integers(1, 5),
    st.sampled_from([1, 2, 7, 32]),
)
@settings(max_examples=100, deadline=None)
def test_every_rank_of_a_forest_has_a_multiple(
    prompts: list[tuple[int, list[int]]], cp_size: int, multiple: int
) -> None:
    tokens = iter(range(1, 10**6))
    rows = []
    for prompt, answers in prompts:
        shared = [next(tokens) for _ in range(prompt)]
        rows += [shared + [next(tokens) for _ in range(answer)] for answer in answers]
    offsets = np.cumsum([0, *map(len, rows)])
    forest = wlb.PrefixForest.from_tokens(np.concatenate(rows), offsets)
    options: dict[str, Any] = {"multiple_of_tokens": multiple, "cp_size": cp_size}
    batches = [wt.collate(rows, forest, cp_rank=rank, **options) for rank in range(cp_size)]
    assert all(batch.tokens.numel() % multiple == 0 for batch in batches)
    plan = wlb.pack(forest, num_micro_batches=1, max_tokens=5000, cost_model=COST, **options)
    assert plan.padded_tokens.tolist() == [sum(batch.tokens.numel() for batch in batches)]


MIXED = [30, 1, 1, 17, 5, 1]


def attended(rank: int, cp_size: int, strategy: str, multiple: int) -> tuple[float, Any]:
    """The loss of a layer of attention on this rank's tokens, and its gradient by the table of embeddings."""
    rows = [np.arange(1, length + 1) for length in MIXED]
    sizes: dict[str, Any] = {"cp_size": cp_size, "multiple_of_tokens": multiple, "strategy": strategy, **CUTS[strategy]}
    batch = collate(rows, cp_rank=rank, **sizes)
    assert batch.tokens.numel() % multiple == 0
    generator = torch.Generator().manual_seed(1)
    table, aims = torch.randn(2, 64, 3 * 2 * 8, generator=generator, dtype=torch.float64)
    table.requires_grad_()
    query, key, value = table[batch.tokens].unflatten(-1, (3, 2, 8)).unbind(1)
    group = dist.group.WORLD if dist.is_initialized() else None
    out = wt.context_parallel_attention(query, key, value, batch.shard, group=group)
    learnt = batch.labels >= 0
    loss = (out.flatten(1) * aims[batch.labels.clamp(min=0), :16])[learnt].sum()
    loss.backward()
    assert table.grad is not None
    return float(loss.detach()), table.grad.numpy()


@pytest.mark.parametrize("strategy", [*CUTS])
def test_attention_over_padded_ranks_is_that_of_one_process(strategy: str) -> None:
    loss, gradient = attended(0, 1, "auto", 1)
    parts = processes.run(4, attended, 4, strategy, 32)
    assert sum(part for part, _ in parts) == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(sum(part for _, part in parts), gradient, rtol=1e-10, atol=1e-10)
