"""Rounds of reinforcement learning: wlb's plans beside those of other trainers, and through wlb's adapters.

    pip install transferqueue==0.1.11; pip install --no-deps verl==0.9.1    # and what these import
    python -m benches.rl     # prints the table, writes benches/records/rl.json and docs/results/rl.md

slime, NeMo-RL and AReaL are in no package: WLB_SLIME, WLB_NEMO_RL and WLB_AREAL name checkouts. The clock on the page
is that of `python -m benches.rl_clock`.

Three rounds, drawn with numpy. A: 64 prompts x 8 samples, one step. B: 512 prompts x 16, four steps. C: 256 prompts of
1 to 20 samples of very unequal lengths, four steps. On 8 and on 64 ranks; costs are verl's, 24,576 d + d^2. *Once*: the
step over a perfectly even one, if ranks wait for each other once a step; *every*: if they wait in every micro-batch.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

import wlb
from benches.common import (
    DOCS,
    Row,
    bars,
    machine,
    markdown,
    options,
    package_version,
    parse,
    rounded,
    tables,
    wrapped,
    write_record,
)
from benches.rl_planners import (
    CHECKOUTS,
    COST,
    Plan,
    Round,
    checkout,
    of_areal,
    of_nemo_rl,
    of_slime,
    of_transferqueue,
    of_verl,
    padded,
    rounds,
    through_adapter,
    whole,
)

RANKS = (8, 64)
CLASSES = 3  # policy versions, for the time of planning


# --- judging ---------------------------------------------------------------------------------------------------------


def judged(plan: Plan, held: Round, ranks: int) -> Row:
    """What a plan takes and what it breaks."""
    costs, once, every, even, over, count = held.cost.cost(held.lengths), 0.0, 0.0, 0.0, 0, []
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
    "slime": (of_slime, False),
    "NeMo-RL": (of_nemo_rl, True),
    "AReaL": (partial(of_areal, algorithm="ffd"), False),
    "AReaL, Karmarkar-Karp": (partial(of_areal, algorithm="kk"), False),
}
"""By name: the planner, and whether it gets a round with equal numbers of samples for all ranks and steps."""


def measure(progress: Any, planners: list[str]) -> list[Row]:
    rows = []
    drawn = rounds()
    for name in ("verl.utils.seqlen_balancing", "transfer_queue.sampler.seqlen_balanced_sampler"):
        with contextlib.suppress(ImportError):  # the planner's row says so; else its time would be that of the import
            importlib.import_module(name)
    task = progress.add_task("rounds", total=len(drawn) * len(RANKS) * len(planners))
    for name, held in drawn.items():
        for ranks in RANKS:
            for planner in planners:
                plan, equal = PLANNERS[planner]
                given = padded(held, ranks)[0] if equal else held
                row: Row = {"round": name, "ranks": ranks, "planner": planner}
                began = time.process_time()
                try:
                    made = plan(given, ranks)
                except (wlb.WlbError, AssertionError, ValueError, ImportError) as refused:
                    row["refused"] = str(refused).partition(" (")[0]  # without the way out
                else:
                    row |= judged(made, given, ranks) | {"ms": (time.process_time() - began) * 1e3}
                rows.append(row)
                progress.advance(task)
    return rows


def planning(repeats: int = 15) -> Row:
    """Least CPU time for round B with steps, classes and weights, beside `wlb.pack` of each step."""
    held = rounds()["B"]
    classes, tokens = np.arange(held.lengths.size) // 2731 % CLASSES, held.lengths // 2
    options: dict[str, Any] = {"dp_size": 8, "max_tokens": held.cap, "cost_model": COST}

    def planned() -> None:
        plan = wlb.rl.plan(held.lengths, groups=held.prompts, num_steps=held.steps, classes=classes, **options)
        plan.weights(tokens, mean="prompt")

    def packed() -> None:
        for lengths in np.array_split(held.lengths, held.steps):
            wlb.pack(lengths, num_micro_batches=None, **options)

    found: dict[str, list[float]] = {"ms": [], "packs_ms": []}
    for _ in range(repeats):
        for name, work in (("ms", planned), ("packs_ms", packed)):
            began = time.process_time()
            work()
            found[name].append((time.process_time() - began) * 1e3)
    times = {name: min(times) for name, times in found.items()}
    return {"samples": held.lengths.size, "classes": CLASSES, **times}


COLUMNS = ("once", "every", "micro-batches", "over cap", "prompts parted", "lost or twice", "ms of CPU")


def cells(row: Row) -> list[str]:
    """What the table shows of one planner in one round, in the order of COLUMNS."""
    if "refused" in row:
        return [f"not run: {row['refused']}", *[""] * (len(COLUMNS) - 1)]
    counts = [str(row[name]) for name in ("micro_batches", "over_cap", "prompts_parted", "lost_or_twice")]
    return [f"{row['once']:.3f}", f"{row['every']:.3f}", *counts, f"{row['ms']:,.1f}"]


def commits() -> Row:
    """The commit of each trainer's checkout, by the trainer's name."""
    found: Row = {}
    for trainer in CHECKOUTS:
        with contextlib.suppress(ImportError):
            command = ["git", "-C", str(checkout(trainer)), "rev-parse", "--short=8", "HEAD"]
            said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
            found[trainer] = said or "of a folder"
    return found


def page(record: Row, clock: Row) -> str:
    """docs/results/rl.md."""
    about, rows, spent = record["machine"], record["rows"], record["planning"]
    versions = ", ".join(f"{name} {number}" for name, number in about["packages"].items() if number)
    text = ["Written by `python -m benches.rl` from benches/records/rl.json and rl_clock.json; do not edit.", ""]
    text += ["# Rounds of reinforcement learning: trainers' planners beside wlb", ""]
    text += wrapped(
        "Time of the optimizer steps over perfectly even ones, by costs. *Once*: ranks wait for each other once a "
        "step. *Every*: in every micro-batch. Costs are verl's for every planner. Each planner is the trainer's own "
        "function; what the trainer does around it is in benches/rl_planners.py. A planner that parts prompts between "
        "steps has more samples to choose from. verl, NeMo-RL, TransferQueue and the adapters for them need equally "
        "many samples on all ranks, so that round C is padded for them. Times of planning are of one run or of several."
    )
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row["commit"], []).append(row["planner"])
    most = max(names, key=lambda commit: len(names[commit]))
    others = [f"{' / '.join(dict.fromkeys(of))} at {commit}" for commit, of in names.items() if commit != most]
    text += ["", *wrapped(f"Measured until {about['time'][:10]}, commit {'; '.join([most, *others])}. {versions}.")]
    what = {
        "A": "64 prompts of 8 samples, one step",
        "B": "512 prompts of 16 samples, four steps",
        "C": "256 prompts of 1 to 20 samples, four steps",
    }
    for name in what:
        for ranks in RANKS:
            shown = Table("planner", *COLUMNS)
            for row in rows:
                if (row["round"], row["ranks"]) == (name, ranks):
                    shown.add_row(row["planner"], *cells(row))
            text += ["", f"## {name}, {ranks} ranks: {what[name]}", "", *markdown(shown)]
    said = f"Planning {spent['samples']:,} samples with four steps, {spent['classes']} classes and weights takes"
    text += ["", *wrapped(f"{said} {spent['ms']:.1f} ms of CPU; packing step by step {spent['packs_ms']:.1f} ms.")]
    text += ["", *clock_section(clock)]
    return "\n".join(line.rstrip() for line in text) + "\n"


def clock_section(clock: Row) -> list[str]:
    """What `python -m benches.rl_clock` measured."""
    about, packages = clock["machine"], clock["machine"]["packages"]
    text = ["## The clock", ""]
    text += wrapped(
        f"`python -m benches.rl_clock --lengths {clock['lengths']}.npy`, {about['time'][:10]}, commit "
        f"{about['commit']}, torch {packages['torch']}, verl {packages['verl']}: loss and model of examples/grpo.py on "
        "two processes over gloo, one optimizer step of 48 samples, whose lengths are an eighth of real ones. The "
        "plain order gives each rank an equal slice and fills micro-batches in order. Times are over those of wlb's "
        f"plan in the same run, by the processors' clock, by which ranks wait for the one that computes longest, and "
        f"by the wall's. The {about['cores']} cores had a load of {about['load'][0]:.1f}, of which these processes "
        f"make 2{_of_the_wall(about)}. The same step takes a tenth more or less in another repeat, so that smaller "
        "differences mean nothing. Gradients of all plans are the same but for rounding."
    )
    return [*text, "", *markdown(clock_table(clock["plans"]))]


def _of_the_wall(about: Row) -> str:
    """What the wall's clock says on a machine that does other things too."""
    return ", so that the wall's clock says little" if about["load"][0] > about["cores"] + 0.5 else ""


