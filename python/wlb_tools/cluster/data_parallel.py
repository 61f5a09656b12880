"""Communication of data-parallel ranks: gradients and sharded parameters, and when they are sent.

The dp x cp ranks of a stage hold the same parameters. Fewer ranks hold the same routed experts: dp x cp / ep, unless
`expert_tp` differs from tp. If state is sharded inside groups (`dp_replicate`, HSDP), gradients are summed inside each
group, and then each rank's shard over the groups. Only gradients of trained parameters are sent; with LoRA those of
adapters. Parameters that are kept in FP8 are gathered in FP8.

- `sync="step"`: once a step, after the last backward pass (DDP that accumulates, ZeRO-1 and 2, Megatron). Gradients are
  summed, and if the optimizer's state is sharded, new parameters are gathered.
- `sync="micro_batch"`: in every micro-batch. Gradients are summed in its backward pass, layer by layer. ZeRO-3 also
  gathers a layer's parameters before its forward and again before its backward pass, so none are gathered at the end of
  a step. Only the next layer's parameters are gathered during this layer's computation, because ZeRO-3 saves memory. So
  these ranks go through every pass of every micro-batch together.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
from numpy.typing import NDArray

from wlb._choices import Schedule, Sync
from wlb._errors import error
from wlb.models import ModelConfig
from wlb_tools.cluster.collectives import Communicator
from wlb_tools.cluster.hardware import Hardware
from wlb_tools.cluster.memory import gathered_bytes_per_rank, trained_per_rank, units_of_stages
from wlb_tools.cluster.parallel import GRADIENT_BYTES, ParallelLayout

Floats = NDArray[np.float64]


def data_parallel_seconds(
    model: ModelConfig,
    layout: ParallelLayout,
    hardware: Hardware,
    *,
    schedule: Schedule | None = None,
    sync: Sync | None = None,
) -> Floats:
    """Seconds at the end of a step in which dp x cp ranks sum gradients and gather new parameters.

    These are a reduce-scatter of gradients and an all-gather of parameters, or without FSDP an all-reduce of gradients;
    the same for experts among the ranks that hold the same ones; with HSDP an all-reduce over replicas in between.
    Computation can hide all of it except the first and last layer's share. Communication in micro-batches is in
    `micro_batch_seconds` instead.

    Args:
        model: its sizes.
        layout: the layout on GPUs.
        hardware: the GPUs and links.
        schedule: of the pipeline, which places stages on ranks; default: 1F1B, interleaved if the layout has virtual
            stages.
        sync: when; default: in every micro-batch with ZeRO-3, else once a step.

    Returns:
        float64[pp], if nothing hides them.

    Raises:
        WlbError: as `wlb_tools.ParallelLayout.check`; or ZeRO-3 with `sync="step"`.
    """
    layout.check(model=model)
    sync = check_sync(sync, layout)
    seconds = np.zeros(layout.pp)
    if sync == "step":
        trained = trained_per_rank(model, layout, schedule=schedule)
        for parameters, group in _alike(*trained, layout, hardware):
            seconds += _summed(parameters, group, layout, hardware)
    if layout.fsdp in ("zero1", "zero2"):
        gathered = gathered_bytes_per_rank(model, layout, schedule=schedule)
        for num_bytes, group in _alike(*gathered, layout, hardware):
            seconds += group.all_gather(num_bytes)
    return seconds


def micro_batch_seconds(
    model: ModelConfig,
    layout: ParallelLayout,
    hardware: Hardware,
    *,
    schedule: Schedule | None = None,
    sync: Sync | None = None,
) -> Floats:
    """Seconds of every micro-batch in which dp x cp ranks gather parameters and sum gradients, if nothing hides them.

    Each layer, the embedding and the output projection have collectives of their own, each with its latency. If a layer
    is recomputed, the parameters for its backward pass serve the recomputation too.

    Args:
        model: its sizes.
        layout: the layout on GPUs.
        hardware: the GPUs and links.
        schedule: as in `data_parallel_seconds`.
        sync: as in `data_parallel_seconds`.

    Returns:
        float64[stages, 3]: for the forward pass and the gradient of inputs the gathering of parameters by ZeRO-3, for
        the gradient of weights their sum; zeros if ranks meet once a step.

    Raises:
        WlbError: as `data_parallel_seconds`.

    Complexity:
        O(stages * kinds of layers).
    """
    layout.check(model=model)
    seconds = np.zeros((layout.num_stages, 3))
    if check_sync(sync, layout) == "step":
        return seconds
    for stage, units in enumerate(units_of_stages(model, layout, schedule=schedule)):
        for unit in units:
            if layout.fsdp == "zero3":
                for parameters, group in _alike(np.array(unit.rest), np.array(unit.experts), layout, hardware):
                    seconds[stage, :2] += unit.count * group.all_gather(parameters * unit.width)
            trained = np.array(unit.trained), np.array(unit.trained_experts)
            for parameters, group in _alike(*trained, layout, hardware):
                seconds[stage, 2] += unit.count * _summed(parameters, group, layout, hardware)
    return seconds


def exposed(communication: Floats, computing: Floats, *, overlap: float) -> Floats:
    """Communication that remains if computation hides a share of it, but no more than the computation takes.

    The two gradients of a backward pass count together: few schedules separate them, and the communication of one may
    overlap with the computation of the other.

    Args:
        communication: float64[stages, 3] seconds of forward pass, gradients of inputs and gradients of weights.
        computing: float64[..., stages, 3] seconds of the computation at the same time.
        overlap: the share of communication that could be hidden.

    Returns:
        float64[..., stages, 3].
    """
    if not communication.any():
        return np.zeros_like(computing)
    left = np.empty_like(computing)
    for passes in (slice(0, 1), slice(1, 3)):
        sent = communication[:, passes].sum(axis=1)
        hidden = np.minimum(overlap * sent, computing[..., passes].sum(axis=-1))
        share = np.divide(sent - hidden, sent, out=np.zeros_like(hidden), where=sent > 0)
        left[..., passes] = share[..., None] * communication[:, passes]
    return left


def check_sync(sync: Sync | None, layout: ParallelLayout) -> Sync:
    """The given `sync`, or the default: in every micro-batch with ZeRO-3, else once a step.

    Raises:
        WlbError: `sync="step"` with ZeRO-3.
    """
    if sync is None:
        return "micro_batch" if layout.fsdp == "zero3" else "step"
    if sync not in get_args(Sync):
        raise error("sync", f"= {sync!r}: must be one of {', '.join(get_args(Sync))}", value=sync)
    if sync == "step" and layout.fsdp == "zero3":
        message = "= 'step': ZeRO-3 gathers parameters in every micro-batch; fsdp='zero2' is what keeps them"
        raise error("sync", message, value=sync)
    return sync


def _alike(
    rest: Floats, experts: Floats, layout: ParallelLayout, hardware: Hardware
) -> list[tuple[Floats, Communicator]]:
    """Sharded parameters with the ranks that share them; divided experts have fewer such ranks."""
    everywhere = Communicator.along("shard", layout, hardware)
    if layout.size("edp") == layout.size("dp_cp"):
        return [(rest + experts, everywhere)]
    return [(rest, everywhere), (experts, Communicator.along("expert_shard", layout, hardware))]


def _summed(parameters: Floats, group: Communicator, layout: ParallelLayout, hardware: Hardware) -> Floats:
    gradients = parameters * GRADIENT_BYTES
    if layout.fsdp == "none":
        return group.all_reduce(gradients)
    replicas = Communicator.along("replicate", layout, hardware)
    return group.reduce_scatter(gradients) + replicas.all_reduce(gradients / group.size)
