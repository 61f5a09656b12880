"""Results of the engine as plain Python values, to compare and to print."""

from typing import Any, NamedTuple

import numpy as np

import wlb

Op = tuple[str, int, int]
"""What a pipeline rank runs: of `PipelineTimeline.KINDS`, which micro-batch, which stage of the model."""


class Piece(NamedTuple):
    """`length` tokens of document `id`, from its token `start` on."""

    id: int
    start: int
    length: int


def plain(packing: wlb.Packing) -> dict[str, Any]:
    """Everything that a packing decides, as JSON values."""
    return {
        "micro_batches": [[list(piece) for piece in pieces_of(batch)] for batch in packing.micro_batches],
        "costs": packing.costs.tolist(),
        "assignment": packing.assignment.tolist(),
        "leftover": [list(piece) for piece in leftover_of(packing)],
        "length_fallbacks": packing.length_fallbacks,
    }


def pieces_of(batch: wlb.MicroBatch) -> list[Piece]:
    """What a micro-batch holds."""
    return _pieces(batch.document_ids.tolist(), batch.starts.tolist(), batch.lengths.tolist())


def leftover_of(packing: wlb.Packing) -> list[Piece]:
    """What found no place."""
    columns = packing.leftover, packing.leftover_starts, packing.leftover_lengths
    return _pieces(*(column.tolist() for column in columns))


def plain_rank(rank: wlb.RankShard) -> dict[str, Any]:
    """Everything that a rank of a shard holds, as JSON values."""
    values = {
        "num_tokens": rank.num_tokens,
        "num_segments": rank.num_segments,
        "token_indices": rank.token_indices,
        "position_ids": rank.position_ids,
        "cu_seqlens_q": rank.cu_seqlens_q,
        "cu_seqlens_k": rank.cu_seqlens_k,
        "max_seqlen_q": rank.max_seqlen_q,
        "max_seqlen_k": rank.max_seqlen_k,
        "k_starts": rank.k_starts,
        "documents": rank.documents,
        "pairs": rank.pairs,
    }
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def orders_of(timeline: wlb.PipelineTimeline) -> list[list[Op]]:
    """What each rank of a pipeline ran, in order."""
    orders: list[list[Op]] = [[] for _ in range(timeline.num_stages)]
    columns = (timeline.ranks, timeline.kinds, timeline.micro_batches, timeline.stages)
    for rank, kind, micro_batch, stage in zip(*(column.tolist() for column in columns), strict=True):
        orders[rank].append((timeline.KINDS[kind], micro_batch, stage))
    return orders


def _pieces(ids: list[int], starts: list[int], lengths: list[int]) -> list[Piece]:
    return [Piece(*piece) for piece in zip(ids, starts, lengths, strict=True)]
