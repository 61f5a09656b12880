"""The Llama of `examples/llama.py` with more ways to split it: tensor parallelism, experts, every attention transport.

Tensor parallelism and FSDP are torch's; the experts are in `experts.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import wlb
from examples import llama
from examples.llama import FeedForward, rotary, rotate
from studies.trainer.experts import Mixture, contexts_of_checkpoint
from wlb.torch.attention import context_parallel_attention
from wlb.torch.gradients import sum_gradients
from wlb.torch.groups import data_and_context


@dataclass(frozen=True)
class LlamaConfig(llama.LlamaConfig):
    """The shape, with experts.

    Args:
        num_experts: feed-forward networks of a layer, of which a token visits some; 1: one for all.
        experts_per_token: experts that a token visits.
        shared_ffn_hidden_size: hidden size of one more that every token visits; 0: there is none.
    """

    num_experts: int = 1
    experts_per_token: int = 1
    shared_ffn_hidden_size: int = 0

    def shape(self) -> dict[str, int]:
        """Arguments of `wlb.CostModel.from_flops` and `wlb.torch.flops.model_flops`: what one token meets."""
        met = self.experts_per_token * self.ffn_hidden_size + self.shared_ffn_hidden_size
        return super().shape() | {"ffn_hidden_size": met}


@dataclass(frozen=True)
class AttentionOptions:
    """How attention runs over the context-parallel ranks; which they are comes with the micro-batch."""

    transport: Any = "all_gather"
    ulysses_size: int | None = None

    def of(self, shard: wlb.Shard) -> dict[str, Any]:
        """What attention takes for a micro-batch: a group smaller than `ulysses_size` exchanges heads as a whole."""
        ulysses_size = None if self.ulysses_size is None else min(self.ulysses_size, shard.cp_size)
        return {"transport": self.transport, "ulysses_size": ulysses_size}


class Attention(llama.Attention):
    def __init__(self, config: llama.LlamaConfig, options: AttentionOptions) -> None:
        super().__init__(config)
        self.options = options

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], shard: wlb.Shard, group: dist.ProcessGroup | None = None
    ) -> Tensor:
        # Under tensor parallelism each rank has some of the heads, hence -1.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, rope), rotate(k, rope)
        # A rank may have tokens that are none of the micro-batch, see `LlamaStage.forward`.
        idle = len(q) - int(shard.tokens_per_rank[0 if group is None else dist.get_rank(group)])
        if idle > 0:
            q, k, v = q[:-idle], k[:-idle], v[:-idle]
        attended = context_parallel_attention(q, k, v, shard, group=group, **self.options.of(shard))
        return self.wo(F.pad(attended.flatten(1), (0, 0, 0, idle)))


class Block(llama.Block):
    def __init__(self, config: LlamaConfig, options: AttentionOptions) -> None:
        super().__init__(config)
        self.attention = Attention(config, options)
        self.shared: nn.Module | None = None
        if config.num_experts > 1:
            sizes = config.hidden_size, config.ffn_hidden_size
            self.ffn = Mixture(*sizes, config.num_experts, config.experts_per_token)
            if config.shared_ffn_hidden_size:
                self.shared = FeedForward(config.hidden_size, config.shared_ffn_hidden_size)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], shard: wlb.Shard, group: dist.ProcessGroup | None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, shard, group)
        normed = self.ffn_norm(x)
        x = x + self.ffn(normed)
        return x if self.shared is None else x + self.shared(normed)


class LlamaStage(llama.LlamaStage):
    """Consecutive layers of the model, on tensor-parallel ranks too, whose activations may be computed again."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        stage: int = 0,
        num_stages: int = 1,
        options: AttentionOptions | None = None,
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__(config, stage=stage, num_stages=num_stages)
        self.checkpoint_activations = checkpoint_activations
        self.tensor_mesh: DeviceMesh | None = None
        for name in self.layers:
            self.layers[name] = Block(config, options or AttentionOptions())

    def forward(
        self, x: Tensor, *, position_ids: Tensor, shard: wlb.Shard, group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """One micro-batch on one context-parallel rank, as the example's stage."""
        # A rank may have no token of a short document. DTensor cannot reshape a sharded dimension of size 0, so under
        # tensor parallelism an idle token takes its place here; nothing looks at it, and its gradient is 0.
        tokens = len(x)
        if tokens == 0 and self.tensor_mesh is not None:
            x, position_ids = x.new_zeros(1, *x.shape[1:]), position_ids.new_zeros(1)
        rope = rotary(position_ids, self.config)
        if self.is_first:
            x = self.embedding(x)
        elif self.tensor_mesh is not None:
            # Between stages all tensor-parallel ranks hold all tokens: any number of tokens splits over them here.
            x = DTensor.from_local(x, self.tensor_mesh, [Replicate()]).redistribute(placements=[Shard(0)])
        for block in self.layers.values():
            if self.checkpoint_activations:
                options = {"use_reentrant": False, "context_fn": contexts_of_checkpoint}
                x = checkpoint(block, x, rope, shard, group, **options)
            else:
                x = block(x, rope, shard, group)
        if self.is_last:
            x = self.head(self.norm(x))
        x = x.full_tensor() if isinstance(x, DTensor) else x
        return x if len(x) == tokens else x[:0]


def tensor_parallel_plan(stage: LlamaStage) -> dict[str, ParallelStyle]:
    """Column- and row-parallel matrices; between them activations are split over tokens (sequence parallelism).

    Everything between is a DTensor: it knows how many tokens there are, so their number need not divide by the ranks.
    """
    plan: dict[str, ParallelStyle] = {}
    if stage.is_first:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0), use_local_output=False)
    for layer in stage.layers:
        block = f"layers.{layer}"
        plan |= {
            f"{block}.attention_norm": SequenceParallel(sequence_dim=0),
            f"{block}.attention": PrepareModuleInput(
                input_layouts=(Shard(0), None, None, None), desired_input_layouts=(Replicate(), None, None, None)
            ),
            **{f"{block}.attention.{w}": ColwiseParallel() for w in ("wq", "wk", "wv")},
            f"{block}.attention.wo": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
            f"{block}.ffn_norm": SequenceParallel(sequence_dim=0),
            f"{block}.ffn": PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)),
            **{f"{block}.ffn.{w}": ColwiseParallel() for w in ("w1", "w3")},
            f"{block}.ffn.w2": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        }
    if stage.is_last:
        plan["norm"] = SequenceParallel(sequence_dim=0)
        plan["head"] = ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())
    return plan


