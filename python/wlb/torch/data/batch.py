"""One micro-batch as one context-parallel rank sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

import wlb

IGNORE: Final = -100
"""The label of a token that predicts nothing; what `torch.nn.functional.cross_entropy` ignores by default."""


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """The tokens of one micro-batch that lie on one context-parallel rank, in the order of `shard.rank(cp_rank)`.

    Attributes:
        tokens: int64 [tokens_of_this_rank].
        labels: int64 [tokens_of_this_rank]: the token that follows in the document, IGNORE at its end.
        position_ids: int64 [tokens_of_this_rank], from 0 in every document, and in every piece of a cut one.
        cu_seqlens: int32 [documents + 1], of the whole packed sequence, on all ranks.
        max_seqlen: The longest document, in tokens; 0 without documents.
        shard: How the packed sequence lies on all context-parallel ranks.
        cp_rank: The rank whose tokens these are.
        document_ids: int64 [documents], in packed order.
        num_valid_tokens: Labels that are not IGNORE, on all context-parallel ranks together.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    shard: wlb.Shard
    cp_rank: int
    document_ids: Tensor
    num_valid_tokens: int

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PackedBatch:
        """The same with its tensors on `device`; `non_blocking` overlaps the copy if they are pinned."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        """The same in page-locked memory; `DataLoader(pin_memory=True)` calls it."""
        return self._map(Tensor.pin_memory)

    def _map(self, work: Callable[[Tensor], Tensor]) -> PackedBatch:
        return replace(
            self,
            tokens=work(self.tokens),
            labels=work(self.labels),
            position_ids=work(self.position_ids),
            cu_seqlens=work(self.cu_seqlens),
            document_ids=work(self.document_ids),
        )
