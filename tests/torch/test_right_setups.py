"""`verify` accuses none of the set-ups that are right, and leaves each as it was."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

import wlb
import wlb.torch as wt
from tests.torch import processes
from tests.torch.small_decoder import WIDTH, Decoder, Loop, alone, dynamic_step, step_of
from tests.torch.test_training import Network, documents
from tests.torch.test_verify import first_step, llama

SMALL: dict[str, Any] = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def mixture() -> nn.Module:
    """Experts, whose router has a loss over whole rows."""
    torch.manual_seed(0)
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
    config = MixtralConfig(**SMALL, **experts, intermediate_size=24, num_key_value_heads=1, output_router_logits=True)
    return MixtralForCausalLM(config)


def with_dropout() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 13, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5))


def checkpointing() -> Any:
    model: Any = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def frozen() -> nn.Module:
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    return model


def sharded(model: nn.Module, mesh: Any = None) -> nn.Module:
    for layer in model.model.layers if hasattr(model, "model") else model.blocks:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp1(strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> nn.Module:
    return FullyShardedDataParallel(
        llama(), device_id=torch.device("cpu"), use_orig_params=True, sharding_strategy=strategy
    )


class WithStatistics(Network):
    """Layers whose statistics are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(7).eval()

    def forward(self, batch: Any) -> Tensor:
        result: Tensor = self.head(self.norm(torch.tanh(self.hidden(self.embedding(batch.tokens)))))
        return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    "takes the batch": Network,
    "ddp": lambda: DistributedDataParallel(llama()),
    "ddp, static graph": lambda: DistributedDataParallel(llama(), static_graph=True, gradient_as_bucket_view=True),
    "fully_shard": lambda: sharded(llama()),
    "fsdp1": fsdp1,
    "fsdp1, not sharded": lambda: fsdp1(ShardingStrategy.NO_SHARD),
    "bfloat16": lambda: llama().bfloat16(),
    "float64": lambda: llama().double(),
    "tied": lambda: llama(tie_word_embeddings=True),
    "grouped queries": lambda: llama(num_key_value_heads=1),
    "router loss": lambda: DistributedDataParallel(mixture(), find_unused_parameters=True),
    "router loss, sharded": lambda: sharded(mixture()),
    "dropout": lambda: DistributedDataParallel(with_dropout()),
    "gradient checkpointing": lambda: DistributedDataParallel(checkpointing()),
    "frozen weights": frozen,
    "frozen statistics": WithStatistics,
}


def of_models(rank: int) -> dict[str, str]:
    warnings.simplefilter("ignore")
    found = {}
    for name, make in MODELS.items():
        model = make()
        if name != "frozen statistics":
            model.train()
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
        found[name] = accused(partial(wt.verify, model, first_step(), report=None))
        assert not optimizer.state
    found["weights of labels"] = accused(partial(wt.verify, Network(), weighed_step(), report=None))
    found["own loop"] = accused(own_loop)
    found["accelerate"] = accused(accelerated)
    return found


def weighed_step() -> wt.Step[Any]:
    """Documents bring weights of their losses."""
    rows = [row | {"loss_weights": torch.linspace(0.1, 2.0, len(row["input_ids"]))} for row in documents()]
    step = first_step(rows)
    assert "loss_weights" in step.micro_batches[0].columns
    return step


def accused(call: Callable[[], object]) -> str:
    try:
        call()
    except wlb.WlbError as wrong:
        return str(wrong)
    return ""


def own_loop() -> None:
    """DDP averages, so the loss is multiplied by the ranks; all but the last micro-batch are held back."""
    model = DistributedDataParallel(llama())

    def train(step: wt.Step[Any]) -> Tensor:
        valid, last = wt.count_valid_tokens(step), len(step.micro_batches) - 1
        total = torch.zeros(())
        for index, batch in enumerate(step.micro_batches):
            with model.no_sync() if index < last else contextlib.nullcontext():
                loss = model(**batch.as_hf(), num_items_in_batch=valid).loss
                (loss * dist.get_world_size()).backward()
            total += loss.detach()
        dist.all_reduce(total)
        return total

    wt.verify(model, first_step(), train=train, report=None)


def accelerated() -> None:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(llama())
    wt.verify(model, first_step(), accelerator=accelerator, report=None)


