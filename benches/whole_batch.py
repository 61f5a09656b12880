"""A batch that is trained whole in one step (fine-tuning, reinforcement learning), beside verl.

    make bench-peers [LENGTHS="x.npy ..."]                                # sets everything up, and runs this as well
    PYTHONPATH=.venv/peers python -m benches.whole_batch [--lengths ...]  # a table; writes records/whole_batch.json

Every sample of a batch is trained, in micro-batches of at most `--max-tokens`, and all data-parallel ranks run equally
many. wlb makes one plan for all ranks: `pack(num_micro_batches=None, dp_size=ranks, sync=...)`, and, beside it,
`multiple_of=ranks`, a plan for no ranks that is then dealt. verl first deals samples to ranks, equally many each
(`_balance_batch`), then each rank splits its own, and all try again with one more until none is over the limit
(`rearrange_micro_batches`); its functions are called here as these do, without a process group. Samples longer than the
limit are left out.

A step is judged by wlb's cost model, over one of equal ranks, in two ways. Where ranks wait for each other once a step
it takes the sum of the heaviest rank; where parameters are sharded they meet in every micro-batch, so that it takes the
sum of the heaviest of each round. Planning is timed for all ranks in one process, though verl's ranks split theirs at
the same time: there one waits for a part of it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

import wlb
from benches.common import COST, Lengths, bars, machine, options, parse, read_lengths, samples, tables, write_record
from benches.peers import verl_balancing

Plan = list[list[list[int]]]  # by rank, by round: the samples
Row = dict[str, Any]
RANKS = object()
"""Stands for the number of ranks."""


def ours(**arguments: Any) -> Callable[[Lengths, int, int], Plan]:
    def plan(lengths: Lengths, ranks: int, max_tokens: int) -> Plan:
        given = {name: ranks if value is RANKS else value for name, value in arguments.items()}
        packing = wlb.pack(lengths, num_micro_batches=None, max_tokens=max_tokens, cost_model=COST, **given)
        return [[packing[index].document_ids.tolist() for index in row] for row in packing.deal(ranks).tolist()]

    return plan


def verl(with_our_costs: bool) -> Callable[[Lengths, int, int], Plan]:
    def plan(lengths: Lengths, ranks: int, max_tokens: int) -> Plan:
        module = verl_balancing()
        work = (COST.cost(lengths) if with_our_costs else module.calculate_workload(lengths)).tolist()
        shares = module.get_seqlen_balanced_partitions(work, ranks, equal_size=True)
        count = max(module.ceildiv(int(lengths[share].sum()), max_tokens) for share in shares)
        while True:
            plans: Plan = [
                [
                    [share[at] for at in part]
                    for part in module.get_seqlen_balanced_partitions(
                        [work[at] for at in share], count, equal_size=False
                    )
                ]
                for share in shares
            ]
            if all(lengths[part].sum() <= max_tokens for parts in plans for part in parts):
                break
            count += 1
        for parts in plans:
            parts.sort(key=lambda part: (sum(work[at] for at in part), part[0]), reverse=True)
        return [parts[::2][::-1] + parts[1::2] for parts in plans]

    return plan


PLANNERS = {
    "verl, its workload": verl(False),
    "verl, our costs": verl(True),
    "wlb, multiple_of, refined": ours(multiple_of=RANKS, method="refined"),
    "wlb, step": ours(dp_size=RANKS, sync="step"),
    "wlb, micro_batch": ours(dp_size=RANKS, sync="micro_batch"),
    "wlb, step, equal samples": ours(dp_size=RANKS, sync="step", equal_documents=True),
    "wlb, micro_batch, equal samples": ours(dp_size=RANKS, sync="micro_batch", equal_documents=True),
}


def present() -> list[str]:
    """Of the planners: all, but verl's where it is not installed."""
    try:
        verl_balancing()
    except ImportError:
        return [name for name in PLANNERS if not name.startswith("verl")]
    return list(PLANNERS)


