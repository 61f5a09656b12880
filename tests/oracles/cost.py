"""Naive costs of documents: the oracle of `wlb.CostModel`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import wlb


def pairs(length: int, *, causal: bool = True) -> int:
    """(query, key) pairs of a document of `length` tokens."""
    return length * (length + 1) // 2 if causal else length * length


class Cost(Protocol):
    """What the other oracles need to know of a cost model."""

    @property
    def causal(self) -> bool:
        """Whether pairs are counted under a causal mask."""

    def __call__(self, length: int) -> float:
        """Cost of one document."""


@dataclass(frozen=True)
class AnalyticCost:
    """cost(d) = attention * pairs(d) + linear * d, in float64, in that order."""

    attention: float
    linear: float
    causal: bool = True

    def __call__(self, length: int) -> float:
        """Cost of one document."""
        return self.attention * float(pairs(length, causal=self.causal)) + self.linear * float(length)

    def model(self) -> wlb.CostModel:
        """The same cost as wlb computes it."""
        return wlb.CostModel(attention=self.attention, linear=self.linear, causal=self.causal)


@dataclass(frozen=True)
class TableCost:
    """Measured times: attention piecewise linear in pairs(d), the rest piecewise linear in d.

    Both start from 0 at 0 and are proportional beyond the last knot. Equal to wlb up to rounding: the order
    of the operations inside one interpolation is not part of the specification.
    """

    lengths: tuple[int, ...]
    attention_seconds: tuple[float, ...]
    linear_seconds: tuple[float, ...]
    causal: bool = True

    def __call__(self, length: int) -> float:
        """Cost of one document."""
        return self.attention(length) + self.linear(length)

    def attention(self, length: int) -> float:
        """The part that follows the pairs."""
        knots = [pairs(knot, causal=self.causal) for knot in self.lengths]
        return _interpolate(pairs(length, causal=self.causal), knots, self.attention_seconds)

    def linear(self, length: int) -> float:
        """The part that follows the tokens."""
        return _interpolate(length, self.lengths, self.linear_seconds)

    def model(self) -> wlb.CostModel:
        """The same cost as wlb computes it."""
        return wlb.CostModel.from_tables(
            self.lengths,
            attention_seconds=self.attention_seconds,
            linear_seconds=self.linear_seconds,
            causal=self.causal,
        )


@dataclass(frozen=True)
class ModelCost:
    """The costs of a `wlb.CostModel`, one document at a time, for oracles that must agree with it exactly."""

    of: wlb.CostModel

    @property
    def causal(self) -> bool:
        """Whether pairs are counted under a causal mask."""
        return self.of.causal

    def __call__(self, length: int) -> float:
        """Cost of one document."""
        return float(self.of.cost([length])[0])


def flops(
    *,
    hidden_size: int,
    ffn_hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    gated_ffn: bool,
    experts_per_token: int,
    passes: str,
    recompute: bool,
) -> tuple[float, float]:
    """(FLOPs of one attended pair, FLOPs of one token) of a transformer."""
    attention_projections = 2 * hidden_size * num_heads * head_dim + 2 * hidden_size * num_kv_heads * head_dim
    ffn = (3 if gated_ffn else 2) * hidden_size * ffn_hidden_size * experts_per_token
    parameters = num_layers * (attention_projections + ffn) + hidden_size * vocab_size
    forward_pair, forward_token = 4.0 * num_heads * head_dim * num_layers, 2.0 * parameters
    backward_pair, backward_token = 2.5 * forward_pair, 2.0 * forward_token
    if recompute:
        backward_pair, backward_token = backward_pair + forward_pair, backward_token + forward_token
    return {
        "forward": (forward_pair, forward_token),
        "backward": (backward_pair, backward_token),
        "forward_backward": (forward_pair + backward_pair, forward_token + backward_token),
    }[passes]


def _interpolate(x: int, knots: Sequence[int], values: Sequence[float]) -> float:
    left_knot, left_value = 0, 0.0
    for knot, value in zip(knots, values, strict=True):
        if x <= knot:
            return left_value + (value - left_value) * ((x - left_knot) / (knot - left_knot))
        left_knot, left_value = knot, value
    return values[-1] * (x / knots[-1])
