"""What must hold of every plan of `wlb.plan_dynamic_cp`."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import wlb


def expanded(plan: wlb.DynamicCpPlan) -> dict[str, Any]:
    """The tables and sums of a plan, from the groups and documents that its pickle holds."""
    held = json.loads(plan.__reduce__()[1][0])
    groups, offsets, lengths = held["groups"], held["document_offsets"], np.array(held["lengths"], np.int64)
    sizes = np.array([group["cp_size"] for group in groups])
    tokens = np.array([lengths[first:end].sum() for first, end in itertools.pairwise(offsets)])
    most = -(-tokens // sizes)
    multiple, buckets = plan.multiple_of_tokens, plan.token_buckets
    padded = [
        min(size for size in buckets if size >= each) if buckets else -(-each // multiple) * multiple for each in most
    ]
    has_padding = multiple > 1 or len(buckets) > 0

    def of_ranks(of_groups: Any, dtype: Any) -> NDArray[Any]:
        table = np.repeat(np.array(of_groups, dtype), sizes)
        return table.reshape(len(held["group_offsets"]) - 1, held["world_size"])

    return {
        "cp_sizes": of_ranks(sizes, np.int32),
        "tokens_per_rank": of_ranks(most, np.int64),
        "padded_tokens_per_rank": of_ranks(padded, np.int64),
        "rank_seconds": of_ranks([group["seconds"] for group in groups], np.float64),
        "padding_tokens": int(sizes @ np.array(padded) - lengths.sum()) if has_padding else 0,
    }


def violations(
    plan: wlb.DynamicCpPlan, lengths: Sequence[int], max_cp_size: int | None = None, group_sizes: str = "powers_of_two"
) -> list[str]:
    """What is wrong with a plan; documents are named by their indices. Empty for every plan that wlb makes."""
    wrong: list[str] = []
    placed: list[int] = []
    for j, batch in enumerate(plan.micro_batches):
        next_rank = 0
        for group in batch.groups:
            name = f"micro-batch {j}, group from rank {group.first_rank}"
            size, ranks = group.cp_size, list(group.ranks)
            aligned = size in (2**bit for bit in range(17)) and group.first_rank % size == 0
            if size < 1 or not (aligned or group_sizes == "any"):
                wrong.append(f"{name}: misaligned")
            if size > (max_cp_size or plan.world_size):
                wrong.append(f"{name}: too large")
            if ranks != list(range(next_rank, next_rank + size)):
                wrong.append(f"{name}: ranks overlap or are left out")
            next_rank += size
            documents = group.document_ids.tolist()
            placed.extend(documents)
            if group.lengths.tolist() != [lengths[document] for document in documents]:
                wrong.append(f"{name}: other lengths")
            if group.cu_seqlens.tolist() != [sum(group.lengths.tolist()[:k]) for k in range(len(documents) + 1)]:
                wrong.append(f"{name}: cu_seqlens")
            if group.max_seqlen != max(group.lengths.tolist(), default=0):
                wrong.append(f"{name}: max_seqlen")
            tokens = sum(group.lengths.tolist())
            padded = -(-tokens // size)
            is_padded = plan.multiple_of_tokens > 1 or plan.token_buckets
            if is_padded:
                sizes = plan.token_buckets or range(0, padded + plan.multiple_of_tokens, plan.multiple_of_tokens)
                padded = next(number for number in sizes if number >= padded)
            if padded > plan.max_tokens_per_rank:
                wrong.append(f"{name}: memory")
            if padded != group.padded_tokens_per_rank or (plan.padded_tokens_per_rank[j, ranks] != padded).any():
                wrong.append(f"{name}: padded tokens")
            if group.padding_tokens != (size * padded - tokens if is_padded else 0):
                wrong.append(f"{name}: padding")
            # As it will be cut, every rank has that size exactly.
            filled = [*group.lengths.tolist(), group.padding_tokens] if group.padding_tokens else group.lengths
            shard = wlb.shard(filled, cp_size=size, strategy="per_document")
            if is_padded and set(shard.tokens_per_rank.tolist()) != {padded}:
                wrong.append(f"{name}: ranks of other sizes")
            if plan.max_documents is not None and len(documents) > plan.max_documents:
                wrong.append(f"{name}: too many documents")
        if next_rank != plan.world_size:
            wrong.append(f"micro-batch {j}: ranks left out")
    if sorted(placed) != list(range(len(lengths))):
        wrong.append("a document is lost or doubled")
    return wrong
