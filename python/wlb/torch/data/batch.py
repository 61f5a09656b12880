"""One micro-batch as one context-parallel rank sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import wlb
from wlb._errors import error

IGNORE: Final = -100
"""The label of a token that predicts nothing; what `torch.nn.functional.cross_entropy` ignores by default."""


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """The tokens of one micro-batch that lie on one context-parallel rank, in the order of `shard.rank(cp_rank)`.

    Attributes:
        tokens: int64 [tokens_of_this_rank].
        labels: int64 [tokens_of_this_rank]: the token that follows in the document, IGNORE at its end.
        position_ids: int64 [tokens_of_this_rank], from 0 in every document, and in every piece of a cut one.
        cu_seqlens: int32 [documents + 1], of the whole packed sequence, on all ranks; padding is a document. With
            `max_documents` it has that and 2 entries, whatever the documents: the last ones repeat the end.
        max_seqlen: The longest document, in tokens, padding included; 0 without documents.
        shard: How the packed sequence lies on all context-parallel ranks.
        cp_rank: The rank whose tokens these are.
        document_ids: int64 [documents], in packed order, without the padding.
        num_valid_tokens: Labels that are not IGNORE, on all context-parallel ranks together.
        cp_first_rank: First rank of its context-parallel group among the data x context ranks, where the plan chose a
            group for this micro-batch (`ContextParallelGroups.of` finds it); None: the group is that of the mesh.
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
    cp_first_rank: int | None = None

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        labels: Tensor,
        *,
        document_ids: Sequence[int] | NDArray[np.int64],
        shard: wlb.Shard,
        cp_rank: int,
        num_valid_tokens: int,
        cp_first_rank: int | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens_size: int | None = None,
    ) -> PackedBatch:
        """One of what this rank holds; all that follows from `shard` is made here.

        A document of the shard beyond `document_ids` is padding: its positions begin anew as often as those of the
        longest document do, so that they stay in any context.
        """
        device = tokens.device
        if position_ids is None:
            mine = shard.rank(cp_rank)
            positions = mine.position_ids.astype(np.int64)
            if shard.lengths.size > len(document_ids):
                filler = mine.token_indices >= int(shard.lengths[:-1].sum())
                positions[filler] %= int(shard.lengths[:-1].max(initial=1))
            position_ids = torch.from_numpy(positions).to(device)
        return cls(
            tokens=tokens,
            labels=labels,
            position_ids=position_ids,
            cu_seqlens=torch.from_numpy(cumulative(shard.lengths, cu_seqlens_size)).to(device),
            max_seqlen=int(shard.lengths.max(initial=0)),
            shard=shard,
            cp_rank=cp_rank,
            document_ids=torch.tensor(document_ids, dtype=torch.int64, device=device),
            num_valid_tokens=num_valid_tokens,
            cp_first_rank=cp_first_rank,
        )

    @property
    def num_padding(self) -> int:
        """Tokens at the end of the packed sequence that fill it up, on all context-parallel ranks together.

        They are a document of their own, which none sees, and predict nothing.
        """
        return int(self.shard.lengths[-1]) if self.shard.lengths.size > self.document_ids.numel() else 0

    @property
    def cp_size(self) -> int:
        """Ranks of its context-parallel group."""
        return self.shard.cp_size

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PackedBatch:
        """A copy with its tensors on `device`. `non_blocking` overlaps the copy if they are in pinned memory."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def as_hf(self, *, plain: bool = False) -> dict[str, Any]:
        """One row of documents as Hugging Face's causal models take it: `model(**batch.as_hf())`.

        The models shift labels themselves, so `labels` are not shifted here, and the first of each document is IGNORE:
        no document predicts the next. What the last token of a piece predicts stands in `shift_labels` alone, which
        losses take as they are. An empty micro-batch becomes one token that no loss counts: legal in every model.

        Args:
            plain: Only what every causal model takes. For models without `**kwargs`; what the last tokens of pieces
                predict is then not learnt.

        Returns:
            `input_ids`, `position_ids` (from 0 in every document), `labels`: int64 [1, tokens]; `use_cache` False, or
            attention would see other documents. Unless `plain` also `shift_labels`, int64 [1, tokens], and what flash
            attention wants: `cu_seq_lens_q`, `cu_seq_lens_k`, int32 [documents + 1]; `max_length_q`, `max_length_k`.

        Raises:
            wlb.WlbError: It is a part of a micro-batch, that of one context-parallel rank.
        """
        if self.cp_size > 1:
            message = f"is rank {self.cp_rank}'s part of {self.cp_size}: these models take whole documents, cp_size=1"
            raise error("batch", message, value=self.cp_size)
        tokens, shifted, positions, cu_seqlens = self.tokens, self.labels, self.position_ids, self.cu_seqlens
        if not tokens.numel():
            tokens = positions = tokens.new_zeros(1)
            shifted = tokens.new_full((1,), IGNORE)
            cu_seqlens = cu_seqlens.new_ones(max(cu_seqlens.numel(), 2))
            cu_seqlens[0] = 0
        labels = shifted.roll(1)
        labels[cu_seqlens[cu_seqlens < tokens.numel()].long()] = IGNORE
        rows = {"input_ids": tokens, "position_ids": positions, "labels": labels}
        if not plain:
            rows["shift_labels"] = shifted
        result: dict[str, Any] = {name: row.unsqueeze(0) for name, row in rows.items()} | {"use_cache": False}
        if not plain:
            longest = max(self.max_seqlen, 1)
            result |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
            result |= {"max_length_q": longest, "max_length_k": longest}
        return result

    def pin_memory(self) -> PackedBatch:
        """A copy in page-locked memory; `DataLoader(pin_memory=True)` calls it."""
        return self._map(Tensor.pin_memory)

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker hands over every tensor through a socket, half a millisecond each: one is enough.
        rows = torch.stack([self.tokens, self.labels, self.position_ids])
        ids, valid = self.document_ids.tolist(), self.num_valid_tokens
        return _from_rows, (rows, ids, self.shard, self.cp_rank, valid, self.cp_first_rank, self.cu_seqlens.numel())

    def _map(self, work: Callable[[Tensor], Tensor]) -> PackedBatch:
        return replace(
            self,
            tokens=work(self.tokens),
            labels=work(self.labels),
            position_ids=work(self.position_ids),
            cu_seqlens=work(self.cu_seqlens),
            document_ids=work(self.document_ids),
        )


def _from_rows(
    rows: Tensor,
    document_ids: list[int],
    shard: wlb.Shard,
    cp_rank: int,
    num_valid_tokens: int,
    cp_first_rank: int | None,
    cu_seqlens_size: int,
) -> PackedBatch:
    tokens, labels, position_ids = rows
    return PackedBatch.of(
        tokens,
        labels,
        document_ids=document_ids,
        shard=shard,
        cp_rank=cp_rank,
        num_valid_tokens=num_valid_tokens,
        cp_first_rank=cp_first_rank,
        position_ids=position_ids,
        cu_seqlens_size=cu_seqlens_size,
    )


def cumulative(lengths: NDArray[Any], size: int | None = None) -> NDArray[np.int32]:
    """int32 [documents + 1]: where each document begins in the packed sequence, and where the last one ends.

    Of `size` entries, if that is given: documents without tokens at the end make up for it.
    """
    result = np.full(lengths.size + 1 if size is None else size, lengths.sum(), np.int32)
    result[0] = 0
    np.cumsum(lengths, out=result[1 : lengths.size + 1])
    return result
