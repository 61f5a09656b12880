"""Megatron-Core's own sequence packing (after 0.19) on our plans: its scheduler's interface, and its data movement."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.torch.processes import run as run_processes

pytest.importorskip("megatron.core", reason="needs megatron-core")

import wlb
from tests.trainers.megatron_run import Run, initialize, on_cpu
from wlb.integrations import megatron
from wlb.integrations.megatron.groups import largest_group

data_schedule = pytest.importorskip("megatron.core.datasets.data_schedule")
KNOWN = ("BalancedCPScheduler", "DpBalancedScheduler", "DefaultDynamicCPScheduler")
PLAIN = {"pipeline_model_parallel_layout": None, "mtp_num_layers": None}  # what its wrapper also asks of a model
COST = wlb.CostModel(attention=1.0, linear=200.0)
needs_packing = pytest.mark.skipif(
    not hasattr(data_schedule, "wrap_data_iterator"), reason="this megatron-core has no sequence packing of its own"
)


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*KNOWN, "scheduler_map"):
        if (found := getattr(data_schedule, name, None)) is not None:
            monkeypatch.setattr(data_schedule, name, dict(found) if isinstance(found, dict) else found)


def samples(rank: int) -> list[dict[str, torch.Tensor]]:
    """A step's of one data-parallel rank: every token says whose it is."""
    lengths = np.random.default_rng(rank).lognormal(4, 1.2, 40).astype(int).clip(8, 900) // 8 * 8
    return [sample(1000 * rank + at, int(length)) for at, length in enumerate(lengths)]


def sample(number: int, length: int) -> dict[str, torch.Tensor]:
    tokens = torch.full((length,), number)
    size = torch.tensor([length])
    given = {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(length)}
    return given | {"position_ids": torch.arange(length), "original_seq_len": size, "padded_seq_len": size.clone()}


