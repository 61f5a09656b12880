"""From a `wlb.Shard` to what a rank does, once for all layers."""

from __future__ import annotations

import functools

import numpy as np
import torch

import wlb
from wlb.torch.attention.all_gather import GatherPlan
from wlb.torch.attention.heads import HeadsPlan
from wlb.torch.attention.ring import RingPlan
from wlb.torch.attention.segments import UNLIMITED, Ints

# Plans of each kind: the micro-batches that a pipeline has under way, whose layers the backward may recompute. Shards
# are compared by content; what a backward needs it holds itself.
_KEPT = 32


@functools.lru_cache(maxsize=_KEPT)
def gather_plan(shard: wlb.Shard, rank: int, *, window: int | None, biased: bool, device: torch.device) -> GatherPlan:
    """What `rank` does when keys are gathered. `biased`: scores have a bias by position."""
    left, right = _reach(shard, window)
    tokens = [_tokens(shard, r) for r in range(shard.cp_size)]
    return GatherPlan.make(
        tokens, shard.lengths.astype(np.int64), rank, left=left, right=right, positions_matter=biased, device=device
    )


@functools.lru_cache(maxsize=_KEPT)
def ring_plan(
    shard: wlb.Shard, rank: int, *, degree: int, window: int | None, biased: bool, device: torch.device
) -> tuple[HeadsPlan | None, RingPlan]:
    """What `rank` does in blocks of `degree` ranks that exchange heads, with a ring over the blocks."""
    left, right = _reach(shard, window)
    lengths = shard.lengths.astype(np.int64)
    held = [_tokens(shard, r) for r in range(shard.cp_size)]
    heads = None
    if degree > 1:
        block = rank - rank % degree
        heads = HeadsPlan.make(held[block : block + degree], rank % degree, device=device)
    held = [np.sort(np.concatenate(held[i : i + degree])) for i in range(0, len(held), degree)]
    offsets = np.cumsum(lengths) - lengths
    return heads, RingPlan.make(
        held, offsets, rank // degree, left=left, right=right, positions_matter=biased, device=device
    )


def _tokens(shard: wlb.Shard, rank: int) -> Ints:
    return shard.rank(rank).token_indices.astype(np.int64)


def _reach(shard: wlb.Shard, window: int | None) -> tuple[int, int]:
    """How many tokens before and after itself a token sees."""
    reach = UNLIMITED if window is None else min(window - 1, UNLIMITED)
    return reach, 0 if shard.causal else reach
