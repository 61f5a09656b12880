"""Keys to the ranks that need them, by all-gather or all-to-all: every rank attends at once.

Documents of which a rank has all keys that it sees run in a call over the rank's own tensors while others' keys are
under way, if there are enough of them; they are its first rows. The others run over a buffer: the rank's own keys, and
behind them what arrives; one varlen call over what its segments see of it. No query is in both calls, so that nothing
is merged: both write their rows of one output. Only short samples of a forest behind a long prompt are merged of two
parts, since that is cheaper than a copy of the prompt's keys for each (`wlb_core::sharding::execution` says when).

`all_gather` gathers the keys that some rank needs from another, as Llama 3's context parallelism does. Ranks send equal
numbers of rows, one fused collective, since NCCL makes one broadcast a rank of unequal counts and gloo refuses them; a
shard's token counts differ by at most one, so without a window the padding is about one row.

`fetch` sends to each rank only what that one needs, `wlb.Shard.keys_moved` rows: where documents lie on few ranks
(`wlb.shard`'s "auto") a fraction of a full gather; where every document lies on all ranks three quarters of one on
average, in as many messages as there are pairs of ranks.

Gradients go home as `fetch` brings keys, in both: from every rank those of the keys that it saw, each summed there over
its segments, in the dtype of the keys, by all-to-all. That is at most half of the bytes of a reduce-scatter in float32,
and needs no float32 of all keys. At home all are summed at once, in float32 for half precision.
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
"""Bytes of keys and values that are gathered, of the heads that are computed together."""


@dataclass(frozen=True)
class KeysExchange:
    """Exchanges keys and values together, their gradients the way back.

    Many heads are taken in parts, so that memory is bounded; one part's keys come, and the gradients of the one before
    go home, while it is computed. Of the first part the local calls run while its keys come, of the last one while its
    gradients go. The backward exchanges keys again instead of keeping other ranks'.
    """

    plan: KeysPlan
    parts: int = 1  # of the heads, computed one after the other

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
                if index + 1 < self.parts:  # the buffer of one part is free before that of the next is made
                    arriving.append(self._exchange(*parts[index + 1][1], group))
                if plan.remote:
                    attend(picked, plan.remote, heads)
                del picked

    def backward(self, k: Tensor, v: Tensor, attend: AttendBackward, group: dist.ProcessGroup | None) -> Tensor:
        """See `KeyExchange`."""
        plan, parts = self.plan, self._parts(k, v)
        shape = (-1, 2, k.shape[1] // self.parts, k.shape[2])
        rows, width = sum(plan.gradients), 2 * shape[2] * shape[3]
        total: Tensor | None = None  # the gradients of all heads, if they come in parts
        finish: Callable[[], Tensor] | None = None
        arriving = [self._exchange(*parts[0][1], group)] if plan.moves else []
        for index, (heads, own) in enumerate(parts):
            # Gradients of keys, of all calls and of what comes home.
            gradients = k.new_empty((rows, *shape[1:]))
            local, remote, home = (
                gradients.split_with_sizes(plan.gradients) if plan.moves else (gradients, gradients, None)
            )
            last = plan.moves and 0 < index == self.parts - 1
            if plan.local and not last:
                attend(own, plan.local, heads, local)
            if arriving:
                picked = self._picked(*arriving.pop())
                if index + 1 < self.parts:  # the buffer of one part is free before that of the next is made
                    arriving.append(self._exchange(*parts[index + 1][1], group))
                if plan.remote:
                    attend(picked, plan.remote, heads, remote)
                del picked
            if finish is not None:
                # Gradients of the heads before, sent home while these are computed.
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
        """Parts of the heads, with their own keys and values."""
        if self.parts == 1:
            return [(ALL_HEADS, (k, v))]
        own = zip(k.chunk(self.parts, 1), v.chunk(self.parts, 1), strict=True)
        return [(Heads(index, self.parts), keys) for index, keys in enumerate(own)]

    def _send_home(self, flat: Tensor, home: Tensor | None, group: dist.ProcessGroup | None) -> Callable[[], Tensor]:
        """Starts it; call the result for the gradient of own keys, `[tokens, 2 * kv_heads * head_dim]`."""
        plan = self.plan
        if home is None:
            return lambda: plan.own.of(flat)
        going = (plan.going.of(flat) if plan.going.count else flat[:0]).view(-1, *home.shape[1:])
        work = dist.all_to_all_single(home, going, plan.coming_rows, plan.going_rows, group=group, async_op=True)

        def finish() -> Tensor:
            nonlocal going
            assert work is not None
            work.wait()
            del going  # the send ends here, so its buffer may go
            return plan.own.of(flat)

        return finish

    def _exchange(self, k: Tensor, v: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Any]:
        """Starts it: the buffer, `[rows, 2, kv_heads, head_dim]`, and what is to be awaited before it is read."""
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
        """What the remote calls take of the buffer, once it is complete."""
        work.wait()
        return pick(buffer, self.plan.picked)


def head_parts(plan: KeysPlan, kv_heads: int, head_bytes: int) -> int:
    """Into how many parts heads are divided, so that what is gathered of one has no more than `GATHERED` bytes.

    The same on all ranks.

    Args:
        plan: Of one rank.
        kv_heads: Key heads.
        head_bytes: Bytes of a key and its value in one head.
    """
    whole = plan.gathered * kv_heads * head_bytes
    divisors = [parts for parts in range(1, kv_heads) if kv_heads % parts == 0]
    return next((parts for parts in divisors if whole <= parts * GATHERED), kv_heads)
