"""What waiting buys: release="adaptive" against Algorithm 1 with one to three tuned queues.

    python benches/release.py                      # synthetic lengths; prints tables, writes the record and the picture
    python benches/release.py --lengths x.npy ...  # the same on real ones

A stream is the documents in random order, split at the context, as many epochs as the steps need (each in a new
order), in global batches of context x micro-batches tokens. Imbalance is over all steps of the stream, delay over all
documents, those flushed at the end included: what `Packer.metrics()` says. The queues' thresholds are tuned on the
very stream that they are measured on, which favours them; the adaptive rule has one price for all. Planning time is
CPU time of the thread; read the ratio to `wlb.pack` of the same lengths, taken in turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from engine import CONTEXT, COST, RECORDS, Lengths, machine, synthetic
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import wlb

MICRO_BATCHES = (4, 16, 64)
ROOMS = (1.5, 2.0)  # max_tokens in contexts
MORE_ROOMS = (1.1, 1.2, 1.3, 1.4, 1.6, 1.75, 2.5, 3.0)  # for the picture
MAX_DELAYS = (None, 16, 8)
PRICES = tuple(round(0.5 / 1.2**k, 5) for k in range(34))
GOALS = {1.5: (0.50, 1.012, 1.06), 2.0: (0.40, 1.005, None)}  # delay, mean and p95 of the imbalance
QUEUES_DELAY = 0.6  # most mean delay of the tuned queues
WLB, QUEUES, INK, SOFT = "#0a5c91", "#c9942f", "#24292f", "#57606a"
Row = dict[str, Any]


def stream(lengths: Lengths, micro_batches: int, steps: int) -> list[Lengths]:
    """Global batches of the documents in random order."""
    rng = np.random.default_rng(0)
    tokens = micro_batches * CONTEXT
    epochs = -(-(steps + 1) * tokens // int(lengths.sum()))
    order = np.concatenate([rng.permutation(lengths) for _ in range(epochs)])
    _, _, pieces = wlb.split_documents(order, max_document_tokens=CONTEXT)
    offsets = wlb.batch_offsets(pieces, tokens_per_batch=tokens)[: steps + 1]
    return [pieces[a:b] for a, b in itertools.pairwise(offsets)]


def adaptive(batches: list[Lengths], options: dict[str, Any], price: float) -> Row:
    """The stream at one price."""
    packer = wlb.Packer(release="adaptive", delay_price=price, max_document_tokens=CONTEXT, **options)
    for batch in batches:
        packer.push(batch)
    packer.flush()
    return {"release": "adaptive", "delay_price": price, **packer.metrics().as_dict()}


def queues(batches: list[Lengths], options: dict[str, Any], number: int) -> tuple[Row, list[Row]]:
    """Algorithm 1 under the best thresholds for this very stream, and the front of all that were tried."""
    tuned = wlb.tune_outlier_thresholds(
        np.concatenate(batches),
        num_queues=number,
        max_mean_delay=QUEUES_DELAY,
        max_document_tokens=CONTEXT,
        tokens_per_batch=options["num_micro_batches"] * CONTEXT,
        **options,
    )
    packer = wlb.Packer(outlier_thresholds=tuned.thresholds, max_document_tokens=CONTEXT, **options)
    for batch in batches:
        packer.push(batch)
    packer.flush()
    best = {"release": "fifo", "queues": number, "thresholds": list(tuned.thresholds), **packer.metrics().as_dict()}
    front = [
        {key: getattr(point, key) for key in ("imbalance_mean", "imbalance_p95", "imbalance_worst", "delay_mean")}
        for point in tuned.pareto
    ]
    return best, front


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
        packs.append(min(took(lambda batch: wlb.pack(batch, **options), batch) for _ in range(3)))
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


def measure(name: str, lengths: Lengths, steps: dict[int, int], most_queues: int, progress: Progress) -> Iterator[Row]:
    """Everything about one source of lengths."""
    cases = [
        (n, room, max_delay)
        for n in MICRO_BATCHES
        for room in (*ROOMS, *MORE_ROOMS)
        for max_delay in (MAX_DELAYS if room in ROOMS else MAX_DELAYS[1:2])
    ]
    task = progress.add_task(name, total=len(cases))
    for n, room, max_delay in cases:
        batches = stream(lengths, n, steps[n])
        options: dict[str, Any] = {
            "num_micro_batches": n,
            "max_tokens": int(room * CONTEXT),
            "cost_model": COST,
            "max_delay": max_delay,
        }
        row: Row = {"lengths": name, "micro_batches": n, "room": room, "max_delay": max_delay, "steps": len(batches)}
        row["epochs"] = sum(int(batch.sum()) for batch in batches) / int(lengths.sum())
        row["adaptive"] = [adaptive(batches, options, price) for price in PRICES]
        if room in ROOMS:
            row["default"] = adaptive(batches, options, wlb.Packer(release="adaptive", **options).delay_price or 0.0)
            row["time"] = planning_time(batches, options)
            tuned = [queues(batches, options, number) for number in range(1, most_queues + 1)]
            row["fifo"] = [best for best, _ in tuned]
            row["fifo_front"] = tuned[-1][1] if tuned else []
        yield row
        progress.advance(task)


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
    figures = ("imbalance_mean", "imbalance_p95", "imbalance_worst", "delay_mean", "memory_skew_mean")

    def cells(point: Row) -> list[str]:
        numbers = [f"{point[key]:.3f}" for key in figures]
        return [*numbers[:4], str(point["delay_p99"]), str(point["delay_max"]), numbers[4]]

    headings = ("mean", "p95", "worst", "delay", "p99", "max", "memory")
    for room in ROOMS:
        delay, mean, p95 = GOALS[room]
        goal = f"{mean}" + (f" / {p95}" if p95 else "") + f" at {delay:.2f}"
        title = f"max_tokens {room} contexts; goal of the adaptive rule: {goal}"
        table = Table("lengths", "N", "max_delay", "release", *headings, "goal", title=title)
        for row in rows:
            if row["room"] != room:
                continue
            best, met = towards(row)
            head = (row["lengths"], str(row["micro_batches"]), str(row["max_delay"]))
            table.add_row(*head, f"adaptive, {best['delay_price']:g}", *cells(best), "met" if met else "missed")
            table.add_row("", "", "", f"adaptive, {row['default']['delay_price']:g} (default)", *cells(row["default"]))
            for point in row["fifo"]:
                table.add_row("", "", "", f"{point['queues']} queue{'s' * (point['queues'] > 1)}", *cells(point))
        console.print(table)
    table = Table("lengths", "N", "room", "documents", "pack us", "push us", "p95", "max", "ratio", "median", "p95")
    table.title = "Planning a step at the default price"
    for row in rows:
        if row["room"] in ROOMS and row["max_delay"] == MAX_DELAYS[1]:
            t = row["time"]
            times = (
                t[key] for key in ("documents_per_step", "pack_us_mean", "push_us_mean", "push_us_p95", "push_us_max")
            )
            ratios = (t[key] for key in ("ratio_of_means", "ratio_median", "ratio_p95"))
            head = (row["lengths"], str(row["micro_batches"]), f"{row['room']:g}")
            table.add_row(*head, *(f"{value:,.0f}" for value in times), *(f"{value:.1f}" for value in ratios))
    console.print(table)


def draw(path: Path, rows: list[Row]) -> None:
    """Balance against delay, and what memory changes, for the first source."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import PercentFormatter

    style: Any = {
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#eaeef2",
        "axes.edgecolor": "#8c959f",
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "legend.frameon": False,
    }
    name = rows[0]["lengths"]
    rows = [row for row in rows if row["lengths"] == name]
    with plt.rc_context(style):
        fig, axes = plt.subplots(3, len(MICRO_BATCHES), figsize=(13.5, 11.5), layout="constrained")
        for column, n in enumerate(MICRO_BATCHES):
            of_n = [row for row in rows if row["micro_batches"] == n]
            for ax, key, goal in ((axes[0, column], "imbalance_mean", 1), (axes[1, column], "imbalance_p95", 2)):
                for max_delay, width, dash in ((None, 2.6, "-"), (16, 1.6, "--"), (8, 1.4, ":")):
                    row = next(r for r in of_n if r["room"] == 1.5 and r["max_delay"] == max_delay)
                    limit = "" if max_delay is None else f", max_delay {max_delay}"
                    for points, color, rule in (
                        (row["fifo_front"], QUEUES, "up to 3 tuned queues"),
                        (row["adaptive"], WLB, "adaptive"),
                    ):
                        xs = [point["delay_mean"] for point in points]
                        ys = [point[key] - 1 for point in points]
                        ax.plot(xs, ys, dash, color=color, lw=width, label=rule + limit)
                delay = GOALS[1.5][0]
                level = GOALS[1.5][goal]
                assert level is not None
                ax.plot([delay], [level - 1], "*", color="#c2482e", ms=13, label="goal", zorder=5, clip_on=False)
                ax.set(xlim=(0, 1.0), ylim=(0, 0.12 if goal == 1 else 0.5), xlabel="mean delay of a token, iterations")
                ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            axes[0, column].set_title(f"{n} micro-batches")
            ax = axes[2, column]
            for excess, color in ((0.005, "#7fb4d8"), (0.01, WLB), (0.02, "#062f4c")):
                found = [(row["room"], delay_for(row, excess)) for row in of_n if row["max_delay"] == 16]
                xs, ys = zip(*sorted((room, delay) for room, delay in found if delay is not None), strict=True)
                ax.plot(xs, ys, "o-", ms=4, color=color, lw=1.8, label=f"for {excess:.1%} mean imbalance")
            ax.set(ylim=(0, 2), xlabel="max_tokens of a micro-batch, contexts")
        axes[0, 0].set_ylabel("mean time over balance")
        axes[1, 0].set_ylabel("p95 over balance")
        axes[2, 0].set_ylabel("mean delay, iterations")
        axes[0, 0].legend(fontsize=9.5)
        axes[2, 0].legend(fontsize=9.5, title="adaptive, max_delay 16", alignment="left")
        fig.suptitle(
            f"What waiting buys: {name}, context {CONTEXT:,}, 7B cost; first two rows at max_tokens of 1.5 contexts",
            x=0.01,
            ha="left",
            color=INK,
        )
        fig.savefig(path, dpi=110)


