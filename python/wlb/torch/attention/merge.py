"""Differentiable attention over keys that arrive in blocks: one autograd function for every way to move them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from wlb.torch.attention.kernels import Kernel, accumulator
from wlb.torch.attention.plan import Call, Rows, add, pick

LSE_CHANNELS = 8
"""Channels that a head gets in its backward for the gradient of the log-sum-exp: flash kernels take multiples of 8."""

Keys = Tensor | tuple[Tensor, Tensor]
"""Keys with their values: `[keys, 2, kv_heads, head_dim]`, or two tensors `[keys, kv_heads, head_dim]`."""


class Heads(NamedTuple):
    """One of equal parts of the heads."""

    part: int = 0
    parts: int = 1

    def of(self, x: Tensor) -> Tensor:
        """Its heads of `[tokens, heads, head_dim]`."""
        return x if self.parts == 1 else x.chunk(self.parts, 1)[self.part]


ALL_HEADS = Heads()

Attend = Callable[[Keys, Sequence[Call], Heads], None]
"""Attends with these heads of the queries to keys that have their heads."""

AttendBackward = Callable[[Keys, Sequence[Call], Heads], list[Tensor]]
"""Gradients of the keys and values of each call, `[keys of the call, 2, kv_heads, head_dim]`."""


class KeyExchange(Protocol):
    """Brings this rank's queries together with keys of other ranks, and the keys' gradients home."""

    @property
    def once(self) -> bool:
        """Whether no query is in two calls: their outputs then need no merging."""
        ...

    def forward(self, k: Tensor, v: Tensor, attend: Attend) -> None:
        """Calls `attend(keys, calls, heads)` for every block of keys, overlapping it with what is still under way.

        Parts of the heads come one after the other.
        """
        ...

    def backward(self, k: Tensor, v: Tensor, attend: AttendBackward) -> Tensor:
        """Passes the same blocks to `attend`, which gives their gradients; returns that of own keys and values.

        Returns:
            `[tokens, 2, kv_heads, head_dim]`.
        """
        ...


def _place(like: Tensor, parts: Sequence[tuple[Rows, Tensor]]) -> Tensor:
    """A tensor like this that has each part in its rows, all of them together every row once."""
    if len(parts) == 1 and parts[0][0] is None:
        return parts[0][1].to(like.dtype)
    spans = [rows for rows, _ in parts if isinstance(rows, slice)]
    starts = [rows.start for rows in spans]
    if parts and len(spans) == len(parts) and starts == sorted(starts):
        return torch.cat([part.to(like.dtype) for _, part in parts])
    result = like.new_empty(like.shape)
    for rows, part in parts:
        if isinstance(rows, Tensor):
            result.index_copy_(0, rows, part.to(result.dtype))
        else:
            result[rows] = part
    return result


class _Parts:
    """Outputs of calls, no query in two of them, by parts of the heads; or gradients of queries."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._parts: list[list[tuple[Rows, Tensor]]] = []
        self._whole: list[Tensor] = []

    def add(self, heads: Heads, rows: Rows, part: Tensor) -> None:
        while len(self._parts) <= heads.part:
            self._close()
            self._parts.append([])
        self._count = heads.parts
        self._parts[heads.part].append((rows, part))

    def _close(self) -> None:
        """Puts the parts of the last heads together, so that they are held once."""
        if self._parts:
            self._whole.append(_place(Heads(0, self._count).of(self._like), self._parts[-1]))
            self._parts[-1] = []

    def result(self) -> Tensor:
        if not self._parts:
            return torch.empty_like(self._like)
        self._close()
        return self._whole[0] if len(self._whole) == 1 else torch.cat(self._whole, 1)