def judged(plan: Plan, lengths: Lengths, ranks: int, max_tokens: int) -> dict[str, float]:
    costs = np.array([[COST.cost(lengths[part]).sum() for part in parts] for parts in plan])  # [ranks, rounds]
    assert sorted(sample for parts in plan for part in parts for sample in part) == list(range(lengths.size))
    assert max(lengths[part].sum() for parts in plan for part in parts) <= max_tokens
    least = int(-(-lengths.sum() // (ranks * max_tokens)))
    mean = costs.sum() / ranks
    return {
        "rounds": costs.shape[1],
        "least_rounds": least,
        "step": float(costs.sum(axis=1).max() / mean),
        "micro_batch": float(costs.max(axis=0).sum() / mean),
    }


def measure(
    paths: Sequence[Path], ranks: int, batch: int, limits: Sequence[int], batches: int, progress: Any
) -> list[Row]:
    """Every planner on the same batches, under each limit."""
    sets = {"lognormal": np.random.default_rng(0).lognormal(7.2, 1.0, 100_000).astype(np.int64).clip(1)}
    sets |= {path.stem: np.random.default_rng(0).permutation(read_lengths(path)) for path in paths}
    rows = []
    planners = present()
    work = progress.add_task("whole batches", total=len(limits) * len(sets) * batches)
    for max_tokens, (name, lengths) in itertools.product(limits, sets.items()):
        kept = lengths[lengths <= max_tokens]
        for number in range(min(batches, kept.size // batch)):
            these = kept[number * batch : (number + 1) * batch]
            for planner in planners:
                call = functools.partial(PLANNERS[planner], these, ranks, max_tokens)
                row = {"max_tokens": max_tokens, "lengths": name, "planner": planner, "us": min(samples(call, 0.05))}
                rows.append(row | judged(call(), these, ranks, max_tokens))
            progress.advance(work)
    return rows


def means(rows: list[Row]) -> Iterator[tuple[int, str, dict[str, Row]]]:
    """For each limit and set of lengths, the means of every planner."""
    for max_tokens, name in dict.fromkeys((row["max_tokens"], row["lengths"]) for row in rows):
        of_planner = {}
        for planner in dict.fromkeys(row["planner"] for row in rows):
            these = [r for r in rows if (r["max_tokens"], r["lengths"], r["planner"]) == (max_tokens, name, planner)]
            keys = ("rounds", "least_rounds", "step", "micro_batch", "us")
            of_planner[planner] = {key: float(np.mean([row[key] for row in these])) for key in keys}
            of_planner[planner] |= {f"worst_{key}": max(row[key] for row in these) for key in ("step", "micro_batch")}
        yield max_tokens, name, of_planner


def main() -> None:
    parser = options(__doc__, lengths=True, record="whole_batch.json")
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel ranks")
    parser.add_argument("--batch", type=int, default=512, help="samples of a batch, a multiple of the ranks")
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[16384, 32768], help="limits of a micro-batch")
    parser.add_argument("--batches", type=int, default=20, help="batches of each set of lengths")
    arguments = parse(parser)
    sizes = {name: getattr(arguments, name) for name in ("ranks", "batch", "max_tokens")}
    with bars() as progress:
        rows = measure(arguments.lengths, *sizes.values(), arguments.batches, progress)
    write_record(arguments.record, {"machine": machine(["verl"]), **sizes, "rows": rows})
    console = tables(150)
    for max_tokens in arguments.max_tokens:
        console.print(table([row for row in rows if row["max_tokens"] == max_tokens], max_tokens, sizes))


def table(rows: list[Row], max_tokens: int, sizes: Row) -> Table:
    title = f"{sizes['batch']} samples on {sizes['ranks']} data-parallel ranks, at most {max_tokens:,} tokens"
    columns = (
        "lengths",
        "planner",
        "micro-batches a rank",
        "tokens need",
        "step, worst",
        "rounds, worst",
        "ms, all ranks",
    )
    table = Table(*columns, title=title)
    for _, name, of_planner in means(rows):
        for planner, mean in of_planner.items():
            numbers = (
                f"{mean['rounds']:.2f}",
                f"{mean['least_rounds']:.2f}",
                f"{mean['step']:.4f}, {mean['worst_step']:.4f}",
                f"{mean['micro_batch']:.4f}, {mean['worst_micro_batch']:.4f}",
                f"{mean['us'] / 1e3:.2f}",
            )
            table.add_row(name, planner, *numbers)
    return table


if __name__ == "__main__":
    main()
