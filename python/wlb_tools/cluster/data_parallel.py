"""Communication of data-parallel ranks: gradients and sharded parameters, and when they are sent.

The dp x cp ranks of a stage hold the same parameters; fewer ranks hold the same routed experts, dp x cp / ep unless
`expert_tp` is apart from tp. Where ranks share state out in groups (`dp_replicate`, HSDP), gradients are summed inside
each group, and then each rank's share of them over the groups. Only gradients of what is trained are sent: with LoRA
those of adapters. Parameters that are kept in FP8 are gathered in FP8.

- `sync="step"`: once a step, behind its last backward (DDP that accumulates, ZeRO-1 and 2, Megatron). Gradients are
  summed, and where the optimizer's state is shared out new parameters are gathered.
- `sync="micro_batch"`: in every micro-batch. Gradients are summed in its backward, layer by layer; ZeRO-3 also gathers
  a layer's parameters before its forward and again before its backward, and none is left to gather at the end of a
  step. The next layer's parameters are gathered beside this layer's computation and no further ahead, since memory is
  what ZeRO-3 saves: so these ranks go through every pass of every micro-batch together.
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
    """Seconds at the end of a step in which dp x cp ranks sum gradients and share out new parameters.

    A reduce-scatter of gradients and an all-gather of parameters, an all-reduce of gradients without FSDP; of experts
    one more, among the ranks that hold the same; with HSDP an all-reduce over replicas between the two. Computation can
    hide all but the first and last layer's share of it. What every micro-batch has of it is in `micro_batch_seconds`,
    and not here.

    Args:
        model: its shape.
        layout: how it is spread.
        hardware: what it runs on.
        schedule: of the pipeline, which says what rank has which stage; default: 1F1B, interleaved where the layout has
            virtual stages.
        sync: when; default: in every micro-batch with ZeRO-3, else once a step.

    Returns:
        float64[pp], if nothing hides them.

    Raises:
        WlbError: as `wlb_tools.ParallelLayout.check`; ZeRO-3 once a step.
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

    Layer by layer, the embedding and the output projection each by themselves: so many collectives of their own, whose
    latency counts. The backward of a layer that is computed again has its parameters for that, too.

    Args:
        model: its shape.
        layout: how it is spread.
        hardware: what it runs on.
        schedule: as in `data_parallel_seconds`.
        sync: as in `data_parallel_seconds`.

    Returns:
        float64[stages, 3]: of the forward and of the inputs' gradient parameters that ZeRO-3 gathers, of the weights'
        gradient its sum; zeros where ranks meet once a step.

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
    """Communication that remains when computation hides a share of it, and no more than there is computation.

    The two gradients of a backward count together: few schedules take them apart, and what one of them sends may travel
    beside the other.

    Args:
        communication: float64[stages, 3] seconds of forward, inputs' and weights' gradient.
        computing: float64[..., stages, 3] seconds of what runs beside it.
        overlap: the share that could be hidden.

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
        WlbError: once a step with ZeRO-3.
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
    """Sharded parameters with the ranks that share them: experts that are divided have fewer ranks."""
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
