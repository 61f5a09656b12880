"""Moves tokens between two cuts of a micro-batch, so that attention is even and neighbours meet in other layers.

Convolutions and recurrent states run along a document: a rank with one run of the packed sequence (``wlb.shard(...,
strategy="contiguous")``) needs little from the rank before it. But attention would be uneven with that cut. A model
with both kinds of layers moves its hidden states from one cut to the other, each token once; the tokens that a
convolution needs from the rank before are its halo.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import wlb
from wlb._errors import check_integer, error
from wlb.torch.attention import arguments
from wlb.torch.attention.plan import KEPT, moves_plan, pick
from wlb.torch.lazy import not_compiled


class _Recut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, before: wlb.Shard, after: wlb.Shard, rank: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.cuts, ctx.rank, ctx.group = (before, after), rank, group
        return _moved(x, before, after, rank, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        before, after = ctx.cuts
        return _moved(gradient, after, before, ctx.rank, ctx.group), None, None, None, None


def _moved(x: Tensor, before: wlb.Shard, after: wlb.Shard, rank: int, group: dist.ProcessGroup | None) -> Tensor:
    plan = moves_plan(before, after, rank, x.device)
    arrived = x.new_empty((sum(plan.arriving_rows), *x.shape[1:]))
    send = pick(x, plan.sent).contiguous()
    dist.all_to_all_single(arrived, send, plan.arriving_rows, plan.sent_rows, group=group)
    return pick(arrived, plan.placed)


@not_compiled
def recut(x: Tensor, before: wlb.Shard, after: wlb.Shard, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """The tokens of this rank under another cut of the same micro-batch. Differentiable; the gradient goes back.

    All ranks of the group have to call it. Nothing is rounded: rows are copied. ::

        even = wlb.shard(lengths, cp_size=cp_size)                              # attention's
        runs = wlb.shard(lengths, cp_size=cp_size, strategy="contiguous")       # the recurrent layers'
        x = recut(x, even, runs, group=group)
        x = x + recurrent(x, runs.rank(cp_rank))
        x = recut(x, runs, even, group=group)

    Inside a document that two ranks share, a convolution needs the last tokens of the rank before: use `halo`. A layer
    passes on a state by itself: `runs.rank(r).position_ids` begin above 0 if a rank continues the document of the one
    before it.

    Args:
        x: `[tokens, ...]`, row `i` being token `before.rank(r).token_indices[i]`, where `r` is this rank in `group`.
        before: how `x` is cut.
        after: how the result is cut; of the same documents for as many ranks.
        group: of context-parallel ranks, as for `context_parallel_attention`; None: one process.

    Returns:
        `[tokens, ...]`, row `i` being token `after.rank(r).token_indices[i]`.

    Raises:
        WlbError: the shards are of other documents or numbers of ranks, the group has another size, or `x` has another
            number of tokens.

    Complexity:
        One all-to-all of every token that changes its rank; the plan is made once, in the core, O(tokens), and kept for
        all layers.
    """
    arguments.check_shard(before, name="before")
    rank, size = arguments.check_group(before, group)
    arguments.check_shard(after, name="after")
    if after.cp_size != size:
        raise error("after", f"is for cp_size = {after.cp_size}, before for {size}", value=after.cp_size)
    if not np.array_equal(before.lengths, after.lengths):
        raise error("after", "is of other documents than before", value=after)
    held = int(before.tokens_per_rank[rank])
    if x.ndim < 1 or x.shape[0] != held:
        message = f"has shape {list(x.shape)}; the shard gives rank {rank} {held} tokens of {before.num_tokens}"
        raise error("x", message, value=list(x.shape))
    if size == 1:
        return x
    moved: Tensor = _Recut.apply(x, before, after, rank, group)
    return moved


@dataclass(frozen=True)
class HaloRoute:
    """Tokens that one rank sends to later ranks and receives from earlier ranks."""

    sent: Tensor  # int32: its rows, by destination
    sent_rows: list[int]  # how many to each rank
    arriving_rows: list[int]  # how many from each rank
    missing: int  # rows of the halo before the document begins

    @classmethod
    def make(cls, shard: wlb.Shard, tokens: int, rank: int) -> HaloRoute:
        """The route of `rank`; tensors on the host.

        Raises:
            WlbError: some rank does not have exactly one run of the packed sequence, in the order of the ranks.
        """
        runs: list[tuple[int, int]] = []
        end = 0
        for number in range(shard.cp_size):
            held = shard.rank(number).token_indices
            if not np.array_equal(held, np.arange(end, end + held.size)):
                message = f"gives rank {number} more than one run of the packed sequence: "
                raise error("shard", f'{message}wlb.shard(..., strategy="contiguous")', value=shard)
            runs.append((end, end + held.size))
            end += held.size
        begins = np.concatenate([[0], np.cumsum(shard.lengths)])

        def wanted(begin: int, end: int) -> tuple[int, int]:
            """The tokens before a run that belong to the document that it begins in."""
            if begin == end:
                return begin, begin
            document = int(begins[np.searchsorted(begins, begin, side="right") - 1])
            return max(document, begin - tokens), begin

        def shared(one: tuple[int, int], other: tuple[int, int]) -> range:
            return range(max(one[0], other[0]), max(min(one[1], other[1]), max(one[0], other[0])))

        mine, halos = runs[rank], [wanted(*run) for run in runs]
        sent = [shared(mine, halo) for halo in halos]
        arriving = [len(shared(run, halos[rank])) for run in runs]
        rows = [np.arange(part.start, part.stop, dtype=np.int32) - mine[0] for part in sent]
        return cls(
            sent=torch.from_numpy(np.concatenate(rows).astype(np.int32)),
            sent_rows=[len(part) for part in sent],
            arriving_rows=arriving,
            missing=tokens - sum(arriving),
        )


@functools.lru_cache(maxsize=KEPT)
def _halo_route(shard: wlb.Shard, tokens: int, rank: int, device: torch.device) -> HaloRoute:
    route = HaloRoute.make(shard, tokens, rank)
    return replace(route, sent=route.sent.to(device))


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, route: HaloRoute, group: dist.ProcessGroup | None) -> Tensor:
        ctx.route, ctx.group, ctx.rows = route, group, x.shape[0]
        halo = x.new_zeros((route.missing + sum(route.arriving_rows), *x.shape[1:]))
        arrived = halo[route.missing :]
        dist.all_to_all_single(
            arrived, x.index_select(0, route.sent), route.arriving_rows, route.sent_rows, group=group
        )
        return halo

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        route = ctx.route
        arrived = gradient.new_empty((sum(route.sent_rows), *gradient.shape[1:]))
        sent = gradient[route.missing :].contiguous()
        dist.all_to_all_single(arrived, sent, route.sent_rows, route.arriving_rows, group=ctx.group)
        total = gradient.new_zeros((ctx.rows, *gradient.shape[1:]))
        return total.index_add_(0, route.sent, arrived), None, None


@not_compiled
def halo(x: Tensor, shard: wlb.Shard, *, tokens: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """The tokens before this rank's first one that a causal convolution needs from its document. Differentiable.

    All ranks of the group have to call it and run its backward pass. For a kernel of `width` taps::

        runs = wlb.shard(lengths, cp_size=cp_size, strategy="contiguous")
        x = recut(x, even, runs, group=group)
        before = halo(x, runs, tokens=width - 1, group=group)     # zeros where the document begins
        y = convolution(torch.cat([before, x]))[width - 1 :]      # row i sees rows i - width + 1 to i

    Inside a rank the convolution itself has to stop at documents: `runs.rank(r).position_ids` tell where they begin.

    Args:
        x: `[tokens of this rank, ...]`, in packed order.
        shard: how the micro-batch is cut: one run a rank.
        tokens: how many rows.
        group: of context-parallel ranks; None: one process.

    Returns:
        `[tokens, ...]`: the last row is the token before this rank's first one; rows before the document begins, and
        those of a rank without tokens, are zero.

    Raises:
        WlbError: a rank holds more than one run, the group has another size, or `x` another number of tokens.

    Complexity:
        One all-to-all of at most `tokens` rows a rank; the route is made once, O(ranks), and kept for all layers.
    """
    arguments.check_shard(shard)
    rank, size = arguments.check_group(shard, group)
    check_integer("tokens", tokens, minimum=0)
    held = int(shard.tokens_per_rank[rank])
    if x.ndim < 1 or x.shape[0] != held:
        message = f"has shape {list(x.shape)}; the shard gives rank {rank} {held} tokens of {shard.num_tokens}"
        raise error("x", message, value=list(x.shape))
    route = _halo_route(shard, int(tokens), rank, x.device)
    if size == 1:
        return x.new_zeros((int(tokens), *x.shape[1:]))
    result: Tensor = _Halo.apply(x, route, group)
    return result