@pytest.mark.long
def test_no_model_or_wrapper_is_accused() -> None:
    for found in processes.run(2, of_models):
        assert len(found) == 19
        assert not any(found.values()), found


def of_layouts(rank: int) -> dict[str, str]:
    warnings.simplefilter("ignore")
    found = {}
    cp = wt.build_mesh(cp=2, device_type="cpu")
    for transport in ("all_gather", "ring", "fetch", "ulysses"):
        for strategy in ("auto", "per_document", "per_sequence", "contiguous"):
            if transport == "all_gather" or strategy == "auto":
                loop = Loop(Decoder(transport=transport), cp)
                step = step_of(cp, 0, strategy)
                found[f"{transport}, {strategy}"] = accused(partial(checked, loop, step))
    found["fully_shard over cp"] = accused(lambda: checked(sharding(cp), step_of(cp, 0)))
    found["ddp over cp"] = accused(lambda: checked(averaging(cp), step_of(cp, 0)))
    dp = wt.build_mesh(dp=2, device_type="cpu")
    found["dynamic"] = accused(
        lambda: checked(Loop(Decoder(), dp, groups=wt.ContextParallelGroups(dp)), dynamic_step(dp))
    )
    pp = wt.build_mesh(pp=2, device_type="cpu")
    for tied in (False, True):
        found[f"pipeline, tied {tied}"] = accused(partial(staged, pp, tied))
    return found


def checked(loop: Loop, step: Any) -> None:
    wt.verify(loop.model, step, train=loop, alone=alone, group=loop.share, report=None)


def sharding(mesh: Any) -> Loop:
    model = sharded(Decoder(), wt.data_and_context(mesh))
    wt.sum_gradients(model)
    return Loop(model, mesh, exchange=lambda loop, step: None)


def averaging(mesh: Any) -> Loop:
    """DDP divides, and the loss is multiplied."""
    size = wt.data_and_context(mesh).size()
    model = DistributedDataParallel(Decoder(), process_group=wt.data_and_context(mesh).get_group())

    def loss(logits: Tensor, labels: Tensor, valid: int) -> Tensor:
        return wt.token_normalized_loss(logits, labels, num_valid_tokens=valid) * size

    loop = Loop(model, mesh, loss=loss, exchange=lambda loop, step: None)
    loop.reported = 1 / size
    return loop


def staged(mesh: Any, tied: bool) -> None:
    index, pipeline = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    part = Decoder(stage=index, num_stages=2, tied=tied)
    loop = Loop(wt.VarlenPipelineStage(part, index, 2, "cpu", group=pipeline, hidden_size=WIDTH), mesh)
    if tied:
        weights = wt.TiedWeights(part.embedding.weight, group=pipeline)
        loop.exchange = lambda loop, step: weights.all_reduce_gradients()
    wt.verify([loop.model], step_of(mesh, 0), train=loop, alone=alone, group=loop.share, report=None)


def test_no_layout_is_accused() -> None:
    for found in processes.run(2, of_layouts):
        assert len(found) == 12
        assert not any(found.values()), found


def of_grids(rank: int) -> dict[str, str]:
    warnings.simplefilter("ignore")
    found = {}
    mesh = wt.build_mesh(dp=2, cp=2, device_type="cpu")
    found["dp x cp, ddp"] = accused(lambda: checked(averaging(mesh), step_of(mesh, 0)))
    found["dp x cp, fully_shard"] = accused(lambda: checked(sharding(mesh), step_of(mesh, 0)))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: Any = sharded(llama(), grid)
    found["replicas of shards"] = accused(lambda: wt.verify(model, first_step(), report=None))
    with torch.no_grad():  # of a replica, not of a shard alone
        model.lm_head.weight.to_local()[0, 0] += 1e-3 * grid["replicate"].get_local_rank()
    found["replicas apart"] = accused(lambda: wt.verify(model, first_step(), report=None))
    stages = wt.build_mesh(pp=2, dp=2, device_type="cpu")
    found["pp x dp"] = accused(lambda: staged(stages, tied=False))
    return found


def test_no_grid_is_accused_and_replicas_of_shards_are_compared() -> None:
    for found in processes.run(4, of_grids):
        text = found.pop("replicas apart")
        assert "weights that differ between ranks (lm_head.weight is" in text
        assert not any(found.values()), found
