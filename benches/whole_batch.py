"""A batch that is trained whole in one step (fine-tuning, reinforcement learning), beside verl.

    make bench-peers [LENGTHS="x.npy ..."]                                # sets everything up, and runs this as well
    PYTHONPATH=.venv/peers python benches/whole_batch.py [--lengths ...]  # a table; writes records/whole_batch.json

Every sample of a batch is trained, in micro-batches of at most `--max-tokens`, and all data-parallel ranks run equally
many. wlb makes one plan for all ranks: `pack(num_micro_batches=None, multiple_of=ranks)`, then `deal`. verl first deals
samples to ranks, equally many each (`_balance_batch`), then each rank splits its own, and all try again with one more
until none is over the limit (`rearrange_micro_batches`); its functions are called here as these do, without a process
group. Samples longer than the limit are left out.

A step is judged by wlb's cost model as data-parallel ranks run it whose parameters are sharded: they meet in every
micro-batch, so it takes the sum of the heaviest of each round, here over that of equal ranks. Planning is timed for all
ranks in one process, though verl's ranks split theirs at the same time: there one waits for a part of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from common import COST, Lengths, bars, machine, options, parse, read_lengths, samples, tables, write_record
from peers import verl_balancing
from rich.console import Console
from rich.table import Table

import wlb

Plan = list[list[list[int]]]  # by rank, by round: the samples


def ours(method: Any) -> Callable[[Lengths, int, int], Plan]:
    def plan(lengths: Lengths, ranks: int, max_tokens: int) -> Plan:
        packing = wlb.pack(
            lengths, num_micro_batches=None, multiple_of=ranks, max_tokens=max_tokens, cost_model=COST, method=method
        )
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
    "wlb, var_length": ours("var_length"),
    "wlb, refined": ours("refined"),
}


def judged(plan: Plan, lengths: Lengths, ranks: int, max_tokens: int) -> dict[str, float]:
    costs = np.array([[COST.cost(lengths[part]).sum() for part in parts] for parts in plan])  # [ranks, rounds]
    assert sorted(sample for parts in plan for part in parts for sample in part) == list(range(lengths.size))
    assert max(lengths[part].sum() for parts in plan for part in parts) <= max_tokens
    least = int(-(-lengths.sum() // (ranks * max_tokens)))
    return {
        "rounds": costs.shape[1],
        "least_rounds": least,
        "step_over_even": float(costs.max(axis=0).sum() * ranks / costs.sum()),
    }


def main() -> None:
    parser = options(__doc__, lengths=True, record="whole_batch.json")
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel ranks")
    parser.add_argument("--batch", type=int, default=512, help="samples of a batch, a multiple of the ranks")
    parser.add_argument("--max-tokens", type=int, default=16384, help="most tokens of a micro-batch")
    parser.add_argument("--batches", type=int, default=20, help="batches of each set of lengths")
    arguments = parse(parser)

    sets = {"lognormal": np.random.default_rng(0).lognormal(7.2, 1.0, 100_000).astype(np.int64).clip(1)}
    sets |= {path.stem: np.random.default_rng(0).permutation(read_lengths(path)) for path in arguments.lengths}
    rows = []
    with bars() as progress:
        work = progress.add_task("whole batches", total=len(sets) * arguments.batches)
        for name, lengths in sets.items():
            kept = lengths[lengths <= arguments.max_tokens]
            for number in range(min(arguments.batches, kept.size // arguments.batch)):
                batch = kept[number * arguments.batch : (number + 1) * arguments.batch]
                for planner, plan in PLANNERS.items():
                    call = functools.partial(plan, batch, arguments.ranks, arguments.max_tokens)
                    row = {"lengths": name, "planner": planner, "us": min(samples(call, 0.05))}
                    rows.append(row | judged(call(), batch, arguments.ranks, arguments.max_tokens))
                progress.advance(work)
    sizes = {name: getattr(arguments, name) for name in ("ranks", "batch", "max_tokens")}
    write_record(arguments.record, {"machine": machine(["verl"]), **sizes, "rows": rows})
    report(tables(150), rows, sizes)


def report(console: Console, rows: list[dict[str, Any]], sizes: dict[str, int]) -> None:
    title = "{batch} samples on {ranks} data-parallel ranks, micro-batches of at most {max_tokens:,} tokens".format(
        **sizes
    )
    columns = ("lengths", "planner", "micro-batches a rank", "tokens need", "step over even", "worst", "ms, all ranks")
    table = Table(*columns, title=title)
    for name in dict.fromkeys(row["lengths"] for row in rows):
        for planner in PLANNERS:
            these = [row for row in rows if (row["lengths"], row["planner"]) == (name, planner)]
            mean = {key: float(np.mean([row[key] for row in these])) for key in ("rounds", "least_rounds", "us")}
            steps = [row["step_over_even"] for row in these]
            numbers = (
                f"{mean['rounds']:.2f}",
                f"{mean['least_rounds']:.2f}",
                f"{np.mean(steps):.3f}",
                f"{max(steps):.3f}",
            )
            table.add_row(name, planner, *numbers, f"{mean['us'] / 1e3:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
