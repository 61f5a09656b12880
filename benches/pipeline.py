"""The pipeline simulator and the placement of micro-batches.

    python benches/pipeline.py [--lengths FILE.npy ...]

Speed is compared with a Python event simulation (`oracles.schedule`) of the same input in the same run. Placement
is compared on the micro-batches of real lengths, or of synthetic ones like the paper's histogram: order of arrival,
`Packing.deal` (light ends), `order_micro_batches`, and for eight micro-batches the best of all orders.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from engine import CONTEXT, COST
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import wlb
from oracles import schedule as naive

STEPS = 20
LAYOUTS: list[dict[str, Any]] = [
    {"schedule": "1f1b", "num_stages": 4},
    {"schedule": "interleaved_1f1b", "num_stages": 4, "num_virtual_stages": 2},
    {"schedule": "interleaved_1f1b", "num_stages": 4, "num_virtual_stages": 4},
    {"schedule": "zb_h1", "num_stages": 4},
]
ALL_ORDERS = np.array(list(itertools.permutations(range(8))))


def best_time(work: Callable[[], Any], calls: int, bursts: int = 10) -> float:
    """Seconds of one call: the least of several means, for the machine may be busy."""
    best = float("inf")
    for _ in range(bursts):
        started = time.perf_counter()
        for _ in range(calls):
            work()
        best = min(best, (time.perf_counter() - started) / calls)
    return best


def speed(console: Console) -> None:
    table = Table("work", "ops", "time", "ops a second", "x Python", title="Speed")
    rng = np.random.default_rng(0)
    for layout, count in ((LAYOUTS[0], 64), (LAYOUTS[1], 64), (LAYOUTS[3], 1024)):
        costs = rng.lognormal(size=count)
        timeline = wlb.simulate_pipeline(costs, **layout)
        orders, stages = naive.orders_of(timeline), layout["num_stages"] * layout.get("num_virtual_stages", 1)
        thirds = (costs / (3 * stages)).tolist()

        def peer(orders: naive.Orders = orders, thirds: list[float] = thirds) -> dict[naive.Op, tuple[float, float]]:
            return naive.simulate(orders, lambda op: thirds[op[1]] * (2 if op[0] == "backward" else 1))

        ends = max(end for _, end in peer().values())
        if abs(ends - timeline.seconds) > 1e-9 * ends:
            raise SystemExit("the Python simulation gives another makespan: this would compare different things")
        ours = best_time(lambda costs=costs, layout=layout: wlb.simulate_pipeline(costs, **layout), 20)
        theirs = best_time(peer, 1, bursts=3)
        row = f"simulate_pipeline, {layout['schedule']}, {count} micro-batches"
        table.add_row(row, f"{len(timeline):,}", _time(ours), f"{len(timeline) / ours:,.0f}", f"{theirs / ours:,.0f}")
    steps = rng.lognormal(size=(500, 4, 16))
    ops = 500 * 4 * 2 * 16 * 8
    ours = best_time(lambda: wlb.simulate_steps(steps, **LAYOUTS[1]), 1)
    table.add_row(
        "simulate_steps, 500 steps, DP 4, 16 micro-batches", f"{ops:,}", _time(ours), f"{ops / ours:,.0f}", ""
    )
    for layout, count in ((LAYOUTS[0], 4), (LAYOUTS[0], 8), (LAYOUTS[1], 16)):
        costs = rng.lognormal(size=count)
        ours = best_time(lambda costs=costs, layout=layout: wlb.order_micro_batches(costs, **layout), 20)
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
            seconds = {
                way: wlb.simulate_steps(
                    np.stack([p.costs[rows] for p, rows in zip(plans, found, strict=True)]), **layout
                )
                for way, found in orders.items()
            }
            placed = seconds["placed"].seconds
            over = [f"{np.mean(seconds[way].seconds / placed) - 1:+.2%}" for way in ("arrival", "deal")]
            best = ""
            if (dp_size, count) == (1, 8):
                least = [wlb.simulate_steps(p.costs[ALL_ORDERS][:, None], **layout).seconds.min() for p in plans]
                best = f"{np.mean(np.array(least) / placed) - 1:+.2%}"
            schedule = f"{layout['schedule']}, PP 4, v={layout.get('num_virtual_stages', 1)}"
            table.add_row(method, f"{dp_size} x {count}", schedule, *over, best)
    console.print(table)


def synthetic() -> NDArray[np.int64]:
    """97.25 % uniform 1..6250, 2.75 % log-uniform 6250..125000."""
    rng = np.random.default_rng(0)
    long = np.exp(rng.uniform(np.log(6250), np.log(125_000), 170_000)).astype(np.int64)
    return np.where(rng.random(long.size) < 0.0275, long, rng.integers(1, 6251, long.size))


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, nargs="*", default=[], help=".npy files of document lengths")
    arguments = parser.parse_args()
    if wlb.BUILD_PROFILE != "release":
        sys.exit("wlb is a debug build: its timings mean nothing. Build a wheel: pip install .")
    console = Console(width=120)
    speed(console)
    for path in arguments.lengths:
        shuffled = np.random.default_rng(0).permutation(np.load(path).astype(np.int64))
        placement(console, path.stem, shuffled)
    if not arguments.lengths:
        placement(console, "synthetic lengths", synthetic())


if __name__ == "__main__":
    main()
