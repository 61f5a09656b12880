"""Checks that all ranks hold the same plan and cut it alike, before a difference hangs or corrupts the step."""

from __future__ import annotations

import hashlib
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from wlb._errors import error
from wlb.torch.collectives import device_of
from wlb.torch.data.batch import PackedBatch
from wlb.torch.data.dynamic_cp import DynamicCpStep
from wlb.torch.data.forest import ForestBatch
from wlb.torch.data.step import Step

_HASH = 16  # bytes


class HasDigest(Protocol):
    """A `wlb.Packing`, a `wlb.Shard` or a `wlb.DynamicCpPlan`."""

    def digest(self) -> str:
        """Equal if and only if plans are equal."""
        ...


def check_agreement(
    plan: Step[Any] | DynamicCpStep[Any] | HasDigest | str,
    *,
    step: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Raises on every rank of `group` if not all have the same plan of the same step, and the same cuts of it.

    For a step from a loader, everything that ranks must have in common is compared: the plan, a hash of some of its
    documents, the number of the step, the ranks that share it and the micro-batches of each, and how the
    context-parallel ranks of a micro-batch cut it (their `shard`, which follows from `strategy`, `kernel_model` and
    `cp_size` of each rank).

    Args:
        plan: a step; or only a plan, or its digest.
        step: number of the step if `plan` is no step; default 0.
        group: the ranks that must agree; None for all. For a step: the ranks that share it, or all of them.

    Raises:
        WlbError: ranks differ; the message names the ranks of each plan, layout or cut, and is equal on every rank. Or
            several ranks share the step, but there is no process group.

    Complexity:
        One all-gather of 56 bytes a rank; for a step with context-parallel ranks another of 32 bytes a micro-batch.
    """
    layout, content, batches, number = b"", "", [], step or 0
    if isinstance(plan, Step | DynamicCpStep):
        if step is not None and step != plan.number:
            raise error("step", f"= {step}: the step given has number {plan.number}", value=step)
        number = plan.number
        if group is None and not dist.is_initialized() and plan.num_ranks > 1:
            message = f"is missing: {plan.num_ranks} ranks share step {number}; call init_process_group first"
            raise error("group", message)
        layout = f"{plan.num_ranks} {len(plan.micro_batches)}".encode()
        content = getattr(plan, "content", None) or ""
        batches, plan = _cut(plan), plan.plan
    if group is None and not dist.is_initialized():
        return  # a single process
    digest = plan if isinstance(plan, str) else plan.digest()
    place = operator.index(number).to_bytes(8, "little", signed=True)
    mine = _hash(digest.encode()) + _hash(layout) + _hash(content.encode()) + place
    holders = _holders(_gathered(mine, group), group)
    if len(holders) > 1:
        raise error("plan", f"differs between ranks: {_named(holders)}", value=digest)
    if batches:
        _check_cuts(batches, group)


def agree(step: Step[Any]) -> None:
    """`check_agreement` of a step that several ranks share, before training without a proof."""
    if step.num_ranks > 1 and dist.is_initialized():
        check_agreement(step)


def _cut(step: Step[Any] | DynamicCpStep[Any]) -> list[tuple[bytes, PackedBatch | ForestBatch]]:
    """This rank's micro-batches, each with a name that all its context-parallel ranks know; none if nothing is cut.

    Ranks with the same plan and layout either all have some or all have none.
    """
    packed = [batch for batch in step.micro_batches if isinstance(batch, PackedBatch | ForestBatch)]
    if len(packed) < len(step.micro_batches) or not packed:
        return []
    if isinstance(step, Step):
        names = [f"micro-batch {number}" for number in step.indices.tolist()]
        return list(zip(map(str.encode, names), packed, strict=True)) if packed[0].cp_size > 1 else []
    names = [f"micro-batch {number}, group {group.first_rank}" for number, group in enumerate(step.groups)]
    return list(zip(map(str.encode, names), packed, strict=True))


def _check_cuts(batches: Sequence[tuple[bytes, PackedBatch | ForestBatch]], group: dist.ProcessGroup | None) -> None:
    """Raises unless all ranks of a micro-batch cut it alike."""
    mine = b"".join(_hash(name) + _hash(batch.shard.digest().encode()) for name, batch in batches)
    cuts: dict[bytes, dict[bytes, list[int]]] = defaultdict(lambda: defaultdict(list))
    for group_rank, theirs in enumerate(_gathered(mine, group)):
        for entry in theirs.reshape(-1, 2 * _HASH):
            cuts[entry[:_HASH].tobytes()][entry[_HASH:].tobytes()].append(_global(group_rank, group))
    different = [(name, held) for name, held in cuts.items() if len(held) > 1]
    if not different:
        return
    name, held = min(different, key=lambda item: (sorted(item[1].values()), item[0]))
    parts = [f"ranks {ranks} cut it as {digest[:4].hex()}" for digest, ranks in _sorted(held)]
    of_mine = {_hash(known): known.decode() for known, _ in batches}
    raise error(
        "shard",
        f"differs between the ranks of {len(different)} micro-batches: of one, {'; '.join(parts)}. Give collate the "
        "same strategy, kernel_model, cp_size and padding on all of them",
        value=of_mine.get(name),
    )


def _gathered(mine: bytes, group: dist.ProcessGroup | None) -> NDArray[np.uint8]:
    """The bytes of every rank: uint8 [ranks, bytes]."""
    device = device_of(group)
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    ranks = dist.get_world_size(group)
    everyone = torch.empty(ranks * sent.numel(), dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(everyone, sent, group=group)
    gathered: NDArray[np.uint8] = everyone.cpu().view(ranks, -1).numpy()
    return gathered


def _holders(everyone: NDArray[np.uint8], group: dist.ProcessGroup | None) -> dict[bytes, list[int]]:
    holders: dict[bytes, list[int]] = defaultdict(list)
    for group_rank, theirs in enumerate(everyone):
        holders[theirs.tobytes()].append(_global(group_rank, group))
    return holders


def _named(holders: Mapping[bytes, list[int]]) -> str:
    """Text of an error: which ranks have which plan, step or layout, where these differ."""
    steps = {held[3 * _HASH :] for held in holders}
    plans = {held[:_HASH] for held in holders}
    layouts = {held[_HASH : 2 * _HASH] for held in holders}
    if len(plans) == len(steps) == len(layouts) == 1:
        held_by = "; ".join(f"ranks {ranks} read {held[2 * _HASH :][:4].hex()}" for held, ranks in _sorted(holders))
        return (
            f"documents have other tokens, though the plan and all lengths are equal: {held_by}. Give every rank the "
            "same data set in the same order: shuffle with one seed, and do not split it by rank"
        )
    parts = []
    for held, ranks in _sorted(holders):
        part = f"ranks {ranks} hold {held[:4].hex()}"
        if len(steps) > 1:
            part += f" of step {int.from_bytes(held[3 * _HASH :], 'little', signed=True)}"
        if len(plans) == len(steps) == 1:
            part += f" for ranks and micro-batches of their own ({held[_HASH : _HASH + 4].hex()})"
        parts.append(part)
    if len(plans) == len(steps) == 1:
        parts.append("give all loaders the dp and cp ranks of the same mesh")
    return "; ".join(parts)


def _sorted(holders: Mapping[bytes, list[int]]) -> list[tuple[bytes, list[int]]]:
    """Most ranks first."""
    return sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))


def _global(group_rank: int, group: dist.ProcessGroup | None) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_HASH).digest()
