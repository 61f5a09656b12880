"""Keys by all-gather: every rank gets the keys that some segment needs from elsewhere, then attends at once.

As in Llama 3's context parallelism, for segments of documents: one varlen call over the gathered keys a rank, since a
segment's keys are neighbours in its document. A segment whose keys are all here (a short document kept whole, a first
chunk, a window) does without: these run in a call of their own while the gather is under way, and keys that only
such segments need are not sent.

Ranks send equal numbers of rows, one fused collective, since NCCL makes one broadcast a rank of unequal counts and gloo
refuses them. A shard's token counts differ by at most one, so without a window the padding is about one row.
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
class GatherRoute:
    """One rank's part in an all-gather of keys."""

    local: list[Call]  # over this rank's own keys
    remote: list[Call]  # over the gathered keys
    sent: Tensor | None  # int32: rows of this rank's keys that are gathered; None: all
    rows: int  # a rank's rows in the gathered keys, padding included; 0: nothing is gathered
    cp_size: int

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
    ) -> GatherRoute:
        """The route of `rank`, where rank `i` holds `held[i]`, in packed order. Its tensors are on the host.

        A query sees `left` tokens before and `right` tokens after itself.
        """
        needs = Needs.of(held, documents, left=left, right=right)
        needed = needs.keys(*range(len(held)))
        sent = [places.of(*needed) for places in needs.own]

        counts = [int(places.length.sum()) for places in sent]
        rows = max(counts)
        gathered = one_after_another(sent, first_rows=np.arange(len(sent)) * rows)

        num_keys = held[rank].num_tokens
        whole = counts[rank] == num_keys == rows
        calls = Calls(num_keys, positions_matter=positions_matter)
        return cls(
            local=calls.add(needs.local(rank), num_keys=num_keys, places=needs.own[rank]),
            remote=calls.add(needs.remote[rank], num_keys=len(held) * rows, places=gathered),
            sent=None if whole else torch.from_numpy(ranges(sent[rank].row, sent[rank].length, np.int32)),
            rows=rows,
            cp_size=len(held),
        )


@dataclass(frozen=True)
class AllGather:
    """Exchanges keys by all-gather, their gradients by reduce-scatter. Keys and values travel together.

    The backward gathers again instead of keeping other ranks' keys; its reduce-scatter is not overlapped.
    """

    route: GatherRoute
    group: dist.ProcessGroup | None

    def forward(self, k: Tensor, v: Tensor, attend: Callable[[Tensor, Tensor, Sequence[Call]], None]) -> None:
        """See `KeyExchange`."""
        arrive = self._gather(k, v)
        attend(k, v, self.route.local)
        if arrive is not None:
            attend(*arrive(), self.route.remote)

    def backward(self, k: Tensor, v: Tensor, attend: AttendBackward) -> tuple[Tensor, Tensor]:
        """See `KeyExchange`."""
        arrive = self._gather(k, v)
        dk, dv = attend(k, v, self.route.local)
        if arrive is None:
            return dk, dv
        keys, values = arrive()
        both = keys.new_empty((keys.shape[0], 2, *keys.shape[1:]), dtype=accumulator(keys.dtype))
        attend(keys, values, self.route.remote, (both[:, 0], both[:, 1]))
        home = both.new_empty((self.route.rows, *both.shape[1:]))
        dist.reduce_scatter_tensor(home, both, group=self.group)
        if self.route.sent is None:
            return dk.add_(home[:, 0]), dv.add_(home[:, 1])
        home = home[: self.route.sent.numel()]
        return dk.index_add_(0, self.route.sent, home[:, 0]), dv.index_add_(0, self.route.sent, home[:, 1])

    def _gather(self, k: Tensor, v: Tensor) -> Callable[[], tuple[Tensor, Tensor]] | None:
        """Starts it; call the result to wait for keys and values, each `[cp_size * rows, kv_heads, head_dim]`."""
        route = self.route
        if route.rows == 0:
            return None
        send = k.new_empty((route.rows, 2, *k.shape[1:]))
        for i, x in enumerate((k, v)):
            chosen = x if route.sent is None else x.index_select(0, route.sent)
            send[: chosen.shape[0], i] = chosen
        send[chosen.shape[0] :] = 0  # padding: no rank reads it; new memory may hold anything
        everything = send.new_empty((route.cp_size * route.rows, *send.shape[1:]))
        work = dist.all_gather_into_tensor(everything, send, group=self.group, async_op=True)

        def arrive() -> tuple[Tensor, Tensor]:
            assert work is not None
            work.wait()
            return everything[:, 0], everything[:, 1]

        return arrive
