"""How far packings are from the optimum where max_tokens binds: var_length, refined, and a solver with a time limit.

    python -m benches.refined                      # prints the tables, writes benches/records/refined.json
    python -m benches.refined --lengths x.npy ...  # also on real lengths, split at 16K, 32K and 128K
    python -m benches.refined --scaling            # only times, up to 100,000 micro-batches

50 to 500 documents in 4 to 64 micro-batches that may hold little more than the mean. Only instances where Algorithm 1
could not always follow the cost are kept. The optimum is rarely known: the yardstick is the greater of two lower
bounds, the solver's (HiGHS, `benches.exact`) and the packing's own (`Packing.lower_bound`).
"""

from __future__ import annotations

import functools
import itertools
import time
import timeit
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import benches.exact
import wlb
from benches.common import COST, Lengths, bars, machine, options, parse, samples, synthetic, tables, write_record

DOCUMENTS = (50, 100, 200, 350, 500)
MICRO_BATCHES = (4, 8, 16, 32, 64)
SIZES = (
    (20, 2),
    (50, 8),
    (100, 4),
    (100, 16),
    (500, 16),
    (1500, 64),
    (8700, 64),
    (30_000, 1024),
    (60_000, 25_000),
    (300_000, 10_000),
    (300_000, 100_000),
    (1_000_000, 10_000),
    (1_000_000, 100_000),
)  # documents, micro-batches
ROOM = (1.02, 1.1, 1.5)
ROOM_TO_SCALE = (1.0, 1.005, *ROOM)  # from no token to spare on
# Where refined has the most to do beside var_length: documents cut at half of a micro-batch, few in each, little room.
# With other costs than elsewhere, other seeds, and lengths with a heavier tail too: more pieces are halves then.
HARD = (
    (20, 2),
    (50, 8),
    (100, 25),
    (500, 64),
    (2000, 400),
    (2000, 500),
    (12_000, 3000),
    (40_000, 10_000),
    (200_000, 50_000),
)
HARD_ROOM = (1.005, 1.01, 1.02)
HARD_LINEAR = (4_000.0, 36_000.0, 250_000.0)  # pairs that cost as much as a token
HARD_SEEDS = (1, 2)
HARD_LENGTHS = ("log-normal", "Pareto")
Instance = tuple[str, Lengths, dict[str, Any]]  # where the lengths are from, and how they are packed
Scaled = tuple[tuple[str, str], Lengths, dict[str, Any]]  # where documents are cut and how much room there is, likewise


