"""How a model is spread over GPUs: data, pipeline, context, tensor and expert parallelism, and what is kept.

Ranks are numbered with tensor parallelism fastest, then context, data and pipeline, as `wlb.torch.build_mesh` does
and as the paper maps them (section 7.1): what talks most sits inside a node. Experts are divided among neighbours of
the dp x cp ranks, as `wlb.torch.expert_ranks` has it: expert parallelism takes no ranks of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from wlb._choices import Schedule
from wlb._errors import check_bool, check_integer, error
from wlb.models import Attention, FeedForward, ModelConfig

Fsdp = Literal["none", "zero1", "zero2", "zero3"]
Recompute = Literal["none", "selective", "full"]
Dtype = Literal["bfloat16", "float32"]
Axis = Literal["tp", "cp", "dp", "pp", "dp_cp", "ep", "edp"]

GRADIENT_BYTES = 4
"""Width of an accumulated gradient."""

V_SHAPED: tuple[Schedule, ...] = ("zbv", "dualpipev")
"""Schedules with two stages a rank, down the ranks and back up: the hop at the bottom stays on its rank."""


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes of the parallel dimensions, and how memory is spent.

    Args:
        dp: data-parallel ranks.
        pp: pipeline ranks.
        cp: context-parallel ranks.
        tp: tensor-parallel ranks.
        ep: expert-parallel ranks: of the dp x cp ranks, neighbours that divide a layer's experts.
        virtual_stages: stages of a pipeline rank; above 1: interleaved 1F1B.
        fsdp: what the dp x cp ranks share out among them: nothing, the optimizer's state ("zero1"), also gradients
            ("zero2"), also parameters, gathered layer by layer ("zero3").
        recompute: what the backward computes again instead of keeping it: "none"; "selective": norms and the product
            inside the feed-forward block (element-wise work only; flash attention keeps no scores anyway); "full":
            everything but the input of each layer.
        sequence_parallel: between matrix multiplications, tensor-parallel ranks split the tokens.
        fused_ffn: the gated product keeps its two inputs only (a fused kernel, torch.compile); plain torch also keeps
            the activated gate.
        fused_loss: the output projection and the loss run in chunks and never hold all logits.
        stage_layers: layers of each stage in the order of the model, `pp * virtual_stages` numbers; default: as even as
            possible, see `layers_of_stages`.
        dtype: of the parameters that are multiplied, and of activations. Gradients are accumulated in float32.
        optimizer_bytes: state for a parameter; 12: float32 master weight and Adam's two moments.

    Raises:
        WlbError: naming the first value that makes no sense.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    virtual_stages: int = 1
    fsdp: Fsdp = "zero1"
    recompute: Recompute = "none"
    sequence_parallel: bool = True
    fused_ffn: bool = True
    fused_loss: bool = False
    stage_layers: tuple[int, ...] | None = None
    dtype: Dtype = "bfloat16"
    optimizer_bytes: int = 12

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                check_integer(field.name, value, minimum=1)
            elif field.type == "bool":
                check_bool(field.name, value)
        for name, choices in (("fsdp", get_args(Fsdp)), ("recompute", get_args(Recompute)), ("dtype", get_args(Dtype))):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in choices:
                raise error(name, f"= {value!r}: must be one of {', '.join(choices)}", value=value)
        if self.dp * self.cp % self.ep:
            raise error("ep", f"= {self.ep}: does not divide dp x cp = {self.dp * self.cp} ranks", value=self.ep)
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

    @property
    def number_bytes(self) -> int:
        """Width of a parameter that is multiplied, and of a number in an activation."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def world_size(self) -> int:
        """Number of GPUs: dp x pp x cp x tp."""
        return self.dp * self.pp * self.cp * self.tp

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, virtual ones counted: `pp * virtual_stages`."""
        return self.pp * self.virtual_stages

    def check(self, *, model: ModelConfig | None = None, world_size: int | None = None) -> None:
        """Refuses a layout that the model cannot have, or of another number of GPUs.

        Args:
            model: the heads, channels and widths of its blocks must divide by tp (fewer key and value heads than tp
                are copied, if they divide it), and the experts of each block that has some by ep. It must have a layer
                for every stage but the first and the last, unless `stage_layers` says otherwise.
            world_size: GPUs there are.

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
        for block in blocks:
            for name, size in block.divisors.items():
                if size % self.tp:
                    raise error("tp", f"= {self.tp}: does not divide {name} = {size}", value=self.tp)
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

        Where the stages do not divide the layers some have one more: those just before the last, which has the output
        projection; the next to go without is the first, which has the embedding and most micro-batches under way. So
        Llama 3 405B has a layer less at both ends, as its authors cut it.
        """
        if self.stage_layers is not None:
            return np.array(self.stage_layers, dtype=np.int64)
        each, left = divmod(model.num_layers, self.num_stages)
        layers = np.full(self.num_stages, each, dtype=np.int64)
        layers[self.num_stages - 1 - left : -1] += 1
        return layers

    def kinds_of_stages(self, model: ModelConfig) -> NDArray[np.int64]:
        """int64[stages, kinds]: of those layers, how many there are of each of `model.kinds`."""
        columns = {kind: column for column, kind in enumerate(model.kinds)}
        ends = self.layers_of_stages(model).cumsum()
        counts = np.zeros((self.num_stages, len(columns)), dtype=np.int64)
        stages = np.searchsorted(ends, np.arange(model.num_layers), side="right")
        np.add.at(counts, (stages, np.array([columns[kind] for kind in model.stack])), 1)
        return counts

    def size(self, axis: Axis) -> int:
        """Ranks of a group along that axis; "dp_cp": that hold the same parameters; "edp": the same experts."""
        both = self.dp * self.cp
        return {"dp_cp": both, "edp": both // self.ep}.get(axis) or int(getattr(self, axis))

    def nodes(self, axis: Axis, *, gpus_per_node: int) -> int:
        """Over how many nodes the ranks of a group along that axis are spread, in the worst group."""
        size, stride = self.size(axis), math.prod(self.size(inner) for inner in _INSIDE[axis])
        if stride >= gpus_per_node:
            return size
        # A group has ranks `first`, `first + stride`, ...: it skips no node, so the later in its node it begins, the
        # more it reaches. `stride` groups beside each other fill a block of ranks, and where in a node a block begins
        # repeats after at most `gpus_per_node` of them.
        block = size * stride
        period = gpus_per_node // math.gcd(block, gpus_per_node)
        starts = range(min(self.world_size // block, period))
        latest = max(block * start % gpus_per_node for start in starts) + stride - 1
        return (min(latest, gpus_per_node - 1) + block - stride) // gpus_per_node + 1


# Whose ranks come between two neighbours along an axis.
_INSIDE: dict[Axis, tuple[Axis, ...]] = {
    "tp": (),
    "cp": ("tp",),
    "dp_cp": ("tp",),
    "ep": ("tp",),
    "edp": ("tp", "ep"),
    "dp": ("tp", "cp"),
    "pp": ("tp", "cp", "dp"),
}


def default_schedule(layout: ParallelLayout) -> Schedule:
    """1F1B, interleaved where the layout has virtual stages."""
    return "1f1b" if layout.virtual_stages == 1 else "interleaved_1f1b"
