"""Do all ranks hold the same plan? A cheap check, before a wrong one hangs or corrupts the step."""

from __future__ import annotations

import hashlib
import operator
from collections import defaultdict
from typing import Protocol

import torch
import torch.distributed as dist

from wlb._errors import error
from wlb.torch.collectives import device_of


class HasDigest(Protocol):
    """A `wlb.Packing`, a `wlb.Shard` or a `wlb.DynamicCpPlan`."""

    def digest(self) -> str:
        """Equal iff plans are equal."""
        ...


def check_agreement(
    plan: HasDigest | str,
    *,
    step: int = 0,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Raises on every rank of `group` if not all have the same plan of the same step.

    Args:
        plan: or its digest.
        step: the step that it is the plan of.
        group: the ranks that must agree; None for all.

    Raises:
        WlbError: that names the ranks of each plan; the same text on every rank.

    Complexity:
        One all-gather of 40 bytes a rank.
    """
    digest = plan if isinstance(plan, str) else plan.digest()
    number = operator.index(step).to_bytes(8, "little", signed=True)
    fingerprint = hashlib.blake2b(digest.encode(), digest_size=32).digest() + number
    device = device_of(group)
    mine = torch.frombuffer(bytearray(fingerprint), dtype=torch.uint8).to(device)
    ranks_in_group = dist.get_world_size(group)
    everyone = torch.empty(ranks_in_group * mine.numel(), dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(everyone, mine, group=group)

    holders: dict[bytes, list[int]] = defaultdict(list)
    for group_rank, theirs in enumerate(everyone.cpu().view(ranks_in_group, -1).numpy()):
        rank = group_rank if group is None else dist.get_global_rank(group, group_rank)
        holders[theirs.tobytes()].append(rank)
    if len(holders) == 1:
        return
    steps = {int.from_bytes(held[32:], "little", signed=True) for held in holders}
    parts = []
    for held, ranks in sorted(holders.items(), key=lambda item: (-len(item[1]), item[1])):
        of_step = f" of step {int.from_bytes(held[32:], 'little', signed=True)}" if len(steps) > 1 else ""
        parts.append(f"ranks {ranks} hold {held[:4].hex()}{of_step}")
    raise error("plan", "differs between ranks: " + "; ".join(parts), value=digest)