class _Merged:
    """Attention over the keys seen so far. It begins as what is added first, if that is for all queries.

    Sums of log-sum-exps are float64: their rounding, in units of their size, is a relative error of the weights.
    """

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._parts: tuple[Tensor, Tensor] | None = None

    def add(self, call: Call, out: Tensor, lse: Tensor) -> None:
        if self._parts is None and call.q_rows is None:
            self._parts = out, lse
            return
        total, total_lse = self._so_far()
        rows = call.q_rows
        if call.fresh:
            _write(total, 0, rows, out)
            _write(total_lse, 1, rows, lse)
            return
        if isinstance(rows, Tensor):
            before, part = total_lse.index_select(1, rows), total.index_select(0, rows)
        else:
            before, part = (total_lse, total) if rows is None else (total_lse[:, rows], total[rows])
        weight = torch.sub(lse, before).sigmoid_().t().unsqueeze(-1)
        part.lerp_(out.to(part.dtype), weight.to(part.dtype))
        torch.logaddexp(before, lse.double(), out=before)
        if isinstance(rows, Tensor):
            total.index_copy_(0, rows, part)
            total_lse.index_copy_(1, rows, before)

    def _so_far(self) -> tuple[Tensor, Tensor]:
        """In the dtypes of sums; what no call has yet been for is 0, and its log-sum-exp -inf."""
        dtype = accumulator(self._q.dtype)
        if self._parts is None:
            tokens, heads, _ = self._q.shape
            lse = self._q.new_full((heads, tokens), -torch.inf, dtype=torch.float64)
            self._parts = self._q.new_zeros(self._q.shape, dtype=dtype), lse
        total, lse = self._parts
        self._parts = total.to(dtype), lse.double()
        return self._parts

    def result(self) -> tuple[Tensor, Tensor]:
        """Output like the queries, and log-sum-exp."""
        out, lse = self._parts or self._so_far()
        return out.to(self._q.dtype), lse.to(accumulator(self._q.dtype))


def _write(x: Tensor, dim: int, rows: Rows, part: Tensor) -> None:
    if isinstance(rows, Tensor):
        x.index_copy_(dim, rows, part.to(x.dtype))
    elif rows is None:
        x.copy_(part)
    else:
        x.narrow(dim, rows.start, rows.stop - rows.start).copy_(part)


class _Sum:
    """A sum of gradients by row, in the dtype of sums. It begins as what is added first, if that is for all rows."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._total: Tensor | None = None

    def add(self, rows: Rows, part: Tensor) -> None:
        if self._total is None and rows is None:
            self._total = part.to(accumulator(part.dtype))
        else:
            add(self.total(), rows, part)

    def total(self) -> Tensor:
        if self._total is None:
            self._total = self._like.new_zeros(self._like.shape, dtype=accumulator(self._like.dtype))
        return self._total


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Autocast would round what the reference kernel multiplies in the forward, and is off where backwards are run."""

    @functools.wraps(function)
    def run(ctx: Any, x: Tensor, *args: Any) -> Any:
        device = x.device.type
        if not torch.is_autocast_enabled(device) if torch.amp.is_autocast_available(device) else True:
            return function(ctx, x, *args)
        with torch.autocast(device, enabled=False):
            return function(ctx, x, *args)

    return run


def _keys(keys: Keys, rows: Rows) -> tuple[Tensor, Tensor]:
    """Keys and values of a call."""
    if isinstance(keys, tuple):
        k, v = keys
        return pick(k, rows), pick(v, rows)
    k, v = pick(keys, rows).unbind(1)
    return k, v


