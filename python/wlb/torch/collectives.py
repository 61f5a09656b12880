"""Facts about a process group that torch does not give: the device of its collectives, and their timeout."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def device_of(group: dist.ProcessGroup | None = None) -> torch.device:
    """Device for the collectives of a group: the host if its backend supports it, else this rank's device.

    Args:
        group: None for all ranks.
    """
    devices = [part.split(":")[0] for part in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in devices else devices[0])


def timeout_of(group: dist.ProcessGroup | None, device: torch.device | str) -> timedelta | None:
    """Timeout of a group's collectives, which a new group does not inherit; None if the backend does not tell.

    Args:
        group: None for all ranks.
        device: Device whose backend is asked.
    """
    group = group or dist.distributed_c10d._get_default_group()
    try:
        return group._get_backend(torch.device(device)).options._timeout
    except (RuntimeError, AttributeError):
        return None
