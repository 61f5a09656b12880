"""What it costs to bound the work of a step: `max_step_cost` of the adaptive release, beside a higher price of delay.

    python -m benches.step_work                      # synthetic lengths; prints a table, writes the record
    python -m benches.step_work --lengths x.npy ...  # real ones instead

Streams are those of release.py, read as training reads them (no more than the packer admits), in orders of several
seeds. Lost time is the sum of the steps' heaviest micro-batches over the sum of their means; variation and the heaviest
step are of the work of steps, those that drain the packer at the end left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.table import Table

import wlb
from benches.common import (
    CONTEXT,
    COST,
    Lengths,
    Row,
    bars,
    machine,
    markdown,
    options,
    parse,
    rounded,
    sources,
    stream,
    tables,
    write_record,
)
from wlb_tools.simulation.stream import Reading

MICRO_BATCHES = (4, 16)
STEPS = 200
ROOM = 1.5  # max_tokens in contexts
SEEDS = (0, 1)
BOUNDS = (None, 3.0, 2.0, 1.5, 1.25, 1.0)
PRICES = (0.3, 1.0, 4.0)  # without a bound: what waits less leaves with fewer of its kind
FIGURES = ("variation", "heaviest", "over", "lost", "worst", "delay", "longest", "tokens")


def ways() -> Iterator[tuple[str, dict[str, Any]]]:
    """What is compared: arguments of the packer."""
    for bound in BOUNDS:
        yield "adaptive" if bound is None else f"bound {bound:g}", {"release": "adaptive", "max_step_cost": bound}
    for price in PRICES:
        yield f"price {price:g}", {"release": "adaptive", "delay_price": price}
    for bound in (2.0, 1.5):
        dear = {"release": "adaptive", "max_step_cost": bound, "delay_price": PRICES[0]}
        yield f"bound {bound:g}, price {PRICES[0]:g}", dear
    yield "nothing waits", {"release": "fifo"}


def measured(lengths: Lengths, micro_batches: int, seed: int, **arguments: Any) -> Row:
    """One stream."""
    pieces = stream(lengths, STEPS * micro_batches * CONTEXT, seed)
    packer = wlb.Packer(
        num_micro_batches=micro_batches,
        max_tokens=int(ROOM * CONTEXT),
        max_document_tokens=CONTEXT,
        cost_model=COST,
        **arguments,
    )
    reading = Reading(pieces, packer, micro_batches * CONTEXT)
    steps = [read.packing for read in reading.steps() if read.seconds is not None and read.packing.tokens.any()]
    work = np.array([step.costs.sum() for step in steps])
    heaviest = np.array([step.costs.max() for step in steps])
    tokens = np.array([step.tokens.sum() for step in steps])
    metrics = reading.packer.metrics()
    return {
        "variation": work.std() / work.mean(),
        "heaviest": work.max() / work.mean(),
        "over": metrics.steps_over_max_cost / len(steps),
        "lost": heaviest.sum() / (work.sum() / micro_batches),
        "worst": metrics.imbalance_worst,
        "delay": metrics.delay_mean,
        "longest": metrics.delay_max,
        "tokens": tokens.std() / tokens.mean(),
    }


def main() -> None:
    arguments = parse(options(__doc__, lengths=True, record="step_work.json"))
    rows: list[Row] = []
    corpora = sources(arguments.lengths, documents=200_000)
    with bars() as progress:
        cases = [(name, n, way) for name in corpora for n in MICRO_BATCHES for way in ways()]
        for name, micro_batches, (way, given) in progress.track(cases):
            of_seeds = [measured(corpora[name], micro_batches, seed, **given) for seed in SEEDS]
            means = {figure: float(np.mean([one[figure] for one in of_seeds])) for figure in FIGURES}
            rows.append({"lengths": name, "micro_batches": micro_batches, "way": way, **means, "seeds": of_seeds})
    table = Table("lengths", "N", "", *FIGURES)
    for row in rows:
        cells = [f"{row[figure]:.3f}" for figure in FIGURES]
        table.add_row(row["lengths"], str(row["micro_batches"]), row["way"], *cells)
    for line in markdown(table):
        tables(160).print(line, soft_wrap=True)
    record = {"machine": machine(), "steps": STEPS, "room": ROOM, "seeds": list(SEEDS), "rows": rows}
    write_record(arguments.record, rounded(record))


if __name__ == "__main__":
    main()
