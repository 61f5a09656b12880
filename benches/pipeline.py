"""The pipeline simulator and the placement of micro-batches.

    python benches/pipeline.py [--lengths FILE.npy ...]

Speed is compared with an event simulation in Python (`simulate`) of the same input in the same run. Placement
is compared on the micro-batches of real lengths, or of synthetic ones like the paper's histogram: order of arrival,
`Packing.deal` (light ends), `order_micro_batches`, and for eight micro-batches the best of all orders.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from common import CONTEXT, COST, options, parse, samples, sources, tables
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import wlb
from plain import Op, orders_of

STEPS = 20
LAYOUTS: list[dict[str, Any]] = [
    {"schedule": "1f1b", "num_stages": 4},
    {"schedule": "interleaved_1f1b", "num_stages": 4, "num_virtual_stages": 2},
    {"schedule": "interleaved_1f1b", "num_stages": 4, "num_virtual_stages": 4},
    {"schedule": "zb_h1", "num_stages": 4},
]
ALL_ORDERS = np.array(list(itertools.permutations(range(8))))


def seconds(work: Callable[[], object]) -> float:
    """Of one call: the least of several bursts, for the machine may be busy."""
    return min(samples(work)) / 1e6


def simulate(orders: list[list[Op]], seconds: Callable[[Op], float]) -> float:
    """Seconds of a step without latency between ranks, in plain Python: what a script of one's own would do.

    Events are taken in the order of their times: an op that ends frees its rank and is an input of others; a rank
    starts its next op as soon as it is free and has all inputs.
    """
    ranks = {stage: rank for rank, order in enumerate(orders) for _, _, stage in order}
    last = max(ranks)
    next_of_rank, free = [0] * len(orders), [True] * len(orders)
    present: set[Op] = set()
    events: list[tuple[float, int, Op]] = []
    now = 0.0

    def inputs(op: Op) -> list[Op]:
        kind, j, stage = op
        if kind == "forward":
            return [("forward", j, stage - 1)] if stage > 0 else []
        if kind == "weight_gradient":
            return [("input_gradient", j, stage)]
        return [("forward", j, stage), *([(kind, j, stage + 1)] if stage < last else [])]

    def start(rank: int) -> None:
        if free[rank] and next_of_rank[rank] < len(orders[rank]):
            op = orders[rank][next_of_rank[rank]]
            if present.issuperset(inputs(op)):
                next_of_rank[rank] += 1
                free[rank] = False
                heapq.heappush(events, (now + seconds(op), rank, op))

    for rank in range(len(orders)):
        start(rank)
    while events:
        now, rank, op = heapq.heappop(events)
        present.add(op)
        free[rank] = True
        start(rank)
        kind, _, stage = op
        if kind != "weight_gradient":
            receiver = ranks.get(stage + 1 if kind == "forward" else stage - 1, rank)
            if receiver != rank:
                start(receiver)
    return now


def speed(console: Console) -> None:
    table = Table("work", "ops", "time", "ops a second", "x Python", title="Speed")
    rng = np.random.default_rng(0)
    for layout, count in ((LAYOUTS[0], 64), (LAYOUTS[1], 64), (LAYOUTS[3], 1024)):
        costs = rng.lognormal(size=count)
        timeline = wlb.simulate_pipeline(costs, **layout)
        orders, stages = orders_of(timeline), layout["num_stages"] * layout.get("num_virtual_stages", 1)
        thirds = (costs / (3 * stages)).tolist()

        def peer(orders: list[list[Op]] = orders, thirds: list[float] = thirds) -> float:
            return simulate(orders, lambda op: thirds[op[1]] * (2 if op[0] == "backward" else 1))

        ends = peer()
        if abs(ends - timeline.seconds) > 1e-9 * ends:
            raise SystemExit("the Python simulation gives another makespan: this would compare different things")
        ours = seconds(lambda costs=costs, layout=layout: wlb.simulate_pipeline(costs, **layout))
        theirs = seconds(peer)
        row = f"simulate_pipeline, {layout['schedule']}, {count} micro-batches"
        table.add_row(row, f"{len(timeline):,}", _time(ours), f"{len(timeline) / ours:,.0f}", f"{theirs / ours:,.0f}")
    steps = rng.lognormal(size=(500, 4, 16))
    ops = 500 * 4 * 2 * 16 * 8
    ours = seconds(lambda: wlb.simulate_steps(steps, **LAYOUTS[1]))
    table.add_row(
        "simulate_steps, 500 steps, DP 4, 16 micro-batches", f"{ops:,}", _time(ours), f"{ops / ours:,.0f}", ""
    )
    for layout, count in ((LAYOUTS[0], 4), (LAYOUTS[0], 8), (LAYOUTS[1], 16)):
        costs = rng.lognormal(size=count)
        ours = seconds(lambda costs=costs, layout=layout: wlb.order_micro_batches(costs, **layout))
        table.add_row(f"order_micro_batches, {layout['schedule']}, {count} micro-batches", "", _time(ours), "", "")
    console.print(table)


def placement(console: Console, name: str, lengths: NDArray[np.int64]) -> None:
    _, _, pieces = wlb.split_documents(lengths, max_document_tokens=CONTEXT)
    title = f"Step time of {name} over order_micro_batches: 128K, up to {STEPS} steps"
    table = Table("packing", "DP x micro-batches", "schedule", "arrival", "deal", "best of all", title=title)
    for (method, room), (dp_size, count) in itertools.product(
        (("original", 1.0), ("var_length", 1.5)), ((1, 4), (1, 8), (4, 4), (4, 8))
    ):
        micro_batches = dp_size * count
        offsets = wlb.batch_offsets(pieces, tokens_per_batch=micro_batches * CONTEXT)[: STEPS + 1]
        options: dict[str, Any] = {"num_micro_batches": micro_batches, "max_tokens": int(CONTEXT * room)}
        plans = [
            wlb.pack(pieces[a:b], cost_model=COST, method=method, **options) for a, b in itertools.pairwise(offsets)
        ]
        for layout in LAYOUTS:
            orders = {
                "placed": [wlb.order_micro_batches(p.costs, dp_size=dp_size, **layout) for p in plans],
                "arrival": [np.arange(micro_batches).reshape(dp_size, count)] * len(plans),
                "deal": [p.deal(dp_size) for p in plans],
            }
            steps = {
                way: wlb.simulate_steps(
                    np.stack([p.costs[rows] for p, rows in zip(plans, found, strict=True)]), **layout
                )
                for way, found in orders.items()
            }
            placed = steps["placed"].seconds
            over = [f"{np.mean(steps[way].seconds / placed) - 1:+.2%}" for way in ("arrival", "deal")]
            best = ""
            if (dp_size, count) == (1, 8):
                least = [wlb.simulate_steps(p.costs[ALL_ORDERS][:, None], **layout).seconds.min() for p in plans]
                best = f"{np.mean(np.array(least) / placed) - 1:+.2%}"
            schedule = f"{layout['schedule']}, PP 4, v={layout.get('num_virtual_stages', 1)}"
            table.add_row(method, f"{dp_size} x {count}", schedule, *over, best)
    console.print(table)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def main() -> None:
    arguments = parse(options(__doc__, lengths=True))
    console = tables(120)
    speed(console)
    for name, lengths in sources(arguments.lengths, documents=170_000).items():
        placement(console, name, np.random.default_rng(0).permutation(lengths))


if __name__ == "__main__":
    main()
