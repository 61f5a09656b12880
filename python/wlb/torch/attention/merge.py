"""Differentiable attention over keys that arrive in blocks: one autograd function for every way to move them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from wlb.torch.attention.kernels import Kernel, accumulator
from wlb.torch.attention.plan import Call, Rows, add, pick, put, queries_of

LSE_CHANNELS = 8
"""Channels added to each head in the backward for the log-sum-exp's gradient: flash kernels take multiples of 8."""

_ROWS_OF_SINKS = 4096
"""Queries per chunk in the gradient of the sinks, which copies each chunk of outputs in a wider dtype."""

Keys = Tensor | tuple[Tensor, Tensor]
"""Keys and values: one tensor `[keys, 2, kv_heads, head_dim]`, or two tensors `[keys, kv_heads, head_dim]`."""


class Heads(NamedTuple):
    """One of several equal parts of the heads."""

    part: int = 0
    parts: int = 1

    def of(self, x: Tensor) -> Tensor:
        """This part of the heads of `x`, `[tokens, heads, head_dim]`."""
        return self.along(x, 1)

    def along(self, x: Tensor, dim: int) -> Tensor:
        """This part of the heads of `x`, whose dimension `dim` counts heads."""
        return x if self.parts == 1 else x.chunk(self.parts, dim)[self.part]


ALL_HEADS = Heads()

Attend = Callable[[Keys, Sequence[Call], Heads], None]
"""`attend(keys, calls, heads)`: computes calls for these heads of the queries; `keys` has the matching heads only."""

AttendBackward = Callable[[Keys, Sequence[Call], Heads, Tensor], None]
"""`attend(keys, calls, heads, d_keys)`: writes gradients of keys and values into `d_keys`, call after call.

`d_keys` is `[keys, 2, kv_heads, head_dim]`, where `keys` is the sum of `Call.num_keys`.
"""


class KeyExchange(Protocol):
    """Brings keys of other ranks to this rank's queries, and gradients of keys back to their owners."""

    @property
    def once(self) -> bool:
        """Whether no query is in two calls, so that outputs need no merging."""
        ...

    def forward(self, k: Tensor, v: Tensor, attend: Attend, group: dist.ProcessGroup | None) -> None:
        """Calls `attend(keys, calls, heads)` for every block of keys, while further blocks arrive.

        If heads are divided into parts, the parts are computed one after the other.
        """
        ...

    def backward(self, k: Tensor, v: Tensor, attend: AttendBackward, group: dist.ProcessGroup | None) -> Tensor:
        """Calls `attend(keys, calls, heads, d_keys)` for the blocks and calls of `forward`, in any order.

        Returns:
            gradients of this rank's keys and values, `[tokens, 2, kv_heads, head_dim]`.
        """
        ...


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Adds sinks to the softmax of an output, in place: scales the output down and raises its log-sum-exp.

    Args:
        out: `[rows, heads, value_dim]`.
        lse: log-sum-exp of the output, `[heads, rows]`.
        sinks: `[heads]`.
    """
    sinks = sinks.to(lse.dtype).unsqueeze(1)
    out.mul_(torch.sub(lse, sinks).sigmoid_().t().unsqueeze(-1))
    torch.logaddexp(lse, sinks, out=lse)


class _Merged:
    """Merges the outputs of calls that share queries. The first output is taken as it is if it has all queries.

    Merged log-sum-exps are float64, because an absolute error of a log-sum-exp is a relative error of the weights.
    """

    def __init__(self, q: Tensor, kernel: Kernel, value_dim: int) -> None:
        self._q, self._kernel, self._value_dim = q, kernel, value_dim
        self._parts: tuple[Tensor, Tensor] | None = None
        self._picked: tuple[Rows, Tensor] | None = None  # rows of the previous call, and their queries

    def attend(self, keys: Keys, calls: Sequence[Call]) -> None:
        """Computes calls and merges their outputs."""
        for call in calls:
            if self._picked is None or self._picked[0] is not call.q_rows:
                self._picked = call.q_rows, queries_of(self._q, call.q_rows)
            given = self._picked[1], *_keys(keys, call.k_rows, self._value_dim), call
            self.add(call, *self._kernel.forward(*given))

    def add(self, call: Call, out: Tensor, lse: Tensor) -> None:
        """Merges a call's output `[rows, heads, value_dim]` and log-sum-exp `[heads, rows]` into the result.

        If `call.q_rows` is a slice, both have rows for all queries, and only those of the slice are read.
        """
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
        """Merged output in the accumulation dtype, and log-sum-exp; 0 and -inf for queries without a call yet."""
        dtype = accumulator(self._q.dtype)
        if self._parts is None:
            lse = self._q.new_full(self._q.shape[:2], -torch.inf, dtype=torch.float64)
            self._parts = self._q.new_zeros((*self._q.shape[:2], self._value_dim), dtype=dtype), lse
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
        if of_kernel.dtype != accumulator(self._q.dtype) or not of_kernel.is_contiguous():
            of_kernel = of_kernel.to(accumulator(self._q.dtype), memory_format=torch.contiguous_format, copy=True)
        return out.to(self._q.dtype), of_kernel


class _MergedParts:
    """Merges outputs as `_Merged` does, for each part of the heads."""

    def __init__(self, q: Tensor, kernel: Kernel, value_dim: int) -> None:
        self._q, self._kernel, self._value_dim = q, kernel, value_dim
        self._parts: dict[Heads, _Merged] = {}

    def attend(self, keys: Keys, calls: Sequence[Call], heads: Heads) -> None:
        """See `Attend`."""
        if heads not in self._parts:
            self._parts[heads] = _Merged(heads.of(self._q), self._kernel, self._value_dim)
        self._parts[heads].attend(keys, calls)

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output in the dtype of the queries, and log-sum-exp `[heads, tokens]`."""
        parts = self._parts or {ALL_HEADS: _Merged(self._q, self._kernel, self._value_dim)}
        found = [parts[heads].result(None if sinks is None else heads.along(sinks, 0)) for heads in sorted(parts)]
        if len(found) == 1:
            return found[0]
        outs, lses = zip(*found, strict=True)
        return torch.cat(outs, 1), torch.cat(lses)


