"""Attention as one torch operator, for compiled models and for checkpointing policies that name operators.

A compiler cannot trace a shard. The operator takes a tensor instead, with the number under which `prepare_attention`
keeps the shard, so one graph serves all micro-batches. In the graph, attention is one node and its backward another.
The backward takes the output and its log-sum-exp and recomputes nothing of the forward.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

import wlb
from wlb._errors import error
from wlb.torch.attention.arguments import Options
from wlb.torch.attention.kernels import accumulator

KEPT = 1024
"""Number of prepared shards that are kept: the latest ones."""

Known = tuple[Tensor, Tensor]
"""The output of an attention, and its log-sum-exp `[tokens, heads]`."""


class _Prepared:
    """Prepared shards, by number."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[Any, int] = OrderedDict()
        self._shards: dict[int, Any] = {}
        self._next = itertools.count(1)
        self._lock = threading.Lock()

    def add(self, shard: wlb.Shard) -> Tensor:
        """Keeps a shard; returns its number as an int64 tensor `[1]` on the CPU. Equal shards get equal numbers."""
        with self._lock:
            number = self._numbers.pop(shard, None) or next(self._next)
            self._numbers[shard], self._shards[number] = number, shard
            if len(self._numbers) > KEPT:
                del self._shards[self._numbers.popitem(last=False)[1]]
        return torch.tensor([number])

    def get(self, prepared: Tensor) -> Any:
        """The shard whose number `prepared` holds."""
        if prepared.device.type != "cpu" or prepared.dtype != torch.int64 or prepared.shape != (1,):
            found = f"{prepared.dtype} {list(prepared.shape)} on {prepared.device}"
            raise error("shard", f"is {found}, not what prepare_attention returned: int64 [1] on the CPU", value=found)
        shard = self._shards.get(number := int(prepared))
        if shard is None:
            message = f"= {number}: no shard of this process, or {KEPT} others were prepared after it"
            raise error("shard", message, value=number)
        return shard


PREPARED = _Prepared()

_ATTEND: list[Callable[..., Any]] = []
"""The function that computes attention. It is registered by `attends`, because its module imports this one."""


def attends(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: registers the function that the operator runs: `function(q, k, v, shard, known=..., with_lse=...)`."""
    _ATTEND[:] = [function]
    return function


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prepared: Tensor,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    group: dist.ProcessGroup | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Runs the operator on the micro-batch whose shard has the number `prepared`.

    Returns:
        the output `[tokens, heads, value_dim]` and its log-sum-exp `[tokens, heads]`.
    """
    name = "" if group is None else group.group_name
    result: tuple[Tensor, Tensor] = torch.ops.wlb.attention(q, k, v, prepared, alibi_slopes, sinks, name, *options)
    return result


_OPTIONS = (
    "Tensor? alibi_slopes, Tensor? sinks, str group, str transport, int? ulysses_size, float? softmax_scale, "
    "float? softcap, SymInt? window, str kernel, bool return_lse"
)


def _named(alibi_slopes: Tensor | None, sinks: Tensor | None, group: str, *options: Any) -> dict[str, Any]:
    found = None if group == "" else _resolve_process_group(group)  # type: ignore[arg-type]
    return {"alibi_slopes": alibi_slopes, "sinks": sinks, "group": found, "options": Options(*options)}


@torch.library.custom_op(
    "wlb::attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor prepared, {_OPTIONS}) -> (Tensor, Tensor)",
)
def _forward(q: Tensor, k: Tensor, v: Tensor, prepared: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        out, lse = _ATTEND[0](q, k, v, PREPARED.get(prepared), with_lse=True, **_named(*options))
    return out.contiguous(), lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, prepared: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:2], dtype=accumulator(q.dtype))
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2])), lse


@contextmanager
def _differentiable() -> Iterator[None]:
    """Context in which autograd records operations: inside a custom operator enable_grad alone is not enough."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    with torch.enable_grad(), torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


@torch.library.custom_op(
    "wlb::attention_backward",
    mutates_args=(),
    schema="(Tensor d_out, Tensor d_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor prepared, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    d_out: Tensor,
    d_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    prepared: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    named = _named(*options)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    if named["sinks"] is not None:
        named["sinks"] = named["sinks"].detach().requires_grad_()
        leaves.append(named["sinks"])
    with _differentiable():
        again = _ATTEND[0](*leaves[:3], PREPARED.get(prepared), known=(out.detach(), lse.detach()), **named)
    results, gradients = ([*again], [d_out, d_lse]) if named["options"].return_lse else ([again], [d_out])
    dq, dk, dv, *d_sinks = torch.autograd.grad(results, leaves, gradients)
    # The gradients of keys and values are views of one tensor, and outputs of an operator must not share memory.
    dk, dv = (x.clone(memory_format=torch.contiguous_format) for x in (dk, dv))
    return dq.contiguous(), dk, dv, d_sinks[0].contiguous() if d_sinks else q.new_empty(0)


@_backward.register_fake
def _(
    d_out: Tensor,
    d_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    prepared: Tensor,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_sinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, prepared, alibi_slopes, sinks, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, prepared, alibi_slopes, sinks)


def _gradients(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
    *saved, prepared, alibi_slopes, sinks = ctx.saved_tensors
    options = (prepared, alibi_slopes, sinks, *ctx.options)
    *found, d_sinks = torch.ops.wlb.attention_backward(d_out, d_lse, *saved, *options)
    return (*found, None, None, None if sinks is None else d_sinks, *[None] * len(ctx.options))


_forward.register_autograd(_gradients, setup_context=_save)
