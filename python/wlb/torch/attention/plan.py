"""Execution plans as tensors: what a rank computes and sends in an attention layer, made once for all layers.

A *segment* is a contiguous run of one document in a rank's tensors. Kernels compute *spans*: rows of queries against
rows of keys, aligned bottom-right, with the last query at the position of the last key. The Rust core decides which
rank computes which spans in which calls, and which rows ranks send (`wlb_core::sharding::execution`). This module turns
its numbers into tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import wlb
from wlb import _core

KEPT = 128
"""Plans that are cached, of each kind. It should cover the micro-batches of a step, whose layers the backward may
recompute, and of the next step, which is prepared meanwhile. The cache compares shards by content. A backward holds its
own plan, so it does not need the cache."""

Rows = slice | Tensor | None
"""Rows of a tensor: neighbouring rows (a slice), listed rows (an index), or all rows in order (None)."""

PlainRows = tuple[int, int, bool]
"""Rows as the core gives them: first row, number of rows, False; or begin in the plan's lists, number of rows, True."""


def pick(x: Tensor, rows: Rows) -> Tensor:
    """Rows of `x`: a view, or a copy if `rows` is an index."""
    if rows is None:
        return x
    return x.index_select(0, rows) if isinstance(rows, Tensor) else x[rows]


def queries_of(x: Tensor, rows: Rows) -> Tensor:
    """Rows of `x` for a call's kernel: listed rows are copied; for a slice all rows, as the kernel skips the others."""
    return x.index_select(0, rows) if isinstance(rows, Tensor) else x


def put(total: Tensor, rows: Rows, part: Tensor) -> None:
    """Writes `part` to rows of `total`; no row may be listed twice."""
    if isinstance(rows, Tensor):
        total.index_copy_(0, rows, part.to(total.dtype))
    else:
        (total if rows is None else total[rows]).copy_(part)


def add(total: Tensor, rows: Rows, part: Tensor) -> None:
    """Adds `part` to rows of `total`; a row may be listed more than once."""
    if isinstance(rows, Tensor):
        total.index_add_(0, rows, part.to(total.dtype))
    else:
        (total if rows is None else total[rows]).add_(part)


@dataclass(frozen=True)
class Call:
    """One varlen kernel call over rows of a rank's queries and of a tensor of keys."""

    q_rows: Rows  # of the queries
    k_rows: Rows  # of the keys
    cu_seqlens_q: Tensor  # int32 [spans + 1]: rows of all queries; if `q_rows` is an index, positions in it
    cu_seqlens_k: Tensor  # int32 [spans + 1]
    max_seqlen_q: int
    max_seqlen_k: int
    window: tuple[int, int]  # keys left and right of the bottom-right diagonal; -1: unlimited
    bounds: NDArray[np.int32]  # on the host: cu_seqlens_q, cu_seqlens_k, `shifts`, concatenated
    fresh: bool  # no earlier call of the plan had any of these queries

    @classmethod
    def of_lengths(
        cls, q_lengths: Sequence[int], k_lengths: Sequence[int], window: tuple[int, int], device: torch.device | str
    ) -> Call:
        """A call over all rows of tensors in which spans of these lengths follow each other."""
        cu = [np.append(0, np.cumsum(lengths)).astype(np.int32) for lengths in (q_lengths, k_lengths)]
        bounds = np.concatenate([*cu, np.zeros(len(q_lengths), np.int32)])
        cu_q, cu_k = (torch.from_numpy(edges).to(device) for edges in cu)
        return cls(None, None, cu_q, cu_k, max(q_lengths), max(k_lengths), window, bounds, True)

    @property
    def spans(self) -> NDArray[np.int32]:
        """`[spans, 4]`: first query, end of queries, first key, end of keys, in the rows of `cu_seqlens_q` and `_k`."""
        count = self.cu_seqlens_q.numel()
        q, k = self.bounds[:count], self.bounds[count : 2 * count]
        return np.stack([q[:-1], q[1:], k[:-1], k[1:]], axis=1)

    @property
    def num_keys(self) -> int:
        """Number of rows of keys."""
        return int(self.bounds[2 * self.cu_seqlens_q.numel() - 1])

    @property
    def shifts(self) -> NDArray[np.int32]:
        """`[spans]`: tokens from the last key to the last query. A true distance is the kernel's distance plus this."""
        return self.bounds[2 * self.cu_seqlens_q.numel() :]