def clock_table(found: list[Row]) -> Table:
    """One line for each plan."""
    shown = Table("ranks meet", "plan", "processors", "wall", "over even, by costs", "losses apart", "gradients apart")
    for row in found:
        met = "once a step" if row["meet"] == "step" else "in every micro-batch (FSDP)"
        ratios = [f"{row['processor_over_wlb']:.2f}", f"{row['wall_over_wlb']:.2f}", f"{row['over_even_by_costs']:.3f}"]
        shown.add_row(met, row["plan"], *ratios, f"{row['loss_apart']:.0e}", f"{row['gradients_apart']:.0e}")
    return shown


def main() -> None:
    parser = options(__doc__, record="rl.json")
    parser.add_argument("--page", type=Path, default=DOCS / "results" / "rl.md", help="where the page goes")
    text = "measure these alone, and keep what the record has of the others"
    parser.add_argument("--planners", nargs="+", choices=list(PLANNERS), default=[], metavar="NAME", help=text)
    given = parse(parser)
    warnings.filterwarnings("ignore", message="groups: prompt")  # 64 prompts on 64 ranks: the table shows it
    with bars() as progress:
        rows = [row | {"commit": machine()["commit"]} for row in measure(progress, given.planners or list(PLANNERS))]
    before: Row = json.loads(given.record.read_text()) if given.planners else {}
    rows += [row for row in before.get("rows", []) if row["planner"] not in given.planners]
    names = [*PLANNERS]
    rows.sort(key=lambda row: (row["round"], row["ranks"], names.index(row["planner"])))
    spent = before.get("planning") or planning()
    shown = Table("round", "ranks", "planner", *COLUMNS)
    for row in rows:
        shown.add_row(row["round"], str(row["ranks"]), row["planner"], *cells(row))
    console = tables(150)
    console.print(shown)
    said = f"planning {spent['samples']} samples, four steps, {spent['classes']} classes, weights"
    console.print(f"{said}: {spent['ms']:.1f} ms of CPU; packed step by step {spent['packs_ms']:.1f}")
    packages = {name: package_version(name) for name in ("verl", "transferqueue")} | commits()
    if before:
        packages = before["machine"]["packages"] | commits()
    record: Row = rounded({"machine": machine() | {"packages": packages}, "rows": rows, "planning": spent})
    write_record(given.record, record)
    clock = json.loads(given.record.with_name("rl_clock.json").read_text())
    given.page.write_text(page(record, clock))


if __name__ == "__main__":
    main()
