"""What waiting buys: release="adaptive" against Algorithm 1 with one to three tuned queues.

    python -m benches.release                      # synthetic lengths; prints tables, writes the record and the picture
    python -m benches.release --lengths x.npy ...  # real ones before them; the picture is of the first

A stream is the documents in random order, split at the context, as many epochs as the steps need (each in a new
order), in global batches of context x micro-batches tokens. Imbalance is over all steps of the stream, delay over all
documents, those flushed at the end included: what `Packer.metrics()` says. The queues' thresholds are tuned on the
very stream that they are measured on, which favours them; the adaptive rule has one price for all.

Two costs of the same 7B Llama, because much depends on it: attention at the full rate of the GEMMs, and at 0.55 of it,
where long documents are heavier. Planning time is CPU time of the thread; read the ratio to `wlb.pack` of the same
lengths, taken in turn. `--fluid-bound` adds what no rule could go below with infinitely many micro-batches (fluid.py).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import wlb
from benches.common import (
    CONTEXT,
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
    write_record,
)

MICRO_BATCHES = (4, 16, 64)
COSTS = {efficiency: llama_7b(efficiency) for efficiency in (1.0, 0.55)}  # by attention efficiency
DRAWN = 0.55
ROOMS = (1.5, 2.0)  # max_tokens in contexts
MORE_ROOMS = (1.1, 1.2, 1.3, 1.4, 1.6, 1.75, 2.5, 3.0)  # for the picture
MAX_DELAYS = (None, 16, 8)
NO_LIMIT = 1 << 53  # the adaptive rule has one by default
PRICES = tuple(round(0.5 / 1.45**k, 5) for k in range(17))
NEARER = 5  # more prices, ever nearer to where the delay passes the goal's
GOALS = {1.5: (0.50, 1.012, 1.06), 2.0: (0.40, 1.005, None)}  # delay, mean and p95 of the imbalance
QUEUES_DELAY = {1: 0.6, 2: 0.6, 3: 0.9}  # most mean delay of the tuned queues
AROUND, BEYOND = (0.8, 0.9, 0.95, 1.05, 1.1, 1.25), 1.1  # of a threshold; of that delay
FIGURES = (
    "imbalance_mean",
    "imbalance_p95",
    "imbalance_worst",
    "delay_mean",
    "delay_p99",
    "delay_max",
    "memory_skew_mean",
    "step_work_heaviest",
)
CURVE = ("delay_price", "imbalance_mean", "imbalance_p95", "imbalance_worst", "delay_mean", "delay_max")


def adaptive(batches: list[Lengths], options: dict[str, Any], price: float) -> Row:
    """The stream at one price."""
    limit = NO_LIMIT if options["max_delay"] is None else options["max_delay"]
    options = {**options, "max_delay": limit}
    packer = wlb.Packer(release="adaptive", delay_price=price, max_document_tokens=CONTEXT, **options)
    for batch in batches:
        packer.push(batch)
    packer.flush()
    return {"delay_price": price, **figures(packer)}


def curve(batches: list[Lengths], options: dict[str, Any], prices: Sequence[float], delay: float | None) -> list[Row]:
    """The stream at these prices, which fall, and at some between them, to spend as much delay as the goal allows."""
    points = [adaptive(batches, options, price) for price in prices]
    for _ in range(NEARER if delay else 0):
        crossing = [
            at for at, (a, b) in enumerate(itertools.pairwise(points)) if a["delay_mean"] <= delay < b["delay_mean"]
        ]
        if not crossing:
            break
        at = crossing[-1] + 1
        price = float(np.sqrt(points[at - 1]["delay_price"] * points[at]["delay_price"]))
        points.insert(at, adaptive(batches, options, price))
    return points


def figures(packer: wlb.Packer) -> Row:
    metrics = packer.metrics()
    return {key: getattr(metrics, key) for key in FIGURES}


def queues(batches: list[Lengths], options: dict[str, Any], number: int) -> tuple[Row, list[Row]]:
    """Algorithm 1 under the best thresholds for this very stream, and the front of all that were tried on it.

    `wlb.tune` reads as a trainer does, which asks the packer how much it takes. Here global batches are
    pushed as they are, which other thresholds may suit better: so all that no others beat there are tried here, and
    others around the best of them.
    """
    limit = QUEUES_DELAY[number]
    tuned = wlb.tune(
        np.concatenate(batches),
        num_queues=number,
        max_mean_delay=limit,
        max_document_tokens=CONTEXT,
        tokens_per_batch=options["num_micro_batches"] * CONTEXT,
        **options,
    )
    tried: dict[tuple[int, ...], Row] = {}

    def pushed(thresholds: tuple[int, ...]) -> None:
        if thresholds in tried or list(thresholds) != sorted(set(thresholds)):
            return
        packer = wlb.Packer(outlier_thresholds=thresholds, max_document_tokens=CONTEXT, **options)
        for batch in batches:
            packer.push(batch)
        packer.flush()
        tried[thresholds] = {"queues": number, "thresholds": list(thresholds), **figures(packer)}

    def best(most: float) -> Row:
        within = [row for row in tried.values() if row["delay_mean"] <= most]
        return min(within or tried.values(), key=lambda row: float(row["imbalance_mean"]))

    for point in (tuned, *tuned.pareto):
        pushed(tuple(point.thresholds))
    for _ in range(NEARER):  # around the best, and around the one a little beyond the limit, each threshold by itself
        for start in (best(limit)["thresholds"], best(BEYOND * limit)["thresholds"]):
            for at, factor in itertools.product(range(len(start)), AROUND):
                pushed((*start[:at], min(CONTEXT, int(start[at] * factor)), *start[at + 1 :]))
    front = [{key: row[key] for key in ("imbalance_mean", "imbalance_p95", "delay_mean")} for row in tried.values()]
    return best(limit), front


def planning_time(batches: list[Lengths], options: dict[str, Any]) -> Row:
    """CPU time of a push at the default price, beside that of a packing of the same lengths."""
    packer = wlb.Packer(release="adaptive", max_document_tokens=CONTEXT, **options)
    options = {key: value for key, value in options.items() if key != "max_delay"}

    def took(work: Any, batch: Lengths) -> float:
        began = time.thread_time_ns()
        work(batch)
        return (time.thread_time_ns() - began) / 1e3

    pushes, packs = [], []
    for batch in batches:
        pushes.append(took(packer.push, batch))
        packs.append(min(took(lambda batch: wlb.pack(batch, leftover="return", **options), batch) for _ in range(3)))
    return {
        "documents_per_step": float(np.mean([len(batch) for batch in batches])),
        "push_us_mean": float(np.mean(pushes)),
        "push_us_p95": float(np.quantile(pushes, 0.95)),
        "push_us_max": max(pushes),
        "pack_us_mean": float(np.mean(packs)),
        "ratio_of_means": float(np.sum(pushes) / np.sum(packs)),
        "ratio_median": float(np.median(np.divide(pushes, packs))),
        "ratio_p95": float(np.quantile(np.divide(pushes, packs), 0.95)),
    }


def measure(
    name: str,
    lengths: Lengths,
    *,
    attention_efficiency: float,
    micro_batches: int,
    room: float,
    max_delay: int | None,
    steps: int,
    queues_up_to: int = 0,
    prices: Sequence[float] = PRICES,
) -> Row:
    """One setting: the adaptive rule at all prices, at the default one, its time, and tuned queues."""
    batches = global_batches(lengths, micro_batches, steps)
    options: dict[str, Any] = {
        "num_micro_batches": micro_batches,
        "max_tokens": int(room * CONTEXT),
        "cost_model": COSTS[attention_efficiency],
        "max_delay": max_delay,
    }
    row: Row = {
        "lengths": name,
        "attention_efficiency": attention_efficiency,
        "micro_batches": micro_batches,
        "room": room,
        "max_delay": max_delay,
        "steps": len(batches),
        "epochs": sum(int(batch.sum()) for batch in batches) / int(lengths.sum()),
        "adaptive": curve(batches, options, prices, GOALS[room][0] if room in GOALS else None),
    }
    if room in ROOMS:
        row["default"] = adaptive(batches, options, wlb.Packer(release="adaptive", **options).delay_price or 0.0)
        row["time"] = planning_time(batches, options)
        tuned = [queues(batches, options, number) for number in range(1, queues_up_to + 1)]
        row["fifo"] = [best for best, _ in tuned]
        row["fifo_front"] = tuned[-1][1] if tuned else []
    return row


def steps_for(micro_batches: int, steps: int) -> int:
    """Fewer of the largest steps."""
    return steps // 2 if micro_batches == 64 else steps


def towards(row: Row) -> tuple[Row, bool]:
    """The price that meets the goal with the least delay; else the one with the best balance within its delay."""
    delay, mean, p95 = GOALS[row["room"]]
    within = [point for point in row["adaptive"] if point["delay_mean"] <= delay]
    met = [p for p in within if p["imbalance_mean"] <= mean and (p95 is None or p["imbalance_p95"] <= p95)]
    if met:
        return min(met, key=lambda point: float(point["delay_mean"])), True
    return min(within or row["adaptive"], key=lambda point: float(point["imbalance_mean"])), False


def report(console: Console, rows: list[Row]) -> None:
    """The tables."""

    def cells(point: Row) -> list[str]:
        return [f"{point[key]:.3f}" if isinstance(point[key], float) else str(point[key]) for key in FIGURES]

    headings = ("mean", "p95", "worst", "delay", "p99", "max", "memory", "steps")
    for efficiency, room in itertools.product(COSTS, ROOMS):
        delay, mean, p95 = GOALS[room]
        goal = f"{mean}" + (f" / {p95}" if p95 else "") + f" at {delay:.2f}"
        title = f"Attention at {efficiency}, max_tokens {room} contexts; goal of the adaptive rule: {goal}"
        table = Table("lengths", "N", "max_delay", "release", *headings, "goal", title=title)
        for row in rows:
            if row["room"] != room or row["attention_efficiency"] != efficiency:
                continue
            best, met = towards(row)
            head = (row["lengths"], str(row["micro_batches"]), str(row["max_delay"]))
            table.add_row(*head, f"adaptive, {best['delay_price']:g}", *cells(best), "met" if met else "missed")
            table.add_row("", "", "", f"adaptive, {row['default']['delay_price']:g} (default)", *cells(row["default"]))
            for point in row["fifo"]:
                table.add_row("", "", "", f"{point['queues']} queue{'s' * (point['queues'] > 1)}", *cells(point))
            if row.get("fluid_bound") is not None and row["max_delay"] == MAX_DELAYS[-1]:
                bound = f"{row['fluid_bound']:.3f}"
                table.add_row("", "infinite", "", "no rule waits less", "", "", "", bound, "", "", "", "")
        console.print(table)
    table = Table("lengths", "cost", "N", "room", "documents", "pack us", "push us", "p95", "max", "ratio")
    table.add_column("median")
    table.add_column("p95")
    table.title = "Planning a step at the default price, CPU time"
    for row in rows:
        if row["room"] in ROOMS and row["max_delay"] == MAX_DELAYS[1]:
            t = row["time"]
            times = (
                t[key] for key in ("documents_per_step", "pack_us_mean", "push_us_mean", "push_us_p95", "push_us_max")
            )
            ratios = (t[key] for key in ("ratio_of_means", "ratio_median", "ratio_p95"))
            setting = (row[key] for key in ("lengths", "attention_efficiency", "micro_batches", "room"))
            table.add_row(
                *map(str, setting), *(f"{value:,.0f}" for value in times), *(f"{value:.1f}" for value in ratios)
            )
    console.print(table)


def columns(points: list[Row], keys: Sequence[str]) -> Row:
    return {key: [point[key] for point in points] for key in keys}


def draw(path: Path, rows: list[Row]) -> None:
    """Balance against delay, and what memory changes, for the first source."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import PercentFormatter

    name = rows[0]["lengths"]
    rows = [row for row in rows if row["lengths"] == name and row["attention_efficiency"] == DRAWN]
    goal_delay, *levels = GOALS[1.5]
    lines = (
        (None, "fifo_front", QUEUES, "-", "Algorithm 1, up to 3 tuned queues, no limit on waits"),
        (8, "adaptive", "#7fb4d8", "-", 'release="adaptive", max_delay 8'),
        (16, "adaptive", WLB, "-", 'release="adaptive", max_delay 16'),
    )
    with plt.rc_context(STYLE):
        fig, axes = plt.subplots(3, len(MICRO_BATCHES), figsize=(13.5, 11.5), layout="constrained", sharey="row")
        for column, n in enumerate(MICRO_BATCHES):
            of_n = [row for row in rows if row["micro_batches"] == n]
            for ax, key, level, top in zip(
                axes[:, column], ("imbalance_mean", "imbalance_p95"), levels, (0.10, 0.42), strict=False
            ):
                for max_delay, curve, color, dash, label in lines:
                    row = next(r for r in of_n if r["room"] == 1.5 and r["max_delay"] == max_delay)
                    best = front(row[curve], key)
                    ax.plot(*zip(*best, strict=True), dash, color=color, lw=2.2, marker="o", ms=3.5, label=label)
                assert level is not None
                ax.plot([goal_delay], [level - 1], "*", color="#c2482e", ms=15, mec="white", label="goal", zorder=5)
                ax.set(xlim=(0, 1.0), ylim=(0, top), xlabel="mean delay of a token, iterations")
                ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            axes[0, column].set_title(f"{n} micro-batches, max_tokens 1.5 contexts", fontsize=12)
            ax = axes[2, column]
            for excess, color in ((0.005, "#062f4c"), (0.01, WLB), (0.02, "#7fb4d8")):
                found = [(row["room"], delay_for(row, excess)) for row in of_n if row["max_delay"] == 16]
                xs, ys = zip(*sorted((room, delay) for room, delay in found if delay is not None), strict=True)
                ax.plot(xs, ys, "o-", ms=4.5, color=color, lw=2.2, label=f"{excess:.1%} longer than balanced")
            ax.set(xlim=(1, 3.05), ylim=(0, 1), xlabel="memory: max_tokens of a micro-batch, contexts")
        axes[0, 0].set_ylabel("mean step, longer than balanced by")
        axes[1, 0].set_ylabel("p95 step, longer than balanced by")
        axes[2, 0].set_ylabel("mean delay of a token, iterations")
        axes[2, 0].legend(fontsize=10, title='release="adaptive", max_delay 16,\nmean step', alignment="left")
        title = (
            f"Balance against delay: {name}, {CONTEXT // 1024}K context, 7B, attention at {DRAWN} of the GEMMs' rate"
        )
        entitle(fig, axes[0, 0], title, ncols=4)
        fig.savefig(path, dpi=110)


