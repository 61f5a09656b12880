"""Gradients are those of the mean over all tokens of the global batch, whatever is wrapped around the model."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import accelerate
import lightning
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import wlb
from tests.torch import processes
from wlb.torch.gradients import all_reduce_gradients, sum_gradients
from wlb.torch.loss import IGNORE, count_valid_tokens, token_normalized_loss

VOCABULARY = 11
MICRO_BATCHES = 8
MicroBatch = tuple[Tensor, Tensor]


def micro_batch(index: int) -> MicroBatch:
    """Of 0 to 43 tokens, some with every second label masked."""
    generator = torch.Generator().manual_seed(index)
    tokens = [7, 43, 0, 3, 20, 1, 11, 30][index]
    inputs = torch.randn(tokens, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    labels[:: 2 if index % 3 == 1 else 1000] = IGNORE
    return inputs, labels


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, VOCABULARY)).double()


def mine() -> list[MicroBatch]:
    """This rank's micro-batches; ranks have unequal numbers of tokens."""
    return [micro_batch(index) for index in range(dist.get_rank(), MICRO_BATCHES, dist.get_world_size())]


def shared_step() -> Any:
    """What the library has to know of a step that all ranks share."""
    batches = [{"labels": labels} for _, labels in mine()]
    ranks, parts = dist.get_world_size(), np.array([dist.get_rank()])
    return SimpleNamespace(number=0, num_ranks=ranks, parts=parts, micro_batches=batches)


def num_valid_tokens() -> int:
    return count_valid_tokens(shared_step(), group=dist.group.WORLD)


def accumulate(model: Any, no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
    """One global batch, its gradients exchanged with the last micro-batch, or with each if `no_sync` does nothing."""
    valid, batches = num_valid_tokens(), mine()
    for done, (inputs, labels) in enumerate(batches, start=1):
        with no_sync() if done < len(batches) else nullcontext():
            token_normalized_loss(model(inputs), labels, num_valid_tokens=valid).backward()


def gradient(model: nn.Module) -> np.ndarray:
    gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
    return torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in gradients]).numpy()


