"""Every schedule, under every wrapper of stages, with and without accumulation: right, or refused before it runs."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wlb
import wlb.torch as wt
from tests.torch import processes
from tests.torch.test_pipeline import loss_fn, micro_batches, model, one_process, own_stages
from wlb.torch.pipeline import pipeline_step

SCHEDULES = {"gpipe": 2, "1f1b": 2, "interleaved_1f1b": 4, "interleaved_zero_bubble": 4, "zbv": 4, "dualpipev": 4}
SPLIT = {"interleaved_zero_bubble", "zbv", "dualpipev"}
DOCUMENTS = [[[5, 3], [2, 9, 1], [4], [12], [7, 2], [3]], [[6], [1, 8], [2, 2], [9], [5], [4, 4]]]  # of each replica


def gradient(found: Any) -> torch.Tensor:
    return found.full_tensor() if hasattr(found, "full_tensor") else found  # type: ignore[no-any-return]


def run(rank: int) -> dict[str, float | str]:
    """How far gradients are off, relative to the largest, or what is refused."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica, group = mesh["dp"].get_local_rank(), mesh["dp"].get_group()
    found: dict[str, float | str] = {}
    for schedule, num_stages in SCHEDULES.items():
        for wrapper in ("plain", "fully_shard", "ddp"):
            for times in (1, 2):
                expected = model(num_stages)
                for documents in DOCUMENTS * times:
                    one_process(expected, micro_batches(documents))
                parts: list[nn.Module] = list(model(num_stages))
                if wrapper == "fully_shard":
                    parts = [fully_shard(part, mesh=mesh["dp"]) for part in parts]
                    for part in parts:
                        wt.sum_gradients(part, group=group)
                stages = own_stages(parts, schedule, mesh["pp"].get_group())
                if wrapper == "ddp":
                    for stage in stages:
                        stage.submod = DistributedDataParallel(stage.submod, process_group=group)
                        wt.sum_gradients(stage.submod, group=group)
                name = f"{schedule} {wrapper} {times}"
                try:
                    for _ in range(times):
                        pipeline_step(stages, micro_batches(DOCUMENTS[replica]), schedule=schedule, loss_fn=loss_fn)
                except wlb.WlbError as wrong:
                    found[name] = str(wrong)
                    continue
                apart = [0.0]
                for stage in stages:
                    pairs = zip(stage.submod.parameters(), expected[stage.stage_index].parameters(), strict=True)
                    for mine, true in pairs:
                        assert mine.grad is not None
                        assert true.grad is not None
                        if wrapper == "plain":
                            dist.all_reduce(mine.grad, group=group)
                        apart.append(float((gradient(mine.grad) - true.grad).abs().max() / true.grad.abs().max()))
                found[name] = max(apart)
    return found


def test_every_schedule_is_right_or_refused_under_every_wrapper() -> None:
    for found in processes.run(4, run):
        assert len(found) == 36
        for name, result in found.items():
            schedule, wrapper, _ = name.split()
            if schedule in SPLIT and wrapper == "ddp":
                assert "holds a DistributedDataParallel" in str(result), name
            else:
                assert isinstance(result, float), (name, result)
                assert result < 1e-5, (name, result)
