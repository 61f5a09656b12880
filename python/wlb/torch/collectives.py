"""Facts about a process group that torch does not give: device and timeout of its collectives, its copy on the host."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

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


_HOSTS: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def host_group(group: dist.ProcessGroup | None = None, *, description: str) -> dist.ProcessGroup:
    """A group of the same ranks whose collectives run on the host: nobody waits for what a device still computes.

    It is the group itself, if its backend works on the host. Else it is a gloo group, which is made once. Making it is
    a collective of the whole world: every rank calls this with its own group.

    Args:
        group: None for all ranks.
        description: what the new group is for.
    """
    group = group or dist.distributed_c10d._get_default_group()
    if device_of(group).type == "cpu":
        return group
    if group not in _HOSTS:
        _HOSTS[group] = on_host(group, description=description)
    return _HOSTS[group]


def on_host(group: dist.ProcessGroup, *, description: str) -> dist.ProcessGroup:
    """A gloo group of the same ranks. A collective of the whole world: every rank calls it with its own group.

    All ranks make the groups of all: `use_local_synchronization` would spare that, but then groups that a rank was in
    before change the name of the next (see `wlb.torch.subgroup`).
    """
    mine = tuple(dist.get_process_group_ranks(group))
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    longest = max(timeout_of(group, device_of(group)) or GLOO_WAITS, GLOO_WAITS)
    result = None
    for ranks in sorted(set(of_ranks)):
        made = dist.new_group(list(ranks), backend="gloo", timeout=longest, group_desc=description)
        if ranks == mine:
            result = made
    assert isinstance(result, dist.ProcessGroup)
    return result
