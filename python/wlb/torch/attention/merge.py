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
"""Channels that a head gets in its backward for the gradient of the log-sum-exp: flash kernels take multiples of 8."""

_ROWS_OF_SINKS = 4096
"""Queries whose part of the sinks' gradient is computed at once: it takes their outputs in the dtype of sums."""

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

    def forward(self, k: Tensor, v: Tensor, attend: Attend, group: dist.ProcessGroup | None) -> None:
        """Calls `attend(keys, calls, heads)` for every block of keys, overlapping it with what is still under way.

        Parts of the heads come one after the other.
        """
        ...

    def backward(self, k: Tensor, v: Tensor, attend: AttendBackward, group: dist.ProcessGroup | None) -> Tensor:
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

    def __init__(self, q: Tensor, kernel: Kernel, value_dim: int | None = None) -> None:
        self._q, self._kernel = q, kernel
        self._value_dim = q.shape[2] if value_dim is None else value_dim
        self._parts: tuple[Tensor, Tensor] | None = None
        self._picked: tuple[Rows, Tensor] | None = None  # rows of the call before, and these queries

    def attend(self, keys: Keys, calls: Sequence[Call], heads: Heads) -> None:
        """See `Attend`."""
        for call in calls:
            if self._picked is None or self._picked[0] is not call.q_rows:
                self._picked = call.q_rows, queries_of(self._q, call.q_rows)
            given = self._picked[1], *_keys(keys, call.k_rows, self._value_dim), call
            self.add(call, *self._kernel.forward(*given))

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
    """Attention of queries of which some are in several calls, in parts of the heads."""

    def __init__(self, q: Tensor, kernel: Kernel, value_dim: int) -> None:
        self._q, self._kernel, self._value_dim = q, kernel, value_dim
        self._parts: dict[Heads, _Merged] = {}

    def attend(self, keys: Keys, calls: Sequence[Call], heads: Heads) -> None:
        """See `Attend`."""
        if heads not in self._parts:
            self._parts[heads] = _Merged(heads.of(self._q), self._kernel, self._value_dim)
        self._parts[heads].attend(keys, calls, heads)

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output in the dtype of the queries, and log-sum-exp `[heads, tokens]`."""
        parts = self._parts or {ALL_HEADS: _Merged(self._q, self._kernel, self._value_dim)}
        found = [
            parts[heads].result(None if sinks is None else heads.of(sinks.unsqueeze(0))[0]) for heads in sorted(parts)
        ]
        if len(found) == 1:
            return found[0]
        outs, lses = zip(*found, strict=True)
        return torch.cat(outs, 1), torch.cat(lses)


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


_has_autocast = functools.cache(torch.amp.is_autocast_available)


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Autocast would round what the reference kernel multiplies in the forward, and is off where backwards are run."""

    @functools.wraps(function)
    def run(ctx: Any, x: Tensor, *args: Any) -> Any:
        device = x.device.type
        if not _has_autocast(device) or not torch.is_autocast_enabled(device):
            return function(ctx, x, *args)
        with torch.autocast(device, enabled=False):
            return function(ctx, x, *args)

    return run


def _keys(keys: Keys, rows: Rows, value_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a call, without the zeros that make the values as wide as the keys."""
    if isinstance(keys, tuple):
        k, v = keys
        k, v = pick(k, rows), pick(v, rows)
    else:
        k, v = pick(keys, rows).unbind(1)
    return k, v if v.shape[2] == value_dim else v[..., :value_dim]


class _Outputs:
    """Outputs of calls of which no two have a query: each is written where it belongs."""

    def __init__(self, q: Tensor, kernel: Kernel, value_dim: int, sinks: Tensor | None, shown: Tensor | None) -> None:
        self._q, self._kernel, self._value_dim, self._sinks = q, kernel, value_dim, sinks
        self.out: Tensor | None = None
        self.shown = shown  # the log-sum-exps `[queries, heads]`, if they are asked for
        self.lses: list[Tensor] = []
        self.places: dict[tuple[int, int], int] = {}  # of the log-sum-exp of each call, by the part of the heads

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
                add_sinks(part[own], lse[:, own], heads.of(self._sinks.unsqueeze(0))[0])
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
        picked: tuple[Rows, int, Any] = (None, 0, None)  # of the call before: its rows, heads, and what they are of

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
                    lse = lses[0] if whole else lses[0].chunk(heads.parts)[heads.part]
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
            dq = torch.cat([totals[part].total().to(q.dtype) for part in sorted(totals)] or [torch.zeros_like(q)], 1)
        if ctx.with_lse:
            dq, d_keys = dq[..., :width], d_keys[..., :width]
        dk, dv = (d_keys if d_keys.dtype == k.dtype else d_keys.to(k.dtype)).unbind(1)
        return dq, dk, dv, None, None, None, None, d_sinks, None, None


def _of_sinks(sinks: Tensor, lse: Tensor, out: Tensor, d_out: Tensor) -> Tensor:
    """The gradient of the sinks, keys whose value is 0. `lse` is `[queries, heads]` and includes them."""
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
    group: dist.ProcessGroup | None,
    kernel: Kernel,
    value_dim: int | None = None,
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
    options = (exchange, group, kernel, width, sinks, with_lse, known)
    result: tuple[Tensor, Tensor | None] = _Attention.apply(q, k, v, *options)
    return result
