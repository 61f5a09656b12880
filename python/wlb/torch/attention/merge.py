"""Differentiable attention over keys that arrive in blocks: one autograd function for every way to move them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from wlb.torch.attention.kernels import Kernel, accumulator
from wlb.torch.attention.plan import Call, Rows, add, pick, put, queries_of

LSE_CHANNELS = 8
"""Channels that a head gets in its backward for the gradient of the log-sum-exp: flash kernels take multiples of 8."""

Keys = Tensor | tuple[Tensor, Tensor]
"""Keys with their values: `[keys, 2, kv_heads, head_dim]`, or two tensors `[keys, kv_heads, head_dim]`."""


class Heads(NamedTuple):
    """One of several equal parts of the heads."""

    part: int = 0
    parts: int = 1

    def of(self, x: Tensor) -> Tensor:
        """The heads of this part of `[tokens, heads, head_dim]`."""
        return x if self.parts == 1 else x.chunk(self.parts, 1)[self.part]


ALL_HEADS = Heads()

Attend = Callable[[Keys, Sequence[Call], Heads], None]
"""Attends with these heads of the queries to keys that have their heads."""

AttendBackward = Callable[[Keys, Sequence[Call], Heads, Tensor], None]
"""Writes the gradients of keys and values, `[keys, 2, kv_heads, head_dim]`, those of all calls one behind the other."""


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
        """Passes the same blocks and calls to `attend`, in any order, which writes their gradients.

        Returns:
            `[tokens, 2, kv_heads, head_dim]`.
        """
        ...


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Lets the sinks take their share of an output `[rows, heads, value_dim]`, and adds them to its log-sum-exp.

    That is `[heads, rows]`; both are changed in place.
    """
    sinks = sinks.to(lse.dtype).unsqueeze(1)
    out.mul_(torch.sub(lse, sinks).sigmoid_().t().unsqueeze(-1))
    torch.logaddexp(lse, sinks, out=lse)