class _Tensors:
    """A plan's numbers on the device, moved in one copy. The host does not wait for a copy to a GPU.

    The copy runs on the current stream, in order with the other work there.
    """

    def __init__(self, indices: tuple[NDArray[np.int32], int], device: torch.device) -> None:
        numbers, begin = indices
        host = torch.from_numpy(numbers)
        if device.type == "cuda":
            host = host.pin_memory()
        moved = host.to(device, non_blocking=True)
        self._numbers = numbers
        self._rows = moved[:begin]
        self._bounds = moved[begin:]
        self._host_bounds = numbers[begin:].copy() if begin else numbers

    def rows(self, plain: PlainRows, total: int | None = None) -> Rows:
        """`plain` as a slice or an index; None if it is all `total` rows of a tensor."""
        first, count, listed = plain
        if listed:
            return self._rows[first : first + count]
        return None if first == 0 and count == total else slice(first, first + count)

    def sum(self, plain: tuple[PlainRows, PlainRows, int], summed: int) -> Sum:
        """A `Sum` over rows of a tensor that has `summed` rows."""
        rows, begins, count = plain
        first, of_result, listed = begins
        same = not listed and rows == (0, summed, False)
        return Sum(self.rows(rows), self._rows[first : first + of_result] if listed else None, count, same)

    def calls(self, plain: Sequence[tuple[Iterable[Sequence[Any]], int, int]]) -> list[list[Call]]:
        """The calls over each tensor of keys, in the order of the plan.

        Args:
            plain: for each tensor of keys its calls, the number of queries, and the number of keys.
        """
        flat = [(call, queries, keys) for of_keys, queries, keys in plain for call in of_keys]
        sizes = [size for (_, _, _, spans, *_), _, _ in flat for size in (spans + 1, spans + 1, spans)]
        bounds, host = iter(self._bounds.split_with_sizes(sizes)), self._host_bounds
        before: tuple[NDArray[np.int32], Tensor] | None = None  # the latest listed queries

        def made(call: Sequence[Any], queries: int, keys: int) -> Call:
            nonlocal before
            q_rows, k_rows, begin, spans, longest_q, longest_k, window, fresh = call
            cu_q, cu_k, _ = next(bounds), next(bounds), next(bounds)
            of_queries = self.rows(q_rows, queries)
            if isinstance(of_queries, Tensor):
                listed = self._numbers[q_rows[0] : q_rows[0] + q_rows[1]]
                if before is None or not np.array_equal(before[0], listed):
                    before = listed, of_queries.long()  # `index_copy_` takes no int32
                of_queries = before[1]  # calls of the same queries share it: they are picked once
            on_host = host[begin : begin + 3 * spans + 2]
            return Call(of_queries, self.rows(k_rows, keys), cu_q, cu_k, longest_q, longest_k, window, on_host, fresh)

        return [[made(call, queries, keys) for call in of_keys] for of_keys, queries, keys in plain]


@dataclass(frozen=True)
class Sum:
    """Rows of a result, each a sum of rows of one tensor."""

    rows: Rows  # summands: all for the first row of the result, then all for the second, and so on
    begins: Tensor | None  # int32: where each result row's summands begin in `rows`; None: one summand each
    count: int  # number of rows of the result
    changes_nothing: bool  # the result is the tensor itself

    def of(self, x: Tensor) -> Tensor:
        """The sums over `x`, `[rows, numbers]`, in the dtype of `x`; half precision is summed in float32."""
        if self.begins is None:
            return x if self.changes_nothing else pick(x, self.rows)
        sums: Tensor = torch.ops.aten._embedding_bag_forward_only(x, self.rows, self.begins)[0]
        return sums


@dataclass(frozen=True)
class KeysPlan:
    """Plan of one rank for the transports that send keys to the ranks that need them.

    The *buffer* holds the rank's own keys from row `first` on, followed by the keys that arrive. The gradients of keys
    are one tensor: first the keys of each local call, then of each remote call, then the rows that come home.
    """

    local: list[Call]  # over the rank's own keys, while other ranks' keys arrive
    remote: list[Call]  # over the rows `picked` of the buffer
    picked: Rows  # rows of the buffer that remote calls read
    gathered: int  # most rows of keys that any rank copies or brings together
    first: int  # first of the rank's own rows whose keys are in the buffer
    own_rows: int  # rows of the buffer before those that arrive: own keys, and filler up to what the rank sends
    sent: Rows  # rows of the buffer that the rank sends; for an all-to-all ordered by destination
    sent_rows: list[int]  # number of rows for each rank; empty for an all-gather
    arriving_rows: list[int]  # number of rows from each rank
    moves: bool  # whether any rank sends anything
    going: Sum  # gradients of other ranks' keys, ordered by rank
    going_rows: list[int]  # number of gradient rows for each rank
    coming_rows: list[int]  # number of gradient rows from each rank
    own: Sum  # gradients of own keys
    gradients: tuple[int, int, int]  # number of gradient rows: of local calls, of remote calls, coming home

    @functools.cached_property
    def once(self) -> bool:
        """Whether no query is in two calls."""
        return all(call.fresh for call in (*self.local, *self.remote))

    @functools.cached_property
    def buffer(self) -> tuple[int, int, int]:
        """`first`, `own_rows`, and the number of rows that arrive."""
        return self.first, self.own_rows, sum(self.arriving_rows)


