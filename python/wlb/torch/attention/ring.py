"""Keys in a ring: at every step a block of keys moves on to the next position, and is attended to where it stands.

As in ring attention (Liu et al., 2023), with the documents' masks as segments: a step is the varlen calls over those
spans of this position's queries and that block's keys that exist, never a mask over the sequence. The next block is
received into a second buffer meanwhile. Memory does not grow with the number of positions. A block goes no farther than
the last position that computes over it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.torch.attention.kernels import accumulator
from wlb.torch.attention.merge import ALL_HEADS, Attend, AttendBackward, Keys
from wlb.torch.attention.plan import Call, RingPlan, add

_CONNECTED: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


@dataclass(frozen=True)
class Ring:
    """Exchanges keys around a ring by send and receive, keys and values together; gradients follow their keys.

    `peers` are the ranks of the positions in `group`.
    """

    plan: RingPlan
    peers: Sequence[int]
    group: dist.ProcessGroup | None

    @property
    def once(self) -> bool:
        """See `KeyExchange`."""
        return self.plan.once

    def forward(self, k: Tensor, v: Tensor, attend: Attend) -> None:
        """See `KeyExchange`."""
        if not any(self.plan.last):
            attend((k, v), self.plan.steps[0], ALL_HEADS)
            return
        self._connect(k.device)
        block: Tensor | None = torch.stack((k, v), 1)
        for step, calls in enumerate(self.plan.steps):
            arrive = self._pass_on(block, step, k)
            if block is not None:
                attend(block, calls, ALL_HEADS)
            block = arrive()

    def backward(self, k: Tensor, v: Tensor, attend: AttendBackward) -> Tensor:
        """See `KeyExchange`.

        A gradient goes on with its keys while the next block's is computed; the last that adds to it sends it home.
        """
        plan = self.plan
        if not any(plan.last):
            gradients = self._gradients((k, v), plan.steps[0], attend)
            whole = _sees_all_rows(plan.steps[0])
            return gradients if whole else self._added(k, plan.steps[0], gradients, None, k.shape[0])
        self._connect(k.device)
        block: Tensor | None = torch.stack((k, v), 1)
        own = k.new_empty(0)
        home: Tensor | None = None  # the sum of other ranks' parts
        coming: Callable[[], Tensor | None] = _nothing  # waits for the gradient from earlier positions
        for step, calls in enumerate(plan.steps):
            arrive = self._pass_on(block, step, k)
            total = None
            if block is None:
                coming()  # waits until the last message has arrived
            else:
                gradients = self._gradients(block, calls, attend)
                total = self._added(k, calls, gradients, coming(), block.shape[0])
            if step == 0:
                assert total is not None
                own, total = total, None
            coming, returned = self._return(total, step, own)
            home = returned if home is None else home
            block = arrive()
        coming()
        if home is not None:
            own += home
        return own

    @staticmethod
    def _gradients(keys: Keys, calls: Sequence[Call], attend: AttendBackward) -> Tensor:
        """The gradients of keys, those of all calls one behind the other."""
        like = keys[0] if isinstance(keys, tuple) else keys
        gradients = like.new_empty((sum(call.num_keys for call in calls), 2, *like.shape[-2:]))
        attend(keys, calls, ALL_HEADS, gradients)
        return gradients

    @staticmethod
    def _added(k: Tensor, calls: Sequence[Call], gradients: Tensor, rest: Tensor | None, rows: int) -> Tensor:
        """The gradients of calls over keys of so many rows and what others have added, in the dtype of sums."""
        dtype = accumulator(k.dtype)
        if _sees_all_rows(calls):
            total = gradients.to(dtype)
            return total if rest is None else total.add_(rest)
        if rest is None:
            rest = k.new_zeros((rows, 2, *k.shape[1:]), dtype=dtype)
        for call, gradient in zip(calls, torch.split(gradients, [call.num_keys for call in calls]), strict=False):
            add(rest, call.k_rows, gradient)
        return rest

    def _pass_on(self, block: Tensor | None, step: int, like: Tensor) -> Callable[[], Tensor | None]:
        """Sends this step's keys on if a later position needs them; call the result to wait for the next step's."""
        plan, size, position = self.plan, len(self.peers), self.plan.position
        of, following = (position - step) % size, (position - step - 1) % size
        operations = []
        if block is not None and step < plan.last[of]:
            operations.append(self._operation(dist.isend, block, position + 1))
        received = None
        if step < plan.last[following]:
            received = like.new_empty((plan.rows[following], 2, *like.shape[1:]))
            operations.append(self._operation(dist.irecv, received, position - 1))
        return _wait(operations, received)

    def _return(
        self, total: Tensor | None, step: int, own: Tensor
    ) -> tuple[Callable[[], Tensor | None], Tensor | None]:
        """Sends the gradient of this step's keys on, or home from the last that adds to it.

        Returns:
            What waits for all of it and gives the gradient of the next step's keys; and this position's own, if it
            comes in this step.
        """
        plan, size, position = self.plan, len(self.peers), self.plan.position
        of, following = (position - step) % size, (position - step - 1) % size
        operations = []
        if total is not None and step <= plan.last[of]:
            operations.append(self._operation(dist.isend, total, position + 1 if step < plan.last[of] else of))
        coming = home = None
        if 0 < step < plan.last[following]:
            coming = own.new_empty((plan.rows[following], *own.shape[1:]))
            operations.append(self._operation(dist.irecv, coming, position - 1))
        if 0 < step == plan.last[position]:
            home = torch.empty_like(own)
            operations.append(self._operation(dist.irecv, home, position + step))
        return _wait(operations, coming), home

    def _operation(self, kind: Callable[..., Any], tensor: Tensor, position: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, group=self.group, group_peer=self.peers[position % len(self.peers)])

    def _connect(self, device: torch.device) -> None:
        """NCCL makes the connections of a group in its first collective, in which all of its ranks must take part."""
        group = self.group or dist.group.WORLD
        assert group is not None
        if device.type == "cuda" and group not in _CONNECTED:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            _CONNECTED.add(group)


def _sees_all_rows(calls: Sequence[Call]) -> bool:
    """Whether one call has all rows of the keys, in their order."""
    return len(calls) == 1 and calls[0].k_rows is None


def _nothing() -> None:
    """Wait of a step of the ring in which no message arrives."""


def _wait(operations: list[dist.P2POp], received: Tensor | None) -> Callable[[], Tensor | None]:
    """Starts these; call the result to wait for them."""
    works = dist.batch_isend_irecv(operations) if operations else []

    def arrive() -> Tensor | None:
        while works:
            works.pop().wait()
        operations.clear()  # they kept the sent tensors alive until here
        return received

    return arrive
