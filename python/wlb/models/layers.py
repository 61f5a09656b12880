"""A layer: blocks one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from wlb._errors import check_bool, check_integer, error
from wlb._shown import explained
from wlb.models.blocks import Block, Mask

Kind = TypeVar("Kind", bound=Block)


@explained
@dataclass(frozen=True)
class Layer:
    """Blocks one after the other, each with its residual; blocks in one tuple run on the same input.

    Args:
        sublayers: blocks, or tuples of blocks. Blocks of a tuple run in parallel (attention and feed-forward block of
            Cohere 2) or belong together (a block after its hyper-connection); tensor-parallel ranks meet once for each.
        norms: number of norms of the layer over whole rows.
        norm_bias: whether they have biases.

    Raises:
        WlbError: there is no block, or an entry is no block.
    """

    sublayers: tuple[Block | tuple[Block, ...], ...]
    norms: int = 2
    norm_bias: bool = False

    def __post_init__(self) -> None:
        check_integer("norms", self.norms, minimum=0)
        check_bool("norm_bias", self.norm_bias)
        if not isinstance(self.sublayers, tuple) or not self.sublayers:
            raise error("sublayers", f"= {self.sublayers!r}: must be a tuple of blocks", value=self.sublayers)
        for index, block in enumerate(self.blocks):
            if not isinstance(block, Block):
                raise error("sublayers", f"= {block!r}: must be a block", index=index, value=block)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks of the layer."""
        return tuple(block for part in self.sublayers for block in (part if isinstance(part, tuple) else (part,)))

    def of_kind(self, kind: type[Kind]) -> Iterator[Kind]:
        """The blocks of this kind."""
        return (block for block in self.blocks if isinstance(block, kind))

    def norm_parameters(self, hidden: int) -> int:
        """Parameters of the norms."""
        return self.norms * (1 + self.norm_bias) * hidden

    def parameters(self, hidden: int, *, active: bool = False) -> int:
        """Parameters of the layer; with `active`, those that one token visits."""
        return sum(block.parameters(hidden, active=active) for block in self.blocks) + self.norm_parameters(hidden)

    def token_flops(self, hidden: int) -> int:
        """Forward FLOPs of one token, besides its pairs."""
        return sum(block.token_flops(hidden) for block in self.blocks)

    def pairs(self) -> Counter[Mask]:
        """Forward FLOPs of each pair, by mask."""
        found: Counter[Mask] = Counter()
        for block in self.blocks:
            for mask, flops in block.pairs():
                found[mask] += flops
        return found
