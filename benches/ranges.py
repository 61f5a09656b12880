"""When costs are not certain: one cost model, a range of them, or a fit that is a little wrong.

    python -m benches.ranges [--lengths ...]        # two tables for each set of lengths; writes records/ranges.json

A 7B Llama on a stream of global batches of 16 x 128K tokens, `max_tokens` of 1.5 contexts, `release="adaptive"`. A
packer is told a rate of attention, relative to the linear part's, or a range of rates; its plans are then graded at
several true rates. The first table has the mean imbalance at each. The second has a packer whose rate is wrong by a
factor, as a fit may be: the mean imbalance over the true rates, and the worst of them. A fit is better than the range
up to the factor at which its row passes the range's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import wlb
from benches.common import (
    CONTEXT,
    Lengths,
    Row,
    bars,
    global_batches,
    llama_7b,
    machine,
    options,
    parse,
    rounded,
    sources,
    tables,
    write_record,
)

MICRO_BATCHES = 16
TRUE_RATES = (0.4, 0.55, 0.67, 0.92, 1.4, 2.1)
TOLD: Mapping[str, tuple[float, ...]] = {
    **{f"{rate:g}": (rate,) for rate in TRUE_RATES},
    "[0.4, 2.1]": (0.4, 2.1),
    "[0.55, 1.4]": (0.55, 1.4),
}
WRONG_BY = (1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 2.0)


def run(batches: list[Lengths], told: tuple[float, ...], true_rates: tuple[float, ...]) -> Row:
    """What a packer that is told these rates does to a stream, by each of the true ones."""
    models = [llama_7b(rate) for rate in told]
    packer = wlb.Packer(
        num_micro_batches=MICRO_BATCHES,
        max_tokens=3 * CONTEXT // 2,
        max_document_tokens=CONTEXT,
        release="adaptive",
        cost_model=models if len(models) > 1 else models[0],
    )
    true = [llama_7b(rate) for rate in true_rates]
    found, micros = [], []
    for batch in batches:
        began = time.perf_counter()
        packing = packer.push(batch)
        micros.append((time.perf_counter() - began) * 1e6)
        costs = np.array([[model.cost(m.lengths).sum() for m in packing.micro_batches] for model in true])
        found.append(costs.max(axis=1) / costs.mean(axis=1))
    return {
        "told": list(told),
        "true_rates": list(true_rates),
        "imbalance": np.mean(found, axis=0).tolist(),
        "delay_mean": packer.metrics().delay_mean,
        "us": float(np.median(micros)),
    }


def main() -> None:
    parser = options(__doc__, lengths=True, record="ranges.json")
    parser.add_argument("--steps", type=int, default=120, help="global batches")
    arguments = parse(parser)
    record: dict[str, Any] = {"machine": machine(), "steps": arguments.steps, "lengths": {}}
    console = tables(130)
    with bars() as progress:
        of = sources(arguments.lengths, documents=200_000)
        work = progress.add_task("ranges", total=len(of) * (len(TOLD) + 2 * len(WRONG_BY) * len(TRUE_RATES)))
        for name, lengths in of.items():
            batches = global_batches(lengths, MICRO_BATCHES, arguments.steps)
            rows = []
            for told in TOLD.values():
                rows.append(run(batches, told, TRUE_RATES))
                progress.advance(work)
            wrong = []
            for factor in WRONG_BY:
                found = []
                for rate in TRUE_RATES:
                    for told_rate in (rate * factor, rate / factor):
                        found += run(batches, (told_rate,), (rate,))["imbalance"]
                        progress.advance(work)
                wrong.append({"factor": factor, "mean": float(np.mean(found)), "worst": max(found)})
            record["lengths"][name] = {"told": rows, "wrong_by": wrong}
            report(console, name, rows, wrong)
    write_record(arguments.record, rounded(record))


def report(console: Console, name: str, rows: list[Row], wrong: list[Row]) -> None:
    table = Table("told", *(f"true {rate:g}" for rate in TRUE_RATES), "worst", "delay", "us a step", title=name)
    for label, row in zip(TOLD, rows, strict=True):
        numbers = [f"{value:.3f}" for value in (*row["imbalance"], max(row["imbalance"]))]
        table.add_row(label, *numbers, f"{row['delay_mean']:.2f}", f"{row['us']:,.0f}")
    console.print(table)
    table = Table("wrong by", *(f"{row['factor']:g}" for row in wrong), title=f"{name}: told a rate that is wrong")
    for key in ("mean", "worst"):
        table.add_row(key, *(f"{row[key]:.3f}" for row in wrong))
    console.print(table)


if __name__ == "__main__":
    main()
