"""Every kernel against float64: output and gradients, each rank's work run alone and put together again."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import wlb
from studies.gpu.emulated import Rank
from studies.gpu.items import Item, Row
from wlb.torch.attention import arguments, kernels
from wlb.torch.attention.merge import attention

HEADS = {"MHA": (8, 8), "GQA": (8, 2), "MQA": (8, 1)}
HEAD_DIMS = (64, 128, 256)
MASKS: dict[str, int | None] = {"causal": None, "full": None, "window 1": 1, "window 37": 37, "window 4096": 4096}
SCORES: dict[str, tuple[int, int]] = {"capped": (128, 128), "sinks": (64, 64), "narrow values": (192, 128)}
"""Kinds of scores beside plain ones, and the widths of keys and of values."""
SOFTCAP = 1.5
CP_SIZES = (1, 2, 4, 8)
LENGTHS = (4700, 1, 700, 1, 1, 130, 5, 260, 37, 1200)  # spans of one token; one document longer than every window
LENGTHS_OF_CPU = (300, 1, 70, 1, 1, 130, 5, 37)
NAMES = ("out", "dq", "dk", "dv", "d_sinks")
TOLERANCES = {"out": 1e-2, "dq": 2e-2, "dk": 2e-2, "dv": 2e-2, "d_sinks": 2e-2}
"""Of the largest value, in bfloat16."""


@dataclass(frozen=True)
class Problem:
    """What the right answer depends on."""

    heads: str
    head_dim: int
    mask: str
    lengths: tuple[int, ...]
    device: torch.device
    scores: str = "plain"

    def shard(self, cp_size: int) -> wlb.Shard:
        return wlb.shard(self.lengths, cp_size=cp_size, strategy="per_document", causal=self.mask != "full")

    @functools.cached_property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def value_dim(self) -> int:
        return SCORES[self.scores][1] if self.scores == "narrow values" else self.head_dim

    def tensors(self) -> list[Tensor]:
        """q, k, v, the gradient of the output, and sinks `[heads]`."""
        heads, kv_heads = HEADS[self.heads]
        generator = torch.Generator(self.device).manual_seed(heads * kv_heads + self.head_dim)
        tokens, width, value_dim = sum(self.lengths), self.head_dim, self.value_dim
        shapes = [(tokens, heads, width), (tokens, kv_heads, width), (tokens, kv_heads, value_dim)]
        options: Any = {"generator": generator, "device": self.device, "dtype": torch.bfloat16}
        return [torch.randn(shape, **options) for shape in (*shapes, (tokens, heads, value_dim), (heads,))]

    def kernel(self, kind: type[kernels.Kernel]) -> kernels.Kernel:
        """A kernel of this kind for these scores."""
        options = {"softcap": SOFTCAP} if self.scores == "capped" else {}
        return kind(self.scale, **options)  # type: ignore[call-arg]


def installed(device: torch.device) -> dict[str, type[kernels.Kernel]]:
    """Kernels by name, of those that are to be had on this device."""
    found: dict[str, type[kernels.Kernel]] = {}
    if device.type == "cuda":
        found["varlen"] = kernels.VarlenKernel
        if kernels._flash_attn_2() is not None:
            found["flash-attn 2"] = kernels.FlashAttention2
        if torch.cuda.get_device_capability(device)[0] == 9 and kernels._flash_attn_3() is not None:
            found["flash-attn 3"] = kernels.FlashAttention3
        if torch.cuda.get_device_capability(device)[0] in (9, 10, 11) and kernels._flash_attn_4() is not None:
            found["flash-attn 4"] = kernels.FlashAttention4
    return {**found, "reference": kernels.ReferenceKernel}


def items(device: torch.device, *, tiny: bool = False) -> Iterator[Item]:
    """All cases, kernel by kernel.

    Args:
        device: where.
        tiny: few cases of few tokens, for a run that is a hundred times as slow.
    """
    small = tiny or device.type == "cpu"
    lengths = LENGTHS_OF_CPU if small else LENGTHS
    head_dims, cp_sizes = ((64,), (1, 4)) if small else (HEAD_DIMS, CP_SIZES)
    for name, kernel in installed(device).items():
        for heads, dim, mask in itertools.product(HEADS, head_dims, MASKS):
            problem = Problem(heads, dim, mask, lengths, device)
            for cp_size in cp_sizes:
                yield f"{name}, {heads}, {dim}, {mask}, CP {cp_size}", functools.partial(one, kernel, problem, cp_size)
        for (scores, (dim, _)), mask in itertools.product(SCORES.items(), ("causal", "window 37")):
            problem = Problem("GQA", dim, mask, lengths, device, scores)
            for cp_size in cp_sizes if runs(kernel, problem) else ():
                yield f"{name}, {scores}, {dim}, {mask}, CP {cp_size}", functools.partial(one, kernel, problem, cp_size)


def runs(kernel: type[kernels.Kernel], problem: Problem) -> bool:
    """Whether a kernel has these scores, at these widths or padded."""
    capped = "softcap" in {field.name for field in dataclasses.fields(kernel)}  # type: ignore[arg-type]
    return (capped or problem.scores != "capped") and any(
        kernel.takes(problem.head_dim, width, kernels._generation(torch.empty(0, device=problem.device)))
        for width in (problem.value_dim, problem.head_dim)
    )


def one(kernel: type[kernels.Kernel], problem: Problem, cp_size: int) -> Row:
    """Largest deviation of output and gradients, over the largest value; whether all are within tolerance."""
    got = attended(problem.kernel(kernel), problem, problem.tensors(), cp_size)
    return compared(got, right_answer(problem))


def compared(got: list[Tensor], right: list[Tensor]) -> Row:
    """Deviations by name, and "ok"."""
    found = {}
    for name, mine, theirs in zip(NAMES, got, right, strict=False):  # not all problems have sinks
        largest = float(theirs.abs().max())
        # A softmax over one key has no gradient: beside the inputs then, which are about 1.
        scale = largest if largest > 1e-9 else 1.0
        found[name] = float((mine.double() - theirs).abs().max()) / scale
    return {**found, "ok": all(off <= TOLERANCES[name] for name, off in found.items())}  # a NaN is not


@functools.lru_cache(maxsize=1)
def right_answer(problem: Problem) -> list[Tensor]:
    """By the kernel that the CPU tests hold to dense attention, in float64, on one rank."""
    tensors = [x.double() for x in problem.tensors()]
    return attended(problem.kernel(kernels.ReferenceKernel), problem, tensors, 1)


def attended(kernel: kernels.Kernel, problem: Problem, tensors: list[Tensor], cp_size: int) -> list[Tensor]:
    """Output and gradients of the whole micro-batch, of what every rank computes by itself; last those of sinks."""
    q, k, v, d_out, sinks = tensors
    shard = problem.shard(cp_size)
    width = kernels.value_width(kernel, q, problem.value_dim)
    out = torch.full_like(d_out, torch.nan)  # what no rank computes is seen
    dq = torch.full_like(q, torch.nan)
    dk, dv, d_sinks = (torch.zeros(x.shape, dtype=kernels.accumulator(x.dtype), device=x.device) for x in (k, v, sinks))
    for r in range(cp_size):
        rank = Rank.of(shard, r, window=MASKS[problem.mask], device=problem.device)
        exchange = rank.exchange(*arguments.of_one_width(q, k, v, problem.head_dim)[1:])
        leaves = [x[rank.tokens].requires_grad_() for x in (q, k, v)]
        sink = sinks.clone().requires_grad_() if problem.scores == "sinks" else None
        wide = arguments.of_one_width(leaves[0], leaves[1], leaves[2], problem.head_dim)
        result, _ = attention(*wide, exchange, None, kernel, width, sink)
        result = result[..., : problem.value_dim]
        result.backward(d_out[rank.tokens])
        out[rank.tokens], dq[rank.tokens] = result.detach(), leaves[0].grad  # type: ignore[assignment]
        assert exchange.gradients is not None
        for total, leaf, part in zip((dk, dv), leaves[1:], exchange.gradients.unbind(1), strict=True):
            assert leaf.grad is not None
            total.index_add_(0, rank.tokens, leaf.grad.to(total.dtype))
            total.index_add_(0, rank.others, part[..., : total.shape[2]].to(total.dtype))
        if sink is not None:
            assert sink.grad is not None
            d_sinks += sink.grad
    return [out, dq, dk, dv, *([d_sinks] if problem.scores == "sinks" else [])]
