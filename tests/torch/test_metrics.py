"""Figures of a run: what they are, and how the loggers that people use take them."""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import wlb
import wlb.torch as wt

LENGTHS = np.random.default_rng(0).integers(1, 200, 400)


def loader() -> wt.StepLoader[Any]:
    cost = wlb.CostModel(attention=1.0, linear=50.0)
    packer = wlb.Packer(num_micro_batches=4, max_tokens=512, cost_model=cost, release="adaptive", max_delay=4)
    sampler = wt.BalancedBatchSampler(LENGTHS, packer=packer, dp_rank=0, dp_size=1, tokens_per_batch=1600, num_epochs=1)
    documents = wt.Documents([{"input_ids": np.zeros(length, np.int64)} for length in LENGTHS])
    return wt.StepLoader(DataLoader(documents, batch_sampler=sampler, collate_fn=wt.collate))


def test_figures_are_those_of_the_plans() -> None:
    steps = loader()
    lines: dict[int, dict[str, float]] = {}
    metrics = wt.StepMetrics(steps, lambda line, number: lines.__setitem__(number, line), every=3)
    heaviest, mean, work = [], [], []
    for step in steps:
        line = metrics.end_step(step)
        costs = step.packing.costs
        heaviest.append(costs.max())
        mean.append(costs.mean())
        work.append(costs.sum())
        if (step.number + 1) % 3:
            assert line == {}
            continue
        assert line is lines[step.number]
        assert line["wlb/imbalance"] == pytest.approx(step.packing.imbalance)
        assert line["wlb/lost_time"] == pytest.approx(sum(heaviest) / sum(mean))
        assert line["wlb/step_work"] == pytest.approx(work[-1] / np.mean(work))
        assert line["wlb/tokens"] == step.packing.tokens.sum()
        assert line["wlb/backlog_tokens"] == step.snapshot.progress.tokens  # type: ignore[union-attr]
        assert line["wlb/delay_max"] == steps.metrics().delay_max
    assert sorted(lines) == list(range(2, len(work), 3))


def test_each_column_has_a_heaviest() -> None:
    packer = wlb.Packer(num_micro_batches=2, max_tokens=10, cost_columns=2, release="fifo")
    sampler = wt.BalancedBatchSampler(
        [4, 4, 2, 2], packer=packer, dp_rank=0, dp_size=1, costs=[[9.0, 1.0], [1.0, 6.0], [1.0, 0.0], [0.0, 2.0]]
    )
    documents = wt.Documents([np.zeros(length, np.int64) for length in (4, 4, 2, 2)])
    steps = wt.StepLoader(DataLoader(documents, batch_sampler=sampler, collate_fn=wt.collate))
    metrics = wt.StepMetrics(steps)
    for step in steps:
        assert step.packing.step_cost > step.packing.costs.max()  # else it shows nothing
        assert metrics.end_step(step)["wlb/imbalance"] == pytest.approx(step.packing.imbalance)


def test_a_loader_without_a_packer_has_no_delays() -> None:
    plan = functools.partial(wlb.plan_dynamic_cp, world_size=1, num_stages=1, max_tokens_per_rank=50)
    steps = wt.DynamicCpLoader([[np.arange(3)]], plan=plan, costs=lambda document: 1.0)
    metrics = wt.StepMetrics(steps)
    (line,) = [metrics.end_step(step) for step in steps]
    steps.close()
    assert line["wlb/tokens"] == 3
    assert "wlb/delay_mean" not in line


def test_what_fills_dynamic_steps_up_is_told() -> None:
    sizes = {"max_tokens_per_rank": 512, "token_buckets": [512]}
    plan = functools.partial(wlb.plan_dynamic_cp, world_size=1, num_stages=1, **sizes)
    steps = wt.DynamicCpLoader([[np.arange(100), np.arange(200)]], plan=plan, costs=lambda document: 1.0)
    metrics = wt.StepMetrics(steps)
    (line,) = [metrics.end_step(step) for step in steps]
    steps.close()
    assert line["wlb/padding"] == pytest.approx(212 / 512)


def test_a_dynamic_step_waits_where_its_ranks_do() -> None:
    """Once, or in every micro-batch: on one stage the heaviest is the step itself."""
    lengths = np.random.default_rng(0).integers(100, 8000, 200)
    machine = {"world_size": 8, "num_stages": 1, "max_tokens_per_rank": 8192}
    exchange = wlb.Exchange(seconds_per_token=0.01, overlap=0.0)
    cost = wlb.CostModel(attention=1e-6, linear=1e-2)
    for sync in ("step", "micro_batch"):
        plan = wlb.plan_dynamic_cp(lengths, **machine, exchange=exchange, cost_model=cost, sync=sync)
        steps = SimpleNamespace(packer=None)
        line = wt.StepMetrics(steps).end_step(SimpleNamespace(plan=plan, number=0, planning_seconds=0.0, snapshot=None))
        mean = plan.rank_seconds.sum(axis=0).mean()
        of_ranks = plan.rank_seconds
        waits = of_ranks.max(axis=1).sum() if sync == "micro_batch" else of_ranks.sum(axis=0).max()
        assert line["wlb/imbalance"] == pytest.approx(waits / mean)
        assert waits <= plan.seconds * (1 + 1e-9)


def test_every_kind_of_logger() -> None:
    seen: list[Any] = []
    board = SimpleNamespace(add_scalar=lambda name, value, step: seen.append((name, step)))
    lightning = SimpleNamespace(log_metrics=lambda line, step: seen.append(("lightning", step)))
    wandb = SimpleNamespace(log=lambda line, step: seen.append(("wandb", step)))
    steps = loader()
    metrics = wt.StepMetrics(steps, board, lightning, wandb)
    line = metrics.end_step(next(iter(steps)))
    assert seen == [*((name, 0) for name in line), ("lightning", 0), ("wandb", 0)]


def test_what_is_no_logger_is_refused() -> None:
    with pytest.raises(wlb.WlbError, match=r"sinks\[1\] is a int: has none of add_scalar, log_metrics and log"):
        wt.StepMetrics(None, print, 3)
    with pytest.raises(wlb.WlbError, match=r"sinks\[0\] is a Logger"):  # its `log` takes a level and a text
        wt.StepMetrics(None, logging.getLogger("wlb"))
    with pytest.raises(wlb.WlbError, match="every"):
        wt.StepMetrics(every=0)
    with pytest.raises(wlb.WlbError, match="step is a object without a plan"):
        wt.StepMetrics().end_step(object())
