"""Who attends to whom, as kernel calls: every transport's route is made of these.

A *segment* is a contiguous run of one document in the tensors of one holder (a rank, a block of ranks, or the whole
packed sequence). A query segment meets a key segment of the same document in a *span*: the queries that see some of
these keys, against the keys that some of these queries see. Flash kernels align masks bottom-right: they take the last
query to stand at the last key. A span whose queries end elsewhere in the document has its window moved by that *shift*;
where no mask cuts it, the shift does not matter. Spans with one window are one kernel call.

Plans are computed with numpy on segments and spans, of which there are few; only the index arrays that kernels need
have an entry for each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import wlb

Ints = NDArray[np.int64]

UNLIMITED = 1 << 40
"""A reach beyond any document, in tokens; far from the ends of int64, so that it can be added to."""


@dataclass(frozen=True)
class Segments:
    """Segments of one holder; one entry each: document, first position inside it, first row of the holder, tokens."""

    document: Ints
    start: Ints
    row: Ints
    length: Ints

    @classmethod
    def of_rank(cls, shard: wlb.Shard, rank: int) -> Segments:
        """Segments of one rank, in packed order."""
        held = shard.rank(rank)
        document, cu_seqlens = held.documents.astype(np.int64), held.cu_seqlens_q.astype(np.int64)
        row = cu_seqlens[:-1]
        return cls(document, held.token_indices[row] - offsets(shard)[document], row, np.diff(cu_seqlens))

    @classmethod
    def of_documents(cls, shard: wlb.Shard) -> Segments:
        """The whole packed sequence: every document is one segment."""
        row = offsets(shard)
        return cls(np.arange(row.size), np.zeros_like(row), row, shard.lengths.astype(np.int64))

    @classmethod
    def concatenate(cls, holders: Sequence[Segments]) -> Segments:
        """The segments of a holder that has the rows of all of these, one holder after another."""
        document, start, length = (
            np.concatenate([getattr(holder, name) for holder in holders]) for name in ("document", "start", "length")
        )
        return cls(document, start, np.cumsum(length) - length, length)

    @property
    def num_tokens(self) -> int:
        """Rows of the holder."""
        return int(self.length.sum())

    def packed_order(self) -> Ints:
        """The permutation that sorts the segments by their place in the packed sequence."""
        return np.lexsort((self.start, self.document))

    def in_packed_order(self) -> Segments:
        """The segments of a holder that has the same tokens in packed order; neighbours become one."""
        order = self.packed_order()
        document, start, length = self.document[order], self.start[order], self.length[order]
        apart = (np.diff(document) != 0) | (start[1:] != (start + length)[:-1])
        first = np.flatnonzero(np.append(np.ones(min(1, order.size), bool), apart))
        row = (np.cumsum(length) - length)[first]
        return Segments(document[first], start[first], row, np.diff(np.append(row, self.num_tokens)))

    def closed_up(self) -> Segments:
        """The same rows with the gaps of each document closed, so that only the order of tokens is kept."""
        if not self.document.size:
            return self
        first = np.flatnonzero(np.diff(self.document, prepend=-1))
        length = np.add.reduceat(self.length, first)
        return Segments(self.document[first], np.zeros_like(first), self.row[first], length)


@dataclass(frozen=True)
class Places:
    """Places of tokens in a tensor, as runs in packed order: first token, first row, number of tokens."""

    token: Ints
    row: Ints
    length: Ints

    def contain(self, token: Ints, length: Ints) -> NDArray[np.bool_]:
        """Whether each range of tokens lies in one run; bool[ranges]."""
        run = np.searchsorted(self.token, token, side="right") - 1
        return (run >= 0) & (token + length <= self.token[run] + self.length[run])

    def of(self, token: Ints, length: Ints) -> Places:
        """The runs of these ranges of tokens, one range after another; tokens without a place are left out."""
        begin = np.searchsorted(self.token + self.length, token, side="right")
        count = np.searchsorted(self.token, token + length, side="left") - begin
        i, j = np.repeat(np.arange(count.size), count), ranges(begin, count)
        first = np.maximum(self.token[j], token[i])
        last = np.minimum(self.token[j] + self.length[j], token[i] + length[i])
        return Places(first, self.row[j] + first - self.token[j], last - first)


@dataclass(frozen=True)
class Spans:
    """Rows of queries against rows of keys; `left` and `right` are the window as a flash kernel means it."""

    segment: Ints  # the query segment it belongs to
    q_row: Ints
    q_length: Ints
    k_row: Ints
    k_length: Ints
    left: Ints  # keys before the diagonal that a query sees; UNLIMITED: all
    right: Ints
    shift: Ints  # tokens from the last key to the last query; the true distance is the kernel's plus this

    def __getitem__(self, which: NDArray[np.bool_] | Ints) -> Spans:
        return Spans(**{name: array[which] for name, array in vars(self).items()})

    def __len__(self) -> int:
        return self.q_row.size

    def joined(self) -> Spans:
        """Unmasked spans made fewer: a query segment's neighbouring keys joined, then neighbours with the same keys.

        Positions mean nothing without a mask. The keys that all of a query segment sees are neighbours, so it has one
        span afterwards.
        """
        if not len(self):
            return self
        k_end = self.k_row + self.k_length
        begins = np.append(True, (self.segment[1:] != self.segment[:-1]) | (self.k_row[1:] != k_end[:-1]))
        first = np.flatnonzero(begins)
        wide = self[first]
        k_length = np.add.reduceat(self.k_length, first)

        q_end = wide.q_row + wide.q_length
        same_keys = (wide.k_row[1:] == wide.k_row[:-1]) & (k_length[1:] == k_length[:-1])
        first = np.flatnonzero(np.append(True, ~same_keys | (wide.q_row[1:] != q_end[:-1])))
        tall = wide[first]
        fields = vars(tall) | {"q_length": np.add.reduceat(wide.q_length, first), "k_length": k_length[first]}
        return Spans(**fields)


def meet(q: Segments, k: Segments, left: int, right: int) -> Spans:
    """All spans in which a query at position `p` sees the keys at `p - left .. p + right` of its document."""
    begin, end = (np.searchsorted(k.document, q.document, side) for side in ("left", "right"))
    count = end - begin
    i = np.repeat(np.arange(count.size), count)
    j = ranges(begin, count)

    # Keys that no query of the segment reaches, then queries that reach none of the keys left.
    k_from = np.maximum(k.start[j], q.start[i] - left)
    k_to = np.minimum(k.start[j] + k.length[j], q.start[i] + q.length[i] + right)
    q_from = np.maximum(q.start[i], k_from - right)
    q_to = np.minimum(q.start[i] + q.length[i], k_to + left)

    shift = q_to - k_to
    # A mask that hides nothing is dropped, except where others share it (causal, on the diagonal: one call, not two)
    # and where only some queries of the segment are left, so that spans without a mask are of whole query segments.
    diagonal = (shift == 0) & (right == 0)
    cut_left = (q_to - 1 - k_from > left) | (q_to < q.start[i] + q.length[i]) | diagonal
    cut_right = (k_to - 1 - q_from > right) | (q_from > q.start[i]) | diagonal
    spans = Spans(
        segment=i,
        q_row=q.row[i] + q_from - q.start[i],
        q_length=q_to - q_from,
        k_row=k.row[j] + k_from - k.start[j],
        k_length=k_to - k_from,
        left=np.where(cut_left & (left < UNLIMITED), left - shift, UNLIMITED),
        right=np.where(cut_right & (right < UNLIMITED), right + shift, UNLIMITED),
        shift=shift,
    )
    return spans[(spans.q_length > 0) & (spans.k_length > 0)]


def by_call(spans: Spans, *, positions_matter: bool) -> Iterator[Spans]:
    """Splits spans into kernel calls: one window each, and no query twice.

    With `positions_matter` (a bias by position), spans keep their own shift and are not joined.
    """
    for left, right in dict.fromkeys(zip(spans.left.tolist(), spans.right.tolist(), strict=True)):
        group = spans[(spans.left == left) & (spans.right == right)]
        if left == right == UNLIMITED and not positions_matter:
            group = group.joined()
        turn = np.arange(len(group)) - np.searchsorted(group.segment, group.segment)
        for n in range(int(turn.max()) + 1):
            yield group[turn == n]


@dataclass(frozen=True)
class Call:
    """One varlen kernel call over rows of a rank's queries and of a block of keys. Its tensors are int32."""

    q_rows: Tensor | None  # [queries]: which rows of q; None: all, in order
    k_rows: Tensor | None  # [keys]: which rows of the block; None: all, in order
    cu_seqlens_q: Tensor  # [spans + 1]
    cu_seqlens_k: Tensor  # [spans + 1]
    max_seqlen_q: int
    max_seqlen_k: int
    window: tuple[int, int]  # left, right of the bottom-right diagonal; -1: unlimited
    spans: Ints  # [spans, 4]: rows of the call: queries from, to; keys from, to
    shifts: Ints  # [spans]
    fresh: bool  # no earlier call of the route had any of these queries


