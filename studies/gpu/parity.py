"""Every kernel against float64: output and gradients, each rank's work run alone and put together again."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import wlb
from studies.gpu.emulated import Rank
from studies.gpu.items import Item, Row
from wlb.torch.attention import kernels
from wlb.torch.attention.merge import attention

HEADS = {"MHA": (8, 8), "GQA": (8, 2), "MQA": (8, 1)}
HEAD_DIMS = (64, 128, 256)
MASKS: dict[str, int | None] = {"causal": None, "full": None, "window 1": 1, "window 37": 37, "window 4096": 4096}
CP_SIZES = (1, 2, 4, 8)
LENGTHS = (4700, 1, 700, 1, 1, 130, 5, 260, 37, 1200)  # spans of one token; one document longer than every window
LENGTHS_OF_CPU = (300, 1, 70, 1, 1, 130, 5, 37)
NAMES = ("out", "dq", "dk", "dv")
TOLERANCES = {"out": 1e-2, "dq": 2e-2, "dk": 2e-2, "dv": 2e-2}
"""Of the largest value, in bfloat16."""


@dataclass(frozen=True)
class Problem:
    """What the right answer depends on."""

    heads: str
    head_dim: int
    mask: str
    lengths: tuple[int, ...]
    device: torch.device

    def shard(self, cp_size: int) -> wlb.Shard:
        return wlb.shard(self.lengths, cp_size=cp_size, strategy="per_document", causal=self.mask != "full")

    @functools.cached_property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def tensors(self) -> list[Tensor]:
        """q, k, v and the gradient of the output."""
        heads, kv_heads = HEADS[self.heads]
        generator = torch.Generator(self.device).manual_seed(heads * kv_heads + self.head_dim)
        shapes = [(sum(self.lengths), h, self.head_dim) for h in (heads, kv_heads, kv_heads, heads)]
        return [torch.randn(s, generator=generator, device=self.device, dtype=torch.bfloat16) for s in shapes]


def installed(device: torch.device) -> dict[str, type[kernels.Kernel]]:
    """Kernels by name, of those that are to be had on this device."""
    found: dict[str, type[kernels.Kernel]] = {}
    if device.type == "cuda":
        found["varlen"] = kernels.VarlenKernel
        if kernels._flash_attn_2() is not None:
            found["flash-attn 2"] = kernels.FlashAttention2
        if torch.cuda.get_device_capability(device)[0] == 9 and kernels._flash_attn_3() is not None:
            found["flash-attn 3"] = kernels.FlashAttention3
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


def one(kernel: type[kernels.Kernel], problem: Problem, cp_size: int) -> Row:
    """Largest deviation of output and gradients, over the largest value; whether all are within tolerance."""
    got = attended(kernel(problem.scale), problem, problem.tensors(), cp_size)  # type: ignore[call-arg]
    return compared(got, right_answer(problem))


def compared(got: list[Tensor], right: list[Tensor]) -> Row:
    """Deviations by name, and "ok"."""
    found = {}
    for name, mine, theirs in zip(NAMES, got, right, strict=True):
        largest = float(theirs.abs().max())
        # A softmax over one key has no gradient: beside the inputs then, which are about 1.
        scale = largest if largest > 1e-9 else 1.0
        found[name] = float((mine.double() - theirs).abs().max()) / scale
    return {**found, "ok": all(found[name] <= TOLERANCES[name] for name in NAMES)}  # a NaN is not


@functools.lru_cache(maxsize=1)
def right_answer(problem: Problem) -> list[Tensor]:
    """By the kernel that the CPU tests hold to dense attention, in float64, on one rank."""
    tensors = [x.double() for x in problem.tensors()]
    return attended(kernels.ReferenceKernel(problem.scale), problem, tensors, 1)


def attended(kernel: kernels.Kernel, problem: Problem, tensors: list[Tensor], cp_size: int) -> list[Tensor]:
    """Output and gradients of the whole micro-batch, of what every rank computes by itself."""
    q, k, v, d_out = tensors
    shard = problem.shard(cp_size)
    out = torch.full_like(q, torch.nan)  # what no rank computes is seen
    dq = torch.full_like(q, torch.nan)
    dk, dv = (torch.zeros(x.shape, dtype=kernels.accumulator(x.dtype), device=x.device) for x in (k, v))
    for r in range(cp_size):
        rank = Rank.of(shard, r, window=MASKS[problem.mask], device=problem.device)
        exchange = rank.exchange(k, v)
        leaves = [x[rank.tokens].requires_grad_() for x in (q, k, v)]
        result, _ = attention(*leaves, exchange, None, kernel)
        result.backward(d_out[rank.tokens])
        out[rank.tokens], dq[rank.tokens] = result.detach(), leaves[0].grad  # type: ignore[assignment]
        assert exchange.gradients is not None
        for total, leaf, part in zip((dk, dv), leaves[1:], exchange.gradients.unbind(1), strict=True):
            assert leaf.grad is not None
            total.index_add_(0, rank.tokens, leaf.grad.to(total.dtype))
            total.index_add_(0, rank.others, part.to(total.dtype))
    return [out, dq, dk, dv]
