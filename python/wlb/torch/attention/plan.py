"""Execution plans of the core as tensors: what a rank does in a layer, made once for all layers.

A *segment* is a contiguous run of one document in a rank's tensors. Kernels compute *spans*: rows of queries against
rows of keys, aligned bottom-right, the last query at the last key. Who computes which, in which calls, and who sends
what to whom, is decided in the core (`wlb_core::sharding::execution`, which says how); here are the tensors.
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
"""Plans of each kind: the micro-batches of a step, whose layers the backward may recompute, and those of the next,
which are prepared beside it. Shards are compared by content; what a backward needs it holds itself."""

AnyShard = wlb.Shard | wlb.ForestShard

Rows = slice | Tensor | None
"""Rows of a tensor: neighbours, an index, or all in order."""

PlainRows = tuple[int, int, bool]


def pick(x: Tensor, rows: Rows) -> Tensor:
    """Rows of `x`: a view, or a copy if `rows` is an index."""
    if rows is None:
        return x
    return x.index_select(0, rows) if isinstance(rows, Tensor) else x[rows]


def queries_of(x: Tensor, rows: Rows) -> Tensor:
    """Queries of a call, or what belongs to them, as its kernel takes them: it leaves out neighbours itself."""
    return x.index_select(0, rows) if isinstance(rows, Tensor) else x


def put(total: Tensor, rows: Rows, part: Tensor) -> None:
    """Writes rows of `total`, each once."""
    if isinstance(rows, Tensor):
        total.index_copy_(0, rows, part.to(total.dtype))
    else:
        (total if rows is None else total[rows]).copy_(part)


def add(total: Tensor, rows: Rows, part: Tensor) -> None:
    """Adds to rows of `total`, which may be named more than once."""
    if isinstance(rows, Tensor):
        total.index_add_(0, rows, part.to(total.dtype))
    else:
        (total if rows is None else total[rows]).add_(part)


@dataclass(frozen=True)
class Call:
    """One varlen kernel call over rows of a rank's queries and of a tensor of keys."""

    q_rows: Rows  # of the queries
    k_rows: Rows  # of the keys
    cu_seqlens_q: Tensor  # int32 [spans + 1]: over all queries, or over those of an index
    cu_seqlens_k: Tensor  # int32 [spans + 1]
    max_seqlen_q: int
    max_seqlen_k: int
    window: tuple[int, int]  # left, right of the bottom-right diagonal; -1: unlimited
    bounds: NDArray[np.int32]  # on the host: cu_seqlens_q, cu_seqlens_k, and the shift of each span
    fresh: bool  # no earlier call of the plan had any of these queries

    @classmethod
    def of_lengths(
        cls, q_lengths: Sequence[int], k_lengths: Sequence[int], window: tuple[int, int], device: torch.device | str
    ) -> Call:
        """A call over all rows of tensors that have the spans of these lengths one behind the other."""
        cu = [np.append(0, np.cumsum(lengths)).astype(np.int32) for lengths in (q_lengths, k_lengths)]
        bounds = np.concatenate([*cu, np.zeros(len(q_lengths), np.int32)])
        cu_q, cu_k = (torch.from_numpy(edges).to(device) for edges in cu)
        return cls(None, None, cu_q, cu_k, max(q_lengths), max(k_lengths), window, bounds, True)

    @property
    def spans(self) -> NDArray[np.int32]:
        """[spans, 4]: queries from, to; keys from, to; counted as `cu_seqlens_q` and `cu_seqlens_k` are."""
        count = self.cu_seqlens_q.numel()
        q, k = self.bounds[:count], self.bounds[count : 2 * count]
        return np.stack([q[:-1], q[1:], k[:-1], k[1:]], axis=1)

    @property
    def num_keys(self) -> int:
        """Rows of keys."""
        return int(self.bounds[2 * self.cu_seqlens_q.numel() - 1])

    @property
    def shifts(self) -> NDArray[np.int32]:
        """[spans]: tokens from the last key to the last query; the true distance is the kernel's plus this."""
        return self.bounds[2 * self.cu_seqlens_q.numel() :]


