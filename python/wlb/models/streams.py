"""Several residual streams: hyper-connections, which mix the streams for a block, and embeddings of n-grams."""

from __future__ import annotations

from dataclasses import dataclass

from wlb._shown import explained
from wlb.models.blocks import Block, Kept, Matrix


@explained
@dataclass(frozen=True, kw_only=True)
class HyperConnection(Block):
    """Several residual streams: the next block reads a mixture of them, and its output is added to each (Qwen4-Exp).

    Args:
        rank: rank of the matrices that give the weights of the mix.
        injects: whether a block follows whose output is added; False after the last layer, where the mix replaces the
            model's last norm.

    Raises:
        WlbError: naming the first size that makes no sense.
    """

    streams: int
    rank: int
    injects: bool = True

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        """Down and up for the weights of the mix, and the weights with which the output is added."""
        width = self.streams * hidden
        mix = (Matrix(width, self.rank, split=False), Matrix(self.rank, width, split=False))
        return (*mix, Matrix(width, self.streams, split=False)) if self.injects else mix

    def vectors(self, hidden: int) -> int:
        """The norm of every stream; after the last layer, one of them is the model's last norm."""
        return (self.streams - (not self.injects)) * hidden

    def kept(self, hidden: int, *, kv_copies: float = 1) -> Kept:
        """The streams, normalised, the weights of their mix, the narrow row before and after, and the added output."""
        added = (hidden + self.streams) * self.injects
        return Kept(rows=3 * self.streams * hidden + 2 * self.rank + added, statistics=self.streams)


@explained
@dataclass(frozen=True, kw_only=True)
class NGramEmbedding(Block):
    """Rows of tables that the last tokens are hashed to, added to every residual stream (PLE of Qwen4-Exp).

    Args:
        table: rows of all tables.
        row: width of one.
        embedding: width of all rows of a token.
        width: of all residual streams.
        conv_kernel: tokens that the convolution after it spans.

    Raises:
        WlbError: naming the first size that makes no sense.
    """

    table: int
    row: int
    embedding: int
    width: int
    conv_kernel: int

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        """Tables, which nothing is multiplied by; keys of the streams, and the value that they share."""
        return (
            Matrix(self.table, self.row, used=0),
            Matrix(self.embedding, self.width),
            Matrix(self.embedding, hidden),
        )

    def vectors(self, hidden: int) -> int:
        """Norms of keys, streams and the convolution's input; the convolution."""
        return (3 + self.conv_kernel) * self.width

    def recurrence(self) -> int:
        """The convolution."""
        return 2 * self.conv_kernel * self.width

    def kept(self, hidden: int, *, kv_copies: float = 1) -> Kept:
        """The embedding, keys and streams before and after their norms, input and output of the convolution."""
        return Kept(rows=self.embedding + hidden + 7 * self.width, statistics=3 * self.width // hidden)