def instances(paths: list[Path], seeds: int) -> Iterator[Instance]:
    for n, micro_batches, seed in itertools.product(DOCUMENTS, MICRO_BATCHES, range(seeds)):
        lengths = synthetic(n, seed)
        # As if split at the mean micro-batch: otherwise the longest document is all that matters.
        split = wlb.split_documents(lengths, max_document_tokens=int(lengths.sum()) // micro_batches)[2]
        for name, these in (("synthetic", lengths), ("synthetic, split", split)):
            if 3 * micro_batches <= len(these) <= max(DOCUMENTS):
                yield from bound_by_tokens(name, these, micro_batches, int(these.sum()) / micro_batches)
    for path in paths:
        corpus = np.random.default_rng(0).permutation(np.load(path).astype(np.int64))
        for micro_batches, context in itertools.product((4, 16, 64), (16384, 32768, 131072)):
            pieces = wlb.split_documents(corpus, max_document_tokens=context)[2]
            offsets = wlb.batch_offsets(pieces, tokens_per_batch=micro_batches * context)
            batches = (pieces[a:b] for a, b in itertools.pairwise(offsets[:-1]))
            usual = (batch for batch in batches if 3 * micro_batches <= len(batch) <= max(DOCUMENTS))
            for batch in itertools.islice(usual, seeds):
                yield from bound_by_tokens(path.stem, batch, micro_batches, context)


def bound_by_tokens(name: str, lengths: Lengths, micro_batches: int, mean: float) -> Iterator[Instance]:
    for room in ROOM:
        max_tokens = max(int(room * mean), int(lengths.max()))
        options = {"num_micro_batches": micro_batches, "max_tokens": max_tokens, "cost_model": COST}
        greedy = wlb.pack(lengths, leftover="return", **options)
        if greedy.length_fallbacks > 0 or len(greedy.leftover) > 0:
            yield name, lengths, options


def measure(name: str, lengths: Lengths, options: dict[str, Any], seconds: float) -> dict[str, Any]:
    def pack(method: Any) -> wlb.Packing:
        return wlb.pack(lengths, method=method, leftover="return", **options)

    greedy, refined = pack("var_length"), pack("refined")
    row: dict[str, Any] = {
        "lengths": name,
        "documents": len(lengths),
        "micro_batches": options["num_micro_batches"],
        "max_tokens_over_mean": options["max_tokens"] * options["num_micro_batches"] / int(lengths.sum()),
        "left_over": [len(greedy.leftover), len(refined.leftover)],
        "us": {
            "sort": samples(lambda: np.sort(lengths), 0.05),
            "var_length": samples(lambda: pack("var_length"), 0.05),
            "refined": samples(lambda: pack("refined"), 0.2),
        },
    }
    if len(refined.leftover) > 0:
        return row
    bound = refined.lower_bound
    row["without_tokens"] = max(float(refined.costs.mean()), float(COST.cost(lengths).max())) / bound - 1.0
    try:
        solution = benches.exact.solve(lengths, time_limit=seconds, **options)
    except wlb.WlbError:  # nothing found in time
        solution = None
    if solution is not None:
        bound = max(bound, solution.lower_bound)
        row |= {"solver_seconds": solution.seconds, "solver": solution.objective / bound - 1.0}
    row["refined"] = float(refined.costs.max()) / bound - 1.0
    if len(greedy.leftover) == 0:
        row["var_length"] = float(greedy.costs.max()) / bound - 1.0
    return row


def scaling(console: Console) -> None:
    """Time of `refined` over that of `var_length`, by size and by how long documents are beside a micro-batch."""
    scaled(console, "refined over var_length", usual())
    scaled(console, "refined over var_length where it has the most to do", hard())


def usual() -> Iterator[Scaled]:
    """Every size, uncut and cut, from no token to spare to half as many again; and as few micro-batches as hold it."""
    for documents, micro_batches in SIZES:
        whole = drawn(documents, 0)
        for cut, parts in (("", 0), ("a mean", 1), ("half a mean", 2)):
            mean = int(whole.sum()) / micro_batches
            limit = max(int(mean / parts), 16) if parts else int(whole.max())
            lengths = wlb.split_documents(whole, max_document_tokens=limit)[2]
            rooms = dict.fromkeys(max(int(room * mean) + 1, int(lengths.max())) for room in ROOM_TO_SCALE)
            for max_tokens in rooms:
                plan = {"num_micro_batches": micro_batches, "max_tokens": max_tokens, "cost_model": COST}
                yield (cut, f"{max_tokens / mean:.3f}"), lengths, plan
        for contexts in (1, 2):
            plan = {"num_micro_batches": None, "max_tokens": contexts * int(whole.max()), "cost_model": COST}
            yield ("", ""), whole, plan


def hard() -> Iterator[Scaled]:
    """Documents cut at half of a micro-batch that has next to no room to spare, under several costs."""
    for (documents, micro_batches), kind, seed in itertools.product(HARD, HARD_LENGTHS, HARD_SEEDS):
        whole = drawn(documents, seed) if kind == "log-normal" else heavy_tailed(documents, seed)
        mean = int(whole.sum()) / micro_batches
        lengths = wlb.split_documents(whole, max_document_tokens=int(mean / 2))[2]
        for linear, room in itertools.product(HARD_LINEAR, HARD_ROOM):
            model = wlb.CostModel(attention=1.0, linear=linear)
            plan = {"num_micro_batches": micro_batches, "max_tokens": int(room * mean) + 1, "cost_model": model}
            yield (f"half a mean, {kind}, linear {linear:.0f}", f"{room:.3f}"), lengths, plan


def drawn(documents: int, seed: int) -> Lengths:
    """Log-normal lengths."""
    return np.exp(np.random.default_rng(seed).normal(7.0, 1.2, documents)).astype(np.int64).clip(16, 131072)


def heavy_tailed(documents: int, seed: int) -> Lengths:
    """Pareto lengths."""
    uniform = np.random.default_rng(seed).random(documents)
    return (300 / uniform ** (1 / 1.3)).astype(np.int64).clip(16, 131072)


def scaled(console: Console, title: str, instances: Iterable[Scaled]) -> None:
    """Times both methods on every instance: a row for each, and what they come to."""
    columns = ("documents", "cut at", "micro-batches", "max_tokens / mean", "var_length, ms", "refined, ms", "ratio")
    table = Table(*columns, title=title)
    ratios = []
    for (cut, room), lengths, shape in instances:
        plan = wlb.pack(lengths, leftover="return", **shape)
        least = {"var_length": float("inf"), "refined": float("inf")}
        # In turn, so that both meet the same machine, and in the time of this thread: others use the machine too.
        for _ in range(5 if len(lengths) > 10_000 else 100):
            for method in least:
                call: Any = functools.partial(wlb.pack, lengths, method=method, leftover="return", **shape)
                least[method] = min(least[method], timeit.timeit(call, number=1, timer=time.thread_time))
        label = f"{len(plan):,}" if shape["num_micro_batches"] else f"as few as hold it: {len(plan):,}"
        times = [f"{1e3 * seconds:.4g}" for seconds in least.values()]
        ratios.append(least["refined"] / least["var_length"])
        table.add_row(f"{len(lengths):,}", cut, label, room, *times, f"{ratios[-1]:.2f}")
    console.print(table)
    above = sum(ratio > 3 for ratio in ratios)
    console.print(f"{len(ratios)} rows: median {np.median(ratios):.2f}, worst {max(ratios):.2f}, {above} above 3")


def main() -> None:
    parser = options(__doc__, lengths=True, record="refined.json")
    parser.add_argument("--seeds", type=int, default=2, help="instances of each kind")
    parser.add_argument("--solver-seconds", type=float, default=5.0, help="time limit of HiGHS, for one instance")
    parser.add_argument("--scaling", action="store_true", help="only print its time over var_length's, by size")
    arguments = parse(parser)

    if arguments.scaling:
        scaling(tables(150))
        return
    with bars() as progress:
        found = progress.track(list(instances(arguments.lengths, arguments.seeds)), description="refined")
        rows = [measure(*instance, arguments.solver_seconds) for instance in found]
    write_record(arguments.record, {"machine": machine(["highspy"]), "rows": rows})
    report(tables(150), rows, arguments.solver_seconds)


def report(console: Console, rows: list[dict[str, Any]], solver_seconds: float) -> None:
    kinds = dict.fromkeys(row["lengths"] for row in rows)
    title = f"Maximum cost above the best lower bound, {len(rows)} instances where max_tokens binds"
    table = Table("lengths", "packer", "solved", "mean", "p50", "p90", "p95", "worst", "within 0.5 %", title=title)
    for kind, packer in itertools.product([*kinds, "all"], ("var_length", "refined", "solver")):
        these = [row for row in rows if kind in (row["lengths"], "all")]
        above = np.array([row[packer] for row in these if packer in row])
        name = f"HiGHS, {solver_seconds:g} s" if packer == "solver" else packer
        if len(above) > 0:
            numbers = [above.mean(), *np.quantile(above, [0.5, 0.9, 0.95, 1.0]), (above <= 0.005).mean()]
            table.add_row(kind, name, f"{len(above)} of {len(these)}", *(f"{number:.2%}" for number in numbers))
    console.print(table)
    us = {name: np.array([min(row["us"][name]) for row in rows]) for name in ("sort", "var_length", "refined")}
    table = Table("time", "p50", "p95", "worst", title="Planning time: the least of many bursts, of each instance")
    table.add_row("refined, us", *(f"{value:.0f}" for value in np.quantile(us["refined"], [0.5, 0.95, 1.0])))
    for other in ("var_length", "sort"):
        ratios = np.quantile(us["refined"] / us[other], [0.5, 0.95, 1.0])
        table.add_row(f"over {other}", *(f"{value:.1f}" for value in ratios))
    console.print(table)
    below = np.array([row["without_tokens"] for row in rows if "without_tokens" in row])
    console.print(
        f"mean micro-batch or largest document, over the bound that knows max_tokens: {below.mean():.2%} on average, "
        f"{below.min():.2%} at worst, lower in {(below < -1e-9).sum()} of {len(below)}"
    )
    left = np.array([row["left_over"] for row in rows])
    console.print(f"documents left over: var_length {left[:, 0].sum()}, refined {left[:, 1].sum()}")


if __name__ == "__main__":
    main()
