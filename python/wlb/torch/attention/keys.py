"""Keys to the ranks that need them, by all-gather or all-to-all: every rank attends at once.

A rank's own keys lie in a buffer, and behind them what arrives; one varlen call runs over what its segments see of it.
A segment whose keys are all here (a short document kept whole, a first chunk) does without: if there are enough of
these, they run in a call of their own over the rank's own tensors, while the others' keys are under way. No query is in
both calls, so that nothing is merged.

`all_gather` gathers the keys that some rank needs from another, as Llama 3's context parallelism does. Ranks send equal
numbers of rows, one fused collective, since NCCL makes one broadcast a rank of unequal counts and gloo refuses them; a
shard's token counts differ by at most one, so without a window the padding is about one row.

`fetch` sends to each rank only what that one needs, `wlb.Shard.keys_moved` rows: where documents lie on few ranks
(`wlb.shard`'s "auto") a fraction of a full gather; where every document lies on all ranks three quarters of one on
average, in as many messages as there are pairs of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.torch.attention.kernels import accumulator
from wlb.torch.attention.merge import Attend, AttendBackward, Heads
from wlb.torch.attention.plan import KeysPlan, add, pick

GATHERED = 1 << 29
"""Bytes of keys and values of all tokens, of the heads that are computed together; gradients take twice as many."""


@dataclass(frozen=True)
class KeysExchange:
    """Exchanges keys and values together, their gradients the way back.

    Many heads are taken in parts, so that memory is bounded; one part's keys come, and the gradients of the one before
    go home, while it is computed. The backward exchanges keys again instead of keeping other ranks'. All-gathered
    gradients are summed on the way, in float32 for half precision; those of `fetch` travel in the dtype of the keys.
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
        for heads, own, arrive in self._parts(k, v):
            attend(own, self.plan.local, heads)
            if arrive is not None:
                attend(arrive(), self.plan.remote, heads)

    def backward(self, k: Tensor, v: Tensor, attend: AttendBackward) -> Tensor:
        """See `KeyExchange`."""
        plan = self.plan
        done: list[Tensor] = []
        finish: Callable[[], Tensor] | None = None
        for heads, own, arrive in self._parts(k, v):
            gradients = attend(own, plan.local, heads)
            if arrive is not None:
                gradients += attend(arrive(), plan.remote, heads)
                arrive = None  # the buffer is free
            total = self._by_row(gradients, own[0])
            del gradients
            if finish is not None:
                done.append(finish())  # of the heads before: sent home meanwhile
            finish = self._send_home(total, own[0])
            del total
        assert finish is not None
        done.append(finish())
        return done[0] if len(done) == 1 else torch.cat(done, 2)

    def _parts(
        self, k: Tensor, v: Tensor
    ) -> Iterator[tuple[Heads, tuple[Tensor, Tensor], Callable[[], Tensor] | None]]:
        """Parts of the heads, their own keys and values, and what waits for the buffer.

        The next part is under way while one is computed.
        """
        count = self.parts if self.plan.moves else 1
        own = list(zip(k.chunk(count, 1), v.chunk(count, 1), strict=True)) if count > 1 else [(k, v)]
        arrive = self._exchange(*own[0])
        for index, keys in enumerate(own):
            following = self._exchange(*own[index + 1]) if index + 1 < count else None
            now, arrive = arrive, following
            yield Heads(index, count), keys, now
            now = None

    def _send_home(self, total: Tensor, k: Tensor) -> Callable[[], Tensor]:
        """Starts it; call the result for the gradient of own keys, `[tokens, 2, kv_heads, head_dim]`."""
        plan, tokens = self.plan, k.shape[0]
        own = total[:tokens]
        if not plan.moves:
            return lambda: own
        back = total[plan.own_rows :]
        if self.fetch:
            back = back.to(k.dtype)
            home = k.new_empty((sum(plan.sent_rows), 2, *k.shape[1:]))
            work = dist.all_to_all_single(
                home, back, plan.sent_rows, plan.arriving_rows, group=self.group, async_op=True
            )
        else:
            home = back.new_empty((plan.arriving_rows[0], 2, *k.shape[1:]))
            work = dist.reduce_scatter_tensor(home, back, group=self.group, async_op=True)

        def finish() -> Tensor:
            assert work is not None
            work.wait()
            sum_of_all = own.to(accumulator(k.dtype))
            if plan.num_needed:
                needed = home if plan.num_needed == home.shape[0] else home[: plan.num_needed]
                add(sum_of_all, plan.needed, needed)
            return sum_of_all

        return finish

    def _by_row(self, gradients: list[Tensor], k: Tensor) -> Tensor:
        """The gradients of calls, one behind the other, added up by row of the buffer."""
        plan, wide = self.plan, accumulator(k.dtype)
        if not gradients:
            return k.new_zeros((plan.own_rows + plan.arriving, 2, *k.shape[1:]), dtype=wide)
        everything = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
        total = pick(everything, plan.gradients)
        if plan.more is not None or (plan.moves and not self.fetch):
            total = total.to(wide)
        if isinstance(plan.without, Tensor):
            total.index_fill_(0, plan.without, 0)
        elif plan.without is not None:
            total[plan.without] = 0
        if plan.more is not None:
            add(total, plan.more_rows, pick(everything, plan.more))
        return total

    def _exchange(self, k: Tensor, v: Tensor) -> Callable[[], Tensor] | None:
        """Starts it; call the result to wait for the buffer, `[rows, 2, kv_heads, head_dim]`."""
        plan = self.plan
        if not plan.moves:
            return None
        buffer = k.new_empty((plan.own_rows + plan.arriving, 2, *k.shape[1:]))
        own, arriving = torch.split(buffer, [plan.own_rows, plan.arriving])
        if plan.remote or plan.num_needed:
            torch.stack((k, v), 1, out=own if k.shape[0] == plan.own_rows else own[: k.shape[0]])
        send = pick(buffer, plan.sent)
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
    whole = 2 * plan.tokens * heads * head_dim * k.element_size()
    divisors = [parts for parts in range(1, heads) if heads % parts == 0]
    return next((parts for parts in divisors if whole <= parts * GATHERED), heads)
