"""Which keys the ranks of a group need from each other: what an exchange of keys is planned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wlb.torch.attention.segments import Ints, Places, Segments, Spans, meet


@dataclass(frozen=True)
class Needs:
    """Keys that every rank's queries see, and keys that it holds, in tokens of the packed sequence."""

    own: list[Places]  # of each rank: where its tokens lie in its tensors
    spans: list[Spans]  # of each rank
    here: list[NDArray[np.bool_]]  # of each rank: which of these spans have all their keys there
    remote: list[Spans]  # of each rank: the others

    @classmethod
    def of(cls, held: Sequence[Segments], documents: Segments, *, left: int, right: int) -> Needs:
        """Keys that ranks with `held` need from each other; a query sees `left` tokens before and `right` after it."""
        own = [Places(documents.row[s.document] + s.start, s.row, s.length) for s in held]
        spans = [meet(s, documents, left, right) for s in held]
        here = [places.contain(s.k_row, s.k_length) for places, s in zip(own, spans, strict=True)]
        remote = [s[~at_home] for s, at_home in zip(spans, here, strict=True)]
        return cls(own, spans, here, remote)

    def local(self, rank: int) -> Spans:
        """Attention that a rank computes from its own keys."""
        return self.spans[rank][self.here[rank]]

    def keys(self, *ranks: int) -> tuple[Ints, Ints]:
        """Ranges of the keys that some of these ranks need for the rest: first tokens, lengths."""
        return union(
            *(np.concatenate([getattr(self.remote[i], name) for i in ranks]) for name in ("k_row", "k_length"))
        )


def union(start: Ints, length: Ints) -> tuple[Ints, Ints]:
    """The ranges that cover the same numbers without meeting, ascending: their starts and lengths."""
    order = np.argsort(start)
    start, end = start[order], np.maximum.accumulate((start + length)[order])
    apart = start[1:] > end[:-1]
    edge = np.ones(min(1, start.size), bool)
    first = start[np.append(edge, apart)]
    return first, end[np.append(apart, edge)] - first


def one_after_another(parts: Sequence[Places], *, first_rows: Ints) -> Places:
    """Places of tokens in a tensor that has the rows of several parts; part `i` begins at row `first_rows[i]`."""
    token, length = (np.concatenate([getattr(part, name) for part in parts]) for name in ("token", "length"))
    counts = np.array([part.length.sum() for part in parts], np.int64)
    shift = np.repeat(first_rows - np.cumsum(counts) + counts, [part.token.size for part in parts])
    order = np.argsort(token)
    return Places(token[order], (np.cumsum(length) - length + shift)[order], length[order])
