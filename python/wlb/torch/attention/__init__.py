"""Context-parallel attention: runs a `wlb.Shard` on the ranks that hold it."""

from __future__ import annotations

import functools
import math
from typing import Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import wlb
from wlb.torch._errors import error
from wlb.torch.attention import kernels
from wlb.torch.attention.all_gather import AllGather, GatherPlan
from wlb.torch.attention.heads import HeadsExchange, HeadsPlan, join_heads, legal_degree, split_heads
from wlb.torch.attention.merge import attention
from wlb.torch.attention.ring import Ring, RingPlan
from wlb.torch.attention.segments import UNLIMITED, Ints

__all__ = ["context_parallel_attention"]

Transport = Literal["all_gather", "ring", "ulysses", "usp"]


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shard: wlb.Shard,
    *,
    group: dist.ProcessGroup | None = None,
    transport: Transport = "all_gather",
    ulysses_size: int | None = None,
    softmax_scale: float | None = None,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    kernel: kernels.KernelName = "auto",
) -> Tensor:
    """Attention of a packed micro-batch whose tokens lie on the ranks of `group` as `shard` says. Differentiable.

    Tokens attend within their document only, to all before them and themselves, or to the whole document
    (`shard.causal`). Row `i` of this rank's tensors is token `shard.rank(r).token_indices[i]`, `r` being its rank in
    `group`. Every shard runs on every transport:

    - `all_gather`: gathers the keys that some rank needs from another, one varlen call; memory for the keys of the
      micro-batch while it runs. Best when keys have few heads, or documents are mostly local.
    - `ring`: keys pass around by send and receive while the others are computed. Memory does not grow with the group.
    - `ulysses`: all-to-all from tokens to heads; work is then equal whatever the shard. The group's size must
      divide the query heads, and divide the key heads or be a multiple of them.
    - `usp`: both: `ulysses_size` neighbouring ranks exchange heads, a ring goes over those blocks:
      rank = ring position * ulysses_size + ulysses rank.

    The window and ALiBi are exact on every transport with the kernel `sdpa`, and the window with the others too. ALiBi
    needs `sdpa` or flash-attn 2; the latter on `ulysses`, on `all_gather` with a causal shard, or on one rank.

    All arguments are checked before anything is sent; what differs only between ranks (their shards, say) cannot be
    seen without communication and is what a check of plan digests is for. The backward communicates as the forward does:
    every rank must run it, also one without tokens. What a rank has to do is derived from the shard once, and kept for all
    layers.

    Args:
        q: Queries `[tokens of this rank, heads, head_dim]`; float16, bfloat16, float32 or float64.
        k: Keys `[tokens of this rank, kv_heads, head_dim]`; `kv_heads` divides `heads`.
        v: Values, like `k`.
        shard: How the whole micro-batch lies on the ranks; the same on all.
        group: The context-parallel group, of `shard.cp_size` ranks. None: one process holds everything.
        transport: How keys and queries meet; see above.
        ulysses_size: For `usp`: ranks that share heads. Divides the group's size.
        softmax_scale: Factor of the scores; None: `head_dim ** -0.5`.
        window: A token sees tokens less than this many positions away: with 1, itself. None: no limit.
        alibi_slopes: float `[heads]`, without gradient: `slope * distance in the document` is subtracted from scores.
        kernel: `flash_attn` (2 or 3, must be installed), `varlen` (torch's own flash kernels), `sdpa` (plain, exact,
            any device and dtype), or `auto`: the fastest that can do it here.

    Returns:
        Output like `q`.

    Raises:
        WlbError: shapes, dtypes, devices, the group, or a combination of options do not fit.
    """
    rank, size = _check_group(shard, group)
    degree = _check_transport(transport, ulysses_size, size)
    _check_tensors(q, k, v, shard, rank)
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
        raise error("softmax_scale", f"= {softmax_scale!r}: a positive number", value=softmax_scale)
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise error("window", f"= {window!r}: a positive number of tokens, or None", value=window)
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, q)
        alibi_slopes = alibi_slopes.float()
    if not legal_degree(q.shape[1], k.shape[1], degree):
        raise error(
            "ulysses_size" if transport == "usp" else "transport",
            f"{transport!r}: {degree} ranks cannot share {q.shape[1]} heads with {k.shape[1]} key heads; the "
            "number of ranks must divide the heads, and divide the key heads or be a multiple of them",
            value=degree,
        )
    aligned = size == degree or (transport == "all_gather" and shard.causal)
    if alibi_slopes is not None:
        share = q.shape[1] // degree
        alibi_slopes = alibi_slopes[rank % degree * share :][:share]
    chosen = kernels.choose(kernel, q, scale=float(scale), alibi_slopes=alibi_slopes, alibi_aligned=aligned)

    biased = alibi_slopes is not None
    if transport == "all_gather":
        gather = AllGather(_gather_plan(shard, rank, window, biased, q.device), group)
        return attention(q, k, v, gather, chosen)
    heads_plan, ring_plan = _ring_plan(shard, rank, degree, window, biased, q.device)
    ring = Ring(ring_plan, range(rank % degree, size, degree), group)
    if heads_plan is None:
        return attention(q, k, v, ring, chosen)
    block = rank - rank % degree
    heads = HeadsExchange(heads_plan, range(block, block + degree), group)
    return join_heads(attention(*split_heads(q, k, v, heads), ring, chosen), heads)


