"""What reading ahead buys: documents that come before their turn (`max_early`), against those that only wait.

    python -m benches.early [--lengths x.npy ...]    # prints a table, writes the record

A stream is as in release.py, read by `BalancedBatchSampler`. Displacement is the mean, over tokens, of the iterations
between the one in which a document comes in order and the one in which it is trained, before or after it
(`delay_mean + early_mean`). Both rules run at several prices of delay; the table interpolates between the best of them
at equal mean imbalance, and says "never" where no price is so even. Streams are long: few prices are near a level, and
on short ones single steps decide where they are. The documents at the end of the stream, drained, count in the
displacement and not in the balance.
"""

from __future__ import annotations

from operator import itemgetter

import numpy as np
from rich.table import Table

import wlb
from benches.common import (
    CONTEXT,
    Lengths,
    Row,
    llama_7b,
    machine,
    options,
    parse,
    rounded,
    sources,
    stream,
    tables,
    write_record,
)
from wlb.torch.data import BalancedBatchSampler

PRICES = (0.2, 0.1, 0.07, 0.05, 0.04, 0.03, 0.022, 0.016, 0.011)
LEVELS = (1.01, 1.005, 1.003)
MOST = (0, 2, 4, 8)


def run(lengths: Lengths, micro_batches: int, price: float, most: int) -> Row:
    packer = wlb.Packer(
        num_micro_batches=micro_batches,
        max_tokens=CONTEXT * 3 // 2,
        max_document_tokens=CONTEXT,
        cost_model=llama_7b(1.0),
        release="adaptive",
        delay_price=price,
    )
    sampler = BalancedBatchSampler(lengths, packer=packer, dp_rank=0, dp_size=1, shuffle=False, max_early=most)
    reader, heaviest, mean = sampler.reader.copy(), 0.0, 0.0
    while not reader.ended:
        costs = reader.next_step().costs
        heaviest, mean = heaviest + float(costs.max()), mean + float(costs.mean())
    of = reader.metrics()
    return {
        "delay_price": price,
        "imbalance_mean": of.imbalance_mean,
        "imbalance_p95": of.imbalance_p95,
        "imbalance_worst": of.imbalance_worst,
        "lost_time": heaviest / mean,
        "displacement": of.delay_mean + of.early_mean,
        "early_mean": of.early_mean,
        "delay_max": of.delay_max,
    }


def measure(lengths: Lengths, micro_batches: int, most: int) -> Row:
    """All prices with so many iterations ahead, and the displacement at each level of imbalance."""
    points = [run(lengths, micro_batches, price, most) for price in PRICES]
    moved = {str(level): at(level, points, "displacement") for level in LEVELS}
    return {"max_early": most, "displacement_at": moved, "points": points}


def at(level: float, points: list[Row], key: str) -> float | None:
    """Between the points around that mean imbalance, on the front; None where no price is so even, or so uneven."""
    front: list[Row] = []
    for point in sorted(points, key=itemgetter("imbalance_mean")):
        # A price so low that steps are less even again is no one's choice.
        if not front or point["displacement"] < front[-1]["displacement"]:
            front.append(point)
    imbalances = [point["imbalance_mean"] for point in front]
    reached = imbalances[0] <= level <= imbalances[-1]
    return float(np.interp(level, imbalances, [point[key] for point in front])) if reached else None


def main() -> None:
    parser = options(__doc__, lengths=True, record="early.json")
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2400, help="global batches of a stream")
    parser.add_argument("--seed", type=int, default=0)
    given = parse(parser)
    table = Table("lengths", "max_early", *(f"displacement at {level}" for level in LEVELS), "worst step at 1.005")
    rows: list[Row] = []
    for name, documents in sources(given.lengths, documents=200_000).items():
        lengths = stream(documents, given.steps * given.micro_batches * CONTEXT, given.seed)
        for most in MOST:
            row: Row = {"lengths": name} | measure(lengths, given.micro_batches, most)
            cells = (*row["displacement_at"].values(), at(1.005, row["points"], "imbalance_worst"))
            table.add_row(name, str(most), *("never" if value is None else f"{value:.3f}" for value in cells))
            rows.append(row)
    tables(120).print(table)
    settings = {"micro_batches": given.micro_batches, "steps": given.steps, "seed": given.seed}
    write_record(given.record, {"machine": machine(), **settings, "rows": rounded(rows)})


if __name__ == "__main__":
    main()
