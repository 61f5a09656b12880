"""One context-parallel rank by itself: the keys of the others are there, as if their gather were over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import wlb
from wlb.torch.attention import routes
from wlb.torch.attention.all_gather import GatherRoute
from wlb.torch.attention.merge import AttendBackward
from wlb.torch.attention.segments import Call

Attend = Callable[[Tensor, Tensor, Sequence[Call]], None]


@dataclass
class GatheredKeys:
    """The keys of all ranks; their gradients are kept, not sent home."""

    route: GatherRoute
    k: Tensor
    v: Tensor
    gradients: tuple[Tensor, Tensor] | None = None  # of `k` and `v`, after a backward

    def forward(self, k: Tensor, v: Tensor, attend: Attend) -> None:
        attend(k, v, self.route.local)
        attend(self.k, self.v, self.route.remote)

    def backward(self, k: Tensor, v: Tensor, attend: AttendBackward) -> tuple[Tensor, Tensor]:
        dk, dv = attend(k, v, self.route.local)
        self.gradients = attend(self.k, self.v, self.route.remote)
        return dk, dv


@dataclass(frozen=True)
class Rank:
    """A rank of a shard.

    Args:
        tokens: int64[tokens of the rank], in the packed sequence.
        gathered: int64[rows of the gather], likewise; of rows that are padding, -1.
    """

    route: GatherRoute
    tokens: Tensor
    gathered: Tensor

    @classmethod
    def of(cls, shard: wlb.Shard, rank: int, *, window: int | None, device: torch.device) -> Rank:
        """What it holds and what it would be sent."""
        made = [routes.gather_route(shard, r, window=window, biased=False, device=device) for r in range(len(shard))]
        held = [torch.from_numpy(shard.rank(r).token_indices.astype(np.int64)).to(device) for r in range(len(shard))]
        route = made[rank]
        gathered = torch.full((route.cp_size * route.rows,), -1, dtype=torch.int64, device=device)
        for r, (other, tokens) in enumerate(zip(made, held, strict=True)):
            sent = tokens if other.sent is None else tokens[other.sent]
            # Where nothing is gathered there are no rows at all.
            gathered[r * route.rows : r * route.rows + len(sent)] = sent[: route.rows]
        return cls(route, held[rank], gathered)

    def exchange(self, k: Tensor, v: Tensor) -> GatheredKeys:
        """The gathered keys and values, of those of the packed sequence."""
        rows = self.gathered.clamp(min=0)
        return GatheredKeys(self.route, k[rows], v[rows])

    @property
    def calls(self) -> list[tuple[Call, bool]]:
        """All kernel calls, and whether each is over gathered keys."""
        return [*((call, False) for call in self.route.local), *((call, True) for call in self.route.remote)]
