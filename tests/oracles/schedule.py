"""Naive pipeline simulation, event by event: the oracle of `wlb.simulate_pipeline`, for any order of ops."""

import heapq
from collections.abc import Callable, Iterable, Sequence

import wlb

Op = tuple[str, int, int]
"""What (of `PipelineTimeline.KINDS`), which micro-batch, which stage of the model."""

Orders = Sequence[Sequence[Op]]
"""Of every rank, what it runs, in order."""


def one_forward_one_backward(num_stages: int, num_micro_batches: int) -> list[list[Op]]:
    """1F1B, as its inventors describe it: fill the pipeline, then alternate, then drain."""
    orders: list[list[Op]] = []
    for rank in range(num_stages):
        ahead = min(num_stages - rank - 1, num_micro_batches)
        order: list[Op] = [("forward", j, rank) for j in range(ahead)]
        for j in range(num_micro_batches):
            if j + ahead < num_micro_batches:
                order.append(("forward", j + ahead, rank))
            order.append(("backward", j, rank))
        orders.append(order)
    return orders


def orders_of(timeline: wlb.PipelineTimeline) -> list[list[Op]]:
    """What each rank ran, in order."""
    orders: list[list[Op]] = [[] for _ in range(timeline.num_stages)]
    columns = (timeline.ranks, timeline.kinds, timeline.micro_batches, timeline.stages)
    for rank, kind, micro_batch, stage in zip(*(column.tolist() for column in columns), strict=True):
        orders[rank].append((timeline.KINDS[kind], micro_batch, stage))
    return orders


def simulate(
    orders: Orders, seconds: Callable[[Op], float], p2p_seconds: Callable[[int], float] = lambda _: 0.0
) -> dict[Op, tuple[float, float]]:
    """When every op starts and ends.

    Events are taken in the order of their times: an op that ends frees its rank and sends its result, which arrives
    `p2p_seconds` later if it goes to another rank; a rank starts its next op as soon as it is free and has all inputs.
    """
    ranks = {stage: rank for rank, order in enumerate(orders) for _, _, stage in order}
    last = max(ranks)
    next_of_rank = [0] * len(orders)
    free = [True] * len(orders)
    present: set[tuple[int, Op]] = set()  # (rank, whose result)
    times: dict[Op, tuple[float, float]] = {}
    events: list[tuple[float, int, int, Op]] = []  # time, 0 for an arrival and 1 for an end, rank, op

    def inputs(op: Op) -> Iterable[Op]:
        kind, j, stage = op
        if kind == "forward":
            return [("forward", j, stage - 1)] if stage > 0 else []
        if kind == "weight_gradient":
            return [("input_gradient", j, stage)]
        return [("forward", j, stage), *([(kind, j, stage + 1)] if stage < last else [])]

    def start(rank: int, now: float) -> None:
        if not free[rank] or next_of_rank[rank] == len(orders[rank]):
            return
        op = orders[rank][next_of_rank[rank]]
        if all((rank, needed) in present for needed in inputs(op)):
            next_of_rank[rank] += 1
            free[rank] = False
            times[op] = now, now + seconds(op)
            heapq.heappush(events, (times[op][1], 1, rank, op))

    for rank in range(len(orders)):
        start(rank, 0.0)
    while events:
        now, is_end, rank, op = heapq.heappop(events)
        present.add((rank, op))
        if is_end:
            free[rank] = True
            kind, j, stage = op
            if kind != "weight_gradient":
                receiver = ranks.get(stage + 1 if kind == "forward" else stage - 1, rank)
                if receiver != rank:
                    heapq.heappush(events, (now + p2p_seconds(j), 0, receiver, op))
        start(rank, now)
    return times
