"""A block whose matrices and FLOPs were counted in a model that another library built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from wlb._errors import check_integer, error
from wlb._shown import explained
from wlb.models.blocks import Block, Kept, Mask, Matrix


@explained
@dataclass(frozen=True, kw_only=True)
class CountedBlock(Block):
    """A block that no other class describes: its matrices one by one, and the work of its attention or its state.

    Args:
        weights: every matrix of the block, in the order in which a row meets them.
        other_parameters: parameters that are in no matrix: norms, sinks, convolutions.
        attention: which keys a query meets, and forward FLOPs of one (query, key) pair; also of an indexer's scores
            and of compressed keys. Empty: the block has no attention.
        other_flops: forward FLOPs of a token outside matrices: convolutions, and reading and writing a state.
        channels: width of convolutions, whose output is kept for the backward pass.
        num_heads: query heads, or heads of a state; 0: the block has neither.
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

    _divided = ("num_heads",)

    weights: tuple[Matrix, ...]
    other_parameters: int = 0
    attention: tuple[tuple[Mask, int], ...] = ()
    other_flops: int = 0
    channels: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    kv_width: int = 0
    streams: int = 1

    def __post_init__(self) -> None:
        sizes = ("other_parameters", "other_flops", "channels", "num_heads", "num_kv_heads", "head_dim", "kv_width")
        for name in sizes:
            check_integer(name, getattr(self, name), minimum=0)
        check_integer("streams", self.streams, minimum=1)
        if self.attention and not self.num_heads:
            raise error("num_heads", "= 0: there is attention", value=0)
        for index, matrix in enumerate(self.weights):
            if not isinstance(matrix, Matrix):
                raise error("weights", f"= {matrix!r}: must be a Matrix", index=index, value=matrix)

    @property
    def divisors(self) -> dict[str, int]:
        """Heads, where there are any."""
        return super().divisors if self.num_heads else {}

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        """The matrices that the count found."""
        return self.weights

    def vectors(self, hidden: int) -> int:
        """Parameters that are in no matrix."""
        return self.other_parameters

    def pairs(self) -> tuple[tuple[Mask, int], ...]:
        """The pairs of the block's attention, by mask."""
        return self.attention

    def recurrence(self) -> int:
        """What a token costs outside matrices."""
        return self.other_flops

    def kept(self, hidden: int, *, kv_copies: float = 1) -> Kept:
        """Activations kept for the backward pass: the output of every matrix but the last, and the input of the last.

        A matrix of several experts gives a row for each expert that a token visits, and takes a copy of its input.
        A layer of several residual streams mixes them for each of its two blocks: it keeps the streams of each mix, and
        the row that is added to them.
        """
        copies = sum(m.rows * m.used for m in self.weights if m.copies > 1 and m.rows == hidden)
        given = sum(self._inner(hidden))
        mixes = 2 * (self.streams + 1) * hidden if self.streams > 1 else 0
        return Kept(given + self.channels, statistics=self.num_heads, rows=copies + mixes)

    def _inner(self, hidden: int) -> Iterator[int]:
        """For each matrix that works on a token, the width of its side inside the block."""
        working = [matrix for matrix in self.weights if matrix.used]
        for index, matrix in enumerate(working):
            last = matrix.columns == hidden and (matrix.rows != hidden or index + 1 == len(working))
            yield (matrix.rows if last else matrix.columns) * matrix.used

    @property
    def exchanged(self) -> int:
        """Keys and values."""
        return self.kv_width
