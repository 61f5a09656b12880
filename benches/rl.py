"""Rounds of reinforcement learning: wlb's plans beside those of verl and TransferQueue, and through the adapters.

    pip install transferqueue==0.1.11; pip install --no-deps verl==0.9.1    # and what these import
    python -m benches.rl                     # prints the table, writes benches/records/rl.json

Three rounds, drawn with numpy. A: 64 prompts x 8 samples, one step. B: 512 prompts x 16, four steps. C: 256 prompts of
1 to 20 samples of very unequal lengths, four steps. On 8 and on 64 ranks; costs are verl's, 24,576 d + d^2. *Once*: the
step over a perfectly even one, if ranks wait for each other once a step; *every*: if they wait in every micro-batch.
The trainers' own functions are called; a rank's steps are cut and split into micro-batches as verl's workers do it.
"""

from __future__ import annotations

import contextlib
import importlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from rich.table import Table

import wlb
from benches.common import Lengths, Row, bars, machine, options, package_version, parse, rounded, tables, write_record
from wlb.integrations import slices

COST = wlb.CostModel(attention=2.0, linear=24575.0)
RANKS = (8, 64)
CLASSES = 3  # policy versions, for the time of planning
Plan = list[list[list[list[int]]]]  # by step, rank and micro-batch: samples


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round of samples.

    Attributes:
        lengths: tokens of each sample.
        prompts: prompt of each sample.
        steps: optimizer steps.
        cap: most tokens of a micro-batch.
    """

    lengths: Lengths
    prompts: Lengths
    steps: int
    cap: int


def rounds() -> dict[str, Round]:
    """The three rounds."""
    rng = np.random.default_rng(1)
    asked = rng.lognormal(np.log(1500), 0.6, 64).clip(1, 16384).astype(np.int64).repeat(8)
    answers = rng.lognormal(np.log(2000), 1.0, 512).clip(16, 16384).astype(np.int64)
    a = Round(lengths=asked + answers, prompts=np.arange(64).repeat(8), steps=1, cap=32768)
    rng = np.random.default_rng(2)
    asked = rng.integers(200, 2001, 512).repeat(16)
    answers = rng.lognormal(np.log(6000), 0.9, 8192).clip(1, 30720).astype(np.int64)
    b = Round(lengths=asked + answers, prompts=np.arange(512).repeat(16), steps=4, cap=40960)
    rng = np.random.default_rng(3)
    prompts = np.arange(256).repeat(rng.integers(1, 21, 256))
    lengths = rng.lognormal(np.log(4000), 1.3, prompts.size).clip(1, 32768).astype(np.int64)
    return {"A": a, "B": b, "C": Round(lengths=lengths, prompts=prompts, steps=4, cap=40960)}


# --- planners --------------------------------------------------------------------------------------------------------


def whole(held: Round, ranks: int, **more: Any) -> Plan:
    """`wlb.rl.plan`."""
    plan = wlb.rl.plan(
        held.lengths,
        dp_size=ranks,
        max_tokens=held.cap,
        cost_model=COST,
        groups=held.prompts,
        num_steps=held.steps,
        **more,
    )
    every_rank = range(ranks)
    return [
        [[part.tolist() for part in plan.micro_batches(step, rank)] for rank in every_rank] for step in range(len(plan))
    ]


def padded(held: Round, ranks: int) -> tuple[Round, int]:
    """The round with verl's padding, short samples of their own, and its samples in a step."""
    size = -(-held.lengths.size // (held.steps * ranks)) * ranks
    pads = size * held.steps - held.lengths.size
    lengths = np.append(held.lengths, np.full(pads, 128))
    prompts = np.append(held.prompts, held.prompts.max() + 1 + np.arange(pads))
    return Round(lengths=lengths, prompts=prompts, steps=held.steps, cap=held.cap), size


def through_adapter(held: Round, ranks: int, *, together: Any) -> Plan:
    """As wlb's adapters for verl ("step") and TransferQueue ("rank"), each rank splitting its steps by our function."""
    verl = importlib.import_module("wlb.integrations.verl")
    parts, _ = slices.planned(
        held.lengths,
        COST.cost(held.lengths),
        held.prompts.tolist(),
        dp_size=ranks,
        samples_per_step=held.lengths.size // held.steps,
        together=together,
    )
    plan: Plan = []
    for step in range(held.steps):
        held_by = [parts[rank][step] for rank in range(ranks)]
        work = [(held.lengths[of], COST.cost(held.lengths[of])) for of in held_by]
        count = max(len(verl._packed(tokens, costs, held.cap, None, 1)) for tokens, costs in work)
        while True:
            packed = [verl._packed(tokens, costs, held.cap, count, 1) for tokens, costs in work]
            if all(one is not None for one in packed):
                break
            count += 1
        plan.append(
            [
                [of[one[int(at)].document_ids].tolist() for at in one.deal(1)[0]]
                for of, one in zip(held_by, packed, strict=True)
            ]
        )
    return plan


def of_verl(held: Round, ranks: int, *, stepwise: bool) -> Plan:
    """As verl 0.9.1: the round balanced and then cut, as its trainer does, or each step balanced (`keep_minibatch`)."""
    verl = importlib.import_module("verl.utils.seqlen_balancing")
    work = (24576 * held.lengths + held.lengths**2).tolist()
    size = held.lengths.size // held.steps
    if stepwise:
        starts = range(0, held.lengths.size, size)
        cut = [verl.get_seqlen_balanced_partitions(work[at : at + size], ranks, equal_size=True) for at in starts]
        steps = [[[at + sample for sample in part] for part in parts] for at, parts in zip(starts, cut, strict=True)]
    else:
        slots = [_ends(part, work) for part in verl.get_seqlen_balanced_partitions(work, ranks, equal_size=True)]
        each = size // ranks
        steps = [[slot[step * each : (step + 1) * each] for slot in slots] for step in range(held.steps)]
    return [_split(step, held, work, verl) for step in steps]


def _ends(part: list[int], work: list[int]) -> list[int]:
    rising = sorted(part, key=lambda sample: (work[sample], sample))
    return rising[::2] + rising[1::2][::-1]


def _split(ranks: list[list[int]], held: Round, work: list[int], verl: Any) -> list[list[list[int]]]:
    """Micro-batches as `rearrange_micro_batches` makes them: one more until every rank keeps to the cap."""
    count = max(-(-int(held.lengths[of].sum()) // held.cap) for of in ranks)
    while True:
        plan = []
        for of in ranks:
            parts = verl.get_seqlen_balanced_partitions([work[sample] for sample in of], count, equal_size=False)
            parts.sort(key=lambda part: (sum(work[of[at]] for at in part), part[0]), reverse=True)
            plan.append([[of[at] for at in part] for part in parts[::2][::-1] + parts[1::2]])
        if all(held.lengths[part].sum() <= held.cap for rank in plan for part in rank):
            return plan
        count += 1


def of_transferqueue(held: Round, ranks: int) -> Plan:
    """TransferQueue 0.1.11: whole prompts on ranks by tokens, step by step, then verl's micro-batches."""
    sampler = importlib.import_module("transfer_queue.sampler.seqlen_balanced_sampler")
    verl = importlib.import_module("verl.utils.seqlen_balancing")
    work, plan = (24576 * held.lengths + held.lengths**2).tolist(), []
    if len(np.unique(np.bincount(held.prompts))) > 1:
        raise ValueError("takes prompts of one size")
    n = held.lengths.size // len(np.unique(held.prompts))
    for groups in np.array_split(np.arange(held.lengths.size).reshape(-1, n), held.steps):
        tokens = held.lengths[groups].sum(axis=1).tolist()
        parts = sampler.get_seqlen_balanced_partitions(tokens, ranks, equal_size=True)
        plan.append(_split([groups[part].ravel().tolist() for part in parts], held, work, verl))
    return plan


# --- judging ---------------------------------------------------------------------------------------------------------


def judged(plan: Plan, held: Round, ranks: int) -> Row:
    """What a plan takes and what it breaks."""
    costs, once, every, even, over, count = COST.cost(held.lengths), 0.0, 0.0, 0.0, 0, []
    for step in plan:
        longest = max(map(len, step))
        work = np.array(
            [[costs[part].sum() if part else 0.0 for part in [*rank, *[[]] * (longest - len(rank))]] for rank in step]
        )
        once, every = once + work.sum(axis=1).max(), every + work.max(axis=0).sum()
        even += work.sum() / ranks
        over += sum(held.lengths[part].sum() > held.cap for rank in step for part in rank if part)
        count.append(longest)
    trained = [sample for step in plan for rank in step for part in rank for sample in part]
    of_step = [np.unique(held.prompts[[s for rank in step for part in rank for s in part]]) for step in plan]
    parted = int((np.bincount(np.concatenate(of_step)) > 1).sum())
    lost = held.lengths.size - len(set(trained))
    return {
        "once": once / even,
        "every": every / even,
        "micro_batches": sum(count),
        "over_cap": int(over),
        "prompts_parted": parted,
        "lost_or_twice": lost + len(trained) - len(set(trained)),
    }


Planner = Callable[[Round, int], Plan]
PLANNERS: dict[str, tuple[Planner, bool]] = {
    "wlb, step": (whole, False),
    "wlb, micro_batch": (partial(whole, sync="micro_batch"), False),
    "wlb, micro_batch, largest first": (partial(whole, sync="micro_batch", order="heaviest_first"), False),
    "wlb, prompts on ranks": (partial(whole, together="rank"), False),
    "wlb in verl": (partial(through_adapter, together="step"), True),
    "wlb in TransferQueue": (partial(through_adapter, together="rank"), True),
    "verl, whole round": (partial(of_verl, stepwise=False), True),
    "verl, each step": (partial(of_verl, stepwise=True), True),
    "TransferQueue, then verl": (of_transferqueue, True),
}
"""By name: the planner, and whether it gets a round with equal numbers of samples for all ranks and steps."""


def measure(progress: Any) -> list[Row]:
    rows = []
    drawn = rounds()
    for name in ("verl.utils.seqlen_balancing", "transfer_queue.sampler.seqlen_balanced_sampler"):
        with contextlib.suppress(ImportError):  # the planner's row says so; else its time would be that of the import
            importlib.import_module(name)
    task = progress.add_task("rounds", total=len(drawn) * len(RANKS) * len(PLANNERS))
    for name, held in drawn.items():
        for ranks in RANKS:
            for planner, (plan, equal) in PLANNERS.items():
                given = padded(held, ranks)[0] if equal else held
                row: Row = {"round": name, "ranks": ranks, "planner": planner}
                began = time.perf_counter()
                try:
                    made = plan(given, ranks)
                except (wlb.WlbError, AssertionError, ValueError, ImportError) as refused:
                    row["refused"] = str(refused).partition(":")[0]
                else:
                    row |= judged(made, given, ranks) | {"ms": (time.perf_counter() - began) * 1e3}
                rows.append(row)
                progress.advance(task)
    return rows


def planning(repeats: int = 9) -> Row:
    """Milliseconds for round B with steps, classes and weights: the median."""
    held, found = rounds()["B"], []
    classes, tokens = np.arange(held.lengths.size) // 2731 % CLASSES, held.lengths // 2
    for _ in range(repeats):
        began = time.perf_counter()
        plan = wlb.rl.plan(
            held.lengths,
            dp_size=8,
            max_tokens=held.cap,
            cost_model=COST,
            groups=held.prompts,
            num_steps=held.steps,
            classes=classes,
        )
        plan.weights(tokens, mean="prompt")
        found.append((time.perf_counter() - began) * 1e3)
    return {"samples": held.lengths.size, "classes": CLASSES, "ms": float(np.median(found))}


def table(rows: list[Row]) -> Table:
    """One line for each planner and round."""
    shown = Table("round", "ranks", "planner", "once", "every", "micro-batches", "over cap", "parted", "lost", "ms")
    for row in rows:
        if "refused" in row:
            shown.add_row(row["round"], str(row["ranks"]), row["planner"], row["refused"])
            continue
        counts = [str(row[name]) for name in ("micro_batches", "over_cap", "prompts_parted", "lost_or_twice")]
        times = [f"{row['once']:.4f}", f"{row['every']:.4f}"]
        shown.add_row(row["round"], str(row["ranks"]), row["planner"], *times, *counts, f"{row['ms']:.1f}")
    return shown


def main() -> None:
    given = parse(options(__doc__, record="rl.json"))
    warnings.filterwarnings("ignore", message="groups: prompt")  # 64 prompts on 64 ranks: the table shows it
    with bars() as progress:
        rows = measure(progress)
    spent = planning()
    console = tables(150)
    console.print(table(rows))
    console.print(
        f"planning {spent['samples']} samples, four steps, {spent['classes']} classes, weights: {spent['ms']:.1f} ms"
    )
    packages = {name: package_version(name) for name in ("verl", "transferqueue")}
    record: Row = {"machine": machine() | {"packages": packages}, "rows": rows, "planning": spent}
    write_record(given.record, rounded(record))


if __name__ == "__main__":
    main()
