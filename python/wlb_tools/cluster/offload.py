"""Seconds of an optimizer with state in host memory: gradients go there, the CPU updates, parameters come back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wlb._choices import Schedule
from wlb.models import ModelConfig
from wlb_tools.cluster.hardware import Hardware
from wlb_tools.cluster.memory import trained_per_rank
from wlb_tools.cluster.parallel import GRADIENT_BYTES, ParallelLayout


def offload_seconds(
    model: ModelConfig, layout: ParallelLayout, hardware: Hardware, *, schedule: Schedule | None = None
) -> NDArray[np.float64]:
    """Seconds of a step for the offloaded share of the optimizer; its three parts do not overlap.

    Gradients in float32 go to the host at `Hardware.host_bandwidth`. The CPU reads gradient and state and writes state
    and parameter, as fast as its memory (`Hardware.host_memory_bandwidth`). The parameters come back.

    Args:
        model: its sizes.
        layout: its `offload_optimizer` is the share, its `fsdp` says how many ranks share the state.
        hardware: the GPUs and links.
        schedule: of the pipeline, which places stages on ranks.

    Returns:
        float64[pp], zeros if nothing is offloaded.

    Raises:
        WlbError: as `wlb_tools.ParallelLayout.check`.
    """
    layout.check(model=model)
    rest, experts = trained_per_rank(model, layout, schedule=schedule)
    if layout.fsdp != "none":
        rest, experts = rest / layout.size("shard"), experts / layout.size("expert_shard")
    parameters = layout.offload_optimizer * (rest + experts)
    sent = GRADIENT_BYTES + layout.number_bytes
    touched = sent + 2 * layout.optimizer_bytes
    return np.asarray(parameters * (sent / hardware.host_bandwidth + touched / hardware.host_memory_bandwidth))
