"""Naive context-parallel sharding: the oracle of `wlb.shard`, and attention to check any shard with."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import wlb


def owners(
    lengths: Sequence[int],
    *,
    cp_size: int,
    strategy: str = "per_document",
    remainder: str = "chunk",
    hybrid_threshold: int = 0,
) -> list[int]:
    """The rank that holds each token of the packed sequence."""
    if strategy == "per_sequence":
        total = sum(lengths)
        return _zigzag([total // (2 * cp_size) + (k < total % (2 * cp_size)) for k in range(2 * cp_size)])
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    owner = [-1] * sum(lengths)
    cursor = 0
    for i in longest_first:
        if strategy == "hybrid" and lengths[i] < hybrid_threshold:
            continue
        base, extra = divmod(lengths[i], 2 * cp_size)
        chunks = [base] * (2 * cp_size)
        dealt: list[int] = []
        for _ in range(extra):
            if remainder == "chunk":
                chunks[cursor % (2 * cp_size)] += 1
            else:
                dealt.append(cursor % cp_size)
            cursor += 1
        owner[starts[i] : starts[i] + lengths[i]] = _zigzag(chunks) + dealt
    if strategy == "hybrid":
        room = hybrid_quotas([owner.count(rank) for rank in range(cp_size)], sum(lengths))
        for i in longest_first:
            if lengths[i] >= hybrid_threshold:
                continue
            position, end = starts[i], starts[i] + lengths[i]
            while position < end:
                rank = room.index(max(room))
                take = min(room[rank], end - position)
                owner[position : position + take] = [rank] * take
                room[rank] -= take
                position += take
    return owner


def hybrid_quotas(held: Sequence[int], total: int) -> list[int]:
    """Tokens each rank may still take so that all hold the same number within one.

    Where ranks hold one token more, these are the ranks that hold most already (ties: the lowest).
    """
    base, extra = divmod(total, len(held))
    larger = sorted(range(len(held)), key=lambda rank: -held[rank])[:extra]
    return [base + (rank in larger) - held[rank] for rank in range(len(held))]


@dataclass(frozen=True)
class Segment:
    """A contiguous run of one document on one rank: packed positions of its queries and of its keys."""

    document: int
    q_start: int
    q_end: int
    k_start: int
    k_end: int
    causal: bool

    @property
    def pairs(self) -> int:
        """Pairs it attends: every query to all of its keys, or to those up to itself."""
        return sum(
            (query + 1 if self.causal else self.k_end) - self.k_start for query in range(self.q_start, self.q_end)
        )


def segments(lengths: Sequence[int], owner: Sequence[int], *, rank: int, causal: bool) -> list[Segment]:
    """The runs of `rank`, in packed order."""
    found = []
    start = 0
    for document, length in enumerate(lengths):
        end = start + length
        position = start
        while position < end:
            run = position
            while position < end and owner[position] == owner[run]:
                position += 1
            if owner[run] == rank:
                found.append(Segment(document, run, position, start, position if causal else end, causal))
        start = end
    return found


def plain_rank(lengths: Sequence[int], owner: Sequence[int], *, rank: int, causal: bool) -> dict[str, Any]:
    """Everything that a `wlb.RankShard` holds, as JSON values."""
    runs = segments(lengths, owner, rank=rank, causal=causal)
    q_lengths = [run.q_end - run.q_start for run in runs]
    k_lengths = [run.k_end - run.k_start for run in runs]
    document_start = [sum(lengths[:i]) for i in range(len(lengths))]
    return {
        "num_tokens": sum(q_lengths),
        "num_segments": len(runs),
        "token_indices": [token for run in runs for token in range(run.q_start, run.q_end)],
        "position_ids": [
            token - document_start[run.document] for run in runs for token in range(run.q_start, run.q_end)
        ],
        "cu_seqlens_q": _cumulative(q_lengths),
        "cu_seqlens_k": _cumulative(k_lengths),
        "max_seqlen_q": max(q_lengths, default=0),
        "max_seqlen_k": max(k_lengths, default=0),
        "k_starts": [run.k_start for run in runs],
        "documents": [run.document for run in runs],
        "pairs": sum(run.pairs for run in runs),
    }


def plain(rank: wlb.RankShard) -> dict[str, Any]:
    """A `wlb.RankShard` as JSON values; equal to `plain_rank` when wlb computes the same shard."""
    values = {
        "num_tokens": rank.num_tokens,
        "num_segments": rank.num_segments,
        "token_indices": rank.token_indices,
        "position_ids": rank.position_ids,
        "cu_seqlens_q": rank.cu_seqlens_q,
        "cu_seqlens_k": rank.cu_seqlens_k,
        "max_seqlen_q": rank.max_seqlen_q,
        "max_seqlen_k": rank.max_seqlen_k,
        "k_starts": rank.k_starts,
        "documents": rank.documents,
        "pairs": rank.pairs,
    }
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def document_attention(
    q: NDArray[np.float64],
    k: NDArray[np.float64],
    v: NDArray[np.float64],
    lengths: Sequence[int],
    *,
    causal: bool,
) -> NDArray[np.float64]:
    """Softmax attention of a packed sequence `[tokens, head_dim]`, under one mask over all of it."""
    document = np.repeat(np.arange(len(lengths)), lengths)
    mask = document[:, None] == document[None, :]
    if causal:
        mask &= np.arange(len(q))[:, None] >= np.arange(len(q))[None, :]
    return _softmax_attention(q, k, v, mask)


def rank_attention(
    q: NDArray[np.float64],
    k: NDArray[np.float64],
    v: NDArray[np.float64],
    rank: wlb.RankShard,
    *,
    causal: bool,
) -> NDArray[np.float64]:
    """What a variable-length kernel computes for one rank: `q` holds its tokens, `k` and `v` the packed ones.

    A causal mask is aligned to the last key, as flash attention does.
    """
    out = np.empty((len(q), v.shape[1]))
    for i, k_start in enumerate(rank.k_starts):
        rows = slice(rank.cu_seqlens_q[i], rank.cu_seqlens_q[i + 1])
        keys = slice(k_start, k_start + rank.cu_seqlens_k[i + 1] - rank.cu_seqlens_k[i])
        num_q, num_k = rows.stop - rows.start, keys.stop - keys.start
        mask = np.ones((num_q, num_k), dtype=bool)
        if causal:
            mask = np.tril(mask, num_k - num_q)
        out[rows] = _softmax_attention(q[rows], k[keys], v[keys], mask)
    return out


def _softmax_attention(
    q: NDArray[np.float64], k: NDArray[np.float64], v: NDArray[np.float64], mask: NDArray[np.bool_]
) -> NDArray[np.float64]:
    scores = np.where(mask, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    weights = np.exp(scores - scores.max(axis=1, initial=-np.inf, keepdims=True))
    out: NDArray[np.float64] = weights @ v / weights.sum(axis=1, keepdims=True)
    return out


def _zigzag(chunks: Sequence[int]) -> list[int]:
    """Owners of consecutive chunks: rank i holds chunks i and 2 * cp_size - 1 - i."""
    last = len(chunks) - 1
    return [min(k, last - k) for k, size in enumerate(chunks) for _ in range(size)]


def _cumulative(lengths: Iterable[int]) -> list[int]:
    total = [0]
    for length in lengths:
        total.append(total[-1] + length)
    return total