def parallelize(
    stage: LlamaStage,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype = torch.float32,
    experts: DeviceMesh | None = None,
) -> LlamaStage:
    """Tensor and expert parallelism, then FSDP over all ranks that hold the same parameters (dp and cp).

    Args:
        stage: with its weights, on its device.
        mesh: from `wlb.torch.groups.build_mesh`.
        dtype: of computation; parameters, gradients and the optimizer stay float32.
        experts: from `wlb.torch.groups.expert_ranks`, to divide experts over its "ep"; those of one rank are then held
            by its "edp" only.
    """
    if mesh["tp"].size() > 1:
        stage.tensor_mesh = mesh["tp"]
        parallelize_module(stage, mesh["tp"], tensor_parallel_plan(stage))
    # Inputs as they come: activations are of that type already, and rotary angles have to stay float32.
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Weights stay whole for a step: torch's pipeline stages sum gradients at its end and keep what a backward gathered.
    # Resharding after forwards would free weights where activations are most, but every backward would gather them
    # again, and ranks would wait for each other there.
    options: dict[str, Any] = {"mp_policy": precision, "reshard_after_forward": False}
    ranks = data_and_context(mesh)
    for block in stage.layers.values():
        if experts is not None:
            block.ffn.divide(experts["ep"])
            # Each matrix is sharded, not the stack of them: a rank may have fewer experts than there are ranks.
            fully_shard(
                block.ffn.experts, mesh=experts["edp"], shard_placement_fn=lambda parameter: Shard(1), **options
            )
        fully_shard(block, mesh=ranks, **options)
    fully_shard(stage, mesh=ranks, **options)
    sum_gradients(stage, group=ranks.get_group())
    return stage
