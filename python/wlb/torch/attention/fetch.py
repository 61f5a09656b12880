"""Keys by all-to-all: every rank gets just the keys that its segments need from elsewhere, then attends at once.

Like an all-gather (see `all_gather`), but a rank sends to each other only what that one needs: `wlb.Shard.keys_moved`
rows arrive, and with them a copy of the rank's own keys that its segments need beside them. Where documents lie on few
ranks (`wlb.shard`'s "auto") that is a fraction of a full gather; where every document lies on all ranks it is three
quarters of one on average, in as many messages as there are pairs of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from wlb.torch.attention.kernels import accumulator
from wlb.torch.attention.merge import AttendBackward
from wlb.torch.attention.needs import Needs, one_after_another
from wlb.torch.attention.segments import Call, Calls, Segments, ranges


@dataclass(frozen=True)
class FetchRoute:
    """One rank's part in an all-to-all of keys."""

    local: list[Call]  # over this rank's own keys
    remote: list[Call]  # over the fetched keys
    sent: Tensor  # int32: rows of this rank's keys, by destination
    sent_rows: list[int]  # how many to each rank
    fetched_rows: list[int]  # how many from each rank
    moves: bool  # whether any rank fetches anything

    @classmethod
    def make(
        cls,
        held: Sequence[Segments],
        documents: Segments,
        rank: int,
        *,
        left: int,
        right: int,
        positions_matter: bool,
    ) -> FetchRoute:
        """The route of `rank`, where rank `i` holds `held[i]`, in packed order. Its tensors are on the host.

        A query sees `left` tokens before and `right` tokens after itself.
        """
        needs = Needs.of(held, documents, left=left, right=right)
        needed = [needs.keys(i) for i in range(len(held))]
        sent = [needs.own[rank].of(*keys) for keys in needed]
        fetched = [own.of(*needed[rank]) for own in needs.own]
        counts = np.array([places.length.sum() for places in fetched], np.int64)
        buffer = one_after_another(fetched, first_rows=np.cumsum(counts) - counts)
        calls = Calls(held[rank].num_tokens, positions_matter=positions_matter)
        return cls(
            local=calls.add(needs.local(rank), num_keys=held[rank].num_tokens, places=needs.own[rank]),
            remote=calls.add(needs.remote[rank], num_keys=int(counts.sum()), places=buffer),
            sent=torch.from_numpy(np.concatenate([ranges(places.row, places.length, np.int32) for places in sent])),
            sent_rows=[int(places.length.sum()) for places in sent],
            fetched_rows=counts.tolist(),
            moves=any(spans.q_row.size for spans in needs.remote),
        )


@dataclass(frozen=True)
class Fetch:
    """Exchanges keys by all-to-all, their gradients the way back. Keys and values travel together.

    The backward fetches again instead of keeping other ranks' keys; the way back is not overlapped.
    """

    route: FetchRoute
    group: dist.ProcessGroup | None

    def forward(self, k: Tensor, v: Tensor, attend: Callable[[Tensor, Tensor, Sequence[Call]], None]) -> None:
        """See `KeyExchange`."""
        arrive = self._fetch(k, v)
        attend(k, v, self.route.local)
        if arrive is not None:
            attend(*arrive(), self.route.remote)

    def backward(self, k: Tensor, v: Tensor, attend: AttendBackward) -> tuple[Tensor, Tensor]:
        """See `KeyExchange`."""
        route = self.route
        arrive = self._fetch(k, v)
        dk, dv = attend(k, v, route.local)
        if arrive is None:
            return dk, dv
        keys, values = arrive()
        both = keys.new_empty((keys.shape[0], 2, *keys.shape[1:]), dtype=accumulator(keys.dtype))
        attend(keys, values, route.remote, (both[:, 0], both[:, 1]))
        home = both.new_empty((route.sent.numel(), *both.shape[1:]))
        dist.all_to_all_single(home, both, route.sent_rows, route.fetched_rows, group=self.group)
        # Destination by destination: a row goes to each once at most, so that sums have one order on any device.
        for rows, part in zip(
            torch.split(route.sent, route.sent_rows), torch.split(home, route.sent_rows), strict=True
        ):
            if rows.numel():
                dk.index_add_(0, rows, part[:, 0])
                dv.index_add_(0, rows, part[:, 1])
        return dk, dv

    def _fetch(self, k: Tensor, v: Tensor) -> Callable[[], tuple[Tensor, Tensor]] | None:
        """Starts it; call the result to wait for keys and values, each `[fetched rows, kv_heads, head_dim]`."""
        route = self.route
        if not route.moves:
            return None
        send = k.new_empty((route.sent.numel(), 2, *k.shape[1:]))
        for i, x in enumerate((k, v)):
            send[:, i] = x.index_select(0, route.sent)
        fetched = send.new_empty((sum(route.fetched_rows), *send.shape[1:]))
        work = dist.all_to_all_single(
            fetched, send, route.fetched_rows, route.sent_rows, group=self.group, async_op=True
        )

        def arrive() -> tuple[Tensor, Tensor]:
            assert work is not None
            work.wait()
            return fetched[:, 0], fetched[:, 1]

        return arrive
