"""From a `wlb.Shard` to what a rank does, once for all layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

import wlb
from wlb.torch.attention.all_gather import GatherRoute
from wlb.torch.attention.fetch import FetchRoute
from wlb.torch.attention.heads import HeadsRoute
from wlb.torch.attention.ring import RingRoute
from wlb.torch.attention.segments import UNLIMITED, Segments

# Plans of each kind: the micro-batches of a step, whose layers the backward may recompute, and those of the next, which
# are prepared beside it. Shards are compared by content; what a backward needs it holds itself.
KEPT = 128

_Route = TypeVar("_Route")


@functools.lru_cache(maxsize=KEPT)
def gather_route(shard: wlb.Shard, rank: int, *, window: int | None, biased: bool, device: torch.device) -> GatherRoute:
    """Plans one rank's part when keys are all-gathered. `biased`: scores have a bias by position."""
    left, right = _reach(shard, window)
    documents = Segments.of_documents(shard)
    route = GatherRoute.make(_held(shard), documents, rank, left=left, right=right, positions_matter=biased)
    return on_device(route, device)


@functools.lru_cache(maxsize=KEPT)
def fetch_route(shard: wlb.Shard, rank: int, *, window: int | None, biased: bool, device: torch.device) -> FetchRoute:
    """Plans one rank's part when ranks fetch the keys that they need. `biased`: scores have a bias by position."""
    left, right = _reach(shard, window)
    documents = Segments.of_documents(shard)
    plan = FetchRoute.make(_held(shard), documents, rank, left=left, right=right, positions_matter=biased)
    return on_device(plan, device)


@functools.lru_cache(maxsize=KEPT)
def ring_route(
    shard: wlb.Shard, rank: int, *, degree: int, window: int | None, biased: bool, device: torch.device
) -> tuple[HeadsRoute | None, RingRoute]:
    """Plans one rank's part in blocks of `degree` ranks that exchange heads, with a ring over the blocks."""
    left, right = _reach(shard, window)
    held = _held(shard)
    heads = None
    if degree > 1:
        blocks = [held[i : i + degree] for i in range(0, len(held), degree)]
        heads = HeadsRoute.make(blocks[rank // degree], rank % degree)
        held = [Segments.concatenate(block).in_packed_order() for block in blocks]
    ring = RingRoute.make(held, rank // degree, left=left, right=right, positions_matter=biased)
    return on_device((heads, ring), device)


def on_device(route: _Route, device: torch.device) -> _Route:
    """The route, made on the host, with its int32 tensors on `device`: views of one buffer, sent by one copy.

    To a GPU the copy is from pinned memory, and the host does not wait for it: it is ordered with what the current
    stream runs before and after.
    """
    tensors: list[Tensor] = []
    _map_tensors(route, tensors.append)
    if not tensors:
        return route
    sizes = [tensor.numel() for tensor in tensors]
    host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    torch.cat(tensors, out=host)
    views = iter(torch.split(host.to(device, non_blocking=True), sizes))
    moved: _Route = _map_tensors(route, lambda _: next(views))
    return moved


def _map_tensors(part: Any, replace: Callable[[Tensor], Any]) -> Any:
    if isinstance(part, Tensor):
        return replace(part)
    if isinstance(part, (list, tuple)):
        return type(part)(_map_tensors(item, replace) for item in part)
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
        return type(part)(**{name: _map_tensors(value, replace) for name, value in fields.items()})
    return part


def _held(shard: wlb.Shard) -> list[Segments]:
    return [Segments.of_rank(shard, rank) for rank in range(shard.cp_size)]


def _reach(shard: wlb.Shard, window: int | None) -> tuple[int, int]:
    """Number of tokens before and after itself that a token sees."""
    reach = UNLIMITED if window is None else min(window - 1, UNLIMITED)
    return reach, 0 if shard.causal else reach
