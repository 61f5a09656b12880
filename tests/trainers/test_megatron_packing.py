"""Megatron-Core's own sequence packing (after 0.19) on our plans: its scheduler's interface, and its data movement."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from processes import run as run_processes

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron_run import Run, initialize, on_cpu

import wlb
from wlb.integrations import megatron

data_schedule = pytest.importorskip("megatron.core.datasets.data_schedule")
COST = wlb.CostModel(attention=1.0, linear=200.0)
needs_packing = pytest.mark.skipif(
    not hasattr(data_schedule, "wrap_data_iterator"), reason="this megatron-core has no sequence packing of its own"
)


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BalancedCPScheduler", "DpBalancedScheduler", "scheduler_map"):
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


def packed(rank: int, run: Run, ours: bool, group: int | None) -> Any:
    """Of each micro-batch that its wrapper gives this rank the samples and their lengths."""
    with on_cpu():
        initialize(run)
        if ours:
            megatron.install_schedulers(cost_model=COST)
        config = SimpleNamespace(
            max_seqlen_per_dp_cp_rank=1024 // run.cp,
            sequence_packing_scheduler="dp_balanced",
            virtual_pipeline_model_parallel_size=2 if group else None,
            microbatch_group_size_per_vp_stage=group,
        )
        read = iter([samples(rank // run.cp)])
        wrapped, count, tokens, _ = data_schedule.wrap_data_iterator([read, None] if group else read, config, 1)
        iterator = wrapped[0] if group else wrapped
        found = []
        for _ in range(count):
            batch = next(iterator)
            lengths = batch["cu_seqlens_padded"].diff().tolist()
            held = [int(part[0]) for part in batch["tokens"].split(lengths)]
            assert all((part == part[0]).all() for part in batch["tokens"].split(lengths))
            found.append(dict(zip(held, lengths, strict=True)))
        return found, tokens


def slowest(ranks: list[Any]) -> float:
    """Work of the busiest rank over that of the mean rank."""
    work = [sum(COST.cost(list(part.values())).sum() for part in found) for found, _ in ranks]
    return float(max(work) / np.mean(work))


@needs_packing
@pytest.mark.parametrize(("run", "group"), [(Run(), None), (Run(cp=2), None), (Run(), 4)])
def test_its_wrapper_moves_every_sample_where_the_plan_wants_it(run: Run, group: int | None) -> None:
    ranks = 2 * run.cp
    ours, theirs = (run_processes(ranks, packed, run, mine, group) for mine in (True, False))
    expected = {int(row["tokens"][0]): len(row["tokens"]) for rank in range(2) for row in samples(rank)}
    held = [part for found, _ in ours[:: run.cp] for part in found]
    assert {number: length for part in held for number, length in part.items()} == expected
    assert sum(map(len, held)) == len(expected)
    assert all(part and sum(part.values()) <= 1024 for part in held)
    assert len({len(found) for found, _ in ours}) == 1
    assert len(ours[0][0]) % (group or 1) == 0
    assert all(tokens == sum(expected.values()) for _, tokens in ours)
    assert slowest(ours[:: run.cp]) < 1.01 < slowest(theirs[:: run.cp])


@needs_packing
def test_too_few_samples_are_named(untouched: None) -> None:
    megatron.install_schedulers(cost_model=COST)
    scheduler = data_schedule.DpBalancedScheduler(1024, 1, 4, None)
    scheduler._cost = COST
    with pytest.raises(wlb.WlbError, match="are 3, too few for 4 micro-batches"):
        scheduler.get_groups_and_subsamples([(0, 8), (1, 8), (2, 8)])


def test_one_call_replaces_what_this_version_has(untouched: None) -> None:
    replaced = megatron.install_schedulers(cost_model=COST)
    known = ["BalancedCPScheduler", "DpBalancedScheduler"]
    assert replaced == [name for name in known if hasattr(data_schedule, name)]
    assert megatron.install_schedulers() == replaced  # another time too
    group = SimpleNamespace(size=lambda: 4)
    scheduler = data_schedule.BalancedCPScheduler(max_seq_len_per_rank=64, dp_cp_group=group)
    assert isinstance(scheduler, megatron.DynamicCpScheduler)
    with pytest.raises(wlb.WlbError, match="max_cp_sise is no option here"):
        megatron.install_schedulers(max_cp_sise=4)
