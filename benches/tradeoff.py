"""Which plan when: time of a step against delay and memory, for every plan that wlb makes.

    python -m benches.tradeoff [--lengths x.npy]    # prints the table, writes the record and docs/results/tradeoff.png

One pipeline of 4 stages with 16 GPUs each, 1F1B; global batches of 16 x 128K tokens; a 7B Llama, attention at 0.55 of
the GEMMs' rate; exchange between the ranks of a group is free, which is the best case of Dynamic-CP. A static plan has
16 micro-batches, each on all 16 GPUs of a stage (CP 16); a dynamic one divides the GPUs anew in every micro-batch, and
may have another number of them. Both may hold `max_tokens` for each micro-batch, a sixteenth of it on each rank. Time
is that of all steps over even ones: 16 equal micro-batches of the same total work, filling and draining included (light
ones at both ends are faster than that). Delay is of all tokens, those flushed at the end included; flushed steps are
not timed. `original` cuts documents where a micro-batch ends, and does less work for the same tokens. Beside each time,
in brackets, are those of the same plans were attention half, or half as much again, as fast as they were told.

Queues have the thresholds of the front that `wlb.tune` finds on this very stream; the adaptive rule, and
Dynamic-CP on what it lets go, run at a range of prices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import wlb
from benches.common import (
    CONTEXT,
    COST,
    QUEUES,
    STYLE,
    WLB,
    Lengths,
    Row,
    bars,
    entitle,
    front,
    global_batches,
    llama_7b,
    machine,
    options,
    parse,
    read_lengths,
    rounded,
    synthetic,
    tables,
    write_record,
)
from benches.release import PRICES

MICRO_BATCHES, GPUS, STAGES = 16, 16, 4
ROOMS = (1.1, 1.5, 2.0)  # max_tokens in contexts
LIMITED, MAX_DELAYS = 1.5, (None, 32, 16, 8, 4)
NO_LIMIT = 1 << 53  # the adaptive rule has one by default
MAX_DELAY = 16
DEAR = (16.0, 8.0, 4.0, 2.0, 1.0)  # above those of release.py
NEVER = "#8c959f"
BOTH = "#2f7d4f"
OFF = tuple(llama_7b(0.55 * rate) for rate in (0.5, 1.5))  # what plans are graded by that were made for COST
Timer = Callable[[list[wlb.Packing]], list[float]]  # over even: by COST, then by each of OFF


def even(cost: float) -> float:
    """Seconds of a step whose work is spread evenly over the micro-batches."""
    return cost / GPUS / STAGES * (MICRO_BATCHES + STAGES - 1) / MICRO_BATCHES


def static(plans: list[wlb.Packing]) -> list[float]:
    """Time over even of packings as they are."""
    found = []
    for cost in (COST, *OFF):
        costs = np.stack(
            [np.array([cost.cost(batch.lengths).sum() for batch in plan.micro_batches])[plan.deal(1)] for plan in plans]
        )
        steps = wlb.simulate_steps(costs / GPUS, schedule="1f1b", num_stages=STAGES)
        found.append(float(steps.seconds.sum()) / even(float(costs.sum())))
    return found


def dynamic(room: float) -> Timer:
    """Time over even of the same documents in the same steps, spread by Dynamic-CP."""

    def timer(plans: list[wlb.Packing]) -> list[float]:
        steps = [np.concatenate([batch.lengths for batch in plan.micro_batches]) for plan in plans]
        return regrouped([lengths for lengths in steps if len(lengths) > 0], room)

    return timer


def regrouped(steps: list[Lengths], room: float) -> list[float]:
    """Time over even of these steps by Dynamic-CP."""
    found = [dynamic_plan(lengths, room) for lengths in steps]
    times = [sum(plan.seconds for plan in found) / even(sum(float(COST.cost(lengths).sum()) for lengths in steps))]
    for cost in OFF:
        seconds = work = 0.0
        for plan, lengths in zip(found, steps, strict=True):
            costs = cost.cost(lengths)
            seconds += plan.step_seconds(
                [costs[group.document_ids].sum() / len(group.ranks) for batch in plan for group in batch]
            )
            work += float(costs.sum())
        times.append(seconds / even(work))
    return times


def dynamic_plan(lengths: Lengths, room: float) -> wlb.DynamicCpPlan:
    return wlb.plan_dynamic_cp(
        lengths,
        world_size=GPUS,
        num_stages=STAGES,
        max_tokens_per_rank=int(room * CONTEXT) // GPUS,
        cost_model=COST,
    )


def streamed(batches: list[Lengths], sizes: Row, timers: dict[str, Timer], **options: Any) -> list[Row]:
    """One stream under a packer, timed in several ways."""
    packer = wlb.Packer(max_document_tokens=CONTEXT, **sizes, **options)
    plans = [packer.push(batch) for batch in batches]
    packer.flush()
    metrics = packer.metrics()
    delay = {"delay_mean": metrics.delay_mean, "delay_max": metrics.delay_max}
    return [{"plan": name, **delay, **timed(timer(plans))} for name, timer in timers.items()]


def timed(times: list[float]) -> Row:
    return {"time": times[0], "off": times[1:]}


def limited(batches: list[Lengths]) -> list[Row]:
    """The default price under limits of the delay."""
    sizes: Row = {"num_micro_batches": MICRO_BATCHES, "max_tokens": int(LIMITED * CONTEXT), "cost_model": COST}
    timers = {"adaptive": static, "both": dynamic(LIMITED)}
    found = [
        (limit, streamed(batches, sizes, timers, release="adaptive", max_delay=NO_LIMIT if limit is None else limit))
        for limit in MAX_DELAYS
    ]
    return [{"room": LIMITED, "max_delay": limit, **row} for limit, rows in found for row in rows]


def measure(batches: list[Lengths], room: float, progress: Progress) -> list[Row]:
    sizes: Row = {"num_micro_batches": MICRO_BATCHES, "max_tokens": int(room * CONTEXT), "cost_model": COST}
    at_once: Row = {"delay_mean": 0.0, "delay_max": 0}
    rows = []
    for method in ("original", "var_length"):
        # Cut every context: it needs no more memory than that.
        these = sizes | ({"max_tokens": CONTEXT} if method == "original" else {})
        plans = [wlb.pack(batch, method=method, **these) for batch in batches]
        rows.append({"plan": method, **at_once, **timed(static(plans))})
    rows.append({"plan": "dynamic_cp", **at_once, **timed(regrouped(batches, room))})
    tuned = wlb.tune(
        np.concatenate(batches),
        num_queues=3,
        max_mean_delay=0.9,
        max_document_tokens=CONTEXT,
        tokens_per_batch=MICRO_BATCHES * CONTEXT,
        **sizes,
    )
    for point in progress.track(tuned.pareto, description="queues"):
        found = streamed(batches, sizes, {"queues": static}, outlier_thresholds=point.thresholds)
        rows += [row | {"thresholds": list(point.thresholds)} for row in found]
    timers = {"adaptive": static, "both": dynamic(room)}
    for price in progress.track((*DEAR, *PRICES), description="adaptive"):
        found = streamed(batches, sizes, timers, release="adaptive", delay_price=price, max_delay=MAX_DELAY)
        rows += [row | {"delay_price": price, "max_delay": MAX_DELAY} for row in found]
    return [{"room": room, **row} for row in rows]


def report(console: Console, rows: list[Row], limits_tried: list[Row]) -> None:
    title = "Time of a step over an even one; least found up to a mean delay of"
    limits = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
    table = Table("max_tokens", "plan", *(f"{limit:g}" for limit in limits), title=title)
    for room in ROOMS:
        for plan in dict.fromkeys(row["plan"] for row in rows):
            these = [row for row in rows if row["room"] == room and row["plan"] == plan]
            least = [
                min((row for row in these if row["delay_mean"] <= limit), key=itemgetter("time"), default=None)
                for limit in limits
            ]
            table.add_row(f"{room:g}", plan, *("" if row is None else said(row) for row in least))
    console.print(table)
    of_price = [row for row in rows if row["room"] == LIMITED and "delay_price" in row]
    for knob, these in (("delay_price", of_price), ("max_delay", limits_tried)):
        table = Table(knob, "mean delay", "longest", "static CP", "Dynamic-CP", title=f"{knob}, max_tokens {LIMITED:g}")
        for value, at in itertools.groupby(these, key=itemgetter(knob)):
            alone, both = at
            times = f"{alone['time']:.3f}", f"{both['time']:.3f}"
            table.add_row(str(value), f"{alone['delay_mean']:.3f}", str(alone["delay_max"]), *times)
        console.print(table)


def said(row: Row) -> str:
    return f"{row['time']:.3f} ({min(row['off']):.3f} to {max(row['off']):.3f})"


def draw(path: Path, name: str, rows: list[Row]) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import PercentFormatter

    with plt.rc_context(STYLE):
        fig, axes = plt.subplots(1, len(ROOMS), figsize=(13.5, 5.6), layout="constrained", sharey=True)
        for ax, room in zip(axes, ROOMS, strict=True):

            def of(plan: str, room: float = room) -> list[Row]:
                return [row for row in rows if row["room"] == room and row["plan"] == plan]

            for plan, color, marker, label in (
                ("original", NEVER, "X", "cut every context, no waiting"),
                ("var_length", QUEUES, "s", "static CP, no waiting"),
                ("dynamic_cp", BOTH, "D", "Dynamic-CP, no waiting, exchange free"),
            ):
                (row,) = of(plan)
                ax.plot([0], [row["time"] - 1], marker, color=color, ms=10, mec="white", label=label, clip_on=False)
            for plan, color, label in (
                ("queues", QUEUES, "static CP, tuned queues (Algorithm 1)"),
                ("adaptive", WLB, 'static CP, release="adaptive"'),
                ("both", BOTH, 'Dynamic-CP on what release="adaptive" lets go, exchange free'),
            ):
                best = front(of(plan), "time")
                ax.plot(*zip(*best, strict=True), "o-", color=color, ms=3.5, lw=2.2, label=label)
            ax.axhline(0, color="#8c959f", lw=1)
            ax.set_title(f"memory for {room:g} contexts a micro-batch", fontsize=12)
            ax.set(xlim=(-0.02, 0.9), xlabel="mean delay of a token, iterations")
            ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes[0].set_ylabel("step longer than an even one by")
        title = f"Balance, delay, memory: {name}, 16 x 128K tokens a step, 7B, one pipeline of 4 x 16 GPUs"
        entitle(fig, axes[0], title, ncols=3)
        fig.savefig(path, dpi=110)


def main() -> None:
    parser = options(__doc__, record="tradeoff.json", picture="tradeoff.png")
    parser.add_argument("--lengths", type=Path, help=".npy file of document lengths; synthetic ones without")
    parser.add_argument("--steps", type=int, default=120, help="global batches of the stream")
    arguments = parse(parser)
    name = arguments.lengths.stem if arguments.lengths else "synthetic"
    lengths = read_lengths(arguments.lengths) if arguments.lengths else synthetic(60_000)
    batches = global_batches(lengths, MICRO_BATCHES, arguments.steps)
    with bars() as progress:
        rows = [row for room in ROOMS for row in measure(batches, room, progress)]
    limits_tried = limited(batches)
    record: Row = {"machine": machine(), "lengths": name, "steps": len(batches)}
    record |= {"rows": rounded(rows), "max_delay": rounded(limits_tried)}
    write_record(arguments.record, record)
    report(tables(220), rows, limits_tried)
    draw(arguments.picture, name, rows)


if __name__ == "__main__":
    main()
