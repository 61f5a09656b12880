"""The real TensorBoard and Weights & Biases take a run's figures."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import wlb
import wlb.torch as wt


def trained(*sinks: Any) -> list[dict[str, float]]:
    cost = wlb.CostModel(attention=1.0, linear=50.0)
    sampler = wt.BalancedBatchSampler(
        np.arange(1, 200),
        packer=wlb.Packer(num_micro_batches=2, max_tokens=512, cost_model=cost, release="fifo"),
        dp_rank=0,
        dp_size=1,
        tokens_per_batch=800,
    )
    documents = wt.Documents([{"input_ids": np.zeros(length, np.int64)} for length in range(1, 200)])
    steps: wt.StepLoader[Any] = wt.StepLoader(DataLoader(documents, batch_sampler=sampler, collate_fn=wt.collate))
    metrics = wt.StepMetrics(steps, *sinks)
    return [metrics.end_step(step) for step in steps]


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        lines = trained(writer)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(lines[0])
    found = [event.value for event in events.Scalars("wlb/imbalance")]
    np.testing.assert_allclose(found, [line["wlb/imbalance"] for line in lines], rtol=1e-6)


def test_wandb(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=tmp_path, project="wlb") as run:
        lines = trained(run)
        # Another process keeps the summary, and the last line stays open for what else belongs to its step.
        last = len(lines) - 2
        until = time.monotonic() + 120
        while run.summary.get("_step") != last and time.monotonic() < until:
            time.sleep(0.1)
        assert run.summary["_step"] == last
        assert run.summary["wlb/lost_time"] == pytest.approx(lines[last]["wlb/lost_time"])
