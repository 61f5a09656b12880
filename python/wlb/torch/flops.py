"""Model FLOPs from true document lengths, and how much of the hardware they use."""

from __future__ import annotations

import torch
from numpy.typing import ArrayLike

import wlb
from wlb._core import PEAK_FLOPS
from wlb._errors import error
from wlb.torch.data.forest import ForestBatch

# Dense bf16 tensor-core peak of one GPU, FLOP/s, from NVIDIA's data sheets. An entry fits if all its words are in the
# driver's name of the GPU; the longest entry that fits counts.
PEAK_BF16 = {
    **{generation.upper(): peak for generation, peak in PEAK_FLOPS.items()},
    "GB200": 2.5e15,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H200 PCIe": 835e12,  # the NVL form, by its connector
    "GH200": 989e12,
}


# Arguments of `CostModel.from_flops` that are no part of the shape: with them it would not count model FLOPs.
_NO_SHAPE = ("attention_efficiency", "flops_per_second", "recompute", "passes")


def model_flops(
    lengths: ArrayLike | ForestBatch, model: wlb.ModelConfig | None = None, **shape: int | bool | None
) -> float:
    """FLOPs of one training step over whole documents, as MFU counts them: three times those of the forward pass.

    Counted from the sums of ``d`` and of ``d * (d + 1) / 2`` (causal half), never from `max_seqlen`, which overstates.
    FLOPs that a kernel recomputes in its backward pass are not model FLOPs (a `wlb.CostModel` for packing counts them).

    Args:
        lengths: int[documents], tokens of each document of the step. Or a `ForestBatch`: its samples, each whole, as
            if no token was shared, so that sharing shows as a higher utilization.
        model: its layers of any kind: windows, chunks, states and experts are counted as what they are.
        **shape: instead of `model`, for equal layers: the arguments of `wlb.CostModel.from_flops`: `hidden_size`,
            `ffn_hidden_size`, `num_layers`, `num_heads`, `num_kv_heads`, `vocab_size`, ...

    Raises:
        WlbError: as `wlb.CostModel.from_flops`; for arguments that are no shape; for both a model and a shape.
    """
    if isinstance(lengths, ForestBatch):
        lengths = lengths.forest.sample_lengths[: lengths.document_ids.numel()]
    if model is not None:
        for name, value in shape.items():
            raise error(name, f"= {value!r}: the model says that", value=value)
        return float(model.flops(lengths).sum())
    for name in _NO_SHAPE:
        if name in shape:
            raise error(name, f"= {shape[name]!r}: is no shape of a model", value=shape[name])
    return 3 * float(wlb.CostModel.from_flops(**shape, passes="forward").cost(lengths).sum())  # type: ignore[arg-type]


def peak_flops(device: torch.device | str | None = None) -> float | None:
    """Peak dense bf16 FLOP/s of a CUDA device by its name; None if unknown, also for a MIG slice."""
    if not torch.cuda.is_available():
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    if "MIG" in words:  # NVIDIA H100 80GB HBM3 MIG 1g.10gb
        return None
    known = [model for model in PEAK_BF16 if set(model.split()) <= set(words)]
    return PEAK_BF16[max(known, key=len)] if known else None


def model_flops_utilization(flops: float, *, seconds: float, num_devices: int, peak: float | None) -> float:
    """MFU: model FLOPs of a step over the FLOPs that its devices could have computed in that time.

    Args:
        flops: of the whole step, over all ranks (`model_flops`).
        seconds: wall time of the step.
        num_devices: all ranks.
        peak: FLOP/s of one device (`peak_flops`, which may give None).

    Raises:
        WlbError: for a time, number or peak that is not positive, or a peak that is not known.
    """
    if peak is None:
        raise error("peak", "= None: is not known for this device", value=peak)
    for name, value in (("seconds", seconds), ("num_devices", num_devices), ("peak", peak)):
        if not value > 0:
            raise error(name, f"= {value}: must be positive", value=value)
    return flops / (seconds * num_devices * peak)