def two_dims() -> DeviceMesh:
    """Replicas of shards: 2 x 2 of four ranks, 1 x 2 of two."""
    size = dist.get_world_size()
    return init_device_mesh("cpu", (max(size // 2, 1), min(size, 2)), mesh_dim_names=("replicas", "shards"))


# --- a wrapper each ---------------------------------------------------------------------------------------------------


def plain() -> nn.Module:
    model = network()
    sum_gradients(model)
    accumulate(model)
    all_reduce_gradients(model, shared_step(), group=dist.group.WORLD)
    return model


def ddp(accumulated: bool, hook: Any = None, compiled: bool = False, **options: Any) -> nn.Module:
    wrapped = DistributedDataParallel(network(), **options)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    model = torch.compile(wrapped, backend="aot_eager") if compiled else wrapped
    sum_gradients(model)
    sum_gradients(model)
    accumulate(model, wrapped.no_sync if accumulated else nullcontext)
    return wrapped


def ddp_inside() -> nn.Module:
    model = nn.Sequential(DistributedDataParallel(network()[:3]), DistributedDataParallel(network()[3:]))
    sum_gradients(model)
    accumulate(model)
    return model


def fsdp1(accumulated: bool, strategy: ShardingStrategy) -> nn.Module:
    model = network()
    options: dict[str, Any] = {"sharding_strategy": strategy, "use_orig_params": True, "device_id": torch.device("cpu")}
    if strategy is ShardingStrategy.HYBRID_SHARD:
        options["device_mesh"] = two_dims()
    model[2] = FullyShardedDataParallel(model[2], **options)
    model = FullyShardedDataParallel(model, **options)
    sum_gradients(model)
    sum_gradients(model)
    accumulate(model, model.no_sync if accumulated else nullcontext)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        whole = network()
        for parameter, summoned in zip(whole.parameters(), model.parameters(), strict=True):
            parameter.grad = summoned.grad.clone()
    return whole


def fsdp2(accumulated: bool, dims: int) -> nn.Module:
    mesh = two_dims() if dims == 2 else init_device_mesh("cpu", (dist.get_world_size(),))
    model = network()
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    sum_gradients(model)
    sum_gradients(model)
    valid, batches = num_valid_tokens(), mine()
    for done, (inputs, labels) in enumerate(batches, start=1):
        model.set_requires_gradient_sync(not accumulated or done == len(batches))
        token_normalized_loss(model(inputs), labels, num_valid_tokens=valid).backward()
    return model


def accelerated() -> nn.Module:
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(network())
    assert isinstance(model, DistributedDataParallel)
    sum_gradients(model)
    valid, batches = num_valid_tokens(), mine()
    for done, (inputs, labels) in enumerate(batches, start=1):
        with accelerator.no_sync(model) if done < len(batches) else nullcontext():
            accelerator.backward(token_normalized_loss(model(inputs), labels, num_valid_tokens=valid))
    return accelerator.unwrap_model(model)


class Module(lightning.LightningModule):
    """One batch is a global batch: all micro-batches of this rank."""

    def __init__(self, automatic: bool) -> None:
        super().__init__()
        self.network = network()
        self.automatic_optimization = automatic
        self.result: nn.Module | None = None

    def on_fit_start(self) -> None:
        sum_gradients(self)
        self.valid = num_valid_tokens()

    def loss(self, batch: MicroBatch) -> Tensor:
        inputs, labels = batch
        return token_normalized_loss(self.network(inputs), labels, num_valid_tokens=self.valid)

    def training_step(self, batches: list[MicroBatch]) -> Tensor | None:
        if self.automatic_optimization:
            return torch.stack([self.loss(batch) for batch in batches]).sum()
        for done, batch in enumerate(batches, start=1):
            with self.trainer.strategy.block_backward_sync() if done < len(batches) else nullcontext():
                self.manual_backward(self.loss(batch))
        self.keep()
        return None

    def on_after_backward(self) -> None:
        if self.automatic_optimization:
            self.keep()

    def keep(self) -> None:
        self.result = network()
        for parameter, trained in zip(self.result.parameters(), self.network.parameters(), strict=True):
            parameter.grad = None if trained.grad is None else trained.grad.clone()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: lightning.LightningModule, **options: Any) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(cluster_environment=LightningEnvironment()),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )
    trainer.fit(module, DataLoader([0], collate_fn=lambda _: mine()))


def lightninged(automatic: bool) -> nn.Module:
    module = Module(automatic)
    fit(module)
    assert module.result is not None
    return module.result


def fabricated() -> nn.Module:
    strategy = lightning.fabric.strategies.DDPStrategy(cluster_environment=LightningEnvironment())
    fabric = lightning.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    model = fabric.setup(network())
    sum_gradients(model)
    valid, batches = num_valid_tokens(), mine()
    for done, (inputs, labels) in enumerate(batches, start=1):
        with fabric.no_backward_sync(model, enabled=done < len(batches)):
            fabric.backward(token_normalized_loss(model(inputs), labels, num_valid_tokens=valid))
    return model


WRAPPERS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "ddp": partial(ddp, True),
    "ddp, exchanged each time": partial(ddp, False),
    "ddp, bucket views": partial(ddp, False, gradient_as_bucket_view=True),
    "ddp, static graph": partial(ddp, False, static_graph=True),
    "ddp, unused parameters": partial(ddp, True, find_unused_parameters=True),
    "ddp, hook": partial(ddp, False, hook=default_hooks.allreduce_hook),
    "ddp, compiled": partial(ddp, True, compiled=True),
    "ddp, inside": ddp_inside,
    "fsdp1": partial(fsdp1, True, ShardingStrategy.FULL_SHARD),
    "fsdp1, exchanged each time": partial(fsdp1, False, ShardingStrategy.SHARD_GRAD_OP),
    "fsdp1, hybrid": partial(fsdp1, False, ShardingStrategy.HYBRID_SHARD),
    "fsdp1, not sharded": partial(fsdp1, True, ShardingStrategy.NO_SHARD),
    "fsdp1, not sharded, exchanged each time": partial(fsdp1, False, ShardingStrategy.NO_SHARD),
    "fsdp2": partial(fsdp2, True, 1),
    "fsdp2, exchanged each time": partial(fsdp2, False, 1),
    "fsdp2, 2-D mesh": partial(fsdp2, True, 2),
    "accelerate": accelerated,
    "lightning": partial(lightninged, False),
    "lightning, automatic": partial(lightninged, True),
    "fabric": fabricated,
}


def all_wrappers(rank: int) -> dict[str, np.ndarray]:
    environment()
    return {name: gradient(wrapper()) for name, wrapper in WRAPPERS.items()}


