"""`wlb.Shard` as a load balancer for torch's own context parallelism over FlexAttention.

torch permutes the packed sequence by a balancer, gives rank ``r`` the ``r``-th of equal chunks, gathers keys and values
on every rank and runs FlexAttention with the document mask, rewritten for the permuted indices::

    lengths = padded_lengths(micro_batch.lengths, cp_size=mesh.size())   # a last document of padding
    shard = wlb.shard(lengths, cp_size=mesh.size())
    balancer = ShardLoadBalancer(shard, mesh)
    tokens = shard.num_tokens
    mask = create_block_mask(document_mask(shard, device=device), 1, 1, tokens, tokens, device=device)
    token_ids, labels, position_ids, mask = _context_parallel_shard(
        mesh, [token_ids, labels, position_ids, mask], [1, 1, 1, 2], load_balancer=balancer
    )

Equal pairs do not take exactly equal time: FlexAttention computes whole blocks of 128 x 128, and a short document that
is cut for all ranks touches more of them than one that stays whole. If all documents are short, the slowest rank may
compute more blocks than with torch's head-tail balancer. So keep documents whole whose chunks would be shorter than two
blocks: ``strategy="hybrid", hybrid_threshold=4 * cp_size * 128``. A rank computes
``mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()`` blocks of its sharded mask.
`wlb.torch.context_parallel_attention` is balanced at any length, without blocks or padding.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._attention import _LoadBalancer

import wlb
from wlb._errors import check_integer, error, numbers

__all__ = ["ShardLoadBalancer", "document_mask", "padded_lengths"]


class ShardLoadBalancer(_LoadBalancer):
    """Puts the tokens of a packed sequence in the order of ranks that a shard has.

    Pass it as ``load_balancer`` to torch's ``_context_parallel_shard`` and ``context_parallel_unshard``, for buffers of
    ``shard.num_tokens`` tokens. If they have a batch dimension, all rows must be of the same micro-batch. It keeps two
    int64 index tensors of that length on the mesh's device.

    Args:
        shard: the plan, of any strategy, with equally many tokens on every rank, because torch cuts equal chunks.
        mesh: the one-dimensional context-parallel mesh.

    Raises:
        wlb.WlbError: the mesh has another size, ranks have unequal token counts, or the shard is one of a forest.
    """

    def __init__(self, shard: wlb.Shard, mesh: DeviceMesh) -> None:
        _check(shard)
        if mesh.ndim != 1:
            raise error("mesh", f"must be the context-parallel dimension alone, not {mesh.ndim} dimensions", value=mesh)
        if mesh.size() != shard.cp_size:
            raise error("shard", f"is for {shard.cp_size} ranks, the mesh has {mesh.size()}", value=shard.cp_size)
        tokens = shard.tokens_per_rank
        unequal = np.flatnonzero(tokens != tokens[0])
        if len(unequal):
            rank = int(unequal[0])
            raise error(
                "shard",
                f"gives rank {rank} {tokens[rank]} tokens and rank 0 {tokens[0]}, but torch cuts equal chunks: "
                "shard padded_lengths(lengths, cp_size=...)",
                index=rank,
                value=int(tokens[rank]),
            )
        order = np.concatenate([shard.rank(rank).token_indices for rank in range(shard.cp_size)])
        self._order = torch.as_tensor(order, dtype=torch.int64, device=mesh.device_type).unsqueeze(0)
        self._restore = torch.as_tensor(shard.restore_indices, dtype=torch.int64, device=mesh.device_type).unsqueeze(0)

    def _generate_indices(self, restore: bool = False) -> Tensor:
        """The permutation `x_by_rank = x[indices]`, int64 `[1, tokens]`; with `restore` its inverse."""
        return self._restore if restore else self._order


def document_mask(
    shard: wlb.Shard, *, device: torch.device | str
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention's `mask_mod` of a packed sequence: attention inside documents, causal if the shard is.

    It is for the order of the packed sequence; torch rewrites it for the balancer's order.

    Raises:
        wlb.WlbError: the shard is one of a forest.
    """
    _check(shard)
    documents = torch.from_numpy(np.repeat(np.arange(len(shard.lengths)), shard.lengths)).to(device)
    causal = shard.causal

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = documents[query] == documents[key]
        return same & (query >= key) if causal else same

    return mask


def _check(shard: wlb.Shard) -> None:
    """Refuses the shard of a forest."""
    if not isinstance(shard, wlb.Shard):
        raise error("shard", f"is a {type(shard).__name__}, not a wlb.Shard", value=shard)
    if shard.forest is not None:
        message = (
            "is of a forest: torch's context parallelism is for documents, whose mask knows no shared prefix. "
            "wt.context_parallel_attention takes forests"
        )
        raise error("shard", message, value=shard)


def padded_lengths(lengths: ArrayLike, *, cp_size: int, block_size: int = 128) -> NDArray[np.int64]:
    """The lengths, if necessary with a last document of padding, so that FlexAttention takes the packed sequence.

    torch needs a number of tokens that ``cp_size * block_size`` divides. A ``max_tokens`` that is such a multiple is
    still enough.

    Args:
        lengths: int[n], tokens of each document of the micro-batch.
        cp_size: ranks.
        block_size: query block of the mask; FlexAttention's default is 128.

    Returns:
        int64[n] or int64[n + 1].

    Raises:
        wlb.WlbError: lengths are not integers [n], or negative; another argument is not an integer of at least 1.
    """
    for argument, value in (("cp_size", cp_size), ("block_size", block_size)):
        check_integer(argument, value, minimum=1)
    documents = numbers("lengths", lengths)
    if documents.ndim != 1 or (documents.size and documents.dtype.kind == "f"):
        message = f"are {documents.dtype} of shape {documents.shape}: must be integers [documents]"
        raise error("lengths", message, value=documents.shape)
    negative = np.flatnonzero(documents < 0)
    if len(negative):
        index = int(negative[0])
        value = int(documents[index])
        raise error("lengths", f"= {value}: must not be negative", index=index, value=value)
    documents = documents.astype(np.int64)
    padding = -int(documents.sum()) % (cp_size * block_size)
    return np.append(documents, padding) if padding else documents
