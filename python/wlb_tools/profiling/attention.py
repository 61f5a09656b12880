"""Times attention over segments: varlen calls of many equal ones, forward and backward separately."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from wlb._core import pass_weights
from wlb.models import ModelConfig
from wlb.torch.attention.kernels import Kernel, KernelName, choose
from wlb.torch.attention.plan import Call
from wlb_tools.cluster.memory import kv_width
from wlb_tools.cluster.parallel import ParallelLayout
from wlb_tools.profiling.device import Device
from wlb_tools.profiling.grid import LAUNCH, Shape

_CALL_SECONDS = 1e-3  # least duration of a call for exact timing
_MOST_SEGMENTS = 4096
_WAVES = 4  # how many times a call should fill the GPU


@dataclass(frozen=True)
class AttentionBench:
    """A kernel for the heads of one tensor-parallel rank."""

    device: Device
    kernel: Kernel
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, model: ModelConfig, *, tp: int, device: Device, kernel: KernelName) -> AttentionBench:
        """The kernel that context-parallel attention would choose for the model.

        Raises:
            WlbError: heads differ or do not divide by `tp`, or the kernel cannot run here.
        """
        layout = ParallelLayout(tp=tp)
        layout.check(model=model)
        heads, d = model.attention.num_heads // tp, model.attention.head_dim
        q = torch.empty(1, heads, d, dtype=device.dtype, device=device.device)
        chosen = choose(kernel, q, scale=d**-0.5, alibi_slopes=None, alibi_aligned=True)
        return cls(device, chosen, heads, kv_width(model.attention, layout) // d, d)

    def identity(self) -> dict[str, Any]:
        """Settings that identify the measurement."""
        return {
            "kernel": type(self.kernel).__name__,
            "causal": True,
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "tiles": list(self.kernel.tiles(self.head_dim)),
        }

    def flops(self, shape: Shape) -> float:
        """FLOPs of a call, forward and backward, with whole tiles."""
        return self.segments(shape) * self._segment_flops(shape)

    def _segment_flops(self, shape: Shape) -> float:
        tile = self.kernel.tiles(self.head_dim)[0]
        queries = math.ceil(shape.tokens / tile) * tile
        pairs = queries * (shape.keys - shape.tokens) + queries * (queries + 1) / 2
        return pass_weights("forward_backward")[0] * 4 * self.heads * self.head_dim * pairs

    def segments(self, shape: Shape) -> int:
        """Segments in one call: enough to time it and to fill the GPU, as far as memory allows."""
        if shape == LAUNCH:
            return 1
        long_enough = math.ceil(_CALL_SECONDS * self.device.assumed_flops / self._segment_flops(shape))
        blocks = self.heads * math.ceil(shape.tokens / self.kernel.tiles(self.head_dim)[0])
        filling = math.ceil(_WAVES * self.device.processors / blocks)
        fit = self.device.memory_bytes // self._segment_bytes(shape)
        return max(1, min(max(long_enough, filling), fit, _MOST_SEGMENTS))

    def fits(self, shape: Shape) -> bool:
        """Whether memory has room for one segment."""
        return self._segment_bytes(shape) <= self.device.memory_bytes

    def _segment_bytes(self, shape: Shape) -> int:
        width = self.device.dtype.itemsize
        # q, output, gradients of both, and a float32 sum; k, v, their gradients and float32 sums of these.
        rows = shape.tokens * self.heads * (4 * width + 4) + shape.keys * self.kv_heads * (4 * width + 8)
        if self.kv_heads != self.heads:  # gradients of keys for each query head, before they are summed
            rows += 2 * shape.keys * self.heads * width
        return rows * self.head_dim

    def run(self, shape: Shape, *, seconds: float) -> dict[str, Any]:
        """Samples of calls, within a budget of seconds."""
        segments = self.segments(shape)
        queries, keys = segments * shape.tokens, segments * shape.keys
        options: dict[str, Any] = {"dtype": self.device.dtype, "device": self.device.device}
        q, d_out = (torch.randn(queries, self.heads, self.head_dim, **options) for _ in range(2))
        k, v = (torch.randn(keys, self.kv_heads, self.head_dim, **options) for _ in range(2))
        # Causal: the last query of each segment is at its last key.
        call = Call.of_lengths([shape.tokens] * segments, [shape.keys] * segments, (-1, 0), self.device.device)
        out, lse = self.kernel.forward(q, k, v, call)
        timed = self.device.time(
            {
                "forward_call_seconds": lambda: self.kernel.forward(q, k, v, call),
                "backward_call_seconds": lambda: self.kernel.backward(d_out, q, k, v, out, lse, call),
            },
            seconds=seconds,
        )
        return {"segments_per_call": segments, **timed}