def delay_for(row: Row, excess: float) -> float | None:
    """Least mean delay at which the mean imbalance is at most `1 + excess`."""
    return min((p["delay_mean"] for p in row["adaptive"] if p["imbalance_mean"] <= 1 + excess), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, nargs="*", default=[], help=".npy files of document lengths")
    parser.add_argument("--steps", type=int, default=240, help="global batches of a stream; half of it for 64")
    parser.add_argument("--queues", type=int, default=3, choices=range(4), help="most queues to tune: most of the time")
    parser.add_argument("--record", type=Path, default=RECORDS / "release.json", help="where the raw record goes")
    parser.add_argument("--picture", type=Path, default=RECORDS.parents[1] / "docs" / "release.png")
    arguments = parser.parse_args()
    if wlb.BUILD_PROFILE != "release":
        sys.exit("wlb is a debug build: its timings mean nothing. Build a wheel: pip install .")

    sources = {path.stem: np.load(path).astype(np.int64) for path in arguments.lengths}
    sources["synthetic"] = synthetic(60_000)
    steps = {n: arguments.steps // (2 if n == 64 else 1) for n in MICRO_BATCHES}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        rows = [
            row
            for name, lengths in sources.items()
            for row in measure(name, lengths, steps, arguments.queues, progress)
        ]
    arguments.record.parent.mkdir(parents=True, exist_ok=True)
    arguments.record.write_text(json.dumps({"machine": machine(), "rows": rows}) + "\n")
    console = Console()
    report(Console(width=max(console.width, 130)), rows)
    draw(arguments.picture, rows)


if __name__ == "__main__":
    main()
