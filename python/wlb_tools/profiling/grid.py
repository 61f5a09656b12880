"""Shapes to measure: powers of two, and held-out ones between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from wlb._errors import error
from wlb._shown import explained

Kind = Literal["launch", "attention", "held_out", "layer"]


@explained
@dataclass(frozen=True)
class Shape:
    """Sizes of one measurement.

    "attention": segments of these numbers of queries (`tokens`) and keys; "held_out": the same, for testing a model;
    "launch": the smallest possible call; "layer": a layer's linear part over `tokens` tokens.
    """

    kind: Kind
    tokens: int = 1
    keys: int = 1

    @property
    def name(self) -> str:
        """The shape in words, for progress bars and messages."""
        sizes = f"{self.tokens:,} tokens" if self.kind == "layer" else f"{self.tokens:,} x {self.keys:,}"
        return f"{self.kind.replace('_', ' ')} {sizes}"


@explained
@dataclass(frozen=True, kw_only=True)
class Grid:
    """Lengths of segments and token counts.

    Args:
        query_lengths: of segments, ascending.
        key_lengths: of segments, ascending; a segment has at least as many keys as queries.
        tokens: of the linear part, ascending.
        held_out: (queries, keys) of segments on which the model is tested, and which are not used to make it.

    Raises:
        WlbError: lengths do not ascend, no key length is as long as some queries, or a held-out segment has more
            queries than keys.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    tokens: tuple[int, ...]
    held_out: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("query_lengths", "key_lengths", "tokens"):
            values = getattr(self, name)
            if not values:
                raise error(name, "is empty", value=values)
            for index, (before, value) in enumerate(zip((0, *values), values, strict=False)):
                if value <= before:
                    raise error(name, f"= {value}: must be above {before}", index=index, value=value)
        if self.query_lengths[-1] > self.key_lengths[-1]:
            longest = self.query_lengths[-1]
            message = f"= {longest}: no key length is that long"
            raise error("query_lengths", message, index=len(self.query_lengths) - 1, value=longest)
        for index, (queries, keys) in enumerate(self.held_out):
            if not 1 <= queries <= keys:
                message = f"= {(queries, keys)}: must have 1 or more queries and at least as many keys"
                raise error("held_out", message, index=index, value=(queries, keys))

    @classmethod
    def default(
        cls,
        *,
        queries: Sequence[int] = (16, 8192),
        keys: Sequence[int] = (128, 131072),
        tokens: Sequence[int] = (1024, 131072),
        held_out: int = 24,
    ) -> Grid:
        """Powers of two from the first to the last of each pair, and `held_out` segments to test with.

        These are spread log-uniformly over the same ranges, at no powers of two, and are the same in every run.
        """
        generator = np.random.default_rng(0)
        query_lengths, key_lengths = powers_of_two("queries", queries), powers_of_two("keys", keys)
        shapes: list[tuple[int, int]] = []
        for _ in range(held_out):
            k = int(np.exp(generator.uniform(np.log(key_lengths[0]), np.log(key_lengths[-1]))))
            most = min(k, query_lengths[-1])
            q = int(np.exp(generator.uniform(np.log(min(query_lengths[0], most)), np.log(most))))
            shapes.append((max(1, q), max(1, q, k)))
        return cls(
            query_lengths=tuple(q for q in query_lengths if q <= key_lengths[-1]),
            key_lengths=key_lengths,
            tokens=powers_of_two("tokens", tokens),
            held_out=tuple(dict.fromkeys(shapes)),
        )

    def shapes(self) -> list[Shape]:
        """All shapes, cheap ones first, because the time of a shape is estimated from the one before."""
        attention = [Shape("attention", q, k) for k in self.key_lengths for q in self.query_lengths if q <= k]
        held_out = [Shape("held_out", q, k) for q, k in self.held_out]
        layers = [Shape("layer", tokens) for tokens in self.tokens]
        return [LAUNCH, *sorted(attention + held_out, key=lambda shape: shape.tokens * shape.keys), *layers]


LAUNCH = Shape("launch")


def powers_of_two(name: str, ends: Sequence[int]) -> tuple[int, ...]:
    """All from the first to the last, which must be powers of two themselves."""
    first, last = ends
    for index, end in enumerate(ends):
        if end < 1 or end & (end - 1):
            raise error(name, f"= {end}: must be a power of two", index=index, value=end)
    if first > last:
        raise error(name, f"= {last}: must not be below {first}", index=1, value=last)
    return tuple(1 << power for power in range(first.bit_length() - 1, last.bit_length()))
