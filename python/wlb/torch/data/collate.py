"""Documents of one micro-batch become tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

import wlb
from wlb._errors import error
from wlb.torch.data.batch import IGNORE, PackedBatch, cumulative
from wlb.torch.data.documents import Document, as_document, token_array


def collate(
    documents: Sequence[Document | Any],
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
    strategy: str = "per_document",
    causal: bool = True,
    document_ids: ArrayLike | None = None,
    **sharding: Any,
) -> PackedBatch:
    """Packs documents one after the other and keeps what this context-parallel rank computes.

    Labels are shifted in the whole sequence, before it is sharded: every token predicts the one that follows it in its
    document, wherever that lies, and the last one predicts nothing. The last token of a *piece* predicts the first of
    the next piece (`Document.next_token`): a cut shortens what a token sees and drops no prediction.

    As the `collate_fn` of a `DataLoader`: `functools.partial(collate, cp_rank=..., cp_size=...)`.

    Args:
        documents: Each a `Document`, or bare token ids: array, tensor, bytes or sequence of integers, [n], n >= 1. None
            at all is legal: the batch is empty.
        cp_rank: This rank in the context-parallel group.
        cp_size: Ranks of that group.
        strategy: As in `wlb.shard`.
        causal: As in `wlb.shard`. Labels are those of next-token prediction either way.
        document_ids: int64 [documents], instead of those that the documents bring; bare tokens bring their index here.
        **sharding: Further arguments of `wlb.shard`.

    Returns:
        The batch; its tensors lie in ordinary memory of the CPU.

    Raises:
        wlb.WlbError: An argument makes no sense; it names the document.

    Complexity:
        O(tokens), a few copies of the tokens.
    """
    named = [as_document(document, number) for number, document in enumerate(documents)]
    arrays = [token_array(document.tokens, "documents", number) for number, document in enumerate(named)]
    if document_ids is None:
        ids = np.array([document.id for document in named], np.int64)
    else:
        ids = np.array(document_ids, np.int64)
        if ids.shape != (len(named),):
            raise error("document_ids", f"has shape {ids.shape}, not [{len(named)}]", value=ids.shape)
    lengths = np.array([array.size for array in arrays], np.int64)
    shard = wlb.shard(lengths, cp_size=cp_size, strategy=strategy, causal=causal, **sharding)  # type: ignore[arg-type]
    if not 0 <= cp_rank < cp_size:
        raise error("cp_rank", f"= {cp_rank}: the group has ranks 0 to {cp_size - 1}", value=cp_rank)

    cu_seqlens = cumulative(lengths)
    following = [IGNORE if document.next_token is None else document.next_token for document in named]
    # One more than the tokens: labels are the same array, one further on.
    packed = np.empty(shard.num_tokens + 1, np.int64)
    if arrays:
        np.concatenate(arrays, out=packed[:-1], casting="unsafe")
    tokens, labels = packed[:-1], packed[1:].copy()
    labels[cu_seqlens[1:] - 1] = following
    rank = shard.rank(cp_rank)
    if cp_size > 1:  # one rank alone holds the packed sequence as it is
        tokens, labels = tokens[rank.token_indices], labels[rank.token_indices]
    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(rank.position_ids.astype(np.int64)),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=int(lengths.max(initial=0)),
        shard=shard,
        cp_rank=cp_rank,
        document_ids=torch.from_numpy(ids),
        num_valid_tokens=shard.num_tokens - following.count(IGNORE),
    )
