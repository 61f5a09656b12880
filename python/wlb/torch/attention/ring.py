"""Ring attention: at every step each position computes over one block of keys, while blocks move to the next position.

The method is ring attention (Liu et al., 2023) for packed documents: a step computes varlen calls over the spans of
this position's queries and the block's keys, and no mask over the whole sequence. Meanwhile the next block is received
into a second buffer, so memory does not grow with the number of positions. A block stops at the last position that
computes over it, and hops after the last block has stopped are left out.

A hop is one all-to-all in which a rank sends to at most one rank and receives from at most two. NCCL sends nothing for
empty parts, and the all-to-all takes a third of the host time of a batch of single sends and receives.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.torch.attention.kernels import accumulator
from wlb.torch.attention.merge import ALL_HEADS, Attend, AttendBackward, Keys
from wlb.torch.attention.plan import Call, RingPlan, add


@dataclass(frozen=True)
class Hop:
    """Rows that a rank sends and receives between two steps."""

    sent: list[int]  # to each rank of the group
    received: list[int]  # from each rank of the group
    sends: bool  # whether this position passes on its block, or the block's gradients
    coming: int  # received rows that the next step needs
    home: int  # received rows that are gradients of own keys
    home_first: bool  # whether the `home` rows arrive before the `coming` rows
    rows: int  # all received rows


@dataclass(frozen=True)
class Ring:
    """Passes keys and values around a ring in one tensor; gradients follow their keys."""

    plan: RingPlan
    peers: Sequence[int]  # rank of each position in the group
    size: int  # ranks of the group

    @functools.cached_property
    def once(self) -> bool:
        """See `KeyExchange`."""
        return self.plan.once

    @functools.cached_property
    def hops(self) -> list[Hop]:
        """Hops of keys: `hops[s]` passes the block of step `s` to the next position."""
        plan, count, position = self.plan, len(self.peers), self.plan.position
        found = []
        for step in range(max(plan.last)):
            of, following = (position - step) % count, (position - step - 1) % count
            sends, receives = step < plan.last[of], step < plan.last[following]
            found.append(
                self._hop(
                    {position + 1: plan.rows[of]} if sends else {},
                    {position - 1: plan.rows[following]} if receives else {},
                )
            )
        return found

    @functools.cached_property
    def returns(self) -> list[Hop]:
        """Hops of gradients: `returns[s]` passes on the gradient of the keys of step `s`; `returns[0]` is empty.

        The gradient goes to the next position, or home from the last position that adds to it.
        """
        plan, count, position = self.plan, len(self.peers), self.plan.position
        found = [self._hop({}, {})]
        for step in range(1, max(plan.last) + 1):
            of, following = (position - step) % count, (position - step - 1) % count
            sent, received, home = {}, {}, {}
            if step <= plan.last[of]:
                sent = {position + 1 if step < plan.last[of] else of: plan.rows[of]}
            if step < plan.last[following]:
                received = {position - 1: plan.rows[following]}
            if step == plan.last[position]:
                home = {position + step: plan.rows[position]}
            found.append(self._hop(sent, received, home))
        return found

    def _hop(self, sent: dict[int, int], coming: dict[int, int], home: dict[int, int] | None = None) -> Hop:
        """The hop that sends and receives these numbers of rows, given by position."""
        home = home or {}

        def of_ranks(rows: dict[int, int]) -> list[int]:
            found = [0] * self.size
            for position, count in rows.items():
                found[self.peers[position % len(self.peers)]] = count
            return found

        of_coming, of_home = of_ranks(coming), of_ranks(home)
        first = any(of_home) and any(of_coming) and of_home.index(max(of_home)) < of_coming.index(max(of_coming))
        received = [one + other for one, other in zip(of_coming, of_home, strict=True)]
        return Hop(of_ranks(sent), received, bool(sent), sum(of_coming), sum(of_home), first, sum(received))

    def forward(self, k: Tensor, v: Tensor, attend: Attend, group: dist.ProcessGroup | None) -> None:
        """See `KeyExchange`."""
        steps, hops = self.plan.steps, self.hops
        if not hops:
            attend((k, v), steps[0], ALL_HEADS)
            return
        block = torch.stack((k, v), 1)
        for step, calls in enumerate(steps[: len(hops) + 1]):
            hop = hops[step] if step < len(hops) else None
            arriving, work = block, None
            if hop is not None:
                arriving, work = self._start(hop, block, group)
            if calls:
                attend(block, calls, ALL_HEADS)
            if work is not None:
                work.wait()
            block = arriving

    def backward(self, k: Tensor, v: Tensor, attend: AttendBackward, group: dist.ProcessGroup | None) -> Tensor:
        """See `KeyExchange`.

        A gradient travels with its keys while the next block's gradient is computed. The last position that adds to it
        sends it home.
        """
        steps, hops, returns = self.plan.steps, self.hops, self.returns
        if not hops:
            gradients = self._gradients((k, v), steps[0], attend) if steps[0] else None
            whole = _sees_all_rows(steps[0])
            return gradients if whole and gradients is not None else _added(k, steps[0], gradients, None, k.shape[0])
        block = torch.stack((k, v), 1)
        nothing = block.new_empty((0, *block.shape[1:]), dtype=accumulator(k.dtype))
        own = home = coming = None
        under_way: tuple[Hop, Tensor, Tensor, Any] | None = None  # hop, sent and received gradients, work
        for step, calls in enumerate(steps[: len(hops) + 1]):
            last = step == len(hops)
            arriving, work = (block, None) if last else self._start(hops[step], block, group)
            gradients = self._gradients(block, calls, attend) if calls else None
            if under_way is not None:
                coming, came = _awaited(under_way)
                home = came if home is None else home
            if step == 0:
                own = _added(k, calls, gradients, None, k.shape[0])
            else:
                hop = returns[step]
                total = _added(k, calls, gradients, coming, block.shape[0]) if hop.sends else nothing
                under_way = (hop, total, *self._start(hop, total, group))
            if work is not None:
                work.wait()
            block = arriving
        assert own is not None
        assert under_way is not None
        _, came = _awaited(under_way)
        home = came if home is None else home
        return own if home is None else own.add_(home)

    @staticmethod
    def _start(hop: Hop, tensor: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Any]:
        """Starts a hop; returns the receive buffer and the work to wait for. `tensor` must live until then."""
        received = tensor.new_empty((hop.rows, *tensor.shape[1:]))
        sent = tensor if hop.sends else tensor[:0]
        return received, dist.all_to_all_single(received, sent, hop.received, hop.sent, group=group, async_op=True)

    @staticmethod
    def _gradients(keys: Keys, calls: Sequence[Call], attend: AttendBackward) -> Tensor:
        """Gradients of keys and values, call after call."""
        like = keys[0] if isinstance(keys, tuple) else keys
        gradients = like.new_empty((sum(call.num_keys for call in calls), 2, *like.shape[-2:]))
        attend(keys, calls, ALL_HEADS, gradients)
        return gradients


def _awaited(under_way: tuple[Hop, Tensor, Tensor, Any]) -> tuple[Tensor | None, Tensor | None]:
    """Waits for a hop; returns the gradients of the next step's keys and of own keys, None where none arrived."""
    hop, _, received, work = under_way
    work.wait()
    if not (hop.coming and hop.home):
        return (None, received) if hop.home else (received if hop.coming else None, None)
    if hop.home_first:
        home, coming = received.split_with_sizes((hop.home, hop.coming))
        return coming, home
    coming, home = received.split_with_sizes((hop.coming, hop.home))
    return coming, home


def _added(k: Tensor, calls: Sequence[Call], gradients: Tensor | None, rest: Tensor | None, rows: int) -> Tensor:
    """Adds the gradients of calls to `rest`, the sum of other positions, in the accumulation dtype.

    Args:
        k: gives the shape of a row, and the dtype.
        calls: calls over a block of keys.
        gradients: gradients of the calls, call after call; None: no calls.
        rest: sum so far, may be changed in place; None: zeros.
        rows: number of keys of the block.
    """
    dtype = accumulator(k.dtype)
    if gradients is not None and _sees_all_rows(calls):
        total = gradients.to(dtype)
        return total if rest is None else total.add_(rest)
    if rest is None:
        rest = k.new_zeros((rows, 2, *k.shape[1:]), dtype=dtype)
    if gradients is not None:
        for call, gradient in zip(calls, gradients.split_with_sizes([call.num_keys for call in calls]), strict=True):
            add(rest, call.k_rows, gradient)
    return rest


def _sees_all_rows(calls: Sequence[Call]) -> bool:
    """Whether there is one call, over all keys in order."""
    return len(calls) == 1 and calls[0].k_rows is None