class _Sum:
    """Sums gradients of queries over calls, in the accumulation dtype."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._total: Tensor | None = None

    def add(self, rows: Rows, part: Tensor) -> None:
        """Adds a call's gradient of queries. If `rows` is a slice, `part` has all rows, and only the slice is added."""
        if self._total is None and rows is None:
            self._total = part.to(accumulator(part.dtype))
        else:
            add(self.total(), rows, part[rows] if isinstance(rows, slice) else part)

    def total(self) -> Tensor:
        if self._total is None:
            self._total = self._like.new_zeros(self._like.shape, dtype=accumulator(self._like.dtype))
        return self._total


_has_autocast = functools.cache(torch.amp.is_autocast_available)


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: switches autocast off, which would round the operands of the reference kernel's products."""

    @functools.wraps(function)
    def run(ctx: Any, x: Tensor, *args: Any) -> Any:
        device = x.device.type
        if not _has_autocast(device) or not torch.is_autocast_enabled(device):
            return function(ctx, x, *args)
        with torch.autocast(device, enabled=False):
            return function(ctx, x, *args)

    return run


def _keys(keys: Keys, rows: Rows, value_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a call. Values lose the zero channels that made them as wide as the keys."""
    if isinstance(keys, tuple):
        k, v = keys
        k, v = pick(k, rows), pick(v, rows)
    else:
        k, v = pick(keys, rows).unbind(1)
    return k, v if v.shape[2] == value_dim else v[..., :value_dim]


class _Outputs:
    """Outputs of calls that share no query: each call writes its rows of one output."""

    def __init__(self, q: Tensor, kernel: Kernel, value_dim: int, sinks: Tensor | None, shown: Tensor | None) -> None:
        self._q, self._kernel, self._value_dim, self._sinks = q, kernel, value_dim, sinks
        self.out: Tensor | None = None
        self.shown = shown  # log-sum-exps `[queries, heads]`, or None if nothing reads them
        self.lses: list[Tensor] = []
        self.places: dict[tuple[int, int], int] = {}  # index in `lses`, by part of the heads and `id` of the call

    def attend(self, keys: Keys, calls: Sequence[Call], heads: Heads) -> None:
        """See `Attend`."""
        q = self._q
        for call in calls:
            rows = call.q_rows
            listed = isinstance(rows, Tensor)
            k, v = _keys(keys, call.k_rows, self._value_dim)
            if rows is None and heads.parts == 1:  # one call over all rows
                self.out, lse = self._kernel.forward(q, k, v, call)
                part = out = self.out
            else:
                out, given = heads.of(self.result()), queries_of(heads.of(q), rows)
                part, lse = self._kernel.forward(given, k, v, call, None if listed else out)
            if self._sinks is not None:
                own = rows if isinstance(rows, slice) else slice(None)
                add_sinks(part[own], lse[:, own], heads.along(self._sinks, 0))
            if listed:
                put(out, rows, part)
            self.places[heads.part, id(call)] = len(self.lses)
            self.lses.append(lse)
            if self.shown is not None:
                put(heads.of(self.shown), rows, lse.t()[rows] if isinstance(rows, slice) else lse.t())

    def result(self) -> Tensor:
        """Output `[queries, heads, value_dim]`."""
        if self.out is None:
            self.out = self._q.new_empty((*self._q.shape[:2], self._value_dim))
        return self.out


class _Attention(torch.autograd.Function):
    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        exchange: KeyExchange,
        group: dist.ProcessGroup | None,
        kernel: Kernel,
        value_dim: int,
        sinks: Tensor | None,
        with_lse: bool,
        known: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.exchange, ctx.group, ctx.kernel, ctx.with_lse, ctx.places = exchange, group, kernel, with_lse, None
        ctx.value_dim = value_dim
        if known is not None:
            again = known[0].clone(), known[1].clone() if with_lse else None
            of_sinks = None if sinks is None else known[1]
            ctx.save_for_backward(q, k, v, sinks, of_sinks, again[0], known[1].t().contiguous())
            return again
        if exchange.once:
            seen = with_lse or sinks is not None
            shown = q.new_empty(q.shape[:2], dtype=accumulator(q.dtype)) if seen else None
            outputs = _Outputs(q, kernel, value_dim, sinks, shown)
            exchange.forward(k, v, outputs.attend, group)
            out, ctx.places = outputs.result(), outputs.places
            ctx.save_for_backward(q, k, v, sinks, None if sinks is None else shown, out, *outputs.lses)
            return out, shown if with_lse else None
        merged = _MergedParts(q, kernel, value_dim)
        exchange.forward(k, v, merged.attend, group)
        out, lse = merged.result(sinks)
        ctx.save_for_backward(q, k, v, sinks, None if sinks is None else lse.t(), out, lse)
        return out, lse.t().contiguous() if with_lse else None

    @staticmethod
    @_without_autocast
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, lse_of_sinks, out, *lses = ctx.saved_tensors
        width, value_dim = q.shape[2], ctx.value_dim
        if ctx.with_lse:
            assert d_lse is not None
            q, k, v, out, d_out = _with_lse(q, k, v, out, d_out, d_lse)
            value_dim += LSE_CHANNELS
        once, kernel, places = ctx.exchange.once, ctx.kernel, ctx.places
        d_out = d_out.contiguous()
        d_sinks = None if sinks is None else _of_sinks(sinks, lse_of_sinks, out, d_out)
        dq = q.new_empty(q.shape) if once else None
        totals: dict[int, _Sum] = {}  # by the part of the heads
        picked: tuple[Rows, int, Any] = (None, 0, None)  # previous call: its rows, part of the heads, picked tensors

        def attend(keys: Keys, calls: Sequence[Call], heads: Heads, d_keys: Tensor) -> None:
            nonlocal picked
            whole = heads.parts == 1
            mine = (d_out, q, out) if whole else [heads.of(x) for x in (d_out, q, out)]
            into = dq if whole or dq is None else heads.of(dq)
            of_calls = d_keys.split_with_sizes([call.num_keys for call in calls]) if len(calls) > 1 else (d_keys,)
            for call, d_call in zip(calls, of_calls, strict=False):
                rows = call.q_rows
                listed = isinstance(rows, Tensor)
                if listed and (picked[0] is not rows or picked[1] != heads.part):
                    picked = rows, heads.part, [queries_of(x, rows) for x in mine]
                call_d_out, call_q, call_out = picked[2] if listed else mine
                if places is not None:
                    lse = lses[places[heads.part, id(call)]]
                else:
                    lse = heads.along(lses[0], 0)
                    if isinstance(rows, Tensor):
                        lse = lse.index_select(1, rows)
                given = (call_d_out, call_q, *_keys(keys, call.k_rows, value_dim), call_out, lse, call)
                part, _ = kernel.backward(*given, (None if listed else into, d_call))
                if into is None:
                    if heads.part not in totals:
                        totals[heads.part] = _Sum(mine[1])
                    totals[heads.part].add(rows, part)
                elif listed:
                    put(into, rows, part)

        d_keys = ctx.exchange.backward(k, v, attend, ctx.group)
        if dq is None:
            found = [totals[part].total().to(q.dtype) for part in sorted(totals)] or [torch.zeros_like(q)]
            dq = found[0] if len(found) == 1 else torch.cat(found, 1)
        if ctx.with_lse:
            dq, d_keys = dq[..., :width], d_keys[..., :width]
        dk, dv = (d_keys if d_keys.dtype == k.dtype else d_keys.to(k.dtype)).unbind(1)
        return dq, dk, dv, None, None, None, None, d_sinks, None, None


def _of_sinks(sinks: Tensor, lse: Tensor, out: Tensor, d_out: Tensor) -> Tensor:
    """Gradient of the sinks, `[heads]`. A sink acts as a key with value 0; `lse`, `[queries, heads]`, includes it."""
    sinks_of_lse = sinks.to(lse.dtype)
    total = torch.zeros_like(sinks_of_lse)
    for rows in zip(*(torch.split(x, _ROWS_OF_SINKS) for x in (lse, out, d_out)), strict=True):
        part_lse, part_out, part_d_out = rows
        d_score = (part_d_out.to(lse.dtype) * part_out).sum(-1)
        total.sub_(d_score.mul_(torch.sub(sinks_of_lse, part_lse).exp_()).sum(0))
    return total.to(sinks.dtype)


def _with_lse(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, d_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Widens the inputs of a kernel's backward so that it also propagates the gradient of the log-sum-exp.

    A kernel multiplies the weights by `d_out @ v.T - sum(d_out * out)`, where `+ d_lse` is missing. In the added
    channels `v` is 0, `d_out` is 1 and `out` sums to `-d_lse`, which supplies it. `-d_lse` is spread over three
    channels, because one channel would round it to half precision.
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
    group: dist.ProcessGroup | None,
    kernel: Kernel,
    value_dim: int | None = None,
    sinks: Tensor | None = None,
    with_lse: bool = False,
    known: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of `q` over the keys and values that `exchange` brings.

    Args:
        q: `[queries, heads, head_dim]`.
        k: keys of this rank, `[tokens, kv_heads, head_dim]`.
        v: values, as wide as `k`. Channels from `value_dim` on are 0 and are not computed.
        exchange: brings keys of other ranks.
        group: ranks of the exchange.
        kernel: computes the calls.
        value_dim: width of the values; None: `head_dim`.
        sinks: `[heads]`, or None.
        with_lse: whether to return the log-sum-exp as well. Must be equal on all ranks.
        known: output and log-sum-exp `[queries, heads]` if they are computed already: the forward then returns copies,
            and only gradients are computed.

    Returns:
        the output `[queries, heads, value_dim]`, and the log-sum-exp `[queries, heads]` or None. Both are
        differentiable. The backward communicates: every rank must run it, and all in the same order.

    The backward keeps q, k, v, the output and the log-sum-exp, and exchanges other ranks' keys again. Partial sums are
    float32 for half-precision inputs.
    """
    width = q.shape[2] if value_dim is None else value_dim
    options = (exchange, group, kernel, width, sinks, with_lse, known)
    result: tuple[Tensor, Tensor | None] = _Attention.apply(q, k, v, *options)
    return result
