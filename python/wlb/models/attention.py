"""Attention: with heads, over all keys, a window or chunks; latent; of the keys that an indexer selects."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from wlb._errors import check_integer, error
from wlb._shown import explained
from wlb.models.blocks import Block, Kept, Mask, Matrix


@explained
@dataclass(frozen=True, kw_only=True)
class Attention(Block):
    """Softmax attention with heads: MHA, GQA, MQA; over all keys, a sliding window, or chunks.

    Args:
        num_heads: query heads.
        num_kv_heads: key and value heads; they divide the query heads.
        head_dim: width of a head.
        mask: the keys that a query sees.
        qkv_bias: queries, keys and values have a bias.
        output_bias: the output projection has one.
        qk_norm: queries and keys are normalised: "head": each head, with the same weights (Qwen3); "all": all heads
            together (OLMo 2).
        gated: the output is multiplied by a gate, as wide, that the query projection gives as well (Qwen3-Next).
        sinks: every head has a logit that takes a share of the softmax (gpt-oss).

    Raises:
        WlbError: naming the first size that makes no sense.
    """

    _divided = ("num_heads",)

    num_heads: int
    num_kv_heads: int
    head_dim: int
    mask: Mask = field(default_factory=Mask)
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    gated: bool = False
    sinks: bool = False

    def __post_init__(self) -> None:
        self._check()
        if self.num_heads % self.num_kv_heads:
            message = f"= {self.num_kv_heads}: does not divide num_heads = {self.num_heads}"
            raise error("num_kv_heads", message, value=self.num_kv_heads)

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        """Q, K, V and O."""
        return (
            Matrix(hidden, self.query_width * (1 + self.gated), self.qkv_bias),
            Matrix(hidden, 2 * self.kv_width, self.qkv_bias, parts=2),
            Matrix(self.query_width, hidden, self.output_bias),
        )

    def vectors(self, hidden: int) -> int:
        """Norms of queries and keys, and sinks."""
        norms = {"none": 0, "head": 2 * self.head_dim, "all": self.query_width + self.kv_width}[self.qk_norm]
        return norms + self.sinks * self.num_heads

    def kept(self, hidden: int, *, kv_copies: float = 1) -> Kept:
        """Rotated queries and keys, values, the output and its log-sum-exp; the inputs of norms and of a gate."""
        q, kv = self.query_width, round(self.kv_width * kv_copies)
        normed = (q + kv) * (self.qk_norm != "none")
        norms = {"none": 0, "head": (q + kv) // self.head_dim, "all": 2}[self.qk_norm]
        gate = q * self.gated
        return Kept(2 * q + 2 * kv + normed + gate, recomputed=gate, statistics=self.num_heads + norms)

    @property
    def exchanged(self) -> int:
        """Keys and values."""
        return 2 * self.kv_width

    def pairs(self) -> tuple[tuple[Mask, int], ...]:
        """QK' and PV."""
        return ((self.mask, 4 * self.query_width),)


@explained
@dataclass(frozen=True, kw_only=True)
class Indexer:
    """Scores every key for every query and keeps the best: sparse attention of DeepSeek V3.2.

    Args:
        num_heads: heads that score.
        head_dim: width of one.
        top_k: keys that a query keeps.
    """

    num_heads: int
    head_dim: int
    top_k: int

    def __post_init__(self) -> None:
        for each in fields(self):
            check_integer(each.name, getattr(self, each.name), minimum=1)


@explained
@dataclass(frozen=True, kw_only=True)
class LatentAttention(Block):
    """Multi-head latent attention (DeepSeek): keys and values of all heads are computed from one narrow row of a token.

    FLOPs are those of training, where keys and values are computed from the rows, not absorbed into the queries.

    Args:
        num_heads: heads.
        kv_rank: width of the row that keys and values are computed from.
        key_dim: width of a head's key that comes from that row.
        rope_dim: width of a head's rotated key, which all heads share.
        value_dim: width of a head's value.
        query_rank: width of the row that queries are computed from; 0: from the layer's input.
        bias: the two projections to narrow rows and the output projection have biases.
        indexer: if given, a query attends only to the keys that it selects.

    Raises:
        WlbError: naming the first size that makes no sense.
    """

    _divided = ("num_heads",)

    num_heads: int
    kv_rank: int
    key_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int = 0
    bias: bool = False
    indexer: Indexer | None = None

    def __post_init__(self) -> None:
        self._check("query_rank")
        if self.indexer and not self.query_rank:
            raise error("query_rank", "= 0: the indexer's queries are computed from that row", value=0)

    @property
    def query_width(self) -> int:
        """Width of all query heads together, and of all key heads."""
        return self.num_heads * (self.key_dim + self.rope_dim)

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        """Down and up for queries, down and up for keys and values, O, and the indexer's three."""
        rank = self.query_rank
        queries = (
            (Matrix(hidden, rank, self.bias, split=False), Matrix(rank, self.query_width))
            if rank
            else (Matrix(hidden, self.query_width),)
        )
        indexer: tuple[Matrix, ...] = ()
        if self.indexer is not None:
            heads, width = self.indexer.num_heads, self.indexer.head_dim
            outputs = ((rank, heads * width), (hidden, width), (hidden, heads))
            indexer = tuple(Matrix(rows, columns, split=False) for rows, columns in outputs)
        return (
            *queries,
            Matrix(hidden, self.kv_rank + self.rope_dim, self.bias, split=False),
            Matrix(self.kv_rank, self.num_heads * (self.key_dim + self.value_dim)),
            Matrix(self.num_heads * self.value_dim, hidden, self.bias),
            *indexer,
        )

    def vectors(self, hidden: int) -> int:
        """Norms of the narrow rows, and of the indexer's keys, which has a bias."""
        return self.query_rank + self.kv_rank + (2 * self.indexer.head_dim if self.indexer else 0)

    def kept(self, hidden: int, *, kv_copies: float = 1) -> Kept:
        """Queries, keys, values, the output and its log-sum-exp; the narrow rows before and after their norms.

        An indexer is not trained through the attention that it selects for, and keeps nothing here.
        """
        heads, narrow = self.num_heads, self.query_rank + self.kv_rank
        values = 2 * self.query_width + 2 * heads * self.value_dim
        return Kept(values, statistics=heads, rows=2 * narrow + self.rope_dim)

    @property
    def exchanged(self) -> int:
        """The narrow row, and the rotated key that heads share."""
        return self.kv_rank + self.rope_dim + (self.indexer.head_dim if self.indexer else 0)

    def pairs(self) -> tuple[tuple[Mask, int], ...]:
        """QK' and PV; the indexer's scores are of all keys, weighted and summed over its heads."""
        flops = 2 * self.num_heads * (self.key_dim + self.rope_dim + self.value_dim)
        if self.indexer is None:
            return ((Mask(), flops),)
        scores = 2 * self.indexer.num_heads * (self.indexer.head_dim + 1)
        # A query sees min(position + 1, top_k) keys: as many as in a window of that size, but other keys.
        return ((Mask("window", self.indexer.top_k), flops), (Mask(), scores))
