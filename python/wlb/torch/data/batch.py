"""A micro-batch on one context-parallel rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import get_worker_info

import wlb
from wlb._errors import error
from wlb._shown import explained
from wlb.reading.documents import IGNORE, WEIGHTS
from wlb.torch.boundaries import told


@explained
@dataclass(frozen=True, eq=False)
class PackedBatch:
    """The tokens of one micro-batch on one context-parallel rank, in the order of `shard.rank(cp_rank)`.

    Attributes:
        tokens: int64 [tokens_of_this_rank].
        labels: int64 [tokens_of_this_rank]: the token that follows in the document, IGNORE at its end.
        position_ids: int64 [tokens_of_this_rank], from 0 in every document, and in every piece of a cut one. If a
            document has its own (`own_positions`), those: int64 [..., tokens_of_this_rank], such as [3, tokens] of
            mRoPE.
        cu_seqlens: int32 [documents + 1], of the whole packed sequence, on all ranks; padding is a document. With
            `max_documents` it always has that and 2 entries, of which the last ones repeat the end.
        max_seqlen: tokens of the longest document, also of padding; 0 without documents.
        shard: the places of the packed sequence's tokens on all context-parallel ranks.
        cp_rank: the rank whose tokens these are.
        document_ids: int64 [documents], in packed order, without the padding.
        num_valid_tokens: labels that are not IGNORE, on all context-parallel ranks together.
        cp_first_rank: first rank of its context-parallel group among the data x context ranks, if the plan chose a
            group for this micro-batch (`ContextParallelGroups.of` finds it); None: the group is that of the mesh.
        columns: further values of each token by name, [..., tokens_of_this_rank]. "loss_weights", float
            [tokens_of_this_rank]: factors of the loss of each label. "labels_ahead", int64 [k - 1,
            tokens_of_this_rank]: row j has the label j + 2 ahead in the document, IGNORE behind its end. And the
            columns that the loader was asked to carry. Padding has weight 0, no labels, and 0 in other columns.
        own_positions: whether documents have `position_ids` of their own.
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
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    own_positions: bool = False

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
        columns: Mapping[str, Tensor] | None = None,
        own_positions: bool = False,
    ) -> PackedBatch:
        """Makes a batch from the tokens of this rank; all other tensors are made from `shard`.

        The documents' own position ids may be in `columns`, or in `position_ids` with `own_positions`.

        A document of the shard beyond `document_ids` is padding: its positions begin again from 0 whenever they would
        exceed those of the longest document, so that they stay in any context.
        """
        device = tokens.device
        columns = dict(columns or {})
        if "position_ids" in columns:
            position_ids, own_positions = columns.pop("position_ids"), True
        lengths = shard.lengths
        padded = lengths.size > len(document_ids)
        if position_ids is None or (own_positions and padded):
            held = shard.rank(cp_rank)
            counted = np.empty(held.num_tokens, np.int64)
            filler = count_positions(held, lengths, len(document_ids), counted)
            positions = torch.from_numpy(counted).to(device)
            if position_ids is None or filler is None:
                position_ids = positions if position_ids is None else position_ids
            else:
                position_ids = position_ids.where(torch.from_numpy(~filler).to(device), positions)
        return cls(
            tokens=tokens,
            labels=labels,
            position_ids=position_ids,
            cu_seqlens=torch.from_numpy(cumulative(lengths, cu_seqlens_size)).to(device),
            max_seqlen=int(lengths.max(initial=0)),
            shard=shard,
            cp_rank=cp_rank,
            document_ids=torch.from_numpy(np.array(document_ids, np.int64)).to(device),
            num_valid_tokens=num_valid_tokens,
            cp_first_rank=cp_first_rank,
            columns=columns,
            own_positions=own_positions,
        )

    @property
    def num_padding(self) -> int:
        """Tokens of padding at the end of the packed sequence, on all context-parallel ranks together.

        They are a document of their own, which no other token sees, and predict nothing.
        """
        return int(self.shard.lengths[-1]) if self.shard.lengths.size > self.document_ids.numel() else 0

    @property
    def real(self) -> Tensor:
        """Mask of the tokens of documents: bool [tokens_of_this_rank], False for padding.

        Needed by everything that counts tokens: routers of mixtures of experts, and losses over positions. Many take
        the inverse as a `padding_mask`.

            >>> import wlb.torch as wt
            >>> wt.collate([[5, 6, 7]], multiple_of_tokens=4).real.tolist()
            [True, True, True, False]
        """
        if not self.num_padding:
            return torch.ones(self.tokens.numel(), dtype=torch.bool, device=self.tokens.device)
        end = int(self.shard.lengths[:-1].sum())
        indices = self.shard.rank(self.cp_rank).token_indices
        return torch.from_numpy(indices < end).to(self.tokens.device)

    def check_columns(self, taken: Collection[str], taker: str) -> None:
        """Refuses columns of documents that `taker` does not use and would drop silently.

        Args:
            taken: the columns that it uses, among "position_ids" and the names of `columns`.
            taker: its name in the error.

        Raises:
            wlb.WlbError: naming the column.
        """
        brought = [*self.columns, *(["position_ids"] if self.own_positions else [])]
        for name in brought:
            if name not in taken:
                message = f"bring {name!r}, which {taker}: remove this column from the data set"
                raise error("documents", message, value=name)

    @property
    def cp_size(self) -> int:
        """Ranks of its context-parallel group."""
        return self.shard.cp_size

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PackedBatch:
        """A copy with its tensors on `device`. `non_blocking` overlaps the copy if they are in pinned memory."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def as_hf(self, model: nn.Module | None = None, *, plain: bool = False) -> dict[str, Any]:
        """One row of documents as Hugging Face's causal models take it: `model(**batch.as_hf(model))`.

        These models shift labels themselves, so `labels` are not shifted here, and the first label of each document is
        IGNORE, because no document predicts the next one. The label of the last token of a piece is only in
        `shift_labels`, which losses take as they are. An empty micro-batch becomes one token that no loss counts, which
        every model can run.

        Args:
            model: that will be called, wrapped or not. Needed only for layers that take `cu_seqlens` by that name (Kimi
                delta attention); the row then has it.
            plain: return only what every causal model takes, for models without `**kwargs`. The label after a piece is
                then not learnt.

        Returns:
            `input_ids`, `position_ids` (from 0 in every document), `labels`: int64 [1, tokens]; `use_cache` False,
            without which attention would see other documents. Unless `plain` also `shift_labels`, int64 [1, tokens],
            and arguments of flash attention: `cu_seq_lens_q`, `cu_seq_lens_k`, int32 [documents + 1]; `max_length_q`,
            `max_length_k`; and of convolutions and recurrent states: `seq_idx`, int32 [1, tokens], the number of each
            token's document. If documents have several rows of position ids, these are int64 [1 + rows, 1, tokens]: the
            first row counts from 0 in every document, by which models with mRoPE find the documents. Further columns
            are [1, ..., tokens].

        Raises:
            wlb.WlbError: it is only one context-parallel rank's part of a micro-batch. Documents have weights, which
                these models' losses do not take; or one row of position ids in which the borders of documents cannot be
                found.
        """
        if self.cp_size > 1:
            message = f"is rank {self.cp_rank}'s part of {self.cp_size}: these models take whole documents, cp_size=1"
            raise error("batch", message, value=self.cp_size)
        taken = ("position_ids", *(name for name in self.columns if name != WEIGHTS))
        self.check_columns(taken, "the losses of Hugging Face's models do not take")
        tokens, shifted, cu_seqlens = self.tokens, self.labels, self.cu_seqlens
        positions = self._hf_positions()
        if not tokens.numel():
            tokens = positions = tokens.new_zeros(1)
            shifted = tokens.new_full((1,), IGNORE)
            cu_seqlens = cu_seqlens.new_ones(max(cu_seqlens.numel(), 2))
            cu_seqlens[0] = 0
        labels = shifted.roll(1)
        labels[cu_seqlens[cu_seqlens < tokens.numel()].long()] = IGNORE
        rows = {"input_ids": tokens, "labels": labels}
        if not plain:
            rows["shift_labels"] = shifted
        if self.tokens.numel():
            rows |= self.columns
        result: dict[str, Any] = {name: row.unsqueeze(0) for name, row in rows.items()}
        result |= {"position_ids": positions.unsqueeze(-2), "use_cache": False}
        if not plain:
            longest = max(self.max_seqlen, 1)
            result |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
            result |= {"max_length_q": longest, "max_length_k": longest}
            numbers = torch.arange(cu_seqlens.numel() - 1, dtype=torch.int32, device=tokens.device)
            numbers = numbers.repeat_interleave(cu_seqlens.diff(), output_size=tokens.numel())
            result["seq_idx"] = numbers.unsqueeze(0)
        return result if model is None else told(model, result)

    def _hf_positions(self) -> Tensor:
        """Position ids in which these models find the documents: [tokens], or [1 + rows, tokens]."""
        if not self.own_positions:
            return self.position_ids
        if self.position_ids.ndim > 2:
            shape = tuple(self.position_ids.shape)
            raise error("documents", f"bring position_ids of shape {shape}: must be [tokens] or [rows, tokens]")
        if self.position_ids.ndim == 2:
            counted = torch.from_numpy(self.shard.rank(0).position_ids.astype(np.int64)).to(self.tokens.device)
            return torch.cat([counted[None], self.position_ids])
        end = int(self.shard.lengths[: self.document_ids.numel()].sum())  # beyond it is padding
        begins = torch.zeros_like(self.position_ids, dtype=torch.bool)
        begins[self.cu_seqlens[:-1][self.cu_seqlens[:-1] < begins.numel()].long()] = True
        if not bool(((self.position_ids.diff() != 1) == begins[1:])[:end].all()):
            message = (
                "bring position_ids that jump inside of a document, or go on from the document before it: Hugging "
                "Face's models find documents where positions do not go up by 1; leave position_ids out"
            )
            raise error("documents", message, value="position_ids")
        return self.position_ids

    def pin_memory(self) -> PackedBatch:
        """A copy in page-locked memory; `DataLoader(pin_memory=True)` calls it."""
        return self._map(Tensor.pin_memory)

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker sends every tensor through a socket, half a millisecond each, so all are views of one.
        single = not self.own_positions
        rows = together([self.tokens, self.labels, *([self.position_ids] if single else [])])
        more = dict(self.columns) | ({} if single else {"position_ids": self.position_ids})
        ids, valid = self.document_ids.tolist(), self.num_valid_tokens
        return _from_rows, (
            rows,
            ids,
            self.shard,
            self.cp_rank,
            valid,
            self.cp_first_rank,
            self.cu_seqlens.numel(),
            more,
        )

    def _map(self, work: Callable[[Tensor], Tensor]) -> PackedBatch:
        return replace(
            self,
            tokens=work(self.tokens),
            labels=work(self.labels),
            position_ids=work(self.position_ids),
            cu_seqlens=work(self.cu_seqlens),
            document_ids=work(self.document_ids),
            columns={name: work(values) for name, values in self.columns.items()},
        )


def _from_rows(
    rows: Tensor,
    document_ids: list[int],
    shard: wlb.Shard,
    cp_rank: int,
    num_valid_tokens: int,
    cp_first_rank: int | None,
    cu_seqlens_size: int,
    columns: dict[str, Tensor],
) -> PackedBatch:
    tokens, labels, *positions = rows
    return PackedBatch.of(
        tokens,
        labels,
        document_ids=document_ids,
        shard=shard,
        cp_rank=cp_rank,
        num_valid_tokens=num_valid_tokens,
        cp_first_rank=cp_first_rank,
        position_ids=positions[0] if positions else None,
        cu_seqlens_size=cu_seqlens_size,
        columns=columns,
    )


def shared_rows(count: int, tokens: int) -> Tensor:
    """Memory for int64 [count, tokens] of a batch. In a worker of a `DataLoader` it is shared with the trainer.

    So the batch is not copied between the processes, as by torch's own `default_collate`.
    """
    if get_worker_info() is None or not tokens:
        return torch.empty((count, tokens), dtype=torch.int64)
    storage = torch.UntypedStorage._new_shared(8 * count * tokens)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.int64).set_(storage, 0, (count, tokens))  # type: ignore[call-overload, no-any-return]


def together(rows: Sequence[Tensor]) -> Tensor:
    """Rows [tokens] as one tensor [rows, tokens]: a view if they are all of one memory, in order."""
    first, size = rows[0], rows[0].numel()
    memory = first.untyped_storage()
    one = memory.nbytes() == len(rows) * size * first.element_size() and all(
        row.untyped_storage().data_ptr() == memory.data_ptr() and row.storage_offset() == index * size
        for index, row in enumerate(rows)
    )
    return first.as_strided((len(rows), size), (size, 1)) if one else torch.stack(list(rows))


def count_positions(
    held: wlb.RankShard, lengths: NDArray[np.int32], documents: int, out: NDArray[np.int64]
) -> NDArray[np.bool_] | None:
    """Writes the position of each of a rank's tokens in its document.

    Tokens after the first `documents` documents are padding, whose positions stay below the longest document's length.

    Returns:
        bool [tokens]: which tokens are padding; None without padding.
    """
    out[:] = held.position_ids
    if lengths.size <= documents:
        return None
    filler: NDArray[np.bool_] = held.token_indices >= int(lengths[:documents].sum())
    out[filler] %= int(lengths[:documents].max(initial=1))
    return filler


def cumulative(lengths: NDArray[Any], size: int | None = None) -> NDArray[np.int32]:
    """int32 [documents + 1]: where each document begins in the packed sequence, and where the last one ends.

    With `size`, it has that many entries: empty documents follow at the end.
    """
    result = np.zeros(lengths.size + 1 if size is None else size, np.int32)
    np.cumsum(lengths, out=result[1 : lengths.size + 1])
    result[lengths.size + 1 :] = result[lengths.size]
    return result
