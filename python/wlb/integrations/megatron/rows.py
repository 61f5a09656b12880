"""A packed row as a rank's part of the model takes it, and the losses of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

import wlb
from wlb.integrations.megatron.attention import ShardedSeqParams
from wlb.reading.documents import IGNORE


class Batch(NamedTuple):
    """The input of a forward step, in the order of Megatron-LM's `get_batch`.

    Attributes:
        tokens: int64 [1, tokens of this rank]; only on the first stage, else None.
        labels: int64 [1, tokens of this rank]: the token that follows each in its document, 0 where nothing is learnt;
            only on the last stage, else None.
        loss_mask: float32 [1, tokens of this rank]: 1 or the weight where there is a label, 0 elsewhere; only on the
            last stage, else None.
        attention_mask: None: `packed_seq_params` has the documents.
        position_ids: int64 [1, tokens of this rank], positions in documents.
        packed_seq_params: documents, and the ranks that hold them.
        padding_mask: bool [1, tokens of this rank]: True where a token is padding, which routers of experts must not
            learn from. On every stage; with sequence parallelism, beyond the first stage only the tokens of this
            tensor-parallel rank. None for a model without experts, and if only rows without documents can have padding.
    """

    tokens: Tensor | None
    labels: Tensor | None
    loss_mask: Tensor | None
    attention_mask: None
    position_ids: Tensor
    packed_seq_params: ShardedSeqParams
    padding_mask: Tensor | None = None


@dataclass(frozen=True)
class Row:
    """The layout of a micro-batch on its ranks, as every pipeline stage needs it.

    Attributes:
        lengths: tokens of its documents.
        cp_size: number of ranks that hold it.
        cp_rank: this rank among them.
        filler: tokens of padding at the end of this rank's row, as a document of its own.
        padded: which of the rank's other tokens are padding, as bits; empty: none.
    """

    lengths: tuple[int, ...]
    cp_size: int
    cp_rank: int
    filler: int
    padded: bytes = b""

    @cached_property
    def shard(self) -> wlb.Shard:
        """The whole row, with filler."""
        filler = (self.filler * self.cp_size,) if self.filler else ()
        return wlb.shard([*self.lengths, *filler], cp_size=self.cp_size, strategy="per_document")


@dataclass(frozen=True)
class Ranks:
    """The ranks that hold a row, by the number of ranks.

    Attributes:
        group: this rank's group, by number of ranks; None for 1.
        alone: a group of this rank only.
        dynamic: whether rows have different numbers of ranks.
    """

    group: Callable[[int], dist.ProcessGroup | None]
    alone: dist.ProcessGroup | None
    dynamic: bool

    def described(self, row: Row, device: torch.device) -> tuple[ShardedSeqParams, Tensor]:
        """The row as Megatron-Core's layers take it, and the positions of this rank's tokens."""
        shard, group = row.shard, self.group(row.cp_size)
        cu_seqlens = torch.from_numpy(np.append(0, np.cumsum(shard.lengths)).astype(np.int32)).to(device)
        longest = int(shard.lengths.max(initial=0))
        params = ShardedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,  # one tensor for both: padding comes last, so no query sees it
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_seqlens,
            cu_seqlens_kv_padded=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            local_cp_size=row.cp_size if self.dynamic else None,
            cp_group=group if self.dynamic else None,
            shard=shard,
            ranks=group,
            position=(group or self.alone) if self.dynamic else None,
        )
        positions = torch.from_numpy(shard.rank(row.cp_rank).position_ids.astype(np.int64)).to(device)
        return params, positions[None]


def padding_of(row: Row, num_tokens: int) -> NDArray[np.bool_] | None:
    """Mask of padding in this rank's row, bool [tokens with padding]; None if there is none.

    Args:
        row: its layout.
        num_tokens: of this rank, without filler.
    """
    bits = np.frombuffer(row.padded, np.uint8)
    own = np.unpackbits(bits, count=num_tokens).astype(bool) if bits.size else np.zeros(num_tokens, bool)
    mask = np.append(own, np.ones(row.filler, bool))
    return mask if mask.any() else None


def batch_of(
    row: Row,
    ranks: Ranks,
    tokens: Tensor | None,
    labels: Tensor | None,
    weights: Tensor | None,
    padding: NDArray[np.bool_] | None,
    *,
    pad: int,
    device: Any,
) -> Batch:
    """The row on this rank's device, with its filler.

    Args:
        row: its layout.
        ranks: that hold it.
        tokens: int64 [tokens of this rank], without filler; None if no part of the model takes them.
        labels: int64 [tokens of this rank], IGNORE where nothing is learnt; None if no part of the model takes them.
        weights: float32 [tokens of this rank], of labels; None: 1.
        padding: bool, which tokens are padding, with filler, for the routers of this stage; None: none.
        pad: token id of the filler.
        device: of the model.
    """
    params, positions = ranks.described(row, device)
    mask = None
    if tokens is not None:
        tokens = torch.cat([tokens, tokens.new_full((row.filler,), pad)])[None]
    if labels is not None:
        labels = torch.cat([labels, labels.new_full((row.filler,), IGNORE)])[None]
        learnt = labels != IGNORE
        mask, labels = learnt.float(), labels.where(learnt, 0)
        if weights is not None:
            mask = mask * torch.cat([weights, weights.new_zeros(row.filler)])
    hidden = None if padding is None else torch.from_numpy(padding).to(device)[None]
    params.padded = hidden is not None
    return Batch(tokens, labels, mask, None, positions, params, hidden)


def get_batch(data_iterator: Iterator[Batch]) -> Batch:
    """The next micro-batch of a step, on this rank's device, for the `forward_step` of a model.

    Ranks do not communicate here: each has its step already.
    """
    batch: Batch = next(data_iterator)
    return batch


def loss_func(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The losses of a micro-batch as Megatron-Core sums them over a step, with `calculate_per_token_loss`.

    Args:
        loss_mask: from `get_batch`.
        output: float [1, tokens of this rank]: the model's losses.

    Returns:
        Their sum; the number of labels, int32; and both together, float32 [2], as "lm loss" for reports.
    """
    mask = loss_mask.reshape(-1).float()
    total = (output.reshape(-1).float() * mask).sum()
    count = (mask != 0).sum().float()  # weights change losses, not their number
    return total, count.int(), {"lm loss": torch.stack([total.detach(), count])}


def mean_loss(reports: list[dict[str, Tensor]], *, group: dist.ProcessGroup | None = None) -> float | None:
    """The mean loss over the labels of a step, from the result of Megatron-Core's `forward_backward_func`.

    It waits for the device: call it for the steps that are logged.

    Args:
        reports: from `loss_func`, one for each micro-batch; empty except on the last stage.
        group: the data x context ranks to sum over; by default those of Megatron-Core.

    Returns:
        Equal on all ranks of the last stage; None on others, and for a step without labels.
    """
    if not reports:
        return None
    total = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True) if group is None else group
    dist.all_reduce(total, group=group)
    value, count = total.tolist()
    return value / count if count else None
