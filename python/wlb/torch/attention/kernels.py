"""Attention kernels that compute the spans of one call.

All kernels follow the conventions of flash kernels: tensors `[tokens, heads, head_dim]`, masks aligned bottom-right,
and a natural log-sum-exp `[heads, tokens]`. Forward and backward are separate functions outside autograd, because a
ring merges partial results: the backward of each part needs the merged output and log-sum-exp, which the kernels' own
autograd functions cannot take.

cuDNN's attention for packed rows is not used, although torch offers it with a log-sum-exp. It aligns a causal mask
top-left, so queries would not see the part of their document before them, and torch gives it no window.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from wlb._errors import error
from wlb.torch.attention.plan import Call

KernelName = Literal["auto", "flash_attn", "varlen", "reference"]

_SCORES = 1 << 22
"""Most scores that the reference kernel holds at once on a GPU: 16 MiB in float32."""

_SCORES_OF_CPU = 1 << 19
"""Most scores that the reference kernel holds at once on a CPU. Larger tiles leave the cache, contain more masked
scores, and take up to three times as long."""

FLASH_ATTN_2 = "flash_attn.flash_attn_interface"
FLASH_ATTN_3 = "flash_attn_interface"
FLASH_ATTN_4 = "flash_attn.cute.interface"
"""Modules of the kernels of flash-attn 2, 3 and 4."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Accumulation dtype of partial results and gradients: float32 for half precision, otherwise `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


Gradients = tuple[Tensor, Tensor]
"""Gradients of queries, shaped like `q`, and of keys and values together, `[keys, 2, kv_heads, head_dim]`."""


class Kernel(Protocol):
    """Attention of one call: `q` is `[queries, heads, head_dim]`, `k` `[keys, kv_heads, head_dim]`, and `v` likewise.

    Values and output may be narrower than heads if the kernel supports it; the values' gradient is then padded with 0.
    If `Call.q_rows` is a slice, `q` has all rows of the rank. Rows outside the slice are neither read nor written.
    """

    @staticmethod
    def tiles(head_dim: int) -> tuple[int, int]:
        """Queries per tile in forward and backward. A segment with fewer queries takes as long as a whole tile."""
        ...

    @staticmethod
    def takes(head_dim: int, value_dim: int, generation: int) -> bool:
        """Whether the kernel supports these widths on a GPU whose major compute capability is `generation`."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Output `[queries, heads, value_dim]`, written to `out` if given, and log-sum-exp `[heads, queries]`."""
        ...

    def backward(
        self,
        d_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        call: Call,
        into: tuple[Tensor | None, Tensor] | None = None,
    ) -> Gradients:
        """The gradients, written to `into` if it is given.

        `out` and `lse` are those over all keys of a query, not only over this call's keys.
        """
        ...


