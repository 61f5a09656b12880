"""Groups of ranks for the samples of a step, as Megatron-Core makes them: 1, 2, 4, ... neighbours, or all ranks."""

from __future__ import annotations

from typing import Any, Final

import wlb
from wlb._core import WlbError
from wlb._errors import error

Group = tuple[int, list[int]]
"""Number of ranks, and the samples."""

# Arguments of plans that are computed from the samples and the ranks.
SET_HERE: Final = (
    "lengths",
    "world_size",
    "num_stages",
    "num_virtual_stages",
    "max_tokens_per_rank",
    "group_sizes",
    "cost_model",
    "costs",
    "attention_costs",
    "ids",
)

# Not supported here: Megatron-Core pads samples one by one, and nothing pads micro-batches to the sizes of a plan.
NOT_HERE: Final = ("max_documents", "multiple_of_tokens", "token_buckets")


def largest_group(world_size: int) -> int:
    """Size of the largest group: all ranks if they are a power of two, else the largest power of two up to half."""
    below = 1 << (world_size.bit_length() - 1)
    return below if below in (world_size, 1) else below // 2


def planned(lengths: Any, **options: Any) -> list[list[Group]]:
    """The groups of each micro-batch, by `wlb.plan_dynamic_cp`, without empty groups."""
    plan = wlb.plan_dynamic_cp(lengths, **options)
    return [
        [(group.cp_size, group.document_ids.tolist()) for group in part if len(group.document_ids)] for part in plan
    ]


def filled(groups: list[Group], *, world_size: int, max_cp_size: int) -> list[Group] | None:
    """Puts samples on larger groups so that no rank is idle; None if a group would need more than `max_cp_size`."""
    groups, left = list(groups), world_size - sum(size for size, _ in groups)
    while left:
        groups.sort(key=lambda group: group[0], reverse=True)
        growing = [at for at, (size, _) in enumerate(groups) if size <= min(left, max_cp_size // 2)]
        shared = [at for at, (_, rows) in enumerate(groups) if len(rows) > 1]
        if growing:  # grow the smallest group, so that sizes stay powers of two that fit
            size, rows = groups[growing[-1]]
            groups[growing[-1]], left = (2 * size, rows), left - size
        elif shared and (size := groups[shared[-1]][0]) <= left:
            rows = groups[shared[-1]][1]
            groups[shared[-1]], left = (size, rows[::2]), left - size
            groups.append((size, rows[1::2]))
        else:
            return None
    return groups


def of_ranks(groups: list[Group], world_size: int) -> list[list[int]]:
    """Samples of every rank. The largest groups come first, so that each begins at a multiple of its size."""
    ranks: list[list[int]] = []
    for size, rows in sorted(groups, key=lambda group: -group[0]):
        ranks += [rows] * size
    return ranks + [[]] * (world_size - len(ranks))


def too_few(samples: int, what: str) -> WlbError:
    """The error for fewer samples than ranks."""
    return error("sample_id_seqlens", f"are {samples}, too few for {what}", value=samples)
