"""Sends keys to the ranks that need them, by all-gather or all-to-all, before attention is computed.

A rank may hold all keys that the queries of some documents see. If there are enough such documents, a *local* call
computes them over the rank's own tensors while other ranks' keys arrive. A *remote* call computes all other documents
over a buffer: the rank's own keys, followed by the keys that arrive. No query is in both calls, so each call writes its
rows of one output and nothing is merged. The exception is a forest with short samples behind a long prompt: merging two
outputs per query is then cheaper than copying the prompt's keys for each sample (`wlb_core::sharding::execution`).

`all_gather` gathers the keys that any rank needs from another, as Llama 3's context parallelism does. All ranks send
equally many rows: with unequal counts, NCCL makes one broadcast per rank instead of one collective, and gloo raises. A
shard's token counts differ by at most one, so without a window the padding is about one row.

`fetch` sends each rank only the keys that it needs, `wlb.Shard.keys_moved` rows in total. If documents lie on few ranks
(strategy "auto" of `wlb.shard`), that is a fraction of an all-gather. If every document lies on all ranks, it is three
quarters of one on average, with one message per pair of ranks.

With both transports, gradients of keys return by all-to-all: each rank sums the gradients of another rank's keys over
its own segments and sends the sums in the dtype of the keys. That takes at most half of the bytes of a float32
reduce-scatter, and no float32 copy of all keys. The owner adds up what arrives, in float32 for half precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.torch.attention.merge import ALL_HEADS, Attend, AttendBackward, Heads
from wlb.torch.attention.plan import KeysPlan, pick

GATHERED = 1 << 28
"""Most bytes of gathered keys and values at once. `head_parts` divides the heads to keep to it."""


@dataclass(frozen=True)
class KeysExchange:
    """Exchanges keys and values in one collective, and returns their gradients to the owners.

    Heads are computed in parts to bound memory. While one part is computed, the next part's keys arrive and the
    previous part's gradients are sent. Local calls of the first part run while its own keys arrive; in the backward,
    local calls of the last part run while its gradients are sent. The backward exchanges keys again, so other ranks'
    keys are not kept after the forward.
    """

    plan: KeysPlan
    parts: int = 1  # number of equal parts of the heads, computed one after the other

    @property
    def once(self) -> bool:
        """See `KeyExchange`."""
        return self.plan.once

    def forward(self, k: Tensor, v: Tensor, attend: Attend, group: dist.ProcessGroup | None) -> None:
        """See `KeyExchange`."""
        plan, parts = self.plan, self._parts(k, v)
        arriving = [self._exchange(*parts[0][1], group)] if plan.moves else []
        for index, (heads, own) in enumerate(parts):
            if plan.local:
                attend(own, plan.local, heads)
            if arriving:
                picked = self._picked(*arriving.pop())
                if index + 1 < self.parts:  # only now, so that a copied buffer is freed first
                    arriving.append(self._exchange(*parts[index + 1][1], group))
                if plan.remote:
                    attend(picked, plan.remote, heads)
                del picked

    def backward(self, k: Tensor, v: Tensor, attend: AttendBackward, group: dist.ProcessGroup | None) -> Tensor:
        """See `KeyExchange`."""
        plan, parts = self.plan, self._parts(k, v)
        shape = (-1, 2, k.shape[1] // self.parts, k.shape[2])
        rows, width = sum(plan.gradients), 2 * shape[2] * shape[3]
        total: Tensor | None = None  # gradients of all heads, if there are several parts
        finish: Callable[[], Tensor] | None = None
        arriving = [self._exchange(*parts[0][1], group)] if plan.moves else []
        for index, (heads, own) in enumerate(parts):
            # Gradients of keys: rows of the local calls, of the remote calls, and rows that other ranks send home.
            gradients = k.new_empty((rows, *shape[1:]))
            local, remote, home = (
                gradients.split_with_sizes(plan.gradients) if plan.moves else (gradients, gradients, None)
            )
            last = plan.moves and 0 < index == self.parts - 1
            if plan.local and not last:
                attend(own, plan.local, heads, local)
            if arriving:
                picked = self._picked(*arriving.pop())
                if index + 1 < self.parts:  # only now, so that a copied buffer is freed first
                    arriving.append(self._exchange(*parts[index + 1][1], group))
                if plan.remote:
                    attend(picked, plan.remote, heads, remote)
                del picked
            if finish is not None:
                # The previous part's gradients, which were on their way during this part's calls.
                total = k.new_empty((k.shape[0], 2, *k.shape[1:])) if total is None else total
                total.chunk(self.parts, 2)[index - 1].copy_(finish().view(shape))
            finish = self._send_home(gradients.view(rows, width), home, group)
            if plan.local and last:
                attend(own, plan.local, heads, local)
            del gradients, local, remote, home
        assert finish is not None
        if total is None:
            return finish().view(shape)
        total.chunk(self.parts, 2)[-1].copy_(finish().view(shape))
        return total

    def _parts(self, k: Tensor, v: Tensor) -> list[tuple[Heads, tuple[Tensor, Tensor]]]:
        """The parts of the heads, each with its keys and values of this rank."""
        if self.parts == 1:
            return [(ALL_HEADS, (k, v))]
        own = zip(k.chunk(self.parts, 1), v.chunk(self.parts, 1), strict=True)
        return [(Heads(index, self.parts), keys) for index, keys in enumerate(own)]

    def _send_home(self, flat: Tensor, home: Tensor | None, group: dist.ProcessGroup | None) -> Callable[[], Tensor]:
        """Starts to send gradients home. The returned function waits and gives the gradient of own keys.

        Returns:
            a function that returns `[tokens, 2 * kv_heads * head_dim]`, for the key heads of one part.
        """
        plan = self.plan
        if home is None:
            return lambda: plan.own.of(flat)
        going = (plan.going.of(flat) if plan.going.count else flat[:0]).view(-1, *home.shape[1:])
        work = dist.all_to_all_single(home, going, plan.coming_rows, plan.going_rows, group=group, async_op=True)

        def finish() -> Tensor:
            nonlocal going
            assert work is not None
            work.wait()
            del going  # the send is complete, so its buffer can be freed
            return plan.own.of(flat)

        return finish

    def _exchange(self, k: Tensor, v: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Any]:
        """Starts the exchange; returns the buffer, `[rows, 2, kv_heads, head_dim]`, and the work to wait for."""
        plan = self.plan
        tokens, kv_heads, head_dim = k.shape
        first, own_rows, arriving_rows = plan.buffer
        buffer = k.new_empty((own_rows + arriving_rows, 2, kv_heads, head_dim))
        own, arriving = buffer.split_with_sizes((own_rows, arriving_rows))
        if tokens := tokens - first:
            if first:
                k, v = k[first:], v[first:]
            torch.stack((k, v), 1, out=own if tokens == own_rows else own[:tokens])
        send = pick(own, plan.sent)
        if plan.sent_rows:
            work = dist.all_to_all_single(
                arriving, send, plan.arriving_rows, plan.sent_rows, group=group, async_op=True
            )
        else:
            work = dist.all_gather_into_tensor(arriving, send, group=group, async_op=True)
        return buffer, work

    def _picked(self, buffer: Tensor, work: Any) -> Tensor:
        """Waits for the buffer and returns the rows of it that remote calls read."""
        work.wait()
        return pick(buffer, self.plan.picked)


def head_parts(plan: KeysPlan, kv_heads: int, head_bytes: int) -> int:
    """Least number of equal parts of the heads for which one part gathers at most `GATHERED` bytes.

    If no number of parts suffices, each key head is a part. All ranks get the same number.

    Args:
        plan: plan of any rank; `KeysPlan.gathered` is equal on all.
        kv_heads: number of key heads.
        head_bytes: bytes of a key and its value in one head.
    """
    whole = plan.gathered * kv_heads * head_bytes
    divisors = [parts for parts in range(1, kv_heads) if kv_heads % parts == 0]
    return next((parts for parts in divisors if whole <= parts * GATHERED), kv_heads)