def delay_for(row: Row, excess: float) -> float | None:
    """Least mean delay at which the mean imbalance is at most `1 + excess`."""
    return min((p["delay_mean"] for p in row["adaptive"] if p["imbalance_mean"] <= 1 + excess), default=None)


def settings(first: bool) -> Iterator[Row]:
    """Of a source; more for the first, which is drawn."""
    for efficiency, n, room in itertools.product(COSTS, MICRO_BATCHES, ROOMS):
        for max_delay in MAX_DELAYS:
            yield {"attention_efficiency": efficiency, "micro_batches": n, "room": room, "max_delay": max_delay}
    for n, room in itertools.product(MICRO_BATCHES, MORE_ROOMS if first else ()):
        yield {"attention_efficiency": DRAWN, "micro_batches": n, "room": room, "max_delay": MAX_DELAYS[1]}


def main() -> None:
    parser = options(__doc__, lengths=True, record="release.json", picture="release.png")
    parser.add_argument("--steps", type=int, default=160, help="global batches of a stream; half of it for 64")
    parser.add_argument("--queues", type=int, default=3, choices=range(4), help="most queues to tune: most of the time")
    parser.add_argument("--fluid-bound", action="store_true", help="also a bound on any rule's delay; needs highspy")
    arguments = parse(parser)

    sources = {path.stem: read_lengths(path) for path in arguments.lengths}
    sources["synthetic"] = synthetic(60_000)
    rows: list[Row] = []
    bounds: dict[tuple[Any, ...], float | None] = {}
    with bars() as progress:
        for name, lengths in sources.items():
            of_source = list(settings(not rows))
            for setting in progress.track(of_source, description=name):
                steps = steps_for(setting["micro_batches"], arguments.steps)
                # Tuning takes most of the time; Algorithm 1 has no limit.
                up_to = arguments.queues if setting["max_delay"] is None else 0
                row = measure(name, lengths, steps=steps, queues_up_to=up_to, **setting)
                if arguments.fluid_bound and row["room"] in GOALS:
                    key = (name, row["attention_efficiency"], row["room"])
                    if key not in bounds:
                        bounds[key] = fluid_bound(lengths, row)
                    row["fluid_bound"] = bounds[key]
                rows.append(row)
    kept = []
    for row in rows:
        # A small record: of the curves what is asked for, and fronts of the queues only where they are drawn.
        row = row | {"adaptive": columns(row["adaptive"], CURVE)}
        if "fifo_front" in row:
            points = row["fifo_front"] if drawn(row, rows) else []
            row["fifo_front"] = columns(points, ("imbalance_mean", "imbalance_p95", "delay_mean"))
        kept.append(row)
    record = {"machine": machine(), "rows": rounded(kept)}
    write_record(arguments.record, record)
    console = Console()
    report(Console(width=max(console.width, 130)), rows)
    draw(arguments.picture, rows)


def drawn(row: Row, rows: list[Row]) -> bool:
    return bool(row["lengths"] == rows[0]["lengths"] and row["attention_efficiency"] == DRAWN and row["room"] == 1.5)


def fluid_bound(lengths: Lengths, row: Row) -> float | None:
    """No rule that meets the goal's balance waits less, with infinitely many micro-batches."""
    from benches.fluid import least_delay

    _, mean, p95 = GOALS[row["room"]]
    return least_delay(lengths, COSTS[row["attention_efficiency"]], row["room"], mean=mean, p95=p95)


if __name__ == "__main__":
    main()
