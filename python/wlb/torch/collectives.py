"""Facts about a process group that torch does not give: device and timeout of its collectives."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

GLOO_WAITS = timedelta(minutes=30)
"""How long gloo waits if nobody says otherwise."""


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
        device: device whose backend is asked.
    """
    group = group or dist.distributed_c10d._get_default_group()
    try:
        return group._get_backend(torch.device(device)).options._timeout
    except (RuntimeError, AttributeError):
        return None


def can_split(device: torch.device | str) -> bool:
    """Whether `torch.distributed.split_group` can split the world's process group.

    The backend has to be able to, and to be connected: NCCL is where `init_process_group` was given a `device_id`, and
    gloo always, but torch splits it only from 2.15 on.

    Args:
        device: device whose backend is asked.
    """
    world = dist.distributed_c10d._get_default_group()
    device = torch.device(device)
    try:
        splits = world._get_backend(device).supports_splitting
    except RuntimeError:
        return False
    return splits and (world.bound_device_id is not None or (device.type == "cpu" and torch.__version__ >= "2.15"))
