"""Steps of few documents under Dynamic-CP, beside what anybody would do first: longest first, in groups of one size.

    python -m benches.few_documents     # prints the table, writes benches/records/few_documents.json

4 to 30 documents, one of five long, on 2 to 24 ranks a stage, 1 to 4 stages, groups of powers of two or of any number
of ranks, exchange free or at a price, hidden behind attention or not: all drawn at random. The peer divides every
micro-batch into groups of one size and puts the documents there, the longest first, each where it is done first among
the groups with memory for it. It may try all sizes, and all numbers of micro-batches up to twice what memory or the
pipeline needs, in the order that comes of it and with the longest last; its shortest step counts. Both plans are
judged by the same clock: the ranks of a group wait for one another, others do not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress
from rich.table import Table

import wlb
from benches.common import Lengths, Row, bars, machine, options, parse, rounded, tables, write_record

LINEAR = 3000.0  # seconds of a token, where a pair takes 1
COST = wlb.CostModel(attention=1.0, linear=LINEAR)
EXCHANGE = 900.0  # seconds of a token, where exchange has a price
MICRO_BATCHES_OVER_LEAST = 2  # that the peer tries
STEPS = 3000
MUCH = 0.01  # longer than the peer's step, relative to it
Seconds = NDArray[np.float64]


def drawn(rng: np.random.Generator) -> tuple[Lengths, dict[str, Any]]:
    """The documents of a step, and what it runs on, as `wlb.plan_dynamic_cp` takes it."""
    world_size, max_tokens = int(rng.integers(2, 25)), int(rng.choice([8192, 16384, 32768]))
    machine: dict[str, Any] = {
        "world_size": world_size,
        "num_stages": int(rng.choice([1, 2, 4])),
        "max_tokens_per_rank": max_tokens,
        "group_sizes": str(rng.choice(["powers_of_two", "any"])),
        "exchange": wlb.Exchange(
            seconds_per_token=float(rng.choice([0.0, EXCHANGE, EXCHANGE])), overlap=float(rng.integers(2))
        ),
    }
    documents = int(rng.integers(4, 31))
    long, short = rng.integers(20_000, 131_073, documents), rng.integers(100, 6000, documents)
    lengths = np.where(rng.random(documents) < 0.2, long, short)
    largest_group = 2 ** (world_size.bit_length() - 1)
    return lengths.clip(max=largest_group * max_tokens), machine


def longest_first(lengths: Lengths, machine: dict[str, Any]) -> float:
    """Seconds of the peer's shortest step."""
    world_size, stages = machine["world_size"], machine["num_stages"]
    least = max(stages, -(-int(lengths.sum()) // (world_size * machine["max_tokens_per_rank"])))
    most = max(least, min(MICRO_BATCHES_OVER_LEAST * least, len(lengths)))
    sizes: Sequence[int] = range(1, world_size + 1)
    if machine["group_sizes"] == "powers_of_two":
        sizes = [2**bit for bit in range(world_size.bit_length())]
    steps = []
    for count, size in itertools.product(range(least, most + 1), sizes):
        seconds = placed(lengths, machine, count, size)
        if seconds is not None:
            longest_last = seconds[seconds.max(axis=1).argsort(kind="stable")]
            steps += [step_seconds(seconds, stages), step_seconds(longest_last, stages)]
    return min(steps)


def placed(lengths: Lengths, machine: dict[str, Any], count: int, size: int) -> Seconds | None:
    """Seconds of every micro-batch's groups, all of one size; None where a document finds no memory."""
    tokens = np.zeros((count, machine["world_size"] // size))
    pairs = tokens.copy()
    for document in (-lengths).argsort(kind="stable"):
        more_tokens, more_pairs = tokens + lengths[document], pairs + float(wlb.pairs(int(lengths[document])))
        done = group_seconds(more_tokens, more_pairs, machine, size)
        done[more_tokens > size * machine["max_tokens_per_rank"]] = np.inf
        first = np.unravel_index(done.argmin(), done.shape)
        if np.isinf(done[first]):
            return None
        tokens[first], pairs[first] = more_tokens[first], more_pairs[first]
    return group_seconds(tokens, pairs, machine, size)


def group_seconds(tokens: Seconds, pairs: Seconds, machine: dict[str, Any], size: int) -> Seconds:
    """Of groups of so many ranks: their part of the work, and the exchange that attention does not hide."""
    exchange = machine["exchange"].seconds_per_token * tokens * (size - 1) / size
    exposed: Seconds = np.maximum(exchange - machine["exchange"].overlap * pairs / size, 0)
    return (pairs + LINEAR * tokens) / size + exposed


def step_seconds(seconds: Seconds, stages: int) -> float:
    """Groups of the same ranks in every micro-batch are a pipeline each, and wait for no other."""
    return max(wlb.simulate_pipeline(of_group, schedule="1f1b", num_stages=stages).seconds for of_group in seconds.T)


def measure(count: int, progress: Progress, seed: int = 0) -> list[Row]:
    """How much longer than the peer's each of so many steps is, and than with groups of powers of two alone."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for _ in progress.track(range(count), description="few documents"):
        lengths, machine = drawn(rng)
        seconds = wlb.plan_dynamic_cp(lengths, cost_model=COST, **machine).seconds
        row: Row = machine | {"lengths": lengths.tolist(), "over": seconds / longest_first(lengths, machine) - 1}
        row |= {"exchange": str(machine["exchange"]), "priced": machine["exchange"].seconds_per_token > 0}
        if machine["group_sizes"] == "any":
            narrowed = wlb.plan_dynamic_cp(lengths, cost_model=COST, **machine | {"group_sizes": "powers_of_two"})
            row["over_powers_of_two"] = seconds / narrowed.seconds - 1
        rows.append(row)
    return rows


def main() -> None:
    parser = options(__doc__, record="few_documents.json")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps to plan")
    parser.add_argument("--seed", type=int, default=0)
    given = parse(parser)
    with bars() as progress:
        rows = measure(given.steps, progress, given.seed)
    longer = [row for row in rows if row["over"] > MUCH]
    console = tables(130)
    console.print(table(rows))
    for row in longer:
        console.print(row)
    record: Row = {"machine": machine(), "steps": given.steps, "seed": given.seed}
    record |= {"over": [row["over"] for row in rows], "longer": longer}
    write_record(given.record, rounded(record))


def table(rows: list[Row]) -> Table:
    columns = ("longest first, mean", "at worst", f"over {MUCH:.0%}", "powers of two, mean", "at best")
    table = Table("groups", "exchange", "steps", *columns)
    table.title = "steps of few documents: how much longer wlb's are than others"
    kinds = {(row["group_sizes"], row["priced"]) for row in rows}
    for sizes, priced in sorted(kinds):
        of = [row for row in rows if (row["group_sizes"], row["priced"]) == (sizes, priced)]
        over = np.array([row["over"] for row in of])
        told = [f"{over.mean():+.1%}", f"{over.max():+.1%}", str((over > MUCH).sum())]
        if sizes == "any":
            over = np.array([row["over_powers_of_two"] for row in of])
            told += [f"{over.mean():+.1%}", f"{over.min():+.1%}"]
        table.add_row(sizes, "at a price" if priced else "free", f"{len(of):,}", *told)
    return table


if __name__ == "__main__":
    main()
