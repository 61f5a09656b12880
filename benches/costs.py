"""Documents that bring their own costs: how level the step is, how long the plan takes, and how far the optimum is.

    python -m benches.costs   # prints the tables, writes benches/records/costs.json

Level: two resources, 512 documents, 16 micro-batches, no document above 5 % of a mean micro-batch, in several mixtures.
Time: 8,700 documents, 64 micro-batches, beside the same batch packed by length, burst by burst in turn. Optimum: small
batches solved by HiGHS (extra `exact`); without it these rows are left out. Dynamic: 512 documents of the same mixtures
on 64 ranks by `plan_dynamic_cp`, two columns, over the bound, beside a plan by the sum of the columns, whose groups are
priced column by column as well. Exchange is free, or takes a tenth of the second column's work if every token is
received once, and nothing hides it. *One column* is how far a plan of the second column alone is above its own bound.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

import wlb
from benches.common import (
    CONTEXT,
    COST,
    Row,
    machine,
    options,
    parse,
    rounded,
    samples,
    synthetic,
    tables,
    write_record,
)

Costs = NDArray[np.float64]
SEEDS = 20
MIXTURES: dict[str, Callable[[np.random.Generator, int], Costs]] = {
    "independent, uniform": lambda rng, n: rng.uniform(0, 1, (n, 2)),
    "independent, log-normal": lambda rng, n: rng.lognormal(0, 1, (n, 2)),
    "images in 70 %": lambda rng, n: np.stack(
        [np.where(rng.random(n) < 0.7, rng.uniform(0.2, 1, n), 0), rng.uniform(0.1, 1, n)], axis=1
    ),
    "nearly proportional": lambda rng, n: rng.uniform(0.2, 1, (n, 1)) * rng.uniform(0.9, 1.1, (n, 2)),
    "one or the other": lambda rng, n: (lambda share: np.stack([share, 1 - share], axis=1))(rng.uniform(0, 1, n)),
}


def capped(costs: Costs, micro_batches: int) -> Costs:
    """No document above 5 % of a mean micro-batch, in any column."""
    for _ in range(50):
        costs = np.minimum(costs, 0.05 * costs.sum(axis=0) / micro_batches)
    return costs


def level() -> list[Row]:
    """The step over its lower bound, mean and worst over seeds."""
    rows: list[Row] = []
    shape: dict[str, Any] = {"num_micro_batches": 16, "max_tokens": 10**6}
    lengths = np.full(512, 100)
    for mixture, draw in MIXTURES.items():
        for columns in (1, 2):
            for method in ("var_length", "refined"):
                over = []
                for seed in range(SEEDS):
                    costs = capped(draw(np.random.default_rng(seed), 512), 16)[:, :columns]
                    packing = wlb.pack(lengths, costs=costs, method=method, **shape)
                    over.append(packing.step_cost / packing.lower_bound)
                rows.append(
                    {
                        "mixture": mixture,
                        "columns": columns,
                        "method": method,
                        "mean": statistics.mean(over),
                        "worst": max(over),
                    }
                )
    return rows


def speed() -> list[Row]:
    """Microseconds of a plan, one and two columns beside lengths."""
    lengths = synthetic(8700)
    rng = np.random.default_rng(0)
    one = COST.cost(lengths)
    two = np.stack([np.where(rng.random(8700) < 0.3, rng.lognormal(0, 1, 8700) * one.mean(), 0), one], axis=1)
    shape: dict[str, Any] = {"num_micro_batches": 64, "max_tokens": max(int(lengths.sum() / 64 * 1.5), CONTEXT)}
    works: dict[str, Callable[[], object]] = {
        "by length": lambda: wlb.pack(lengths, cost_model=COST, **shape),
        "costs, one column": lambda: wlb.pack(lengths, costs=one, **shape),
        "costs, two columns": lambda: wlb.pack(lengths, costs=two, **shape),
    }
    measured: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(20):
        for name, work in works.items():
            measured[name] += samples(work, 0.03)
    least = min(measured["by length"])
    return [{"what": name, "us": min(times), "ratio": min(times) / least} for name, times in measured.items()]


RANKS = 64
DYNAMIC: dict[str, Any] = {"world_size": RANKS, "max_tokens_per_rank": 8192}


def by_columns(plan: wlb.DynamicCpPlan, costs: Costs) -> float:
    """Seconds of a step that was planned by the sum of the columns, where these are passes of their own."""
    groups = [group for batch in plan for group in batch]
    seconds = np.array([costs[group.document_ids].sum(axis=0) / group.cp_size for group in groups])
    seconds[:, -1] += [group.seconds for group in groups] - seconds.sum(axis=1)  # what they exchange
    return sum(plan.step_seconds(column.clip(0)) for column in seconds.T)


def dynamic_batch(draw: Callable[[np.random.Generator, int], Costs], seed: int) -> tuple[NDArray[np.int64], Costs]:
    """512 documents, none of more than 5 % of a micro-batch."""
    rng = np.random.default_rng(seed)
    costs = capped(draw(rng, 512), 16)
    return rng.integers(100, 8000, 512), costs / costs.sum(axis=0)


def dynamic() -> list[Row]:
    """Dynamic-CP's step over its lower bound, mean and worst over seeds; and that of a plan by the sum."""
    rows: list[Row] = []
    for mixture, draw in MIXTURES.items():
        for stages, price in ((1, 0.0), (1, 0.1), (4, 0.0), (4, 0.1)):
            over, by_sum, one = [], [], []
            for seed in range(SEEDS // 2):
                lengths, costs = dynamic_batch(draw, seed)
                exchange = wlb.Exchange(seconds_per_token=price / float(lengths.sum()), overlap=0.0)
                shape = {**DYNAMIC, "num_stages": stages, "exchange": exchange}
                plan = wlb.plan_dynamic_cp(lengths, costs=costs, **shape)
                over.append(plan.seconds / plan.lower_bound)
                other = wlb.plan_dynamic_cp(lengths, costs=costs.sum(axis=1), **shape)
                by_sum.append(by_columns(other, costs) / plan.lower_bound)
                alone = wlb.plan_dynamic_cp(lengths, costs=costs[:, 1], **shape)
                one.append(alone.seconds / alone.lower_bound)
            rows.append(
                {
                    "mixture": mixture,
                    "stages": stages,
                    "exchange": price,
                    "mean": statistics.mean(over),
                    "worst": max(over),
                    "by the sum": statistics.mean(by_sum),
                    "its worst": max(by_sum),
                    "one column": statistics.mean(one),
                }
            )
    return rows


def dynamic_speed() -> list[Row]:
    """Milliseconds of a dynamic plan by one column and by two."""
    rows: list[Row] = []
    lengths, costs = dynamic_batch(MIXTURES["images in 70 %"], 0)
    for stages, price in ((1, 0.0), (1, 0.1), (8, 0.0), (8, 0.1)):
        exchange = wlb.Exchange(seconds_per_token=price / float(lengths.sum()), overlap=0.0)
        shape = {**DYNAMIC, "num_stages": stages, "exchange": exchange}
        works: list[Callable[[], object]] = [
            lambda shape=shape: wlb.plan_dynamic_cp(lengths, costs=costs.sum(axis=1), **shape),
            lambda shape=shape: wlb.plan_dynamic_cp(lengths, costs=costs, **shape),
        ]
        measured: list[list[float]] = [[], []]
        for _ in range(10):
            for times, work in zip(measured, works, strict=True):
                times += samples(work, 0.03)
        one, two = (min(times) / 1e3 for times in measured)
        rows.append({"stages": stages, "exchange": price, "one column, ms": one, "two, ms": two, "ratio": two / one})
    return rows


def optimal_step(costs: Costs, micro_batches: int) -> float:
    """The shortest step, by HiGHS: the sum over columns of a bound on every micro-batch, as small as can be."""
    import highspy

    model = highspy.Highs()  # type: ignore[no-untyped-call]
    model.setOptionValue("output_flag", False)
    model.setOptionValue("threads", 1)
    model.setOptionValue("mip_rel_gap", 1e-6)
    model.setOptionValue("time_limit", 60.0)
    unit = costs.sum() / micro_batches
    heaviest = [model.addVariable(lb=0.0, obj=1.0) for _ in range(costs.shape[1])]
    documents = range(len(costs))
    # Micro-batches are alike: the k-th document uses one of the first k + 1.
    inside = [{i: model.addBinary() for i in documents if j <= i} for j in range(micro_batches)]
    for i in documents:
        places = [bins[i] for bins in inside if i in bins]
        model.addConstr(sum(places[1:], start=places[0] * 1.0) == 1)
    for bins in inside:
        (first, x), *others = bins.items()
        for column, most in enumerate(heaviest):
            scaled = costs[:, column] / unit
            model.addConstr(sum((y * float(scaled[i]) for i, y in others), start=x * float(scaled[first])) <= most)
    model.run()
    return float(model.getInfo().mip_dual_bound) * unit


def optimum() -> list[Row]:
    """Small batches over what the solver proved to be the least."""
    rows = []
    for documents, micro_batches in ((12, 3), (16, 4)):
        over: dict[str, list[float]] = {"var_length": [], "refined": []}
        for seed in range(10):
            costs = np.random.default_rng(seed).lognormal(0, 1, (documents, 2))
            least = optimal_step(costs, micro_batches)
            for method, found in over.items():
                shape: dict[str, Any] = {"num_micro_batches": micro_batches, "max_tokens": 10**6, "method": method}
                found.append(wlb.pack(np.full(documents, 100), costs=costs, **shape).step_cost / least)
        for method, found in over.items():
            mean, worst = statistics.mean(found), max(found)
            rows.append(
                {"documents": documents, "micro_batches": micro_batches, "method": method, "mean": mean, "worst": worst}
            )
    return rows


def show(title: str, rows: list[Row]) -> None:
    """A table of rows with the same keys."""
    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows:
        table.add_row(*(f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()))
    tables(110).print(table)


def main() -> None:
    """Prints what was measured and writes the record."""
    arguments = parse(options(__doc__, record="costs.json"))
    record: Row = {"machine": machine(), "level": level(), "speed": speed()}
    record |= {"dynamic": dynamic(), "dynamic speed": dynamic_speed()}
    if find_spec("highspy"):
        record["optimum"] = optimum()
    for title in ("level", "speed", "dynamic", "dynamic speed", "optimum"):
        if title in record:
            show(title, record[title])
    write_record(arguments.record, rounded(record))


if __name__ == "__main__":
    main()