# A step's micro-batches, with some room for recomputation in the backward. A shard is compared by content.
@functools.lru_cache(maxsize=32)
def _gather_plan(shard: wlb.Shard, rank: int, window: int | None, biased: bool, device: torch.device) -> GatherPlan:
    left, right = _reach(shard, window)
    tokens = [_tokens(shard, r) for r in range(shard.cp_size)]
    return GatherPlan.make(
        tokens, shard.lengths.astype(np.int64), rank, left=left, right=right, positions_matter=biased, device=device
    )


@functools.lru_cache(maxsize=32)
def _ring_plan(
    shard: wlb.Shard, rank: int, degree: int, window: int | None, biased: bool, device: torch.device
) -> tuple[HeadsPlan | None, RingPlan]:
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


def _check_group(shard: wlb.Shard, group: dist.ProcessGroup | None) -> tuple[int, int]:
    if not isinstance(shard, wlb.Shard):
        raise error("shard", f"is a {type(shard).__name__}, not a wlb.Shard", value=shard)
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    if rank < 0:
        raise error("group", "does not contain this process", value=group)
    if size != shard.cp_size:
        found = "None: one process" if group is None else f"a group of {size}"
        raise error("group", f"is {found}, but the shard is for cp_size = {shard.cp_size}", value=size)
    return rank, size


def _check_transport(transport: Transport, ulysses_size: int | None, size: int) -> int:
    """The number of ranks that exchange heads."""
    if transport not in get_args(Transport):
        raise error("transport", f"= {transport!r}: one of {', '.join(get_args(Transport))}", value=transport)
    if transport != "usp":
        if ulysses_size is not None:
            raise error("ulysses_size", f"= {ulysses_size!r}: only for the transport 'usp'", value=ulysses_size)
        return size if transport == "ulysses" else 1
    whole = isinstance(ulysses_size, int) and not isinstance(ulysses_size, bool)
    if ulysses_size is None or not whole or ulysses_size < 1 or size % ulysses_size:
        raise error("ulysses_size", f"= {ulysses_size!r}: a divisor of the group's size {size}", value=ulysses_size)
    return ulysses_size


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, shard: wlb.Shard, rank: int) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 3:
            shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise error(name, f"is {shape}, not a tensor [tokens, heads, head_dim]", value=shape)
        if x.dtype != q.dtype or x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise error(name, f"is {x.dtype}: floating point and one dtype for q, k and v ({q.dtype})", value=x.dtype)
        if x.device != q.device:
            raise error(name, f"is on {x.device}, q on {q.device}", value=x.device)
        if x.shape[1] < 1 or x.shape[2] != q.shape[2] or x.shape[2] < 1:
            raise error(name, f"is {list(x.shape)}, q {list(q.shape)}: at least one head, one head_dim", value=x.shape)
    if v.shape[1] != k.shape[1]:
        raise error("v", f"has {v.shape[1]} heads, k {k.shape[1]}", value=v.shape[1])
    if q.shape[1] % k.shape[1]:
        raise error("k", f"has {k.shape[1]} heads, which do not divide the {q.shape[1]} of q", value=k.shape[1])
    held = shard.tokens_per_rank.tolist()
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[0] != held[rank]:
            message = f"has {x.shape[0]} tokens; the shard gives rank {rank} {held[rank]} of {shard.num_tokens}"
            raise error(name, message, value=x.shape[0])


def _check_slopes(slopes: Tensor, q: Tensor) -> None:
    if not isinstance(slopes, Tensor) or slopes.shape != q.shape[1:2] or not slopes.is_floating_point():
        found = f"{slopes.dtype} {list(slopes.shape)}" if isinstance(slopes, Tensor) else type(slopes).__name__
        raise error("alibi_slopes", f"is {found}, not floating point [{q.shape[1]}], one for each head", value=found)
    if slopes.device != q.device:
        raise error("alibi_slopes", f"is on {slopes.device}, q on {q.device}", value=slopes.device)
    if slopes.requires_grad:
        raise error("alibi_slopes", "requires a gradient, and gets none", value=slopes.requires_grad)