def wrapped(rank: int, run: Run, ours: bool, group: int | None, sizes: dict[str, Any]) -> Any:
    """What its wrapper gives this rank: of each micro-batch the samples, their lengths, and among how many ranks."""
    with on_cpu():
        initialize(run)
        if ours:
            megatron.install_schedulers(cost_model=COST)
        virtual = {"virtual_pipeline_model_parallel_size": 2 if group else None}
        config = SimpleNamespace(microbatch_group_size_per_vp_stage=group, **virtual, **sizes, **PLAIN)
        read = iter([samples(rank // run.cp)])
        iterators, count, tokens, _ = data_schedule.wrap_data_iterator([read, None] if group else read, config, 1)
        iterator = iterators[0] if group else iterators
        found = []
        for _ in range(count):
            batch = next(iterator)
            lengths = batch["cu_seqlens_padded"].diff().tolist()
            parts = batch["tokens"].split(lengths)
            assert all((part == part[0]).all() for part in parts) or "min_dynamic_context_parallel_size" in sizes
            size = batch.get("local_cp_size")
            held = dict(zip([int(part[0]) for part in parts], lengths, strict=True))
            found.append((held, run.cp if size is None else int(size)))
        return found, tokens


def slowest(ranks: list[Any]) -> float:
    """Work of the busiest rank over that of the mean rank."""
    work = [sum(COST.cost(list(part.values())).sum() for part, _ in found) for found, _ in ranks]
    return float(max(work) / np.mean(work))


@needs_packing
@pytest.mark.parametrize(("run", "group"), [(Run(), None), (Run(cp=2), None), (Run(), 4)])
def test_its_wrapper_moves_every_sample_where_the_plan_wants_it(run: Run, group: int | None) -> None:
    ranks = 2 * run.cp
    sizes = {"max_seqlen_per_dp_cp_rank": 1024 // run.cp, "sequence_packing_scheduler": "dp_balanced"}
    ours, theirs = (run_processes(ranks, wrapped, run, mine, group, sizes) for mine in (True, False))
    expected = {int(row["tokens"][0]): len(row["tokens"]) for rank in range(2) for row in samples(rank)}
    held = [part for found, _ in ours[:: run.cp] for part, _ in found]
    assert {number: length for part in held for number, length in part.items()} == expected
    assert sum(map(len, held)) == len(expected)
    assert all(part and sum(part.values()) <= 1024 for part in held)
    assert len({len(found) for found, _ in ours}) == 1
    assert len(ours[0][0]) % (group or 1) == 0
    assert all(tokens == sum(expected.values()) for _, tokens in ours)
    assert slowest(ours[:: run.cp]) < 1.01 < slowest(theirs[:: run.cp])


DYNAMIC = getattr(data_schedule, "DefaultDynamicCPScheduler", None)
needs_groups = pytest.mark.skipif(DYNAMIC is None, reason="this megatron-core has no groups for each micro-batch")
CAPACITY = 256


def longest(ranks: list[Any]) -> float:
    """The slowest rank of every micro-batch, over equal ranks."""
    steps = [[COST.cost(list(held.values())).sum() / size for held, size in found] for found, _ in ranks]
    return float(np.max(steps, axis=0).sum() / np.mean(steps, axis=0).sum())


@needs_groups
@pytest.mark.parametrize(("least", "group"), [(1, None), (2, None), (1, 4)])
def test_its_wrapper_shares_every_sample_among_the_ranks_of_the_plan(least: int, group: int | None) -> None:
    sizes = {
        "max_seqlen_per_dp_cp_rank": CAPACITY,
        "sequence_packing_scheduler": "default_dynamic_cp",
        "min_dynamic_context_parallel_size": least,
    }
    ours, theirs = (run_processes(4, wrapped, Run(), mine, group, sizes) for mine in (True, False))
    expected = {int(row["tokens"][0]): len(row["tokens"]) for rank in range(4) for row in samples(rank)}
    held: dict[int, int] = {}
    for part in zip(*(found for found, _ in ours), strict=True):
        first = 0
        while first < 4:
            samples_here, size = part[first]
            assert samples_here, "a rank is idle"
            assert size in (1, 2, 4)
            assert size >= least
            assert first % size == 0  # one of the groups that there are
            assert all(other == part[first] for other in part[first : first + size])
            assert sum(samples_here.values()) / size <= CAPACITY
            assert not held.keys() & samples_here.keys()
            held |= samples_here
            first += size
    assert held == expected
    assert len(ours[0][0]) % (group or 1) == 0
    assert all(tokens == sum(expected.values()) for _, tokens in ours)
    assert longest(ours) < longest(theirs)


@needs_groups
@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 900), min_size=1, max_size=60), st.sampled_from([2, 4, 6, 8]), st.sampled_from([1, 2]))
def test_groups_hold_their_samples_and_no_rank_is_idle(lengths: list[int], world: int, least: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in (*KNOWN, "scheduler_map"):
            if (found := getattr(data_schedule, name, None)) is not None:
                patch.setattr(data_schedule, name, dict(found) if isinstance(found, dict) else found)
        megatron.install_schedulers(cost_model=COST)
        scheduler = data_schedule.DefaultDynamicCPScheduler(CAPACITY, 1, world, None, min_cp_size=least)
        numbers = {10 * at + 3: length for at, length in enumerate(lengths)}
        try:
            parts = scheduler.get_groups_and_subsamples(list(numbers.items()))
        except wlb.WlbError as refused:
            assert max(lengths) > CAPACITY * least * largest_group(world // least), refused  # noqa: PT017
            return
    for part in parts:
        assert len(part) == world
        for rank, mine in enumerate(part):
            assert mine
            size = sum(other[0] in mine for other in part)
            assert size == world or (size & (size - 1) == 0 and size >= least)
            begin = rank // size * size
            assert part[begin : begin + size] == [mine] * size
            assert sum(numbers[number] for number in mine) <= CAPACITY * size
    trained = [number for part in parts for number in {number for rank in part for number in rank}]
    assert sorted(trained) == sorted(numbers)


@needs_groups
def test_what_dynamic_groups_cannot_be_is_named(untouched: None) -> None:
    megatron.install_schedulers()
    scheduler = data_schedule.DefaultDynamicCPScheduler(CAPACITY, 1, 4, None, min_cp_size=1)
    with pytest.raises(wlb.WlbError, match="cost_model is missing"):
        scheduler.get_groups_and_subsamples([(0, 8)])
    assert scheduler.get_groups_and_subsamples([]) == []
    megatron.install_schedulers(cost_model=COST, max_cp_size=2)
    scheduler = data_schedule.DefaultDynamicCPScheduler(CAPACITY, 1, 4, None, min_cp_size=1)
    with pytest.raises(wlb.WlbError, match=r"lengths\[0\] = 800"):
        scheduler.get_groups_and_subsamples([(0, 800)])
    scheduler = data_schedule.DefaultDynamicCPScheduler(CAPACITY, 1, 4, None, min_cp_size=3)
    with pytest.raises(wlb.WlbError, match="min_cp_size = 3: must be a power of two"):
        scheduler.get_groups_and_subsamples([(0, 8)])


@needs_packing
def test_too_few_samples_are_named(untouched: None) -> None:
    megatron.install_schedulers(cost_model=COST)
    scheduler = data_schedule.DpBalancedScheduler(1024, 1, 4, None)
    scheduler._cost = COST
    with pytest.raises(wlb.WlbError, match="are 3, too few for 4 micro-batches"):
        scheduler.get_groups_and_subsamples([(0, 8), (1, 8), (2, 8)])


def test_one_call_replaces_what_this_version_has(untouched: None) -> None:
    replaced = megatron.install_schedulers(cost_model=COST)
    assert replaced == [name for name in KNOWN if hasattr(data_schedule, name)]
    assert megatron.install_schedulers() == replaced  # another time too
    group = SimpleNamespace(size=lambda: 4)
    scheduler = data_schedule.BalancedCPScheduler(max_seq_len_per_rank=64, dp_cp_group=group)
    assert isinstance(scheduler, megatron.DynamicCpScheduler)
    with pytest.raises(wlb.WlbError, match="max_cp_sise is no option here"):
        megatron.install_schedulers(max_cp_sise=4)