@dataclass(frozen=True)
class ReferenceKernel:
    """Softmax attention in plain torch, span by span and in tiles of queries: exact, on any device, in any dtype.

    Memory is limited by the size of a tile, and keys outside the mask are not read. Scores are float32 for
    half-precision inputs.
    """

    scale: float
    alibi_slopes: Tensor | None = None
    softcap: float | None = None

    @staticmethod
    def tiles(head_dim: int) -> tuple[int, int]:
        """Tiles of one query: the time of this kernel is proportional to its queries, whatever its tiles."""
        return 1, 1

    @staticmethod
    def takes(head_dim: int, value_dim: int, generation: int) -> bool:
        """See `Kernel`: all."""
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        out = q.new_empty((*q.shape[:2], v.shape[2])) if out is None else out
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=accumulator(q.dtype))
        kv_heads = k.shape[1]
        for rows, keys, distance, hidden in self._tiles(call, q.shape[1]):
            scores, _ = self._scores(_stack(q[rows], kv_heads), _by_head(k[keys]), distance, hidden)
            tile_lse = scores.logsumexp(-1)
            p = scores.sub_(tile_lse.unsqueeze(-1)).exp_()
            out[rows] = _unstack(p @ _by_head(v[keys]), out[rows].shape).to(q.dtype)
            lse[:, rows] = tile_lse.view(q.shape[1], -1)
        return out, lse

    def backward(
        self,
        d_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        call: Call,
        into: tuple[Tensor | None, Tensor] | None = None,
    ) -> Gradients:
        """See `Kernel`."""
        dq, d_keys = _gradients(q, k, into)
        wide = accumulator(k.dtype)
        summed = d_keys.zero_() if d_keys.dtype == wide else torch.zeros_like(d_keys, dtype=wide)
        dk, dv = summed[:, 0], summed[:, 1, :, : v.shape[2]]
        kv_heads = k.shape[1]
        for rows, keys, distance, hidden in self._tiles(call, q.shape[1]):
            q_tile, k_tile, v_tile = _stack(q[rows], kv_heads), _by_head(k[keys]), _by_head(v[keys])
            d_tile = _stack(d_out[rows], kv_heads)
            p, slope = self._scores(q_tile, k_tile, distance, hidden, with_slope=True)
            p = p.sub_(lse[:, rows].reshape(kv_heads, -1, 1)).exp_()
            dv[keys] += (p.mT @ d_tile).transpose(0, 1)
            delta = (d_tile * _stack(out[rows], kv_heads)).sum(-1, keepdim=True)
            ds = (d_tile @ v_tile.mT).sub_(delta).mul_(p).mul_(self.scale)
            if slope is not None:
                ds.mul_(slope)
            dq[rows] = _unstack(ds @ k_tile, q[rows].shape).to(dq.dtype)
            dk[keys] += (ds.mT @ q_tile).transpose(0, 1)
        if summed is not d_keys:
            d_keys.copy_(summed)
        return dq, d_keys

    def _scores(
        self, q: Tensor, k: Tensor, distance: Tensor | None, hidden: Tensor | None, with_slope: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Scaled, capped, biased, masked scores `[kv_heads, group * queries, keys]`.

        With `with_slope`, also returns the derivative of the cap in the shape of the scores; None without a cap.
        """
        scores = (q @ k.mT).mul_(self.scale)
        slope = None
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_()
            slope = torch.addcmul(scores.new_ones(()), scores, scores, value=-1) if with_slope else None
            scores.mul_(self.softcap)
        if distance is None:
            return scores, slope
        by_head = scores.view(k.shape[0], -1, *distance.shape)
        if self.alibi_slopes is not None:
            by_head.sub_(self.alibi_slopes.to(scores.dtype).view(k.shape[0], -1, 1, 1) * distance.abs())
        if hidden is not None:
            by_head.masked_fill_(hidden, -torch.inf)
        return scores, slope

    def _tiles(self, call: Call, heads: int) -> Iterator[tuple[slice, slice, Tensor | None, Tensor | None]]:
        """Tiles of the call: rows of queries, rows of keys, and distances and mask (None if not needed)."""
        left, right = call.window
        scores = _SCORES_OF_CPU if call.cu_seqlens_q.device.type == "cpu" else _SCORES
        for (q_from, q_to, k_from, k_to), shift in zip(call.spans.tolist(), call.shifts.tolist(), strict=True):
            diagonal = (k_to - k_from) - (q_to - q_from)  # the last key that the first query sees
            step = max(1, scores // (heads * (k_to - k_from)))
            for i in range(0, q_to - q_from, step):
                i_end = min(i + step, q_to - q_from)
                j = 0 if left < 0 else max(0, i + diagonal - left)
                j_end = k_to - k_from if right < 0 else min(k_to - k_from, i_end + diagonal + right)
                distance = hidden = None
                masked_left = 0 <= left < i_end - 1 + diagonal - j
                masked_right = 0 <= right < j_end - 1 - i - diagonal
                if masked_left or masked_right or self.alibi_slopes is not None:
                    device = call.cu_seqlens_q.device
                    standing = torch.arange(i + diagonal, i_end + diagonal, device=device)
                    distance = standing.unsqueeze(1) - torch.arange(j, j_end, device=device)
                    if masked_left:
                        hidden = distance > left
                    if masked_right:
                        hidden = distance < -right if hidden is None else hidden | (distance < -right)
                    distance += shift
                yield slice(q_from + i, q_from + i_end), slice(k_from + j, k_from + j_end), distance, hidden


@dataclass(frozen=True)
class CpuFlashKernel:
    """torch's flash attention for the CPU, span by span: what its SDPA runs, with the log-sum-exp.

    Its causal mask is aligned top-left. So a causal span with more keys than queries has two parts, the keys that all
    its queries see and a square, merged by their log-sum-exps. The backward pass gets the merged ones, so that the two
    parts add up. Windows are left to the reference kernel.
    """

    scale: float

    @staticmethod
    def tiles(head_dim: int) -> tuple[int, int]:
        """Tiles of one query: the time of this kernel is proportional to its queries."""
        return 1, 1

    @staticmethod
    def takes(head_dim: int, value_dim: int, generation: int) -> bool:
        """See `Kernel`: values as wide as heads."""
        return head_dim == value_dim

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        spans = self._spans(call)
        if spans is None:
            return ReferenceKernel(self.scale).forward(q, k, v, call, out)
        out = _like(q) if out is None else out
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=accumulator(q.dtype))
        for queries, parts in spans:
            found = [self._forward(q[queries], k[keys], v[keys], causal) for keys, causal in parts]
            part, part_lse = found[0]
            for other, other_lse in found[1:]:
                weight = torch.sigmoid(other_lse - part_lse).t().unsqueeze(-1)
                part = torch.lerp(part.to(weight.dtype), other.to(weight.dtype), weight)
                part_lse = torch.logaddexp(part_lse, other_lse)
            out[queries], lse[:, queries] = part, part_lse
        return out, lse

    def backward(
        self,
        d_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        call: Call,
        into: tuple[Tensor | None, Tensor] | None = None,
    ) -> Gradients:
        """See `Kernel`."""
        spans = self._spans(call)
        if spans is None:
            return ReferenceKernel(self.scale).backward(d_out, q, k, v, out, lse, call, into)
        dq, d_keys = _gradients(q, k, into)
        for queries, parts in spans:
            given = (d_out[queries], q[queries], out[queries], lse[:, queries])
            found = []
            for keys, causal in parts:
                part, d_keys[keys, 0], d_keys[keys, 1] = self._backward(*given, k[keys], v[keys], causal)
                found.append(part)
            dq[queries] = found[0] if len(found) == 1 else torch.add(*(x.to(accumulator(x.dtype)) for x in found))
        return dq, d_keys

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        group = q.shape[1] // k.shape[1]
        tensors = _heads_first(q), *(_heads_first(x.repeat_interleave(group, 1)) for x in (k, v))
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(*tensors, 0.0, causal, scale=self.scale)
        return out[0].transpose(0, 1), lse[0]

    def _backward(
        self, d_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
        k, v = (_heads_first(x.repeat_interleave(group, 1)) for x in (k, v))
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        options = (0.0, causal)
        found = flash(
            _heads_first(d_out), _heads_first(q), k, v, _heads_first(out), lse[None], *options, scale=self.scale
        )
        dq, dk, dv = (x[0].transpose(0, 1) for x in found)
        if group > 1:
            wide = accumulator(k.dtype)
            dk, dv = (x.unflatten(1, (kv_heads, group)).sum(2, dtype=wide) for x in (dk, dv))
        return dq, dk, dv

    @staticmethod
    def _spans(call: Call) -> list[tuple[slice, list[tuple[slice, bool]]]] | None:
        """For each span, the rows of its queries and parts of its keys: rows, and whether the part is a causal square.

        None if the call has a window, or a query without keys.
        """
        if call.window not in ((-1, -1), (-1, 0)):
            return None
        spans = []
        for q_from, q_to, k_from, k_to in call.spans.tolist():
            square = k_to - (q_to - q_from)
            parts = [(slice(k_from, k_to), False)]
            if call.window == (-1, 0) and q_to - q_from > 1:
                if square < k_from:  # queries that see no key
                    return None
                parts = [(slice(square, k_to), True)]
                if square > k_from:
                    parts.append((slice(k_from, square), False))
            spans.append((slice(q_from, q_to), parts))
        return spans


def _heads_first(x: Tensor) -> Tensor:
    """`[tokens, heads, head_dim]` as a batch of one, `[1, heads, tokens, head_dim]`."""
    return x.transpose(0, 1).unsqueeze(0)


def _by_head(x: Tensor) -> Tensor:
    """`[tokens, heads, head_dim]` as `[heads, tokens, head_dim]` to compute with."""
    return x.transpose(0, 1).to(accumulator(x.dtype))


def _stack(x: Tensor, kv_heads: int) -> Tensor:
    """`[tokens, heads, head_dim]` as `[kv_heads, group * tokens, head_dim]`: queries that share a key head, stacked."""
    return _by_head(x).reshape(kv_heads, -1, x.shape[2])


def _unstack(x: Tensor, shape: torch.Size) -> Tensor:
    return x.view(shape[1], shape[0], shape[2]).transpose(0, 1)


def _window(call: Call) -> dict[str, int]:
    left, right = call.window
    return {"window_size_left": left, "window_size_right": right}


def _spans(call: Call) -> tuple[Tensor, Tensor, int, int]:
    """Offsets and longest spans of queries and keys, as FlashAttention-2 and torch's varlen kernel take them.

    These kernels limit both sides of a window to the longest span of keys. With more queries than keys that is too
    short, because the last key is `queries - 1` after the first query: keys would be lost, or seen wrongly
    (Dao-AILab/flash-attention, #895). With a window, the longest span of keys is therefore at least that of queries.
    """
    most = call.max_seqlen_k
    if call.window not in ((-1, -1), (-1, 0)):
        most = max(call.max_seqlen_q, most)
    return call.cu_seqlens_q, call.cu_seqlens_k, longest_queries(call), most


def _named_spans(call: Call) -> dict[str, Any]:
    """Offsets and longest spans of queries and keys, by the names that flash-attn 3 and 4 give them."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_k")
    return {name: getattr(call, name) for name in names} | {"max_seqlen_q": longest_queries(call)}


def longest_queries(call: Call) -> int:
    """Queries of the longest span, at least 2: with 1, flash kernels would treat every row as a separate span."""
    return max(call.max_seqlen_q, 2)


def _like(q: Tensor) -> Tensor:
    """An uninitialised contiguous tensor like `q`."""
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _gradients(
    q: Tensor, k: Tensor, into: tuple[Tensor | None, Tensor] | None, value_dim: int | None = None
) -> Gradients:
    """Tensors to write gradients of queries and of keys and values to: those of `into`, or new ones."""
    dq = None if into is None else into[0]
    d_keys = k.new_empty((k.shape[0], 2, *k.shape[1:])) if into is None else into[1]
    if value_dim is not None and value_dim < k.shape[2]:
        d_keys[:, 1, :, value_dim:] = 0
    return _like(q) if dq is None else dq, d_keys


def _written(call: Call, rows: Tensor, into: Tensor | None) -> Tensor:
    """Copies the call's rows to `into` and returns it; without `into`, returns `rows`."""
    if into is None:
        return rows
    place = slice(None) if call.q_rows is None or isinstance(call.q_rows, Tensor) else call.q_rows
    into[place] = rows[place]
    return into


class FlashTiles:
    """Tiles of flash-attention 2 and 3 on Hopper, by their launch templates.

    Measured for the kernels of torch 2.11 on an H200 (docs/results/gpu.md).
    """

    @staticmethod
    def tiles(head_dim: int) -> tuple[int, int]:
        """See `Kernel`."""
        return 128, 128 if head_dim <= 64 else 64

    @staticmethod
    def takes(head_dim: int, value_dim: int, generation: int) -> bool:
        """See `Kernel`: values as wide as heads."""
        return head_dim == value_dim <= 256


@dataclass(frozen=True)
class VarlenKernel(FlashTiles):
    """The flash kernels that torch ships, which `torch.nn.attention.varlen.varlen_attn` calls (CUDA, half precision).

    `varlen_attn` itself has no backward from a given log-sum-exp, and may choose cuDNN, which aligns masks top-left.
    """

    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        causal = call.window == (-1, 0)
        given = (q, k, v, *_spans(call), 0.0, causal, False)
        options = {"scale": self.scale, **_window(call)}
        into = getattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace", None)
        if out is not None and into is not None:
            return out, into(out, *given, **options)
        found, lse, *_ = torch.ops.aten._flash_attention_forward(*given, **options)
        return _written(call, found, out), lse

    def backward(
        self,
        d_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        call: Call,
        into: tuple[Tensor | None, Tensor] | None = None,
    ) -> Gradients:
        """See `Kernel`."""
        given = (d_out, q, k, v, out, lse, *_spans(call), 0.0, call.window == (-1, 0))
        # A random state of dropout, which is not used.
        nothing = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(*given, *nothing, scale=self.scale, **_window(call))
        if into is None:
            return dq, torch.stack((dk, dv), 1)
        torch.stack((dk, dv), 1, out=into[1])
        return _written(call, dq, into[0]), into[1]


@dataclass(frozen=True)
class FlashAttention2(FlashTiles):
    """flash-attn 2.7 and newer. The only flash kernel with ALiBi."""

    scale: float
    alibi_slopes: Tensor | None = None
    softcap: float | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        options: dict[str, Any] = {"softcap": self.softcap or 0.0, "alibi_slopes": self.alibi_slopes, **_window(call)}
        options["causal"] = call.window == (-1, 0)
        forward = _flash_attn_2()._flash_attn_varlen_forward
        found, lse, *_ = forward(q, k, v, *_spans(call), 0.0, self.scale, **options)
        return _written(call, found, out), lse

    def backward(
        self,
        d_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        call: Call,
        into: tuple[Tensor | None, Tensor] | None = None,
    ) -> Gradients:
        """See `Kernel`."""
        dq, d_keys = _gradients(q, k, into)
        dk, dv = d_keys.unbind(1)
        softcap, deterministic = self.softcap or 0.0, torch.are_deterministic_algorithms_enabled()
        options = (0.0, self.scale, call.window == (-1, 0), *call.window, softcap, self.alibi_slopes, deterministic)
        _flash_attn_2()._flash_attn_varlen_backward(d_out, q, k, v, out, lse, dq, dk, dv, *_spans(call), *options)
        return dq, d_keys


@dataclass(frozen=True)
class FlashAttention3(FlashTiles):
    """flash-attn 3, for Hopper; the releases whose window is two arguments (3.0.0b1 took a pair)."""

    scale: float
    softcap: float | None = None

    @staticmethod
    def takes(head_dim: int, value_dim: int, generation: int) -> bool:
        """See `Kernel`: equal widths, DeepSeek's, and wide values of narrow heads."""
        if head_dim == value_dim:
            return head_dim <= 256
        if value_dim % 8:
            return False
        return (128 < head_dim <= 192 and 96 < value_dim <= 128) or (head_dim <= 64 and value_dim <= 256)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        options = {"causal": call.window == (-1, 0), "out_": out, **self._options(call)}
        out, lse, *_ = _flash_attn_3()._flash_attn_forward(q, k, v, **options)
        return out, lse

    def backward(
        self,
        d_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        call: Call,
        into: tuple[Tensor | None, Tensor] | None = None,
    ) -> Gradients:
        """See `Kernel`."""
        dq, d_keys = _gradients(q, k, into, v.shape[2])
        dk, dv = d_keys[:, 0], d_keys[:, 1, :, : v.shape[2]]
        options = {"is_causal": call.window == (-1, 0), **self._options(call)}
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        _flash_attn_3()._flash_attn_backward(d_out, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, **options)
        return dq, d_keys

    def _options(self, call: Call) -> dict[str, Any]:
        return _named_spans(call) | {"softmax_scale": self.scale, "softcap": self.softcap or 0.0, **_window(call)}


@dataclass(frozen=True)
class FlashAttention4:
    """flash-attn 4 from 4.0.0b36 on, for Hopper and Blackwell. The first call of a kind compiles its kernel."""

    scale: float
    softcap: float | None = None

    @staticmethod
    def tiles(head_dim: int) -> tuple[int, int]:
        """See `Kernel`."""
        return 128, 128

    @staticmethod
    def takes(head_dim: int, value_dim: int, generation: int) -> bool:
        """See `Kernel`: on Hopper widths up to 256, on Blackwell up to 128, and DeepSeek's."""
        if head_dim % 8 or value_dim % 8:
            return False
        if generation == 9:
            return head_dim <= 256 and value_dim <= 256
        return (head_dim <= 128 and value_dim <= 128) or (head_dim, value_dim) == (192, 128)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        found, lse, *_ = _flash_attn_4()._flash_attn_fwd(q, k, v, out=out, return_lse=True, **self._options(call))
        return found, lse

    def backward(
        self,
        d_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        call: Call,
        into: tuple[Tensor | None, Tensor] | None = None,
    ) -> Gradients:
        """See `Kernel`."""
        dq, d_keys = _gradients(q, k, into, v.shape[2])
        options = self._options(call) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
        options |= {"dq": dq, "dk": d_keys[:, 0], "dv": d_keys[:, 1, :, : v.shape[2]]}
        _flash_attn_4()._flash_attn_bwd(q, k, v, out, d_out, lse, **options)
        return dq, d_keys

    def _options(self, call: Call) -> dict[str, Any]:
        """Window sides are None if they are open, and unchanged if they are wider than a span."""
        causal = call.window == (-1, 0)
        sides = {name: None if causal or side < 0 else side for name, side in _window(call).items()}
        options = {"softmax_scale": self.scale, "softcap": self.softcap or 0.0, "causal": causal, **sides}
        return _named_spans(call) | options


@functools.cache
def _flash_attn_2() -> Any:
    """The module of flash-attn 2, or None. Its package may be installed without it, by flash-attn 4."""
    return _installed(FLASH_ATTN_2)


@functools.cache
def _flash_attn_3() -> Any:
    """The module of flash-attn 3, or None."""
    return _installed(FLASH_ATTN_3)


@functools.cache
def _flash_attn_4() -> Any:
    """The module of flash-attn 4, or None: older ones have no backward for packed rows on every GPU."""
    module = _installed(FLASH_ATTN_4)
    backward = getattr(module, "_flash_attn_bwd", None)
    return module if backward is not None and "learnable_sink" in inspect.signature(backward).parameters else None


def _installed(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception:  # missing, or built for another torch or compiler
        return None


def choose(
    name: KernelName,
    q: Tensor,
    *,
    scale: float,
    alibi_slopes: Tensor | None,
    alibi_aligned: bool,
    softcap: float | None = None,
    value_dim: int | None = None,
    more: int = 0,
) -> Kernel:
    """Chooses the kernel for tensors like `q`.

    On a GPU "auto" prefers flash-attn 3 (Hopper), flash-attn 4 (Hopper, Blackwell), flash-attn 2, then torch's varlen
    kernels. On a CPU it takes torch's flash attention for CPUs. It takes the reference kernel if none of these supports
    the GPU, the dtype, the width of heads, ALiBi or softcap.

    Args:
        name: name of a kernel, or "auto".
        q: queries; gives device, dtype and the width of heads.
        scale: factor of the scores.
        alibi_slopes: slopes of ALiBi, one for each head, or None.
        alibi_aligned: whether every span's last query is at its last key, so that a flash kernel uses true distances.
        softcap: cap of the scores, or None.
        value_dim: width of the values; None: that of `q`.
        more: channels by which the widest call is wider.

    Raises:
        WlbError: there is no such kernel, it is not installed, or it does not support the options.
    """
    if name not in get_args(KernelName):
        raise error("kernel", f"= {name!r}: must be one of {', '.join(get_args(KernelName))}", value=name)
    exact = ReferenceKernel(scale, alibi_slopes, softcap)
    if name == "reference":
        return exact
    widths = _widths(q, value_dim, more)
    refusal = _flash_refusal(q, widths)
    if name == "auto" and refusal:
        flash_on_cpu = q.device.type == "cpu" and alibi_slopes is None and softcap is None
        return CpuFlashKernel(scale) if flash_on_cpu else exact
    if refusal:
        raise error("kernel", f"{name!r} {refusal}; kernel='reference' has no such limit", value=name)

    generation = _generation(q)
    reason = None
    for kind in () if name == "varlen" else _flash_attn(generation):
        reason = _lacks(kind, generation, widths, alibi_slopes, alibi_aligned)
        if reason is not None:
            continue
        if kind is FlashAttention2:
            return FlashAttention2(scale, None if alibi_slopes is None else alibi_slopes.float(), softcap)
        return kind(scale, softcap=softcap)
    if name == "flash_attn" and reason is None:
        raise error("kernel", "'flash_attn' is not installed (2.7, 3 or 4.0.0b36, or newer)", value=name)
    if name != "flash_attn" and alibi_slopes is None and softcap is None:
        return VarlenKernel(scale)
    if name == "auto":
        return exact
    reason = reason or ("has no ALiBi" if alibi_slopes is not None else "caps no scores (softcap)")
    raise error("kernel", f"{name!r} {reason}; kernel='reference' supports it with every transport", value=name)


def gains_by_buckets(kernel: Kernel | None) -> bool:
    """Whether a kernel gains by calls that are divided into buckets of spans with similar lengths.

    It does if it starts thread blocks for the longest span of a call in every span. flash-attn 4, kernels on a CPU and
    the reference kernel start as many as each span needs.
    """
    return isinstance(kernel, VarlenKernel | FlashAttention2 | FlashAttention3)


def is_prepared_in_buckets(device: torch.device) -> bool:
    """`gains_by_buckets` of the kernel that "auto" chooses on a device in bfloat16."""
    if device.type != "cuda":
        return False
    q = torch.empty((0, 1, 128), dtype=torch.bfloat16, device=device)
    return gains_by_buckets(choose("auto", q, scale=1.0, alibi_slopes=None, alibi_aligned=True))


def value_width(kernel: Kernel, q: Tensor, value_dim: int, more: int = 0) -> int:
    """The width at which a kernel computes values: `value_dim`, or the width of heads if they must be padded to it."""
    if value_dim == q.shape[2]:
        return value_dim
    generation = _generation(q)
    head_dim, _ = _widths(q, value_dim, 0)
    both = (_widths(q, value_dim, 0), _widths(q, value_dim, more))  # of the forward, and of the widest call
    return value_dim if all(kernel.takes(*widths, generation) for widths in both) else head_dim


def _widths(q: Tensor, value_dim: int | None, more: int) -> tuple[int, int]:
    """Widths of heads and values in the widest call. Heads are at least as wide as values."""
    value_dim = q.shape[2] if value_dim is None else value_dim
    return max(q.shape[2], value_dim) + more, value_dim + more


def _generation(q: Tensor) -> int:
    """Major compute capability; 0 without a GPU."""
    return torch.cuda.get_device_capability(q.device)[0] if q.device.type == "cuda" else 0


def _flash_attn(generation: int) -> list[type[FlashAttention2 | FlashAttention3 | FlashAttention4]]:
    """The installed kernels of flash-attn that this GPU supports, the fastest first."""
    found: list[type[FlashAttention2 | FlashAttention3 | FlashAttention4]] = []
    if generation == 9 and _flash_attn_3() is not None:
        found.append(FlashAttention3)
    if generation in (9, 10, 11) and _flash_attn_4() is not None:
        found.append(FlashAttention4)
    if _flash_attn_2() is not None:
        found.append(FlashAttention2)
    return found


def _lacks(
    kind: type[FlashAttention2 | FlashAttention3 | FlashAttention4],
    generation: int,
    widths: tuple[int, int],
    alibi_slopes: Tensor | None,
    alibi_aligned: bool,
) -> str | None:
    """Why a kernel of flash-attn does not support the options; None if it does."""
    if alibi_slopes is not None:
        if kind is not FlashAttention2:
            return "has no ALiBi"
        if not alibi_aligned:
            return "measures ALiBi distances wrongly on this transport"
    head_dim, _ = widths
    if not kind.takes(*widths, generation) and not kind.takes(head_dim, head_dim, generation):
        return "takes no heads of {} with values of {} on this GPU".format(*widths)
    return None


def _flash_refusal(q: Tensor, widths: tuple[int, int]) -> str | None:
    """Why flash kernels do not support the tensors; None if they do."""
    if q.device.type != "cuda":
        return f"runs on CUDA, not on {q.device.type}"
    capability = torch.cuda.get_device_capability(q.device)
    if capability < (8, 0):
        return "needs compute capability 8.0, this GPU has {}.{}".format(*capability)
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, not {q.dtype}"
    if widths[0] % 8 or widths[0] > 256:
        return f"takes a head_dim divisible by 8 up to 256, not {widths[0]}"
    return None
