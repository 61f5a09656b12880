"""Differentiable attention over keys that arrive in blocks: one autograd function for every way to move them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from wlb.torch.attention.kernels import Kernel, accumulator
from wlb.torch.attention.segments import Call

LSE_CHANNELS = 8
"""Channels that a head gets in its backward for the gradient of the log-sum-exp: flash kernels take multiples of 8."""


class AttendBackward(Protocol):
    """Computes the gradients of a block of keys."""

    def __call__(
        self, k: Tensor, v: Tensor, calls: Sequence[Call], into: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Gradients of `k` and `v`, in the dtype of sums (`accumulator`): in new tensors, or written over `into`."""
        ...


class KeyExchange(Protocol):
    """Brings this rank's queries together with keys of other ranks, and the keys' gradients home."""

    def forward(self, k: Tensor, v: Tensor, attend: Callable[[Tensor, Tensor, Sequence[Call]], None]) -> None:
        """Calls `attend(k, v, calls)` for every block of keys, overlapping it with what is still under way."""
        ...

    def backward(self, k: Tensor, v: Tensor, attend: AttendBackward) -> tuple[Tensor, Tensor]:
        """Passes the same blocks to `attend`, which gives their gradients; returns those of `k` and `v`."""
        ...


class _Output:
    """Attention over the keys seen so far. It begins as what is added first, if that is for all queries.

    Sums of log-sum-exps are float64: their rounding, in units of their size, is a relative error of the weights.
    """

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._parts: tuple[Tensor, Tensor] | None = None

    def add(self, call: Call, out: Tensor, lse: Tensor) -> None:
        if call.fresh and call.q_rows is None:
            self._parts = out, lse
            return
        total, total_lse = self._parts or (self._q.new_zeros(self._q.shape), self._no_keys())
        self._parts = total, total_lse = total.to(accumulator(total.dtype)), total_lse.double()
        rows = slice(None) if call.q_rows is None else call.q_rows
        if call.fresh:
            total[rows] = out.to(total.dtype)
            total_lse[:, rows] = lse.double()
            return
        before = total_lse[:, rows]
        weight = torch.sigmoid(lse - before).t().unsqueeze(-1)
        total[rows] = total[rows].lerp(out.to(total.dtype), weight.to(total.dtype))
        total_lse[:, rows] = torch.logaddexp(before, lse.double())

    def result(self) -> tuple[Tensor, Tensor]:
        """Output like the queries, and log-sum-exp; where no key was seen these are 0 and -inf."""
        out, lse = self._parts or (self._q.new_zeros(self._q.shape), self._no_keys())
        return out.to(self._q.dtype), lse.to(accumulator(self._q.dtype))

    def _no_keys(self) -> Tensor:
        tokens, heads, _ = self._q.shape
        return self._q.new_full((heads, tokens), -torch.inf, dtype=torch.float64)


class _Gradient:
    """A sum of gradients by row, in `into` if given. It begins as what is added first, if that is for all rows."""

    def __init__(self, like: Tensor, into: Tensor | None = None) -> None:
        self._like = like
        self._into = into
        self._sum: Tensor | None = None

    def add(self, rows: Tensor | None, part: Tensor) -> None:
        if rows is None and self._sum is None:
            self._sum = part if self._into is None else self._into.copy_(part)
            return
        total = self.total()
        if rows is None:
            total += part
        else:
            total.index_add_(0, rows, part.to(total.dtype))

    def total(self) -> Tensor:
        dtype = accumulator(self._like.dtype)
        if self._sum is None and self._into is not None:
            self._sum = self._into.zero_()
        elif self._sum is None:
            self._sum = self._like.new_zeros(self._like.shape, dtype=dtype)
        self._sum = self._sum.to(dtype)
        return self._sum


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Autocast would round what the reference kernel multiplies in the forward, and is off where backwards are run."""

    @functools.wraps(function)
    def run(ctx: Any, x: Tensor, *args: Any) -> Any:
        device = x.device.type
        known = torch.amp.is_autocast_available(device)
        with torch.autocast(device, enabled=False) if known else contextlib.nullcontext():
            return function(ctx, x, *args)

    return run


class _Attention(torch.autograd.Function):
    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, exchange: KeyExchange, kernel: Kernel, with_lse: bool
    ) -> tuple[Tensor, Tensor]:
        output = _Output(q)

        def attend(k: Tensor, v: Tensor, calls: Sequence[Call]) -> None:
            for call in calls:
                parts = _rows(q, call.q_rows), _rows(k, call.k_rows), _rows(v, call.k_rows)
                output.add(call, *kernel.forward(*parts, call))

        exchange.forward(k, v, attend)
        out, lse = output.result()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.exchange, ctx.kernel, ctx.with_lse = exchange, kernel, with_lse
        shown = lse.t().contiguous()
        if not with_lse:
            ctx.mark_non_differentiable(shown)
        return out, shown

    @staticmethod
    @_without_autocast
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        dtypes, width = (q.dtype, k.dtype, v.dtype), q.shape[2]
        if ctx.with_lse:
            q, k, v, out, d_out = _with_lse(q, k, v, out, d_out, d_lse)
        d_out = d_out.contiguous()
        dq = _Gradient(q)

        def attend(
            k: Tensor, v: Tensor, calls: Sequence[Call], into: tuple[Tensor, Tensor] | None = None
        ) -> tuple[Tensor, Tensor]:
            dk, dv = (_Gradient(k), _Gradient(v)) if into is None else (_Gradient(k, into[0]), _Gradient(v, into[1]))
            for call in calls:
                mine, theirs = call.q_rows, call.k_rows
                call_lse = lse if mine is None else lse[:, mine]
                dq_part, dk_part, dv_part = ctx.kernel.backward(
                    _rows(d_out, mine),
                    _rows(q, mine),
                    _rows(k, theirs),
                    _rows(v, theirs),
                    _rows(out, mine),
                    call_lse,
                    call,
                )
                dq.add(mine, dq_part)
                dk.add(theirs, dk_part)
                dv.add(theirs, dv_part)
            return dk.total(), dv.total()

        dk, dv = ctx.exchange.backward(k, v, attend)
        gradients = [x[..., :width].to(dtype) for x, dtype in zip((dq.total(), dk, dv), dtypes, strict=True)]
        return gradients[0], gradients[1], gradients[2], None, None, None


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


def _rows(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def attention(
    q: Tensor, k: Tensor, v: Tensor, exchange: KeyExchange, kernel: Kernel, *, with_lse: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention of `q` over the keys and values that `exchange` brings, and its log-sum-exp `[queries, heads]`.

    The log-sum-exp has a gradient only `with_lse`, which has to be the same on all ranks.

    Kept for the backward are q, k, v, the output and its log-sum-exp; other ranks' keys are exchanged again. Partial
    sums are float32 for half-precision inputs. Every rank must run the backward, in the same order: it communicates.
    """
    result: tuple[Tensor, Tensor] = _Attention.apply(q, k, v, exchange, kernel, with_lse)
    return result