class Calls:
    """Turns spans into the calls of one route, in the order in which they will run. Their tensors are on the host."""

    def __init__(self, num_queries: int, *, positions_matter: bool) -> None:
        self._seen = np.zeros(num_queries, bool)
        self._positions_matter = positions_matter

    def add(self, spans: Spans, *, num_keys: int, places: Places | None = None) -> list[Call]:
        """Calls over a block of `num_keys` rows; `places` tells where in it the tokens are that spans name as keys."""
        return [
            self._call(group, num_keys, places) for group in by_call(spans, positions_matter=self._positions_matter)
        ]

    def _call(self, spans: Spans, num_keys: int, places: Places | None) -> Call:
        q_rows = index(spans.q_row, spans.q_length, self._seen.size)
        touched = slice(None) if q_rows is None else q_rows.numpy()
        fresh = not self._seen[touched].any()
        self._seen[touched] = True
        keys = Places(spans.k_row, spans.k_row, spans.k_length)
        if places is not None:
            keys = places.of(keys.token, keys.length)
        cu_q, cu_k = (np.append(0, np.cumsum(length)) for length in (spans.q_length, spans.k_length))
        left, right = int(spans.left[0]), int(spans.right[0])
        return Call(
            q_rows=q_rows,
            k_rows=index(keys.row, keys.length, num_keys),
            cu_seqlens_q=torch.from_numpy(cu_q.astype(np.int32)),
            cu_seqlens_k=torch.from_numpy(cu_k.astype(np.int32)),
            max_seqlen_q=int(spans.q_length.max()),
            max_seqlen_k=int(spans.k_length.max()),
            window=(-1 if left >= UNLIMITED else left, -1 if right >= UNLIMITED else right),
            spans=np.stack([cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]], axis=1),
            shifts=spans.shift,
            fresh=fresh,
        )


def offsets(shard: wlb.Shard) -> Ints:
    """First token of each document in the packed sequence."""
    lengths = shard.lengths.astype(np.int64)
    return np.cumsum(lengths) - lengths


def ranges(start: Ints, length: Ints, dtype: type[np.signedinteger] = np.int64) -> NDArray[np.signedinteger]:
    """`start[0] .. start[0] + length[0] - 1`, then the same of the next, and so on."""
    result: NDArray[np.signedinteger] = np.repeat((start - np.cumsum(length) + length).astype(dtype), length)
    result += np.arange(result.size, dtype=dtype)
    return result


def index(start: Ints, length: Ints, total: int) -> Tensor | None:
    """The `ranges` as int32, to index a tensor of `total` rows with; None: they are all its rows, in order."""
    ends = np.cumsum(length)
    if length.sum() == total and (start == ends - length).all():
        return None
    return torch.from_numpy(ranges(start, length, np.int32))
