"""Keys to the ranks that need them, by all-gather or all-to-all: every rank attends at once.

A rank's own keys lie in a buffer, and behind them what arrives; one varlen call runs over what its segments see of it. A
segment whose keys are all here (a short document kept whole, a first chunk) does without: if there are enough of these,
they run in a call of their own over the rank's own tensors, while the others' keys are under way. No query is in both
calls, so that nothing is merged.

`all_gather` gathers the keys that some rank needs from another, as Llama 3's context parallelism does. Ranks send equal
numbers of rows, one fused collective, since NCCL makes one broadcast a rank of unequal counts and gloo refuses them; a
shard's token counts differ by at most one, so without a window the padding is about one row.

`fetch` sends to each rank only what that one needs, `wlb.Shard.keys_moved` rows: where documents lie on few ranks
(`wlb.shard`'s "auto") a fraction of a full gather; where every document lies on all ranks three quarters of one on
average, in as many messages as there are pairs of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.torch.attention.kernels import accumulator
from wlb.torch.attention.merge import Attend, AttendBackward
from wlb.torch.attention.plan import KeysPlan, add, pick


@dataclass(frozen=True)
class KeysExchange:
    """Exchanges keys and values together, their gradients the way back.

    The backward exchanges keys again instead of keeping other ranks'; the way back is not overlapped. All-gathered
    gradients are summed on the way, in float32 for half precision; those of `fetch` travel in the dtype of the keys.
    """

    plan: KeysPlan
    fetch: bool
    group: dist.ProcessGroup | None

    @property
    def once(self) -> bool:
        """See `KeyExchange`."""
        return True

    def forward(self, k: Tensor, v: Tensor, attend: Attend) -> None:
        """See `KeyExchange`."""
        arrive = self._exchange(k, v)
        attend((k, v), self.plan.local)
        if arrive is not None:
            attend(arrive(), self.plan.remote)

    def backward(self, k: Tensor, v: Tensor, attend: AttendBackward) -> Tensor:
        """See `KeyExchange`."""
        plan = self.plan
        arrive = self._exchange(k, v)
        gradients = attend((k, v), plan.local)
        if arrive is not None:
            gradients += attend(arrive(), plan.remote)
        total = self._by_row(gradients, k)
        if arrive is None:
            return total[: k.shape[0]]
        back = total[plan.own_rows :]
        if self.fetch:
            home = k.new_empty((sum(plan.sent_rows), 2, *k.shape[1:]))
            dist.all_to_all_single(home, back.to(k.dtype), plan.sent_rows, plan.arriving_rows, group=self.group)
        else:
            home = back.new_empty((plan.arriving_rows[0], 2, *k.shape[1:]))
            dist.reduce_scatter_tensor(home, back, group=self.group)
            if plan.num_needed < home.shape[0]:
                home = home[: plan.num_needed]
        own = total[: k.shape[0]].to(accumulator(k.dtype))
        if plan.num_needed:
            add(own, plan.needed, home)
        return own

    def _by_row(self, gradients: list[Tensor], k: Tensor) -> Tensor:
        """The gradients of calls, one behind the other, added up by row of the buffer."""
        plan, wide = self.plan, accumulator(k.dtype)
        if not gradients:
            return k.new_zeros((plan.own_rows + plan.arriving, 2, *k.shape[1:]), dtype=wide)
        everything = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
        total = pick(everything, plan.gradients)
        if plan.more is not None or (plan.moves and not self.fetch):
            total = total.to(wide)
        if plan.without is not None:
            total.index_fill_(0, plan.without, 0)
        if plan.more is not None:
            add(total, plan.more_rows, pick(everything, plan.more))
        return total

    def _exchange(self, k: Tensor, v: Tensor) -> Callable[[], Tensor] | None:
        """Starts it; call the result to wait for the buffer, `[rows, 2, kv_heads, head_dim]`."""
        plan = self.plan
        if not plan.moves:
            return None
        buffer = k.new_empty((plan.own_rows + plan.arriving, 2, *k.shape[1:]))
        own, arriving = buffer.split((plan.own_rows, plan.arriving))
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
