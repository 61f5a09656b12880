"""Keys to the ranks that need them, by all-gather or all-to-all: every rank attends at once.

Documents of which a rank has all keys that it sees run in a call over the rank's own tensors while others' keys are
under way, if there are enough of them; they are its first rows. The others run over a buffer: the rank's own keys, and
behind them what arrives; one varlen call over what its segments see of it. No query is in both calls, so that nothing
is merged: both write their rows of one output.

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

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.torch.attention.merge import Attend, AttendBackward, Heads
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
    fetch: bool
    group: dist.ProcessGroup | None
    parts: int = 1  # of the heads, computed one after the other

    @property
    def once(self) -> bool:
        """See `KeyExchange`."""
        return True

    def forward(self, k: Tensor, v: Tensor, attend: Attend) -> None:
        """See `KeyExchange`."""
        for heads, own, take in self._parts(k, v):
            attend(own, self.plan.local, heads)
            if take is not None:
                attend(take(), self.plan.remote, heads)

    def backward(self, k: Tensor, v: Tensor, attend: AttendBackward) -> Tensor:
        """See `KeyExchange`."""
        plan = self.plan
        of_local, of_remote, coming = plan.gradients
        total: Tensor | None = None  # the gradients of all heads, if they come in parts
        finish: Callable[[], Tensor] | None = None
        for heads, own, take in self._parts(k, v):
            # Gradients of keys, of all calls and of what comes home.
            gradients = k.new_empty((of_local + of_remote + coming, 2, *own[0].shape[1:]))
            local, remote, home = torch.split(gradients, [of_local, of_remote, coming])
            last = heads.part > 0 and heads.part == heads.parts - 1
            if not last:
                attend(own, plan.local, heads, local)
            if take is not None:
                attend(take(), plan.remote, heads, remote)
            if finish is not None:
                # Gradients of the heads before, sent home while these are computed.
                total = k.new_empty((k.shape[0], 2, *k.shape[1:])) if total is None else total
                total.chunk(heads.parts, 2)[heads.part - 1].copy_(finish())
            finish = self._send_home(gradients, home)
            if last:
                attend(own, plan.local, heads, local)
            del gradients, local, remote, home
        assert finish is not None
        if total is None:
            return finish()
        total.chunk(self.parts, 2)[-1].copy_(finish())
        return total

    def _parts(
        self, k: Tensor, v: Tensor
    ) -> Iterator[tuple[Heads, tuple[Tensor, Tensor], Callable[[], Tensor] | None]]:
        """Parts of the heads, their own keys and values, and what waits for the keys of remote calls.

        It has the next part sent, too: the buffer of one part is free before that of the next is made.
        """
        count = self.parts
        own = list(zip(k.chunk(count, 1), v.chunk(count, 1), strict=True)) if count > 1 else [(k, v)]
        arrive = self._exchange(*own[0])
        for index, keys in enumerate(own):

            def take(index: int = index) -> Tensor:
                nonlocal arrive
                assert arrive is not None
                picked, arrive = pick(arrive(), self.plan.picked), None
                if index + 1 < count:
                    arrive = self._exchange(*own[index + 1])
                return picked

            yield Heads(index, count), keys, None if arrive is None else take

    def _send_home(self, gradients: Tensor, home: Tensor) -> Callable[[], Tensor]:
        """Starts it; call the result for the gradient of own keys, `[tokens, 2, kv_heads, head_dim]`."""
        plan, shape = self.plan, gradients.shape[1:]
        flat = gradients.flatten(1)
        if not plan.moves:
            return lambda: plan.own.of(flat).view(-1, *shape)
        going = plan.going.of(flat) if plan.going.count else flat[:0]
        work = dist.all_to_all_single(
            home, going.view(-1, *shape), plan.coming_rows, plan.going_rows, group=self.group, async_op=True
        )

        def finish() -> Tensor:
            nonlocal going
            assert work is not None
            work.wait()
            del going  # the send ends here, so its buffer may go
            return plan.own.of(flat).view(-1, *shape)

        return finish

    def _exchange(self, k: Tensor, v: Tensor) -> Callable[[], Tensor] | None:
        """Starts it; call the result to wait for the buffer, `[rows, 2, kv_heads, head_dim]`."""
        plan = self.plan
        if not plan.moves:
            return None
        buffer = k.new_empty((plan.own_rows + plan.arriving, 2, *k.shape[1:]))
        own, arriving = torch.split(buffer, [plan.own_rows, plan.arriving])
        tokens = k.shape[0] - plan.first
        if tokens:
            if plan.first:
                k, v = k[plan.first :], v[plan.first :]
            torch.stack((k, v), 1, out=own if tokens == plan.own_rows else own[:tokens])
        send = pick(own, plan.sent)
        if self.fetch:
            work = dist.all_to_all_single(
                arriving, send, plan.arriving_rows, plan.sent_rows, group=self.group, async_op=True
            )
        else:
            work = dist.all_gather_into_tensor(arriving, send, group=self.group, async_op=True)

        def arrive() -> Tensor:
            assert work is not None
            work.wait()
            return buffer

        return arrive


def head_parts(plan: KeysPlan, k: Tensor) -> int:
    """Into how many parts heads are divided, so that what is gathered of one has no more than `GATHERED` bytes.

    The same on all ranks.
    """
    _, heads, head_dim = k.shape
    whole = 2 * plan.gathered * heads * head_dim * k.element_size()
    divisors = [parts for parts in range(1, heads) if heads % parts == 0]
    return next((parts for parts in divisors if whole <= parts * GATHERED), heads)
