"""Keys in a ring: at every step a block of keys moves on to the next position, and is attended to where it stands.

As in ring attention (Liu et al., 2023), with the documents' masks as segments: a step is the varlen calls over those
spans of this position's queries and that block's keys that exist, never a mask over the sequence. The next block is
received into a second buffer meanwhile. Memory does not grow with the number of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.torch.attention.kernels import accumulator
from wlb.torch.attention.merge import AttendBackward
from wlb.torch.attention.segments import UNLIMITED, Call, Calls, Segments, meet


@dataclass(frozen=True)
class RingRoute:
    """One rank's part in a ring: `steps[s]` are the kernel calls on keys of position `self - s`."""

    position: int
    steps: list[list[Call]]
    rows: list[int]  # keys of every position

    @classmethod
    def make(
        cls,
        held: Sequence[Segments],
        position: int,
        *,
        left: int,
        right: int,
        positions_matter: bool,
    ) -> RingRoute:
        """The route of `position`, where position `i` holds `held[i]`, in packed order. Its tensors are on the host.

        A query sees `left` tokens before and `right` tokens after itself.
        """
        calls = Calls(held[position].num_tokens, positions_matter=positions_matter)
        steps = []
        for step in range(len(held)):
            q, k = held[position], held[(position - step) % len(held)]
            if step == 0 and left == UNLIMITED and not positions_matter:
                # Among its own tokens only their order counts: one call, a square for each document.
                q = k = q.closed_up()
            steps.append(calls.add(meet(q, k, left, right), num_keys=k.num_tokens))
        return cls(position, steps, [segments.num_tokens for segments in held])


@dataclass(frozen=True)
class Ring:
    """Exchanges keys around a ring by send and receive, keys and values together; gradients travel with their keys.

    `peers` are the ranks of the positions in `group`. A position without keys sends nothing, and none waits for it.
    """

    route: RingRoute
    peers: Sequence[int]
    group: dist.ProcessGroup | None

    def forward(self, k: Tensor, v: Tensor, attend: Callable[[Tensor, Tensor, Sequence[Call]], None]) -> None:
        """See `KeyExchange`."""
        if len(self.peers) == 1:
            attend(k, v, self.route.steps[0])
            return
        block = torch.stack((k, v))
        for step, calls in enumerate(self.route.steps):
            arrive = self._pass_on(block, step) if step + 1 < len(self.peers) else None
            attend(block[0], block[1], calls)
            if arrive is not None:
                block = arrive()

    def backward(self, k: Tensor, v: Tensor, attend: AttendBackward) -> tuple[Tensor, Tensor]:
        """See `KeyExchange`. A gradient is sent on while the next block's is computed, and ends at its owner."""
        if len(self.peers) == 1:
            return attend(k, v, self.route.steps[0])
        block = torch.stack((k, v))
        gradient: Callable[[], Tensor] | None = None  # of the keys of this step, from the positions they were at before
        for step, calls in enumerate(self.route.steps):
            arrive = self._pass_on(block, step) if step + 1 < len(self.peers) else None
            total = block.new_empty(block.shape, dtype=accumulator(block.dtype))
            attend(block[0], block[1], calls, (total[0], total[1]))
            if gradient is not None:
                total += gradient()
            gradient = self._pass_on(total, step)
            if arrive is not None:
                block = arrive()
        assert gradient is not None
        dk, dv = gradient()
        return dk, dv

    def _pass_on(self, block: Tensor, step: int) -> Callable[[], Tensor]:
        """Sends the block of this step to the next position; call the result to wait for the block of the next step."""
        size, position = len(self.peers), self.route.position
        following = self.route.rows[(position - step - 1) % size]
        received = block.new_empty((2, following, *block.shape[2:]))
        operations = []
        if block.shape[1]:
            to = self.peers[(position + 1) % size]
            operations.append(dist.P2POp(dist.isend, block, group=self.group, group_peer=to))
        if following:
            source = self.peers[(position - 1) % size]
            operations.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=source))
        works = dist.batch_isend_irecv(operations) if operations else []

        def arrive() -> Tensor:
            for work in works:
                work.wait()
            operations.clear()  # until here they kept alive what was being sent
            return received

        return arrive
