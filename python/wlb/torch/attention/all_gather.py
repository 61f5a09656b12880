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

from wlb.torch.attention.segments import Call, Calls, Ints, Segments, meet


@dataclass(frozen=True)
class GatherPlan:
    """What one rank does in an all-gather of keys."""

    local: list[Call]  # over this rank's own keys
    remote: list[Call]  # over the gathered keys
    sent: Tensor | None  # int64: rows of this rank's keys that are gathered; None: all
    rows: int  # a rank's rows in the gathered keys, padding included; 0: nothing is gathered
    cp_size: int

    @classmethod
    def make(
        cls,
        tokens: Sequence[Ints],
        lengths: Ints,
        rank: int,
        *,
        left: int,
        right: int,
        positions_matter: bool,
        device: torch.device,
    ) -> GatherPlan:
        """The plan of `rank`, where rank `i` holds the tokens `tokens[i]` of the packed sequence of `lengths`.

        A query sees `left` tokens before and `right` tokens after itself.
        """
        total = int(lengths.sum())
        offsets = np.cumsum(lengths) - lengths
        documents = Segments.of_documents(lengths)
        owner = np.empty(total, np.int64)
        for i, held in enumerate(tokens):
            owner[held] = i
        run = np.cumsum(np.diff(owner, prepend=-1) != 0)  # of tokens that stand on one rank

        mine = (meet(Segments.of_tokens(tokens[rank], offsets), documents, left, right), np.zeros(0, bool))
        edges = np.zeros(total + 1, np.int64)
        for i, held in enumerate(tokens):
            spans = meet(Segments.of_tokens(held, offsets), documents, left, right)
            last = spans.k_row + spans.k_length - 1
            here = (owner[spans.k_row] == i) & (run[spans.k_row] == run[last])
            np.add.at(edges, spans.k_row[~here], 1)
            np.add.at(edges, last[~here] + 1, -1)
            if i == rank:
                mine = (spans, here)
        needed = np.cumsum(edges[:-1]) > 0

        sent = [np.flatnonzero(needed[held]) for held in tokens]
        rows = max(s.size for s in sent)
        own_row, gathered_row = np.zeros(total, np.int64), np.zeros(total, np.int64)
        own_row[tokens[rank]] = np.arange(tokens[rank].size)
        for i, (held, chosen) in enumerate(zip(tokens, sent, strict=True)):
            gathered_row[held[chosen]] = i * rows + np.arange(chosen.size)

        spans, here = mine
        calls = Calls(tokens[rank].size, positions_matter=positions_matter, device=device)
        local = calls.add(spans[here], num_keys=tokens[rank].size, key_rows=own_row)
        remote = calls.add(spans[~here], num_keys=len(tokens) * rows, key_rows=gathered_row)
        whole = sent[rank].size == tokens[rank].size == rows
        return cls(local, remote, None if whole else torch.from_numpy(sent[rank]).to(device), rows, len(tokens))


@dataclass(frozen=True)
class AllGather:
    """Exchanges keys by all-gather, their gradients by reduce-scatter. Keys and values travel together.

    The backward gathers again instead of keeping other ranks' keys; its reduce-scatter is not overlapped.
    """

    plan: GatherPlan
    group: dist.ProcessGroup | None

    def forward(self, k: Tensor, v: Tensor, attend: Callable[[Tensor, Tensor, Sequence[Call]], None]) -> None:
        """See `KeyExchange`."""
        arrive = self._gather(k, v)
        attend(k, v, self.plan.local)
        if arrive is not None:
            attend(*arrive(), self.plan.remote)

    def backward(
        self, k: Tensor, v: Tensor, attend: Callable[[Tensor, Tensor, Sequence[Call]], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """See `KeyExchange`."""
        arrive = self._gather(k, v)
        dk, dv = attend(k, v, self.plan.local)
        if arrive is None:
            return dk, dv
        both = torch.stack(attend(*arrive(), self.plan.remote), dim=1)
        home = both.new_empty((self.plan.rows, *both.shape[1:]))
        dist.reduce_scatter_tensor(home, both, group=self.group)
        if self.plan.sent is None:
            return dk + home[:, 0], dv + home[:, 1]
        home = home[: self.plan.sent.numel()]
        return dk.index_add(0, self.plan.sent, home[:, 0]), dv.index_add(0, self.plan.sent, home[:, 1])

    def _gather(self, k: Tensor, v: Tensor) -> Callable[[], tuple[Tensor, Tensor]] | None:
        """Starts it; call the result to wait for keys and values, each `[cp_size * rows, kv_heads, head_dim]`."""
        plan = self.plan
        if plan.rows == 0:
            return None
        send = k.new_empty((plan.rows, 2, *k.shape[1:]))  # rows of padding are never read
        for i, x in enumerate((k, v)):
            chosen = x if plan.sent is None else x.index_select(0, plan.sent)
            send[: chosen.shape[0], i] = chosen
        everything = send.new_empty((plan.cp_size * plan.rows, *send.shape[1:]))
        work = dist.all_gather_into_tensor(everything, send, group=self.group, async_op=True)

        def arrive() -> tuple[Tensor, Tensor]:
            assert work is not None
            work.wait()
            return everything[:, 0], everything[:, 1]

        return arrive
