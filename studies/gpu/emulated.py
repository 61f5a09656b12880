"""One context-parallel rank by itself: the keys of the others are there, as if their gather were over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import wlb
from wlb.torch.attention.keys import KeysExchange
from wlb.torch.attention.merge import ALL_HEADS, Attend, AttendBackward
from wlb.torch.attention.plan import Call, KeysPlan, keys_plan, pick


@dataclass
class GatheredKeys:
    """A rank's buffer of keys, filled; gradients of keys of others are kept, not sent home."""

    plan: KeysPlan
    buffer: Tensor
    gradients: Tensor | None = None  # of the rows that arrived, after a backward

    @property
    def once(self) -> bool:
        return True

    def forward(self, k: Tensor, v: Tensor, attend: Attend) -> None:
        attend((k, v), self.plan.local, ALL_HEADS)
        attend(self.buffer, self.plan.remote, ALL_HEADS)

    def backward(self, k: Tensor, v: Tensor, attend: AttendBackward) -> Tensor:
        gradients = attend((k, v), self.plan.local, ALL_HEADS) + attend(self.buffer, self.plan.remote, ALL_HEADS)
        total = KeysExchange(self.plan, fetch=False, group=None)._by_row(gradients, k)
        self.gradients = total[self.plan.own_rows :]
        return total[: k.shape[0]]


@dataclass(frozen=True)
class Rank:
    """A rank of a shard.

    Args:
        tokens: int64[tokens of the rank], in the packed sequence.
        gathered: int64[rows that arrive], likewise; of rows that nobody reads, -1.
    """

    plan: KeysPlan
    tokens: Tensor
    gathered: Tensor

    @classmethod
    def of(cls, shard: wlb.Shard, rank: int, *, window: int | None, device: torch.device) -> Rank:
        """What it holds and what it would be sent."""
        options = {"fetch": False, "window": window, "biased": False, "device": device}
        made = [keys_plan(shard, r, **options) for r in range(len(shard))]  # type: ignore[arg-type]
        held = [torch.from_numpy(shard.rank(r).token_indices.astype(np.int64)).to(device) for r in range(len(shard))]
        parts = []
        for r, (other, tokens) in enumerate(zip(made, held, strict=True)):
            part = torch.full((made[rank].arriving_rows[r],), -1, dtype=torch.int64, device=device)
            if r != rank and other.num_needed:
                part[: other.num_needed] = pick(tokens, other.needed)
            parts.append(part)
        return cls(made[rank], held[rank], torch.cat(parts))

    def exchange(self, k: Tensor, v: Tensor) -> GatheredKeys:
        """The keys and values of its buffer, of those of the packed sequence."""
        filler = self.tokens.new_zeros(self.plan.own_rows - self.tokens.numel())
        rows = torch.cat((self.tokens, filler, self.gathered.clamp(min=0)))
        return GatheredKeys(self.plan, torch.stack((k[rows], v[rows]), 1))

    def calls(self, k: Tensor, v: Tensor, buffer: Tensor) -> Iterator[tuple[Call, Tensor, Tensor]]:
        """All kernel calls with their keys and values; `k` and `v` are the rank's own."""
        for call in self.plan.local:
            yield call, pick(k, call.k_rows), pick(v, call.k_rows)
        for call in self.plan.remote:
            yield (call, *pick(buffer, call.k_rows).unbind(1))