def environment() -> None:
    """What accelerate and Lightning want to know of a group that there already is; and silence."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_are_those_of_the_mean_over_all_tokens(ranks: int) -> None:
    model = network()
    inputs, labels = (torch.cat(parts) for parts in zip(*map(micro_batch, range(MICRO_BATCHES)), strict=True))
    nn.functional.cross_entropy(model(inputs), labels).backward()
    expected = gradient(model)
    for found in processes.run(ranks, all_wrappers):
        errors = {name: np.abs(value - expected).max() / np.abs(expected).max() for name, value in found.items()}
        assert errors.keys() == WRAPPERS.keys()
        assert max(errors.values()) < 1e-6, errors


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(wlb.WlbError) as raised:
        call()
    assert raised.value.argument == "model"
    return str(raised.value)


def hooked_ddp() -> None:
    def adds_up(state, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations, and wants no strings
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])

    model = nn.Sequential(DistributedDataParallel(network()[:3]), DistributedDataParallel(network()[3:]))
    model[1].register_comm_hook(None, adds_up)
    try:
        sum_gradients(model)
    finally:
        assert not any(parameter._backward_hooks for parameter in model.parameters()), "half done"


def hooked_fsdp1() -> None:
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    model.register_comm_hook(None, lambda state, whole, shard: None)
    sum_gradients(model)


def hooked_fsdp2() -> None:
    model = network()
    fully_shard(model)
    model.set_all_reduce_hook(lambda reduced: None)
    sum_gradients(model)


def one_shard_a_replica() -> None:
    mesh = init_device_mesh("cpu", (2, 1))
    strategy, device = ShardingStrategy.HYBRID_SHARD, torch.device("cpu")
    sum_gradients(FullyShardedDataParallel(network(), device_mesh=mesh, sharding_strategy=strategy, device_id=device))


def composable_replicate() -> None:
    sum_gradients(import_module("torch.distributed._composable.replicate").replicate(network()))


def inside(what: Callable[[nn.Module], None]) -> None:
    wrapped = DistributedDataParallel(network())
    what(wrapped.module)


def divided_by_accelerate() -> None:
    sum_gradients(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4).prepare(network()))


class TooEarly(Module):
    def setup(self, stage: str) -> None:
        sum_gradients(self)


REFUSALS: dict[str, tuple[Callable[[], None], str]] = {
    "ddp, hook": (hooked_ddp, "DistributedDataParallel with a communication hook .*adds_up"),
    "fsdp1, hook": (hooked_fsdp1, "register_comm_hook"),
    "fsdp2, hook": (hooked_fsdp2, "set_all_reduce_hook"),
    "fsdp1, one shard a replica": (one_shard_a_replica, "exchanges nothing"),
    "replicate": (composable_replicate, "use DistributedDataParallel or fully_shard"),
    "inside": (partial(inside, sum_gradients), "is inside a torch.nn.parallel.distributed.DistributedDataParallel"),
    "added up twice": (partial(inside, lambda model: all_reduce_gradients(model, shared_step())), "is inside a"),
    "added up by both": (
        lambda: all_reduce_gradients(DistributedDataParallel(network()), shared_step()),
        "exchanges gradients by itself",
    ),
    "accelerate": (divided_by_accelerate, "gradient_accumulation_steps = 4"),
    "lightning": (lambda: fit(Module(automatic=True), accumulate_grad_batches=3), "accumulate_grad_batches = 3"),
    "lightning, too early": (lambda: fit(TooEarly(automatic=False)), "not wrapped yet .* on_fit_start"),
}


def all_refusals(rank: int) -> dict[str, str]:
    environment()
    return {name: refused(call) for name, (call, _) in REFUSALS.items()}


def test_what_is_not_known_is_refused() -> None:
    for found in processes.run(2, all_refusals):
        for name, (_, message) in REFUSALS.items():
            assert re.search(message, found[name]), (name, found[name])


class Deepspeed(nn.Module):
    """Stands in for an engine that cannot run here."""

    __module__ = "deepspeed.runtime.engine"


def test_wrappers_of_other_libraries_are_refused_by_name() -> None:
    cls = import_module("megatron.core.distributed").DistributedDataParallel
    megatron_ddp = cls.__new__(cls)  # made without its process groups, which want a GPU
    nn.Module.__init__(megatron_ddp)
    assert "calculate_per_token_loss=True" in refused(lambda: sum_gradients(nn.Sequential(megatron_ddp)))
    assert "multiply the loss by both" in refused(lambda: sum_gradients(Deepspeed()))
    assert "torch.nn.parallel.data_parallel.DataParallel" in refused(lambda: sum_gradients(nn.DataParallel(network())))
