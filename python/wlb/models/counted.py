"""A block whose matrices were counted in a model that another library built."""

from __future__ import annotations

from dataclasses import dataclass, field

from wlb._errors import check_integer, error
from wlb._shown import explained
from wlb.models.blocks import Block, Kept, Mask, Matrix


@explained
@dataclass(frozen=True, kw_only=True)
class CountedBlock(Block):
    """A block that no other class describes: its matrices one by one, and the work of its attention.

    Args:
        weights: every matrix of the block.
        other_parameters: parameters that are in no matrix: norms, sinks, convolutions.
        mask: which keys a query meets.
        pair_flops: forward FLOPs of one (query, key) pair under the mask; 0: the block has no attention.
        other_pairs: further masks and forward FLOPs of their pairs: scores of an indexer, compressed keys.
        state_flops: forward FLOPs of a token in convolutions and in a state.
        num_heads: query heads; 0: the block has no attention.
        num_kv_heads: key and value heads.
        head_dim: width of a head, the mean of keys and values.
        kv_width: numbers of a token that context-parallel ranks send each other: keys and values.
        streams: residual streams that the block mixes; 1: it has the usual one.

    Raises:
        WlbError: naming the first size that makes no sense.

    Examples:
        >>> from wlb.models.counted import CountedBlock
        >>> from wlb.models import Matrix
        >>> CountedBlock(weights=(Matrix(64, 32), Matrix(32, 64)), other_parameters=64).parameters(64)
        4160
    """

    weights: tuple[Matrix, ...]
    other_parameters: int = 0
    mask: Mask = field(default_factory=Mask)
    pair_flops: int = 0
    other_pairs: tuple[tuple[Mask, int], ...] = ()
    state_flops: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    kv_width: int = 0
    streams: int = 1

    def __post_init__(self) -> None:
        for name in (
            "other_parameters",
            "pair_flops",
            "state_flops",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "kv_width",
        ):
            check_integer(name, getattr(self, name), minimum=0)
        if self.pair_flops and not self.num_heads:
            raise error("num_heads", "= 0: there is attention", value=0)

    @property
    def divisors(self) -> dict[str, int]:
        """The number of heads, which tensor parallelism has to divide."""
        return {"num_heads": self.num_heads} if self.num_heads else {}

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        """The matrices that were counted."""
        return self.weights

    def vectors(self, hidden: int) -> int:
        """The number of other parameters that was counted."""
        return self.other_parameters

    def pairs(self) -> tuple[tuple[Mask, int], ...]:
        """QK' and PV, then the other pairs."""
        found = ((self.mask, self.pair_flops), *self.other_pairs)
        return tuple((mask, flops) for mask, flops in found if flops)

    def recurrence(self) -> int:
        """The FLOPs of recurrent states that were counted."""
        return self.state_flops

    def kept(self, hidden: int, *, kv_copies: float = 1) -> Kept:
        """Activations kept for the backward pass: the output of every matrix, and of attention.

        A matrix of several experts gives a row for each expert that a token visits, and takes a copy of its input.
        """
        given = sum(m.columns * m.used for m in self.weights if m.columns != hidden)
        copies = sum(m.rows * m.used for m in self.weights if m.copies > 1 and m.rows == hidden)
        return Kept(given, statistics=self.num_heads, rows=copies)

    @property
    def exchanged(self) -> int:
        """Keys and values."""
        return self.kv_width
