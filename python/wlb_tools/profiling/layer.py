"""Everything in one transformer layer except attention: norms, QKV, rotation, O, feed-forward block, residuals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wlb._errors import error
from wlb.models import ModelConfig
from wlb_tools.cluster.memory import kv_width
from wlb_tools.cluster.parallel import ParallelLayout
from wlb_tools.profiling.device import Device
from wlb_tools.profiling.grid import Shape


class _NoAttention(torch.autograd.Function):
    """Returns the queries as the output, and gives gradients to all inputs, without computing or copying anything."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.kv_heads = k.shape[1]
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d_kv = d_out[:, : ctx.kv_heads]
        return d_out, d_kv, d_kv


class _LinearPart(nn.Module):
    """One tensor-parallel rank's matrices, in plain torch. Widths are those of the rank, tokens those of its group.

    Norms and residuals are over all tokens too, as without sequence parallelism.
    """

    def __init__(self, hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int, gated: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.gated = heads, kv_heads, head_dim, gated
        self.attention_norm, self.ffn_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.o = nn.Linear(heads * head_dim, hidden, bias=False)
        self.up = nn.Linear(hidden, (1 + gated) * ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        attended: Tensor = _NoAttention.apply(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        x = x + self.o(attended.flatten(1))
        inner = self.up(self.ffn_norm(x))
        if self.gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * up
        else:
            inner = F.gelu(inner)
        result: Tensor = x + self.down(inner)
        return result


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@dataclass(frozen=True)
class LayerBench:
    """The linear part of a layer on one tensor-parallel rank."""

    device: Device
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    gated_ffn: bool
    tp: int

    @classmethod
    def of(cls, model: ModelConfig, *, tp: int, device: Device) -> LayerBench:
        """Bench for a layer of a model; with experts, for the feed-forward rows that a token visits.

        Raises:
            WlbError: layers differ; widths do not divide by `tp`; or heads of odd width cannot be rotated.
        """
        attention, feed_forward = model.attention, model.feed_forward
        if attention.head_dim % 2:
            raise error("head_dim", f"= {attention.head_dim}: must be even", value=attention.head_dim)
        layout = ParallelLayout(tp=tp)
        layout.check(model=model)
        return cls(
            device=device,
            hidden_size=model.hidden_size,
            ffn_hidden_size=feed_forward.inner // tp,
            num_heads=attention.num_heads // tp,
            num_kv_heads=kv_width(attention, layout) // attention.head_dim,
            head_dim=attention.head_dim,
            gated_ffn=feed_forward.gated,
            tp=tp,
        )

    def identity(self) -> dict[str, Any]:
        """Settings that identify the measurement; widths are those of one rank."""
        names = ("hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads", "head_dim", "gated_ffn", "tp")
        return {name: getattr(self, name) for name in names} | {"implementation": "torch, not compiled"}

    @property
    def _weights(self) -> int:
        attention = self.hidden_size * (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return attention + (3 if self.gated_ffn else 2) * self.hidden_size * self.ffn_hidden_size

    def flops(self, shape: Shape) -> float:
        """FLOPs of forward and backward."""
        return 6.0 * shape.tokens * self._weights

    def fits(self, shape: Shape) -> bool:
        """Whether memory has room for weights, activations and the gradients of both."""
        widths = 8 * self.hidden_size + 8 * self.num_heads * self.head_dim + 6 * self.ffn_hidden_size
        need = (2 * self._weights + 2 * shape.tokens * widths) * self.device.dtype.itemsize
        return need <= self.device.memory_bytes

    def run(self, shape: Shape, *, seconds: float) -> dict[str, Any]:
        """Samples of the forward pass, and of the backward pass with all gradients, within a budget of seconds."""
        options: dict[str, Any] = {"dtype": self.device.dtype, "device": self.device.device}
        with torch.device(self.device.device):
            sizes = (self.hidden_size, self.ffn_hidden_size, self.num_heads, self.num_kv_heads, self.head_dim)
            layer = _LinearPart(*sizes, self.gated_ffn).to(**options)
        x = torch.randn(shape.tokens, self.hidden_size, **options).requires_grad_()
        d_y = torch.randn(shape.tokens, self.hidden_size, **options)
        angles = torch.rand(shape.tokens, 1, self.head_dim // 2, **options)
        cos, sin = angles.cos(), angles.sin()
        inputs = [x, *layer.parameters()]
        y = layer(x, cos, sin)
        return self.device.time(
            {
                "forward_call_seconds": lambda: layer(x, cos, sin),
                "backward_call_seconds": lambda: torch.autograd.grad(y, inputs, d_y, retain_graph=True),
            },
            seconds=seconds,
        )
