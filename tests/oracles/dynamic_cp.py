"""Naive Dynamic-CP: what must hold of every plan of `wlb.plan_dynamic_cp`, and how long it takes."""

from collections.abc import Sequence
from functools import cache

import wlb


def violations(plan: wlb.DynamicCpPlan, lengths: Sequence[int], max_cp_size: int | None = None) -> list[str]:
    """What is wrong with a plan; documents are named by their indices. Empty for every plan that wlb makes."""
    wrong: list[str] = []
    placed: list[int] = []
    for j, batch in enumerate(plan.micro_batches):
        next_rank = 0
        for group in batch.groups:
            name = f"micro-batch {j}, group from rank {group.first_rank}"
            size, ranks = group.cp_size, list(group.ranks)
            if size not in (2**bit for bit in range(17)) or group.first_rank % size:
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


def step_seconds(plan: wlb.DynamicCpPlan, p2p_seconds: float = 0.0) -> float:
    """Seconds of a step under 1F1B: every op of every rank waits for its group, its stage and its input."""
    p, m = plan.num_stages, plan.num_micro_batches
    groups = [{rank: group for group in batch.groups for rank in group.ranks} for batch in plan.micro_batches]
    orders: list[list[tuple[str, int]]] = []
    for stage in range(p):
        ahead = min(p - 1 - stage, m)
        order = [("forward", j) for j in range(ahead)]
        for j in range(m - ahead):
            order += [("forward", j + ahead), ("backward", j)]
        orders.append(order + [("backward", j) for j in range(m - ahead, m)])

    @cache
    def end(stage: int, kind: str, j: int, rank: int) -> float:
        group = groups[j][rank]
        position = orders[stage].index((kind, j))
        sender = stage - 1 if kind == "forward" else stage + 1
        start = 0.0
        for peer in group.ranks:
            if position > 0:
                start = max(start, end(stage, *orders[stage][position - 1], peer))
            if 0 <= sender < p:
                start = max(start, end(sender, kind, j, peer) + p2p_seconds)
        return start + float(group.seconds) * (1 if kind == "forward" else 2) / (3 * p)

    # In order of time, so that the recursion stays shallow.
    for j in range(m):
        for stage in range(p):
            for rank in range(plan.world_size):
                end(stage, *orders[stage][min(2 * j, 2 * m - 1)], rank)
    ranks = range(plan.world_size)
    return max(end(stage, *orders[stage][-1], rank) for stage in range(p) for rank in ranks)
