"""A tuned price of delay on documents that it was not tuned on, beside the default, and the luckiest of one order.

    python -m benches.delay_price                      # synthetic lengths; prints a table and writes the record
    python -m benches.delay_price --lengths x.npy ...  # real ones instead

A stream is the documents in random order, split at the context, as in release.py. A price is tuned on one stream and
measured on four others, again for twelve streams. *One order*: the price with the least mean imbalance on the stream
itself, within the limit, as before prices were judged; it is among the points that tuning returns. Lost
time is the sum of the steps' heaviest micro-batches over the sum of their means, the worst step that of any measured
stream. *Bound* is of that step: its heaviest document over the mean micro-batch of the most work that documents which
were there, trained in it or waiting on, have within its tokens. Whoever trains that document then does no better.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from rich.table import Table

import wlb
from benches.common import (
    CONTEXT,
    Lengths,
    Row,
    bars,
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
from wlb._core import DELAY_PRICE
from wlb_tools.simulation.stream import Reading

STEPS = 32  # global batches of a stream
TUNED_ON, MEASURED_ON = range(12), range(100, 104)  # seeds: a price that is lucky once in ten streams has to be seen
ROOMS = (1.0, 1.5)  # max_tokens in contexts
LIMITS = (0.3, 0.6, 2.0)  # most mean delay
MICRO_BATCHES = 16
COST = llama_7b(0.55)


def packing(room: float) -> dict[str, Any]:
    """Arguments of a packer."""
    return {
        "num_micro_batches": MICRO_BATCHES,
        "max_tokens": int(room * CONTEXT),
        "max_document_tokens": CONTEXT,
        "cost_model": COST,
        "max_delay": 16,
    }


def measured(lengths: Lengths, room: float, price: float) -> tuple[float, float, float, float]:
    """Lost time, worst step, its bound and mean delay of a stream at a price."""
    packer = wlb.Packer(release="adaptive", delay_price=price, **packing(room))
    reading = Reading(lengths, packer, MICRO_BATCHES * CONTEXT)
    heaviest, mean, worst, bound = 0.0, 0.0, 0.0, 0.0
    for read in reading.steps():
        if read.seconds is None or not read.packing.num_tokens:
            continue
        costs = read.packing.costs
        heaviest, mean = heaviest + float(costs.max()), mean + float(costs.mean())
        if costs.max() / costs.mean() > worst:
            worst = float(costs.max() / costs.mean())
            bound = least(read.packing, reading.packer)
    return heaviest / mean, worst, bound, reading.packer.metrics().delay_mean


def least(packing: wlb.Packing, after: wlb.Packer) -> float:
    """The least imbalance of a step with this one's heaviest document, of all that was there."""
    trained = np.concatenate([micro_batch.lengths for micro_batch in packing.micro_batches])
    state = after.state_dict()
    waits = [length for queue in (*state["queues"], state["carried"]) for length in queue["lengths"]]
    lengths = np.sort(np.concatenate([trained, np.array(waits, np.int64)]))[::-1]
    costs, room = COST.cost(lengths), MICRO_BATCHES * packing.max_tokens - (lengths.cumsum() - lengths)
    most = float((costs * np.clip(room / lengths, 0.0, 1.0)).sum())  # of a token the longest cost most
    return max(float(COST.cost([trained.max()])[0]) * MICRO_BATCHES / most, 1.0)


def rows(name: str, lengths: Lengths) -> list[Row]:
    """Of one source."""
    tokens = MICRO_BATCHES * CONTEXT * STEPS
    tuned_on, measured_on = ([stream(lengths, tokens, seed) for seed in seeds] for seeds in (TUNED_ON, MEASURED_ON))
    made: list[Row] = []
    for room, limit in itertools.product(ROOMS, LIMITS):
        prices: dict[str, list[float]] = {"default": [], "one order": [], "tuned": []}
        for sample in tuned_on:
            found = wlb.tune(sample, max_mean_delay=limit, **packing(room))
            within = [point for point in found.pareto if point.delay_mean <= limit] or list(found.pareto[:1])
            for how, price in (
                ("default", DELAY_PRICE),
                ("one order", within[-1].delay_price),
                ("tuned", found.delay_price),
            ):
                assert price is not None
                prices[how].append(price)
        known: dict[float, list[tuple[float, float, float, float]]] = {}
        for price in set().union(*prices.values()):
            known[price] = [measured(other, room, price) for other in measured_on]
        for how, of_seeds in prices.items():
            figures = np.array([known[price] for price in of_seeds])  # [tuned on, measured on, 4]
            lost, worst, bound, delay = (figures[:, :, index] for index in range(4))
            made.append(
                {
                    "lengths": name,
                    "room": room,
                    "max_mean_delay": limit,
                    "how": how,
                    "prices": of_seeds,
                    "lost_time": float(lost.mean()),
                    "worst": float(worst.max()),
                    "bound": float(bound.flat[worst.argmax()]),
                    "delay_mean": float(delay.mean()),
                }
            )
    return made


def report(made: list[Row]) -> None:
    """One line for each room and limit."""
    table = Table(
        "lengths", "room", "limit", *(f"{how}: lost, worst (bound), delay" for how in ("default", "one order", "tuned"))
    )
    for of_case in zip(*[iter(made)] * 3, strict=True):
        figures = (
            f"{row['lost_time']:.3f} {row['worst']:.2f} ({row['bound']:.2f}) {row['delay_mean']:.2f}" for row in of_case
        )
        table.add_row(of_case[0]["lengths"], str(of_case[0]["room"]), str(of_case[0]["max_mean_delay"]), *figures)
    tables(120).print(table)


def main() -> None:
    parser = options(__doc__, lengths=True, record="delay_price.json")
    arguments = parse(parser)
    made: list[Row] = []
    with bars() as progress:
        every = sources(arguments.lengths, documents=20_000)
        for name, lengths in progress.track(every.items(), description="prices"):
            made += rows(name, lengths)
    write_record(arguments.record, {"machine": machine(), "rows": rounded(made)})
    report(made)


if __name__ == "__main__":
    main()