@functools.lru_cache(maxsize=KEPT)
def keys_plan(
    shard: wlb.Shard,
    rank: int,
    *,
    fetch: bool,
    window: int | None,
    biased: bool,
    device: torch.device,
    buckets: bool = False,
) -> KeysPlan:
    """Plan of `rank` for `all_gather`, or for `fetch`.

    Args:
        shard: shard of the micro-batch.
        rank: rank in the context-parallel group.
        fetch: whether keys go by all-to-all to the ranks that need them; False: by all-gather.
        window: tokens that a query sees, itself included; None: no limit.
        biased: whether scores have a bias by position.
        device: device of the plan's tensors.
        buckets: whether to divide calls where that makes the kernel faster.
    """
    indices, local, remote, (first, own_rows), sent, sizes, gathers, going, own = _core.keys_plan(
        shard, rank, fetch=fetch, window=window, biased=biased, buckets=buckets
    )
    (sent_rows, arriving_rows), (moves, gathered) = sizes, gathers
    tensors = _Tensors(indices, device)
    queries = int(shard.tokens_per_rank[rank])
    rows = own_rows + sum(arriving_rows)
    of_going, going_rows, coming_rows = going
    local_calls, remote_calls = tensors.calls([(local, queries, queries), (remote, queries, rows)])
    picked: Rows = None
    if len(remote_calls) == 1:
        # Its keys are picked before the call, so that the buffer is free while the call runs.
        picked, remote_calls = remote_calls[0].k_rows, [replace(remote_calls[0], k_rows=None)]
    of_local, of_remote = (sum(call.num_keys for call in calls) for calls in (local_calls, remote_calls))
    gradients = of_local, of_remote, sum(coming_rows)
    return KeysPlan(
        local=local_calls,
        remote=remote_calls,
        picked=picked,
        gathered=gathered,
        first=first,
        own_rows=own_rows,
        sent=tensors.rows(sent),
        sent_rows=sent_rows,
        arriving_rows=arriving_rows,
        moves=moves,
        going=tensors.sum(of_going, sum(gradients)),
        going_rows=going_rows,
        coming_rows=coming_rows,
        own=tensors.sum(own, sum(gradients)),
        gradients=gradients,
    )


@dataclass(frozen=True)
class RingPlan:
    """Plan of one position of a ring."""

    position: int
    steps: list[list[Call]]  # `steps[s]`: calls over the keys of position `position - s`
    rows: list[int]  # number of keys of each position
    last: list[int]  # for each position, the last step in which another position uses its keys; 0: none does

    @property
    def once(self) -> bool:
        """Whether no query is in two calls."""
        return all(call.fresh for calls in self.steps for call in calls)


@dataclass(frozen=True)
class HeadsPlan:
    """Plan of one rank for the exchange of tokens for heads inside a block of ranks."""

    counts: list[int]  # tokens of each rank of the block
    place: int  # position of this rank in the block
    ascending: Tensor  # int32 [tokens of the block]: from the order of ranks to packed order
    by_rank: Tensor  # int32 [tokens of the block]: the inverse of `ascending`


@functools.lru_cache(maxsize=KEPT)
def ring_plan(
    shard: wlb.Shard,
    rank: int,
    *,
    degree: int,
    window: int | None,
    biased: bool,
    device: torch.device,
    buckets: bool = False,
) -> tuple[HeadsPlan | None, RingPlan]:
    """Plans of `rank` if blocks of `degree` ranks exchange heads and a ring connects the blocks.

    Returns:
        the plan of the exchange inside the block (None if `degree` is 1), and the plan of the ring.
    """
    indices, steps, rows, last, heads = _core.ring_plan(
        shard, rank, degree, window=window, biased=biased, buckets=buckets
    )
    tensors = _Tensors(indices, device)
    position = rank // degree
    calls = tensors.calls(
        [(plain, rows[position], rows[(position - step) % len(rows)]) for step, plain in enumerate(steps)]
    )
    ring = RingPlan(position, calls, rows, last)
    if heads is None:
        return None, ring
    counts, place, numbers = heads
    ascending, by_rank = torch.from_numpy(numbers).to(device, non_blocking=True).view(2, -1).unbind(0)
    return HeadsPlan(counts, place, ascending, by_rank), ring


@dataclass(frozen=True)
class MovesPlan:
    """Plan of the tokens that one rank sends and receives when a micro-batch is sharded anew."""

    sent: Rows  # rows that the rank sends, ordered by destination
    sent_rows: list[int]  # number of rows for each rank
    placed: Rows  # for each row after the move, its index among the arriving rows
    arriving_rows: list[int]  # number of rows from each rank


@functools.lru_cache(maxsize=KEPT)
def moves_plan(before: wlb.Shard, after: wlb.Shard, rank: int, device: torch.device) -> MovesPlan:
    """Plan of `rank` for moving tokens from one shard of a micro-batch to another."""
    numbers, sent, sent_rows, placed, arriving_rows = _core.moves_plan(before, after, rank)
    tensors = _Tensors((numbers, len(numbers)), device)
    held = int(before.tokens_per_rank[rank])
    return MovesPlan(tensors.rows(sent, held), sent_rows, tensors.rows(placed, sum(arriving_rows)), arriving_rows)
