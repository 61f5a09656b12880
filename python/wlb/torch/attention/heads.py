"""All-to-all over heads: exchanges all heads of some tokens for some heads of all tokens, and back.

The method is that of DeepSpeed-Ulysses (Jacobs et al., 2023); ranks may have different numbers of tokens. It runs in
blocks of `degree` neighbouring ranks. Blocks exchange nothing with each other and need no process group of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.torch.attention.plan import HeadsPlan


@dataclass(frozen=True)
class HeadsExchange:
    """The all-to-all of one block."""

    plan: HeadsPlan
    block: range  # ranks of the block in `group`
    group: dist.ProcessGroup | None

    def split_heads(self, x: Tensor) -> Tensor:
        """Exchanges `[tokens of this rank, heads, dim]` for `[tokens of the block, heads / degree, dim]`."""
        degree = len(self.block)
        tokens, heads, dim = x.shape
        send = x.view(tokens, degree, heads // degree, dim).transpose(0, 1).reshape(-1, heads // degree, dim)
        counts = self.plan.counts
        received = self._all_to_all(send, [tokens] * degree, counts)
        return received.index_select(0, self.plan.ascending)

    def join_heads(self, x: Tensor) -> Tensor:
        """The inverse of `split_heads`."""
        degree, tokens = len(self.block), self.plan.counts[self.plan.place]
        received = self._all_to_all(x.index_select(0, self.plan.by_rank), self.plan.counts, [tokens] * degree)
        _, heads, dim = x.shape
        return received.view(degree, tokens, heads, dim).transpose(0, 1).reshape(tokens, degree * heads, dim)

    def _all_to_all(self, send: Tensor, send_rows: list[int], receive_rows: list[int]) -> Tensor:
        received = send.new_empty((sum(receive_rows), *send.shape[1:]))
        size = dist.get_world_size(self.group)
        before, after = [0] * self.block.start, [0] * (size - self.block.stop)
        dist.all_to_all_single(
            received, send, before + receive_rows + after, before + send_rows + after, group=self.group
        )
        return received


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: HeadsExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.split_heads(x.contiguous())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.join_heads(gradient), None


class _JoinHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: HeadsExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.join_heads(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.split_heads(gradient.contiguous()), None


def split_heads(q: Tensor, k: Tensor, v: Tensor, exchange: HeadsExchange) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's share of the heads for all tokens of its block, in one message. Differentiable.

    With fewer key heads than ranks, ranks whose query heads share a key head each get that head.
    """
    degree = len(exchange.block)
    if k.shape[1] < degree:
        k, v = (x.repeat_interleave(degree // x.shape[1], dim=1) for x in (k, v))
    shares = [x.reshape(x.shape[0], degree, x.shape[1] // degree, x.shape[2]) for x in (q, k, v)]
    widths = [share.shape[2] for share in shares]
    together: Tensor = _SplitHeads.apply(torch.cat(shares, dim=2).flatten(1, 2), exchange)
    q, k, v = (x.contiguous() for x in torch.split(together, widths, dim=1))
    return q, k, v


def join_heads(out: Tensor, exchange: HeadsExchange) -> Tensor:
    """The inverse of `split_heads`, for the output. Differentiable."""
    result: Tensor = _JoinHeads.apply(out, exchange)
    return result
