"""Who attends to whom, as kernel calls: every transport's plan is made of these.

A *segment* is a contiguous run of one document in the tensors of one holder (a rank, a block of ranks, or the whole
packed sequence). A query segment meets a key segment of the same document in a *span*: the queries that see some of
these keys, against the keys that some of these queries see. Flash kernels align masks bottom-right: they take the last
query to stand at the last key. A span whose queries end elsewhere in the document has its window moved by that *shift*;
where no mask cuts it, the shift does not matter. Spans with one window are one kernel call.

Everything is computed with numpy, in time linear in tokens and spans, and sent to the device once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

UNLIMITED = 1 << 40
"""A reach beyond any document, in tokens; far from the ends of int64, so that it can be added to."""


@dataclass(frozen=True)
class Segments:
    """Segments in packed order; one entry each: document, first position inside it, first row of the holder, tokens."""

    document: Ints
    start: Ints
    row: Ints
    length: Ints

    @classmethod
    def of_tokens(cls, tokens: Ints, offsets: Ints) -> Segments:
        """The segments of ascending indices into the packed sequence, whose documents begin at `offsets`."""
        document = np.searchsorted(offsets, tokens, side="right") - 1
        cut = (np.diff(tokens) != 1) | (np.diff(document) != 0)
        row = np.flatnonzero(np.concatenate([np.ones(min(1, tokens.size), bool), cut]))
        length = np.diff(np.append(row, tokens.size))
        return cls(document[row], tokens[row] - offsets[document[row]], row, length)

    @classmethod
    def of_documents(cls, lengths: Ints) -> Segments:
        """The whole packed sequence: every document is one segment."""
        row = np.cumsum(lengths) - lengths
        return cls(np.arange(lengths.size), np.zeros_like(row), row, lengths)

    def closed_up(self) -> Segments:
        """The same rows as if each document had no gaps: only the order of its tokens is kept."""
        if not self.document.size:
            return self
        first = np.flatnonzero(np.diff(self.document, prepend=-1))
        length = np.add.reduceat(self.length, first)
        return Segments(self.document[first], np.zeros_like(first), self.row[first], length)


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
    """One varlen kernel call over rows of a rank's queries and of a block of keys, on the device."""

    q_rows: Tensor | None  # int64 [queries]: which rows of q; None: all, in order
    k_rows: Tensor | None  # int64 [keys]: which rows of the block; None: all, in order
    cu_seqlens_q: Tensor  # int32 [spans + 1]
    cu_seqlens_k: Tensor  # int32 [spans + 1]
    max_seqlen_q: int
    max_seqlen_k: int
    window: tuple[int, int]  # left, right of the bottom-right diagonal; -1: unlimited
    spans: list[tuple[int, int, int, int]]  # rows of the call: queries from, to; keys from, to
    shifts: list[int]  # one a span
    fresh: bool  # no earlier call of the plan had any of these queries


class Calls:
    """Turns spans into the calls of one plan, in the order in which they will run."""

    def __init__(self, num_queries: int, *, positions_matter: bool, device: torch.device) -> None:
        self._seen = np.zeros(num_queries, bool)
        self._positions_matter = positions_matter
        self._device = device

    def add(self, spans: Spans, *, num_keys: int, key_rows: Ints | None = None) -> list[Call]:
        """Calls over a block of `num_keys` rows; `key_rows` tells where the keys that spans name by row lie in it."""
        return [
            self._call(group, num_keys, key_rows) for group in by_call(spans, positions_matter=self._positions_matter)
        ]

    def _call(self, spans: Spans, num_keys: int, key_rows: Ints | None) -> Call:
        q_rows = ranges(spans.q_row, spans.q_length)
        k_rows = ranges(spans.k_row, spans.k_length)
        if key_rows is not None:
            k_rows = key_rows[k_rows]
        fresh = not self._seen[q_rows].any()
        self._seen[q_rows] = True
        cu_q, cu_k = (np.append(0, np.cumsum(length)) for length in (spans.q_length, spans.k_length))
        left, right = int(spans.left[0]), int(spans.right[0])
        return Call(
            q_rows=self._index(q_rows, self._seen.size),
            k_rows=self._index(k_rows, num_keys),
            cu_seqlens_q=self._send(cu_q.astype(np.int32)),
            cu_seqlens_k=self._send(cu_k.astype(np.int32)),
            max_seqlen_q=int(spans.q_length.max()),
            max_seqlen_k=int(spans.k_length.max()),
            window=(-1 if left >= UNLIMITED else left, -1 if right >= UNLIMITED else right),
            spans=list(zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), cu_k[:-1].tolist(), cu_k[1:].tolist(), strict=True)),
            shifts=spans.shift.tolist(),
            fresh=fresh,
        )

    def _index(self, rows: Ints, total: int) -> Tensor | None:
        return None if rows.size == total and (rows == np.arange(total)).all() else self._send(rows)

    def _send(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def ranges(start: Ints, length: Ints) -> Ints:
    """`start[0] .. start[0] + length[0] - 1`, then the same of the next, and so on."""
    return np.arange(length.sum()) + np.repeat(start - np.cumsum(length) + length, length)