class _Merged:
    """Attention over the keys seen so far. It begins as what is added first, if that is for all queries.

    Sums of log-sum-exps are float64: their rounding, in units of their size, is a relative error of the weights.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._parts: tuple[Tensor, Tensor] | None = None

    def add(self, call: Call, out: Tensor, lse: Tensor) -> None:
        """Adds a call's output and log-sum-exp, of the rows that the kernel was given."""
        rows, lse = call.q_rows, lse.t()
        if self._parts is None and rows is None:
            self._parts = out, lse
            return
        total, total_lse = self._so_far()
        if isinstance(rows, Tensor):
            if call.fresh:
                put(total, rows, out)
                put(total_lse, rows, lse)
                return
            before, part = total_lse.index_select(0, rows), total.index_select(0, rows)
        else:
            before, part, out, lse = (pick(x, rows) for x in (total_lse, total, out, lse))
            if call.fresh:
                part.copy_(out)
                before.copy_(lse)
                return
        weight = torch.sub(lse, before).sigmoid_().unsqueeze(-1)
        part.lerp_(out.to(part.dtype), weight.to(part.dtype))
        torch.logaddexp(before, lse, out=before)
        if isinstance(rows, Tensor):
            total.index_copy_(0, rows, part)
            total_lse.index_copy_(0, rows, before)

    def _so_far(self) -> tuple[Tensor, Tensor]:
        """In the dtypes of sums; what no call has yet been for is 0, and its log-sum-exp -inf."""
        dtype = accumulator(self._like.dtype)
        if self._parts is None:
            lse = self._like.new_full(self._like.shape[:2], -torch.inf, dtype=torch.float64)
            self._parts = self._like.new_zeros(self._like.shape, dtype=dtype), lse
        total, lse = self._parts
        if lse.dtype != torch.float64 or total.dtype != dtype:
            self._parts = total.to(dtype), lse.to(torch.float64, memory_format=torch.contiguous_format)
        return self._parts

    def result(self, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Output in the dtype of the queries, and log-sum-exp `[heads, tokens]`."""
        out, lse = self._parts or self._so_far()
        if sinks is not None:
            out, lse = self._so_far()
            add_sinks(out, lse.t(), sinks)
        of_kernel = lse.t()
        if of_kernel.dtype != accumulator(self._like.dtype) or not of_kernel.is_contiguous():
            of_kernel = of_kernel.to(accumulator(self._like.dtype), memory_format=torch.contiguous_format, copy=True)
        return out.to(self._like.dtype), of_kernel


class _Sum:
    """A sum of gradients by row, in the dtype of sums. It begins as what is added first, if that is for all rows."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._total: Tensor | None = None

    def add(self, rows: Rows, part: Tensor) -> None:
        """Adds the rows of a call, of those that the kernel was given."""
        if self._total is None and rows is None:
            self._total = part.to(accumulator(part.dtype))
        else:
            add(self.total(), rows, part[rows] if isinstance(rows, slice) else part)

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


def _keys(keys: Keys, rows: Rows, value_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a call, without the zeros that make the values as wide as the keys."""
    if isinstance(keys, tuple):
        k, v = (pick(x, rows) for x in keys)
    else:
        k, v = pick(keys, rows).unbind(1)
    return k, v if v.shape[2] == value_dim else v[..., :value_dim]


class _Attention(torch.autograd.Function):
    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        exchange: KeyExchange,
        kernel: Kernel,
        value_dim: int,
        with_lse: bool,
        known: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.exchange, ctx.kernel, ctx.value_dim, ctx.with_lse, ctx.places = exchange, kernel, value_dim, with_lse, None
        if known is not None:
            again = known[0].clone(), known[1].clone() if with_lse else None
            ctx.save_for_backward(q, k, v, sinks, known[1], again[0], known[1].t().contiguous())
            return again
        like = q if q.shape[2] == value_dim else q[..., :value_dim]
        merged = None if exchange.once else _Merged(like)
        out: Tensor | None = None
        seen = with_lse or sinks is not None
        shown = q.new_empty(q.shape[:2], dtype=accumulator(q.dtype)) if seen else None
        lses: list[Tensor] = []
        places: dict[tuple[int, int], int] = {}  # of the log-sum-exp of each call, by the part of the heads

        def attend(keys: Keys, calls: Sequence[Call], heads: Heads) -> None:
            nonlocal out
            queries = heads.of(q)
            for call in calls:
                rows = call.q_rows
                given = (queries_of(queries, rows), *_keys(keys, call.k_rows, value_dim), call)
                if merged is not None:
                    merged.add(call, *kernel.forward(*given))
                    continue
                if rows is None and heads.parts == 1:  # one call over all rows: nothing to merge
                    out, lse = part, _ = kernel.forward(*given)
                else:
                    out = q.new_empty(like.shape) if out is None else out
                    if isinstance(rows, Tensor):
                        part, lse = kernel.forward(*given)
                    else:
                        part, lse = kernel.forward(*given, heads.of(out))
                if sinks is not None:
                    own = slice(None) if isinstance(rows, Tensor) or rows is None else rows
                    add_sinks(part[own], lse[:, own], heads.of(sinks[None])[0])
                if isinstance(rows, Tensor):
                    assert out is not None
                    put(heads.of(out), rows, part)
                places[heads.part, id(call)] = len(lses)
                lses.append(lse)
                if shown is not None:
                    put(heads.of(shown), rows, lse.t()[rows] if isinstance(rows, slice) else lse.t())

        exchange.forward(k, v, attend)
        if merged is not None:
            out, lse = merged.result(sinks)
            lses.append(lse)
            shown = lse.t().contiguous() if seen else None
        elif out is None:
            out = q.new_empty(like.shape)
        ctx.save_for_backward(q, k, v, sinks, shown if sinks is not None else None, out, *lses)
        if merged is None:
            ctx.places = places
        return out, shown if with_lse else None

    @staticmethod
    @_without_autocast
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, shown, out, *lses = ctx.saved_tensors
        width, value_dim = q.shape[2], ctx.value_dim
        if ctx.with_lse:
            assert d_lse is not None
            q, k, v, out, d_out = _with_lse(q, k, v, out, d_out, d_lse)
            value_dim += LSE_CHANNELS
        once = ctx.exchange.once
        d_out = d_out.contiguous()
        d_sinks = None if sinks is None else _of_sinks(sinks, shown, out, d_out)
        dq = q.new_empty(q.shape) if once else q
        total = _Sum(q)

        def attend(keys: Keys, calls: Sequence[Call], heads: Heads, d_keys: Tensor) -> None:
            mine = [heads.of(x) for x in (d_out, q, out)]
            of_calls = torch.split(d_keys, [call.num_keys for call in calls]) if len(calls) > 1 else (d_keys,)
            for call, d_call in zip(calls, of_calls, strict=False):
                rows = call.q_rows
                if ctx.places is not None:
                    lse = lses[ctx.places[heads.part, id(call)]]
                else:
                    lse = lses[0] if heads.parts == 1 else lses[0].chunk(heads.parts)[heads.part]
                    if isinstance(rows, Tensor):
                        lse = lse.index_select(1, rows)
                call_d_out, call_q, call_out = (queries_of(x, rows) for x in mine)
                given = (call_d_out, call_q, *_keys(keys, call.k_rows, value_dim), call_out, lse, call)
                if once and not isinstance(rows, Tensor):
                    ctx.kernel.backward(*given, (heads.of(dq), d_call))
                    continue
                part, _ = ctx.kernel.backward(*given, (None, d_call))
                if once:
                    put(heads.of(dq), rows, part)
                else:
                    total.add(rows, part)

        d_keys = ctx.exchange.backward(k, v, attend)
        dq = dq if once else total.total().to(q.dtype)
        if ctx.with_lse:
            dq, d_keys = dq[..., :width], d_keys[..., :width]
        dk, dv = d_keys.to(k.dtype).unbind(1)
        return dq, dk, dv, d_sinks, None, None, None, None, None


def _of_sinks(sinks: Tensor, lse: Tensor, out: Tensor, d_out: Tensor) -> Tensor:
    """The gradient of the sinks, keys whose value is 0. `lse` is `[queries, heads]` and includes them."""
    wide = accumulator(out.dtype)
    d_score = (d_out.to(wide) * out).sum(-1).mul_(torch.sub(sinks.to(lse.dtype), lse).exp_())
    return d_score.sum(0).neg_().to(sinks.dtype)


def _with_lse(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, d_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs for a kernel's backward with which it also gives the gradient of the log-sum-exp.

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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    exchange: KeyExchange,
    kernel: Kernel,
    value_dim: int | None = None,
    *,
    sinks: Tensor | None = None,
    with_lse: bool = False,
    known: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of `q` over the keys and values that `exchange` brings.

    Values are as wide as keys; those behind `value_dim` are 0, and are not computed. `with_lse` also gives its
    log-sum-exp `[queries, heads]`, which has a gradient, too; the same on all ranks. Output and log-sum-exp that are
    `known` are not computed, only their gradients are.

    Kept for the backward are q, k, v, the output and its log-sum-exp; other ranks' keys are exchanged again. Partial
    sums are float32 for half-precision inputs. Every rank must run the backward, in the same order: it communicates.
    """
    width = q.shape[2] if value_dim is None else value_dim
    result: tuple[Tensor, Tensor | None] = _Attention.apply(q, k, v, sinks, exchange, kernel, width, with_lse, known)
    return result