class _Tensors:
    """The numbers of a plan on the device: one copy; to a GPU from pinned memory, without waiting for it.

    It is ordered with what the current stream runs before and after.
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
        """Rows as slice or index; None if they are all `total` rows of a tensor."""
        first, count, listed = plain
        if listed:
            return self._rows[first : first + count]
        return None if first == 0 and count == total else slice(first, first + count)

    def sum(self, plain: tuple[PlainRows, PlainRows, int], summed: int) -> Sum:
        """A sum over rows of a tensor that has `summed`."""
        rows, begins, count = plain
        first, of_result, listed = begins
        same = not listed and rows == (0, summed, False)
        return Sum(self.rows(rows), self._rows[first : first + of_result] if listed else None, count, same)

    def calls(self, plain: Sequence[tuple[Iterable[Sequence[Any]], int, int]]) -> list[list[Call]]:
        """Calls: of each tensor of keys those over it, in the order of the plan, its queries and its rows."""
        flat = [(call, queries, keys) for of_keys, queries, keys in plain for call in of_keys]
        sizes = [size for (_, _, _, spans, *_), _, _ in flat for size in (spans + 1, spans + 1, spans)]
        bounds, host = iter(self._bounds.split_with_sizes(sizes)), self._host_bounds
        before: tuple[NDArray[np.int32], Tensor] | None = None  # queries of the call before, if they are listed

        def made(call: Sequence[Any], queries: int, keys: int) -> Call:
            nonlocal before
            q_rows, k_rows, begin, spans, longest_q, longest_k, window, fresh = call
            cu_q, cu_k, _ = next(bounds), next(bounds), next(bounds)
            of_queries = self.rows(q_rows, queries)
            if isinstance(of_queries, Tensor):
                listed = self._numbers[q_rows[0] : q_rows[0] + q_rows[1]]
                if before is None or not np.array_equal(before[0], listed):
                    before = listed, of_queries.long()  # `index_copy_` takes no int32
                of_queries = before[1]  # one tensor for calls of the same queries, which are then picked once
            on_host = host[begin : begin + 3 * spans + 2]
            return Call(of_queries, self.rows(k_rows, keys), cu_q, cu_k, longest_q, longest_k, window, on_host, fresh)

        return [[made(call, queries, keys) for call in of_keys] for of_keys, queries, keys in plain]


@dataclass(frozen=True)
class Sum:
    """Rows of a result, each a sum of rows of one tensor."""

    rows: Rows  # what is summed
    begins: Tensor | None  # int32: where the summands of each result begin in `rows`; None: one each
    count: int  # rows of the result
    changes_nothing: bool  # it is what is summed

    def of(self, x: Tensor) -> Tensor:
        """The sums over `x`, `[rows, numbers]`, in its dtype; they are summed in float32, or wider if `x` is."""
        if self.begins is None:
            return x if self.changes_nothing else pick(x, self.rows)
        sums: Tensor = torch.ops.aten._embedding_bag_forward_only(x, self.rows, self.begins)[0]
        return sums


@dataclass(frozen=True)
class KeysPlan:
    """Plan of one rank for transports that bring keys to the ranks that need them.

    Its *buffer* has the rank's own keys, from row `first` on, and behind them what arrives. Gradients of keys stand one
    behind the other, call by call, local ones first, and behind them those that come home.
    """

    local: list[Call]  # over the rank's own keys, while others' arrive
    remote: list[Call]  # over what is picked of the buffer
    picked: Rows  # of the buffer
    gathered: int  # rows of keys that are copied or brought together, at most, on any rank
    first: int  # the first of the rank's rows whose keys are in the buffer
    own_rows: int  # rows of own keys in the buffer, before those that arrive
    sent: Rows  # of the buffer; by destination, or as many as every rank sends
    sent_rows: list[int]  # to each rank; empty: as many to all
    arriving_rows: list[int]  # from each rank
    moves: bool  # whether any rank sends anything
    going: Sum  # gradients of others' keys, by rank
    going_rows: list[int]  # to each rank
    coming_rows: list[int]  # from each rank
    own: Sum  # gradients of own keys
    gradients: tuple[int, int, int]  # rows of gradients: of the local calls, of the remote ones, coming home

    @property
    def arriving(self) -> int:
        """Rows of the buffer that arrive."""
        return self.buffer[2]

    @functools.cached_property
    def once(self) -> bool:
        """Whether no query is in two calls."""
        return all(call.fresh for call in (*self.local, *self.remote))

    @functools.cached_property
    def buffer(self) -> tuple[int, int, int]:
        """The first of the rank's rows whose keys are in the buffer, its rows of own keys, and those that arrive."""
        return self.first, self.own_rows, sum(self.arriving_rows)


@functools.lru_cache(maxsize=KEPT)
def keys_plan(
    shard: AnyShard,
    rank: int,
    *,
    fetch: bool,
    window: int | None,
    biased: bool,
    device: torch.device,
    buckets: bool = False,
) -> KeysPlan:
    """Plan of `rank` for `all_gather`, or for `fetch`.

    `biased`: scores have a bias by position. `buckets`: calls are divided where the kernel gains by it.
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
        # Picked before the call, so that the buffer is free while it runs.
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
    """Plan of one position of a ring: `steps[s]` are the calls over the keys of position `self - s`."""

    position: int
    steps: list[list[Call]]
    rows: list[int]  # keys of every position
    last: list[int]  # last step in which any position uses the keys of each position

    @property
    def once(self) -> bool:
        """Whether no query is in two calls."""
        return all(call.fresh for calls in self.steps for call in calls)


@dataclass(frozen=True)
class HeadsPlan:
    """Plan by which the ranks of a block exchange tokens for heads."""

    counts: list[int]  # tokens of each rank of the block
    place: int  # of this rank in the block
    ascending: Tensor  # int32: puts tokens in order of ranks into packed order
    by_rank: Tensor  # int32: the inverse


@functools.lru_cache(maxsize=KEPT)
def ring_plan(
    shard: AnyShard,
    rank: int,
    *,
    degree: int,
    window: int | None,
    biased: bool,
    device: torch.device,
    buckets: bool = False,
) -> tuple[HeadsPlan | None, RingPlan]:
    """Plans of `rank` in blocks of `degree` ranks that exchange heads, with a ring over the blocks."""
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
    """Plan of the tokens that one rank sends and receives when a micro-batch is cut in another way."""

    sent: Rows  # its rows before, by destination
    sent_rows: list[int]  # how many to each rank
    placed: Rows  # place among the arriving rows of each row after the move
    arriving_rows: list[int]  # how many from each rank


@functools.lru_cache(maxsize=KEPT)
def moves_plan(before: wlb.Shard, after: wlb.Shard, rank: int, device: torch.device) -> MovesPlan:
    """Plan of `rank` for moving tokens from one shard of a micro-batch to another."""
    numbers, sent, sent_rows, placed, arriving_rows = _core.moves_plan(before, after, rank)
    tensors = _Tensors((numbers, len(numbers)), device)
    held = int(before.tokens_per_rank[rank])
    return MovesPlan(tensors.rows(sent, held), sent_rows, tensors.rows(placed, sum(arriving_rows)), arriving_rows)