class _Attention(torch.autograd.Function):
    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, exchange: KeyExchange, kernel: Kernel, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        merged = None if exchange.once else _Merged(q)
        parts = _Parts(q)
        lses: list[Tensor] = []
        shown = _Parts(q.new_empty(q.shape[:2], dtype=accumulator(q.dtype))) if with_lse else None

        def attend(keys: Keys, calls: Sequence[Call], heads: Heads) -> None:
            queries = heads.of(q)
            for call in calls:
                out, lse = kernel.forward(pick(queries, call.q_rows), *_keys(keys, call.k_rows), call)
                if merged is not None:
                    merged.add(call, out, lse)
                else:
                    parts.add(heads, call.q_rows, out)
                    lses.append(lse)
                    if shown is not None:
                        shown.add(heads, call.q_rows, lse.t())

        exchange.forward(k, v, attend)
        if merged is None:
            out = parts.result()
        else:
            out, lse = merged.result()
            lses.append(lse)
        ctx.save_for_backward(q, k, v, out, *lses)
        ctx.exchange, ctx.kernel, ctx.with_lse = exchange, kernel, with_lse
        if shown is None:
            return out, None
        return out, (lses[0].t() if merged is not None else shown.result()).contiguous()

    @staticmethod
    @_without_autocast
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, out, *lses = ctx.saved_tensors
        dtypes, width = (q.dtype, k.dtype), q.shape[2]
        if ctx.with_lse:
            assert d_lse is not None
            q, k, v, out, d_out = _with_lse(q, k, v, out, d_out, d_lse)
        once = ctx.exchange.once
        d_out = d_out.contiguous()
        parts = _Parts(q)
        total = _Sum(q)
        in_turn = iter(lses)  # in the order of the forward

        def attend(keys: Keys, calls: Sequence[Call], heads: Heads) -> list[Tensor]:
            gradients = []
            mine = [heads.of(x) for x in (d_out, q, out)]
            for call in calls:
                rows = call.q_rows
                if once:
                    lse = next(in_turn)
                else:
                    (lse,) = lses
                    if rows is not None:
                        lse = lse.index_select(1, rows) if isinstance(rows, Tensor) else lse[:, rows].contiguous()
                call_d_out, call_q, call_out = (pick(x, rows) for x in mine)
                dq, d_keys = ctx.kernel.backward(call_d_out, call_q, *_keys(keys, call.k_rows), call_out, lse, call)
                if once:
                    parts.add(heads, rows, dq)
                else:
                    total.add(rows, dq)
                gradients.append(d_keys)
            return gradients

        d_keys = ctx.exchange.backward(k, v, attend)
        dq = parts.result() if once else total.total()
        if ctx.with_lse:
            dq, d_keys = dq[..., :width], d_keys[..., :width]
        dk, dv = d_keys.to(dtypes[1]).unbind(1)
        return dq.to(dtypes[0]), dk, dv, None, None, None


def _with_lse(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, d_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What a kernel's backward takes so that its gradients are those of the output and of the log-sum-exp.

    A kernel multiplies the weights by `d_out @ v.T - sum(d_out * out)`, and the gradient of the log-sum-exp belongs
    behind it. So channels are added, of which the values are 0, the output is minus that gradient, and the gradient of
    the output is 1: in three parts, which are exact together where one would be rounded to half precision.
    """
    padded = [pad(x, (0, LSE_CHANNELS)) for x in (q, k, v, out, d_out)]
    rest = -d_lse
    for channel in range(out.shape[2], out.shape[2] + 3):
        part = rest.to(out.dtype)
        padded[3][..., channel] = part
        padded[4][..., channel] = 1
        rest = rest - part.to(rest.dtype)
    return padded[0], padded[1], padded[2], padded[3], padded[4]


def attention(
    q: Tensor, k: Tensor, v: Tensor, exchange: KeyExchange, kernel: Kernel, *, with_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Attention of `q` over the keys and values that `exchange` brings.

    `with_lse` also gives its log-sum-exp `[queries, heads]`, which has a gradient, too; the same on all ranks.

    Kept for the backward are q, k, v, the output and its log-sum-exp; other ranks' keys are exchanged again. Partial
    sums are float32 for half-precision inputs. Every rank must run the backward, in the same order: it communicates.
    """
    result: tuple[Tensor, Tensor | None] = _Attention.apply(q, k, v, exchange, kernel, with_lse)
    return result
