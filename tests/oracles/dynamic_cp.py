"""What must hold of every plan of `wlb.plan_dynamic_cp`."""

from collections.abc import Sequence

import wlb


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
            if -(-sum(group.lengths.tolist()) // size) > plan.max_tokens_per_rank:
                wrong.append(f"{name}: memory")
        if next_rank != plan.world_size:
            wrong.append(f"micro-batch {j}: ranks left out")
    if sorted(placed) != list(range(len(lengths))):
        wrong.append("a document is lost or doubled")
    return wrong
