"""Layouts of a model on GPUs: data, pipeline, context, tensor and expert parallelism, and settings that save memory.

Ranks are numbered with tensor parallelism fastest, then context, data and pipeline parallelism, as in
`wlb.torch.build_mesh` and the paper (section 7.1), so that ranks that communicate most are in one node. Neighbours
among the ranks of a stage divide the experts, as in `wlb.torch.expert_ranks` and Megatron-Core, so expert parallelism
needs no ranks of its own. With `dp_replicate`, neighbours shard the parameters, as in torch's HSDP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from wlb._choices import Schedule
from wlb._errors import check_bool, check_integer, check_share, error
from wlb._shown import explained
from wlb.models import Attention, FeedForward, ModelConfig

Fsdp = Literal["none", "zero1", "zero2", "zero3"]
Recompute = Literal["none", "attention", "selective", "full"]
Fp8 = Literal["none", "matmul", "parameters"]
Dtype = Literal["bfloat16", "float32"]
Axis = Literal["tp", "cp", "dp", "pp", "dp_cp", "etp", "ep", "edp", "shard", "expert_shard", "replicate"]

GRADIENT_BYTES = 4
"""Bytes of an accumulated gradient."""

V_SHAPED: tuple[Schedule, ...] = ("zbv", "dualpipev")
"""Schedules with two stages a rank, down the ranks and back up: the lowest rank sends to itself."""


@explained
@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes of the parallel dimensions, and settings that save memory.

    Args:
        dp: data-parallel ranks.
        pp: pipeline ranks.
        cp: context-parallel ranks.
        tp: tensor-parallel ranks.
        ep: expert-parallel ranks: neighbours of a stage's ranks that divide a layer's experts.
        expert_tp: tensor-parallel ranks of one expert (Megatron's --expert-tensor-parallel-size); default: tp.
        virtual_stages: stages of a pipeline rank; above 1: interleaved 1F1B.
        fsdp: what the dp x cp ranks shard: nothing, the optimizer's state ("zero1"), also gradients ("zero2"), also
            parameters, gathered layer by layer ("zero3").
        dp_replicate: groups of the dp x cp ranks that each hold everything, and shard it inside (HSDP).
        recompute: what the backward pass computes again instead of keeping it: "none"; "attention": attention, which
            saves almost nothing with flash attention (Megatron's core_attn, the default of its selective); "selective":
            norms and the product inside the feed-forward block, which is element-wise work; "full": everything but the
            input of each layer.
        recompute_layers: first layers of each stage that `recompute` applies to; default: all.
        sequence_parallel: between matrix multiplications, tensor-parallel ranks split the tokens.
        fused_ffn: the gated product keeps only its two inputs (a fused kernel, torch.compile); plain torch also keeps
            the activated gate.
        fused_loss: the output projection and the loss run in chunks and never hold all logits.
        stage_layers: layers of each stage in the order of the model, `pp * virtual_stages` numbers; default: as even as
            possible, see `layers_of_stages`.
        dtype: of activations and of the parameters that are multiplied. Gradients are accumulated in float32.
        fp8: what is in FP8: "none"; "matmul": matrix products of layers, from FP8 copies of their weights;
            "parameters": these weights are also kept and gathered in FP8. Activations stay in bfloat16.
        lora_rank: rank of LoRA adapters on every matrix of a layer but routers and routed experts; all other parameters
            are frozen. 0: all parameters are trained.
        optimizer_bytes: bytes of state of each parameter; 12: float32 master weight and Adam's two moments.
        offload_optimizer: share of the optimizer's state that is in host memory and updated by the CPU, from 0 to 1.

    Raises:
        WlbError: naming the first invalid value.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    virtual_stages: int = 1
    fsdp: Fsdp = "zero1"
    dp_replicate: int = 1
    recompute: Recompute = "none"
    recompute_layers: int | None = None
    sequence_parallel: bool = True
    fused_ffn: bool = True
    fused_loss: bool = False
    stage_layers: tuple[int, ...] | None = None
    dtype: Dtype = "bfloat16"
    fp8: Fp8 = "none"
    lora_rank: int = 0
    optimizer_bytes: int = 12
    offload_optimizer: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" or (field.type == "int | None" and value is not None):
                check_integer(field.name, value, minimum=0 if field.name == "lora_rank" else 1)
            elif field.type == "bool":
                check_bool(field.name, value)
        for name, literal in _CHOICES.items():
            value, choices = getattr(self, name), get_args(literal)
            if not isinstance(value, str) or value not in choices:
                raise error(name, f"= {value!r}: must be one of {', '.join(choices)}", value=value)
        check_share("offload_optimizer", self.offload_optimizer)
        self._check_experts()
        self._check_savings()
        if self.virtual_stages > 1 and self.pp == 1:
            raise error("virtual_stages", f"= {self.virtual_stages}: needs pp above 1", value=self.virtual_stages)
        if self.stage_layers is not None:
            if not isinstance(self.stage_layers, tuple):
                raise error("stage_layers", f"= {self.stage_layers!r}: must be a tuple", value=self.stage_layers)
            if len(self.stage_layers) != self.num_stages:
                message = f"has {len(self.stage_layers)} numbers: pp x virtual_stages = {self.num_stages} stages"
                raise error("stage_layers", message, value=self.stage_layers)
            for index, layers in enumerate(self.stage_layers):
                check_integer("stage_layers", layers, minimum=0, index=index)

    def _check_experts(self) -> None:
        """Checks that groups of experts fill the ranks of a stage and fit its tensor-parallel groups."""
        etp, ranks, group = self.tp_of_experts, self.tp * self.dp * self.cp, self.tp_of_experts * self.ep
        if ranks % group:
            if self.expert_tp is None:
                message = f"= {self.ep}: does not divide dp x cp = {self.dp * self.cp} ranks"
                raise error("ep", message, value=self.ep)
            message = f"= {etp}: expert_tp x ep = {group} does not divide tp x dp x cp = {ranks} ranks"
            raise error("expert_tp", message, value=etp)
        if group % self.tp and self.tp % group:
            message = f"= {etp}: expert_tp x ep = {group} neither divides nor is a multiple of tp = {self.tp}"
            raise error("expert_tp", message, value=etp)
        if etp != self.tp and self.tp > 1 and not self.sequence_parallel:
            message = f"= {etp}: apart from tp = {self.tp} it needs sequence_parallel, which splits the tokens"
            raise error("expert_tp", message, value=etp)

    def _check_savings(self) -> None:
        """Checks that settings that save memory go together."""
        if self.recompute_layers is not None and self.recompute == "none":
            message = f"= {self.recompute_layers}: recompute = 'none' computes no layer again; set recompute as well"
            raise error("recompute_layers", message, value=self.recompute_layers)
        if self.fp8 != "none" and self.dtype != "bfloat16":
            raise error("fp8", f"= {self.fp8!r}: goes with dtype = 'bfloat16', which the rest is in", value=self.fp8)
        copies = self.dp_replicate
        if copies > 1 and self.fsdp == "none":
            message = f"= {copies}: fsdp = 'none' shares nothing out, so that every rank is a replica already"
            raise error("dp_replicate", message, value=copies)
        both, same_experts = self.size("dp_cp"), self.size("edp")
        if both % copies:
            raise error("dp_replicate", f"= {copies}: does not divide dp x cp = {both} ranks", value=copies)
        if same_experts % copies:
            message = f"= {copies}: does not divide the {same_experts} ranks that hold the same experts"
            raise error("dp_replicate", message, value=copies)

    @property
    def tp_of_experts(self) -> int:
        """Tensor-parallel ranks of one expert: `expert_tp`, by default `tp`."""
        return self.expert_tp or self.tp

    @property
    def ranks_of_experts(self) -> int:
        """Number of neighbouring dp x cp ranks whose tokens visit the same experts; 1: each rank has its own."""
        return max(1, self.ep * self.tp_of_experts // self.tp) if self.ep > 1 else 1

    @property
    def number_bytes(self) -> int:
        """Bytes of a parameter that is multiplied, and of a number in an activation."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def world_size(self) -> int:
        """Number of GPUs: dp x pp x cp x tp."""
        return self.dp * self.pp * self.cp * self.tp

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, with virtual ones: `pp * virtual_stages`."""
        return self.pp * self.virtual_stages

    def check(self, *, model: ModelConfig | None = None, world_size: int | None = None) -> None:
        """Refuses a layout that the model does not allow, or that has another number of GPUs.

        Args:
            model: tp must divide the heads, channels and widths of its blocks (fewer key and value heads than tp are
                copied, if they divide it), `expert_tp` the widths of routed experts, and ep the number of experts of
                each block. It must have a layer for every stage except the first and the last, unless `stage_layers`
                says otherwise.
            world_size: number of GPUs.

        Raises:
            WlbError: naming the argument and the numbers.
        """
        if world_size is not None and world_size != self.world_size:
            sizes = " x ".join(f"{name} {getattr(self, name)}" for name in ("dp", "pp", "cp", "tp"))
            message = f"= {world_size}: {sizes} = {self.world_size} GPUs"
            raise error("world_size", message, value=world_size)
        if model is None:
            return
        blocks = [block for layer in (*model.kinds, *model.prediction_layers) for block in layer.blocks]
        experts = [block.num_experts for block in blocks if isinstance(block, FeedForward) and block.num_experts > 1]
        for count in experts or [1]:  # a dense model has nothing to divide
            if count % self.ep:
                raise error("ep", f"= {self.ep}: does not divide num_experts = {count}", value=self.ep)
        if not experts and self.tp_of_experts != self.tp:
            message = f"= {self.expert_tp}: {model.name} has no experts, which wlb could divide apart from tp"
            raise error("expert_tp", message, value=self.expert_tp)
        for block in blocks:
            routed = isinstance(block, FeedForward) and block.num_experts > 1
            for name, size in block.divisors.items():
                of_experts = routed and name == "ffn_hidden_size" and self.expert_tp is not None
                argument, degree = ("expert_tp", self.tp_of_experts) if of_experts else ("tp", self.tp)
                if size % degree:
                    raise error(argument, f"= {degree}: does not divide {name} = {size}", value=degree)
            kv_heads = block.num_kv_heads if isinstance(block, Attention) else self.tp
            if kv_heads % self.tp and self.tp % kv_heads:
                raise error(
                    "tp", f"= {self.tp}: neither divides nor is a multiple of num_kv_heads = {kv_heads}", value=self.tp
                )
        if self.stage_layers is not None and sum(self.stage_layers) != model.num_layers:
            message = f"add up to {sum(self.stage_layers)}: the model has num_layers = {model.num_layers}"
            raise error("stage_layers", message, value=self.stage_layers)
        if self.stage_layers is None and model.num_layers < self.num_stages - 2:
            message = (
                f"= {self.pp}: pp x virtual_stages = {self.num_stages} stages, too many for num_layers ="
                f" {model.num_layers}; only the first and the last can do without"
            )
            raise error("pp", message, value=self.pp)

    def layers_of_stages(self, model: ModelConfig) -> NDArray[np.int64]:
        """int64[stages]: layers of every stage in the order of the model: `stage_layers`, or as even as possible.

        If the stages do not divide the layers, some have one more. The last stage, which has the output projection, is
        the first to have one less, and then the first stage, which has the embedding and most micro-batches under way.
        So Llama 3 405B has one layer less at both ends, as its authors cut it.
        """
        if self.stage_layers is not None:
            return np.array(self.stage_layers, dtype=np.int64)
        each, left = divmod(model.num_layers, self.num_stages)
        layers = np.full(self.num_stages, each, dtype=np.int64)
        layers[self.num_stages - 1 - left : -1] += 1
        return layers

    def kinds_of_stages(self, model: ModelConfig) -> NDArray[np.int64]:
        """int64[stages, kinds]: the number of these layers of each of `model.kinds`."""
        return self._first_layers(model, None)

    def recomputed_of_stages(self, model: ModelConfig) -> NDArray[np.int64]:
        """int64[stages, kinds]: the number of these layers that `recompute` applies to; zeros if it is "none"."""
        return self._first_layers(model, 0 if self.recompute == "none" else self.recompute_layers)

    def _first_layers(self, model: ModelConfig, most: int | None) -> NDArray[np.int64]:
        """int64[stages, kinds]: the number of each kind among the first layers of each stage, at most `most` layers."""
        columns = {kind: column for column, kind in enumerate(model.kinds)}
        layers = self.layers_of_stages(model)
        ends = layers.cumsum()
        counts = np.zeros((self.num_stages, len(columns)), dtype=np.int64)
        index = np.arange(model.num_layers)
        stages = np.searchsorted(ends, index, side="right")
        chosen = index - (ends - layers)[stages] < (model.num_layers if most is None else most)
        kinds = np.array([columns[kind] for kind in model.stack])
        np.add.at(counts, (stages[chosen], kinds[chosen]), 1)
        return counts

    def size(self, axis: Axis) -> int:
        """Ranks of a group along an axis.

        Args:
            axis: one of the layout's sizes, or "dp_cp": ranks with the same parameters; "edp": ranks with the same
                experts; "shard" and "expert_shard": those of them that shard state among them; "replicate": ranks with
                the same shard of it; "etp": the tensor-parallel ranks of one expert.
        """
        both = self.dp * self.cp
        same_experts = self.tp * both // (self.tp_of_experts * self.ep)
        sizes = {
            "dp_cp": both,
            "edp": same_experts,
            "etp": self.tp_of_experts,
            "shard": both // self.dp_replicate,
            "expert_shard": same_experts // self.dp_replicate,
            "replicate": self.dp_replicate,
        }
        return sizes.get(axis) or int(getattr(self, axis))

    def _stride(self, axis: Axis) -> int:
        """Distance of two neighbours along an axis, in ranks."""
        stage = self.tp * self.dp * self.cp
        strides: dict[Axis, int] = {
            "tp": 1,
            "etp": 1,
            "cp": self.tp,
            "dp_cp": self.tp,
            "shard": self.tp,
            "dp": self.tp * self.cp,
            "pp": stage,
            "ep": self.tp_of_experts,
            "edp": self.tp_of_experts * self.ep,
            "expert_shard": self.tp_of_experts * self.ep,
            "replicate": stage // self.dp_replicate,
        }
        return strides[axis]

    def nodes(self, axis: Axis, *, gpus_per_node: int) -> int:
        """Number of nodes over which the ranks of a group along that axis are spread, in the worst group."""
        size, stride = self.size(axis), self._stride(axis)
        if stride >= gpus_per_node:
            return size
        # A group has ranks `first`, `first + stride`, ...: it skips no node, so it reaches more nodes if it begins
        # later in its node. `stride` groups side by side fill a block of ranks, and the positions of blocks in nodes
        # repeat after at most `gpus_per_node` blocks.
        block = size * stride
        period = gpus_per_node // math.gcd(block, gpus_per_node)
        starts = range(min(self.world_size // block, period))
        latest = max(block * start % gpus_per_node for start in starts) + stride - 1
        return (min(latest, gpus_per_node - 1) + block - stride) // gpus_per_node + 1


_CHOICES: dict[str, Any] = {"fsdp": Fsdp, "recompute": Recompute, "dtype": Dtype, "fp8": Fp8}
"""The values of a layout's fields that are one of a few words."""


def default_schedule(layout: ParallelLayout) -> Schedule:
    """1F1B, interleaved if the layout has virtual stages."""
    return "1f1b" if layout.virtual_stages == 1 else "interleaved_1f1b"
