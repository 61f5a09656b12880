"""Under FSDP ranks wait for each other in every micro-batch, where it gathers parameters. Plans are made for that."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import wlb
import wlb.torch as wt
from tests.torch import processes

pytest.importorskip("transformers", reason="needs transformers")

from accelerate import FullyShardedDataParallelPlugin
from transformers import Trainer, TrainingArguments

from tests.trainers.small_corpus import llama
from tests.trainers.test_advice import LENGTHS, RANKS, rows
from wlb.integrations.huggingface import balance

EVERYWHERE = (RANKS, "micro_batch")
NOWHERE = (None, None)
LIMITS: Any = {"max_tokens": 160, "tokens_per_batch": 640}


def waits(packer: wlb.Packer) -> tuple[int | None, str | None]:
    """The ranks of a packer, and where they wait for each other."""
    return packer.dp_size, packer.sync


def hugging_face(rank: int, folder: str, fsdp: dict[str, Any] | None, given: dict[str, Any]) -> Any:
    arguments: dict[str, Any] = {"use_cpu": True, "report_to": [], "max_steps": 2, "per_device_train_batch_size": 1}
    trainer = Trainer(llama(), TrainingArguments(folder, **arguments), train_dataset=rows())
    if fsdp is not None:  # accelerate itself takes it only with a device
        trainer.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(**fsdp)
    balanced: Any = balance(trainer, **LIMITS, **given)
    return waits(balanced._wlb_plan.packer)


@pytest.mark.parametrize(
    ("fsdp", "given", "expected"),
    [
        (None, {}, NOWHERE),
        ({"fsdp_version": 2}, {}, EVERYWHERE),
        ({"fsdp_version": 1, "sharding_strategy": "SHARD_GRAD_OP"}, {}, EVERYWHERE),
        ({"fsdp_version": 1, "sharding_strategy": "NO_SHARD"}, {}, NOWHERE),
        ({"fsdp_version": 2}, {"sync": "step"}, NOWHERE),
        (None, {"sync": "micro_batch"}, EVERYWHERE),
    ],
)
def test_hugging_faces_trainer(fsdp: Any, given: Any, expected: Any, tmp_path: Path) -> None:
    assert processes.run(RANKS, hugging_face, str(tmp_path), fsdp, given) == [expected] * RANKS


def lightnings(rank: int, kind: str, given: dict[str, Any]) -> Any:
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

    from wlb.integrations.lightning import BalancedDataModule

    strategy: Any = {
        "ddp": DDPStrategy,
        "fsdp": FSDPStrategy,
        "no_shard": lambda: FSDPStrategy(sharding_strategy="NO_SHARD"),
        "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1),
    }[kind]()
    data = BalancedDataModule(rows(), **LIMITS, config=llama().config, **given)
    # A trainer as the data module reads it: Lightning itself takes these strategies only with a device.
    module = SimpleNamespace(automatic_optimization=True, model=llama())
    data.trainer = SimpleNamespace(strategy=strategy, world_size=RANKS, global_rank=rank, lightning_module=module)  # type: ignore[assignment]
    return waits(data._sampler(rank, RANKS)._origin.packer)


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("ddp", {}, NOWHERE),
        ("fsdp", {}, EVERYWHERE),
        ("no_shard", {}, NOWHERE),
        ("fsdp2", {}, EVERYWHERE),
        ("fsdp2", {"sync": "step"}, NOWHERE),
        ("ddp", {"sync": "micro_batch"}, EVERYWHERE),
    ],
)
def test_lightning(kind: str, given: Any, expected: Any) -> None:
    pytest.importorskip("lightning", reason="needs lightning")
    assert processes.run(RANKS, lightnings, kind, given) == [expected] * RANKS


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("fsdp", [False, True])
def test_megatron(strategy: str, fsdp: bool) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    from megatron.core.distributed import DistributedDataParallelConfig

    from wlb.integrations.megatron.setup import _is_sharded

    chunk: Any = torch.nn.Linear(1, 1)
    chunk.ddp_config = DistributedDataParallelConfig(
        use_megatron_fsdp=fsdp, data_parallel_sharding_strategy=strategy, use_distributed_optimizer=True
    )
    assert _is_sharded(chunk) == (fsdp and strategy.startswith("optim_grads"))


def own_loop(rank: int, sync: Any) -> Any:
    loader = wt.balanced_loader(rows(), **LIMITS, config=llama().config, sync=sync)
    return waits(wlb.Packer.from_state_dict(loader.state_dict()["packer"]))


def test_a_loop_of_your_own_says_it() -> None:
    for sync, expected in (("micro_batch", EVERYWHERE), ("step", NOWHERE), (None, NOWHERE)):
        assert processes.run(RANKS, own_loop, sync) == [expected] * RANKS
    with pytest.raises(wlb.WlbError, match="sync = 'round': must be one of step, micro_batch"):
        wt.balanced_loader(rows(), **LIMITS, config=llama().config, sync="round")


def test_a_checkpoint_goes_on_with_another_wrapper() -> None:
    """Where ranks wait is no part of the documents that wait."""
    cost = wlb.CostModel(attention=1.0, linear=64.0)
    options: Any = {"num_micro_batches": 4, "max_tokens": 160, "cost_model": cost, "release": "adaptive"}
    before = wlb.Packer(**options, dp_size=2, sync="micro_batch")
    before.push(LENGTHS[:16])
    for ranks in ({}, {"dp_size": 4}, {"dp_size": 4, "sync": "micro_batch"}):
        after = wlb.Packer(**options, **ranks)
        after.load_state_dict(before.state_dict())
        assert after.pending_tokens == before.pending_tokens
