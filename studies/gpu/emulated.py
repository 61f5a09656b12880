"""One context-parallel rank by itself: the keys of the others are there, as if their gather were over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import wlb
from wlb.torch.attention import kernels
from wlb.torch.attention.merge import ALL_HEADS, Attend, AttendBackward
from wlb.torch.attention.plan import Call, KeysPlan, keys_plan, pick


@dataclass
class GatheredKeys:
    """A rank's buffer of keys, filled; gradients of keys of others are kept, not sent home."""

    plan: KeysPlan
    buffer: Tensor
    gradients: Tensor | None = None  # of the rank's `others`, after a backward

    @property
    def once(self) -> bool:
        return True

    def forward(self, k: Tensor, v: Tensor, attend: Attend, group: object) -> None:
        attend((k, v), self.plan.local, ALL_HEADS)
        attend(pick(self.buffer, self.plan.picked), self.plan.remote, ALL_HEADS)

    def backward(self, k: Tensor, v: Tensor, attend: AttendBackward, group: object) -> Tensor:
        of_local, of_remote, coming = self.plan.gradients
        gradients = k.new_zeros((of_local + of_remote + coming, 2, *k.shape[1:]))
        local, remote, _ = torch.split(gradients, [of_local, of_remote, coming])
        attend((k, v), self.plan.local, ALL_HEADS, local)
        attend(pick(self.buffer, self.plan.picked), self.plan.remote, ALL_HEADS, remote)
        flat = gradients.flatten(1)
        self.gradients = self.plan.going.of(flat).view(-1, *gradients.shape[1:])
        return self.plan.own.of(flat).view(-1, *gradients.shape[1:])


@dataclass(frozen=True)
class Rank:
    """A rank of a shard.

    Args:
        tokens: int64[tokens of the rank], in the packed sequence.
        buffer: int64[rows of the buffer], likewise; of rows that nobody reads, -1.
        others: int64[rows whose gradients go home], likewise.
    """

    plan: KeysPlan
    tokens: Tensor
    buffer: Tensor
    others: Tensor

    @classmethod
    def of(cls, shard: wlb.Shard, rank: int, *, window: int | None, device: torch.device) -> Rank:
        """What it holds and what it would be sent."""
        options = {"fetch": False, "window": window, "biased": False, "device": device}
        options["buckets"] = kernels.is_prepared_in_buckets(device)
        made = [keys_plan(shard, r, **options) for r in range(len(shard))]  # type: ignore[arg-type]
        held = [torch.from_numpy(shard.rank(r).token_indices.astype(np.int64)).to(device) for r in range(len(shard))]
        parts = []
        for other, tokens in zip(made, held, strict=True):
            filler = tokens.new_full((other.first + other.own_rows - tokens.numel(),), -1)
            parts.append(torch.cat((tokens[other.first :], filler)))
        mine = made[rank]
        arriving = [
            pick(part, other.sent) if r != rank and mine.moves else part.new_full((mine.arriving_rows[r],), -1)
            for r, (other, part) in enumerate(zip(made, parts, strict=True))
        ]
        buffer = torch.cat((parts[rank], *arriving))
        # Of each gradient its token, and of each sum of gradients: that of any of them, since all have the same.
        seen = [pick(held[rank], call.k_rows) for call in mine.local]
        seen += [pick(pick(buffer, mine.picked), call.k_rows) for call in mine.remote]
        tokens = torch.cat((*seen, buffer.new_zeros(mine.gradients[2]))).double().unsqueeze(1)
        others = (mine.going.of(tokens) / mine.going.of(torch.ones_like(tokens))) if mine.going.count else tokens[:0]
        return cls(mine, held[rank], buffer, others.flatten().round().long())

    def exchange(self, k: Tensor, v: Tensor) -> GatheredKeys:
        """The keys and values of its buffer, of those of the packed sequence."""
        rows = self.buffer.clamp(min=0)
        return GatheredKeys(self.plan, torch.stack((k[rows], v[rows]), 1))

    def calls(self, k: Tensor, v: Tensor, buffer: Tensor) -> Iterator[tuple[Call, Tensor, Tensor]]:
        """All kernel calls with their keys and values; `k` and `v` are the rank's own."""
        for call in self.plan.local:
            yield call, pick(k, call.k_rows), pick(v, call.k_rows)
        for call in self.plan.remote:
            yield (call, *pick(pick(buffer, self.plan.picked), call.k_rows).unbind(1))
