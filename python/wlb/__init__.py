"""wlb: balanced work for the GPUs of a long-context training run.

Documents have unequal lengths and attention is quadratic, so micro-batches with equally many tokens have unequal work,
and all GPUs wait for the slowest. wlb packs documents into micro-batches of equal *work* (`pack`), may hold some
documents back for a few steps to make steps more even (`Packer`), and divides every document among context-parallel
ranks without padding (`shard`).

    cost = wlb.CostModel.from_flops(hidden_size=4096, ffn_hidden_size=11008, num_layers=32, num_heads=32,
                                    vocab_size=32000, attention_efficiency=0.55)
    plan = wlb.pack(lengths, num_micro_batches=16, max_tokens=196608, cost_model=cost)
    for micro_batch in plan.micro_batches:
        shard = wlb.shard(micro_batch, cp_size=4)

The same lengths give the same plan, byte for byte, on every rank. Only numpy is required.
"""

from typing import TYPE_CHECKING

from wlb import _arrays, _core, _named, _shown, profiles
from wlb._core import (
    BUILD_PROFILE,
    BacklogWarning,
    CostModel,
    CpGroup,
    DynamicCpPlan,
    DynamicMicroBatch,
    Exchange,
    KernelModel,
    MicroBatch,
    Packer,
    Packing,
    PrefixForest,
    RankShard,
    Shard,
    StateError,
    WlbError,
    __version__,
    batch_offsets,
    order_micro_batches,
    pack,
    pairs,
    plan_dynamic_cp,
    shard,
    simulate_pipeline,
    simulate_steps,
    split_documents,
    tune,
)
from wlb._results import (
    Bounds,
    CostFit,
    PackerMetrics,
    PipelineSteps,
    PipelineTimeline,
    TunedPoint,
    TuneResult,
)

if TYPE_CHECKING:
    from wlb import models as models
    from wlb import rl as rl
    from wlb import timings as timings
    from wlb.models import ModelConfig
else:  # a type checker would take any name for one of the package

    def __getattr__(name: str) -> object:
        """`ModelConfig`, `models`, `rl` and `timings`: imported when first used, since packing needs none of them."""
        if name == "ModelConfig":
            from wlb.models import ModelConfig

            globals()[name] = ModelConfig
            return ModelConfig
        if name in ("models", "rl", "timings"):
            from importlib import import_module

            return import_module(f"wlb.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, "models", "rl", "timings"})


# The engine imports no Python modules and reads no files, so Python gives it the functions that it calls.
_core.hand_down(_arrays.integers, _arrays.floats, profiles.read, _shown.summary, _shown.to_pandas, _shown.html)
_core.hand_down(_named.refuse_unknown)

__all__ = [
    "BUILD_PROFILE",
    "BacklogWarning",
    "Bounds",
    "CostFit",
    "CostModel",
    "CpGroup",
    "DynamicCpPlan",
    "DynamicMicroBatch",
    "Exchange",
    "KernelModel",
    "MicroBatch",
    "ModelConfig",
    "Packer",
    "PackerMetrics",
    "Packing",
    "PipelineSteps",
    "PipelineTimeline",
    "PrefixForest",
    "RankShard",
    "Shard",
    "StateError",
    "TuneResult",
    "TunedPoint",
    "WlbError",
    "__version__",
    "batch_offsets",
    "order_micro_batches",
    "pack",
    "pairs",
    "plan_dynamic_cp",
    "shard",
    "simulate_pipeline",
    "simulate_steps",
    "split_documents",
    "tune",
]

globals().update(_named.name_options([getattr(_core, name) for name in __all__ if hasattr(_core, name)]))
