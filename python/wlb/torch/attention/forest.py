"""Attention over the shard of a forest: a query sees the keys of the nodes above its own, and its own up to itself.

The keys of a path stand at neighbouring positions, but lie in several intervals of memory. Each run of queries gets
those of its path picked one behind the other, so that one varlen call with a mask aligned bottom-right computes all
runs, with any window. A node that continues its parent in memory is one run with it. Keys picked can reach the tokens
of all samples; `picked` says how many they are.

On several ranks all keys are gathered first, as the transport `all_gather` does. Gradients of a key add up over all
runs that picked it, and over ranks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

import wlb
from wlb._core import MAX_TOKENS
from wlb._errors import error
from wlb.torch.attention.kernels import Kernel, accumulator

KEPT = 128
"""Routes that are kept for all layers, as for other shards."""


@dataclass(frozen=True)
class PathCall:
    """One varlen kernel call: what kernels read of a call."""

    cu_seqlens_q: Tensor  # int32 [runs + 1]
    cu_seqlens_k: Tensor  # int32 [runs + 1]
    max_seqlen_q: int
    max_seqlen_k: int
    window: tuple[int, int]  # left, right of the bottom-right diagonal; -1: unlimited
    bounds: NDArray[np.int32]  # on the host: cu_seqlens_q, cu_seqlens_k, and 0 for each run

    @property
    def spans(self) -> NDArray[np.int32]:
        """[runs, 4]: rows of the call: queries from, to; keys from, to."""
        count = self.cu_seqlens_q.numel()
        q, k = self.bounds[:count], self.bounds[count : 2 * count]
        return np.stack([q[:-1], q[1:], k[:-1], k[1:]], axis=1)

    @property
    def shifts(self) -> NDArray[np.int32]:
        """[runs]: none, since the last query stands at the last key."""
        return self.bounds[2 * self.cu_seqlens_q.numel() :]


@dataclass(frozen=True)
class ForestRoute:
    """What one rank does in a layer."""

    call: PathCall | None  # None: it has no tokens
    keys: Tensor  # int64 [picked]: rows of the gathered keys
    rows: int  # that each rank gathers, the last ones of some padding
    cp_size: int

    @property
    def picked(self) -> int:
        """Keys that are copied for the call."""
        return self.keys.numel()


@functools.lru_cache(maxsize=KEPT)
def forest_route(shard: wlb.ForestShard, rank: int, *, window: int | None, device: torch.device) -> ForestRoute:
    """What `rank` does. Complexity: O(tokens of the rank, and keys that it picks)."""
    mine = shard.rank(rank)
    token, position = mine.token_indices.astype(np.int64), mine.position_ids.astype(np.int64)
    cu_q, cu_intervals = mine.cu_seqlens_q.astype(np.int64), mine.cu_intervals.astype(np.int64)
    counts = shard.tokens_per_rank
    rows = int(counts.max(initial=0))
    # Of each packed token its row among the gathered keys of all ranks.
    place = shard.restore_indices.astype(np.int64)
    owner = np.searchsorted(np.cumsum(counts), place, side="right")
    place += owner * rows - (np.cumsum(counts) - counts)[owner]

    # Runs that go on in memory and in position are one: its last part sees all of its keys.
    first, last = cu_q[:-1], cu_q[1:] - 1
    apart = (token[first[1:]] != token[last[:-1]] + 1) | (position[first[1:]] != position[last[:-1]] + 1)
    ends = np.flatnonzero(np.append(apart, np.ones(min(1, first.size), bool)))
    begins = np.append(0, ends[:-1] + 1) if ends.size else ends
    queries = cu_q[ends + 1] - cu_q[begins]
    picked: list[NDArray[np.int64]] = []
    for run, length in zip(ends.tolist(), queries.tolist(), strict=True):
        intervals = range(cu_intervals[run], cu_intervals[run + 1])
        path = np.concatenate([np.arange(mine.key_starts[i], mine.key_ends[i]) for i in intervals])
        picked.append(path if window is None else path[max(0, path.size - length - window + 1) :])
    lengths = np.array([path.size for path in picked], np.int64)
    if lengths.sum() > MAX_TOKENS:
        message = (
            f"has runs on rank {rank} that see {lengths.sum()} keys in all: at most {MAX_TOKENS} (cu_seqlens are int32)"
        )
        raise error("shard", message, value=int(lengths.sum()))
    keys = torch.from_numpy(place[np.concatenate([*picked, np.zeros(0, np.int64)])]).to(device)
    if not picked:
        return ForestRoute(None, keys, rows, shard.cp_size)
    edges = [np.append(0, np.cumsum(sizes)).astype(np.int32) for sizes in (queries, lengths)]
    bounds = np.concatenate([*edges, np.zeros(len(picked), np.int32)])
    cu_queries, cu_keys = (torch.from_numpy(array).to(device) for array in edges)
    left = -1 if window is None else window - 1
    call = PathCall(cu_queries, cu_keys, int(queries.max()), int(lengths.max()), (left, 0), bounds)
    return ForestRoute(call, keys, rows, shard.cp_size)


def forest_attention(
    q: Tensor, k: Tensor, v: Tensor, route: ForestRoute, group: dist.ProcessGroup | None, kernel: Kernel
) -> Tensor:
    """Attention of this rank's queries. Kept for the backward are q, k, v, the output and its log-sum-exp."""
    result: Tensor = _PathAttention.apply(q, k, v, route, group, kernel)
    return result


class _PathAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, route: ForestRoute, group: dist.ProcessGroup | None, kernel: Any
    ) -> Tensor:
        ctx.route, ctx.group, ctx.kernel = route, group, kernel
        keys, values = _gathered(k, v, route, group)
        if route.call is None:
            out, lse = torch.empty_like(q), q.new_empty((q.shape[1], 0), dtype=accumulator(q.dtype))
        else:
            with torch.autocast(q.device.type, enabled=False):
                out, lse = kernel.forward(
                    q, keys.index_select(0, route.keys), values.index_select(0, route.keys), route.call
                )
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        route: ForestRoute = ctx.route
        keys, values = _gathered(k, v, route, ctx.group)
        dtype = accumulator(k.dtype)
        both = k.new_zeros((route.cp_size * route.rows, 2, *k.shape[1:]), dtype=dtype)
        dq = torch.zeros_like(q)
        if route.call is not None:
            picked = keys.index_select(0, route.keys), values.index_select(0, route.keys)
            with torch.autocast(q.device.type, enabled=False):
                dq, d_keys = ctx.kernel.backward(d_out.contiguous(), q, *picked, out, lse, route.call)
            both.index_add_(0, route.keys, d_keys.to(dtype))
        if route.cp_size > 1:
            home = both.new_empty((route.rows, *both.shape[1:]))
            dist.reduce_scatter_tensor(home, both, group=ctx.group)
            both = home
        mine = both[: k.shape[0]].to(k.dtype)
        return dq.to(q.dtype), mine[:, 0], mine[:, 1], None, None, None


def _gathered(k: Tensor, v: Tensor, route: ForestRoute, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Keys and values of all ranks, `[cp_size * rows, kv_heads, head_dim]`."""
    if route.cp_size == 1:
        return k, v
    send = k.new_zeros((route.rows, 2, *k.shape[1:]))
    send[: k.shape[0], 0], send[: k.shape[0], 1] = k, v
    everything = send.new_empty((route.cp_size * route.rows, *send.shape[1:]))
    dist.all_gather_into_tensor(everything, send, group=group)
    return everything[:, 0], everything[:, 1]
