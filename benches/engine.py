"""How fast the engine is, beside numpy.sort and a plain loop; `make compare` sets it beside other packers.

    python -m benches.engine                      # prints the table, writes benches/records/engine.json
    python -m benches.engine --lengths x.npy ...  # adds balance on real lengths, streamed at 128K x 16

Everything is measured from Python, numpy int64 in, in one process. Timings on shared machines are noisy: read the
ratios. The plain loop packs the same lengths in Python, longest first with a heap; what it takes moves with the clock
of a machine alone, where numpy.sort is 5 times faster with AVX-512. Each sample is the mean of a burst; the record
keeps all of them, the table shows the least.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
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
    Lengths,
    bars,
    machine,
    options,
    parse,
    read_lengths,
    reference_us,
    samples,
    synthetic,
    write_record,
)

TIGHT = 1.02  # max_tokens over the mean where the limit is meant to bind


def speed(progress: Progress) -> list[dict[str, Any]]:
    """Every number of the engine, next to numpy.sort of the same lengths and to the plain loop over them."""
    rows: list[dict[str, Any]] = []

    def row(
        name: str, goal: str, lengths: Lengths | None, work: Callable[[], object], bins: int = 8, **more: Any
    ) -> None:
        measured = samples(work)
        floor = None if lengths is None else samples(lambda: np.sort(lengths), 0.2)
        loop = None if lengths is None else reference_us(lengths, bins)
        rows.append({"name": name, "goal": goal, "us": measured, "sort_us": floor, "loop_us": loop, **more})
        progress.advance(task)

    packs = [
        (100, 4, "var_length", "8 us", 1.5),
        (1500, 64, "var_length", "28 us", 1.5),
        (1500, 64, "var_length", "", TIGHT),
        (8700, 64, "var_length", "165 us, 6x sort", 1.5),
        (8700, 64, "var_length", "", TIGHT),
        (500, 16, "refined", "1 ms", TIGHT),
        (30000, 1024, "var_length", "1 ms", 1.5),
        (1500, 64, "fixed_length", "", 1.5),
        (1500, 64, "original", "", 1.5),
    ]
    task = progress.add_task("engine", total=len(packs) + 6)
    for documents, bins, method, goal, room in packs:
        lengths = synthetic(documents)
        mean = int(lengths.sum()) / bins
        options: dict[str, Any] = {
            "num_micro_batches": bins,
            "max_tokens": int(mean * room) if room == TIGHT else max(int(mean * room), CONTEXT),
            "cost_model": COST,
            "leftover": "return",
        }
        plan = wlb.pack(lengths, method=method, **options)
        tight = f", max_tokens {TIGHT} of the mean" if room == TIGHT else ""
        row(
            f"pack {method}, {documents:,} documents, {bins:,} micro-batches{tight}",
            goal,
            lengths,
            lambda lengths=lengths, method=method, options=options: wlb.pack(lengths, method=method, **options),
            bins=bins,
            over_lower_bound=float(plan.costs.max() / plan.lower_bound),
            length_fallbacks=plan.length_fallbacks,
        )

    lengths = synthetic(130)
    packer = wlb.Packer(num_micro_batches=4, max_tokens=3 * CONTEXT, cost_model=COST, outlier_thresholds=(32768, 65536))
    row("Packer.push, 130 documents, N = 4, 2 queues", "15 us", lengths, lambda: packer.push(lengths), bins=4)
    state = packer.state_dict()
    row("Packer.state_dict", "", None, packer.state_dict)
    row("Packer.load_state_dict", "", None, lambda: packer.load_state_dict(state))

    packed = np.random.default_rng(0).multinomial(CONTEXT - 64, np.full(64, 1 / 64)).astype(np.int64) + 1
    row(
        "shard per_document, 64 documents, 128K tokens, CP 8",
        "5 us",
        packed,
        lambda: wlb.shard(packed, cp_size=8, strategy="per_document"),
    )
    row(
        "shard per_sequence, the same",
        "5 us",
        packed,
        lambda: wlb.shard(packed, cp_size=8, strategy="per_sequence"),
    )
    shard = wlb.shard(packed, cp_size=8, strategy="per_document")

    def arrays() -> None:
        rank = shard.rank(3)
        _ = rank.token_indices, rank.position_ids, rank.cu_seqlens_q, rank.cu_seqlens_k, rank.k_starts

    row("one rank's arrays (16K indices, positions, cu_seqlens)", "12 us", None, arrays)
    return rows


def balance(path: Path, progress: Progress) -> list[dict[str, Any]]:
    """Real lengths streamed at 128K x 16: original against two queues, and the pairs of ranks at CP 16.

    Two ways to tune: on the first quarter of the stream (lengths to come are unknown), and on all of it (they are not).
    """
    bins = 16
    lengths = np.random.default_rng(0).permutation(read_lengths(path))
    _, _, pieces = wlb.split_documents(lengths, max_document_tokens=CONTEXT)
    offsets = wlb.batch_offsets(pieces, tokens_per_batch=bins * CONTEXT)
    batches = [pieces[a:b] for a, b in itertools.pairwise(offsets)]
    task = progress.add_task(path.stem, total=4 + 2 * len(batches))

    def original(batch: Lengths) -> float:
        return wlb.pack(batch, num_micro_batches=bins, max_tokens=CONTEXT, cost_model=COST, method="original").imbalance

    found = [original(batch) for batch in batches]
    rows: list[dict[str, Any]] = [summary(path, "original", found)]
    progress.advance(task)
    options: dict[str, Any] = {
        "num_micro_batches": bins,
        "max_tokens": CONTEXT * 3 // 2,
        "cost_model": COST,
        "max_document_tokens": CONTEXT,
    }
    ratios: dict[str, list[float]] = {"per_sequence": [], "per_document": []}
    for part, tuned_on in (("first quarter", pieces[: offsets[max(1, len(batches) // 4)]]), ("all", pieces)):
        tuned = wlb.tune(tuned_on, num_queues=2, max_mean_delay=0.6, **options)
        progress.advance(task)
        packer = wlb.Packer(outlier_thresholds=tuned.thresholds, **options)
        for batch in batches:
            packing = packer.push(batch)
            progress.advance(task)
            if part == "all":
                for strategy, found in ratios.items():
                    found.extend(pair_ratios(packing, strategy))
        packer.flush()
        method = f"wlb, 2 queues tuned on {part}"
        thresholds = list(tuned.thresholds)
        rows.append({"lengths": path.stem, "method": method, "thresholds": thresholds, **packer.metrics().as_dict()})
    for strategy, found in ratios.items():
        rows.append(summary(path, f"pairs of CP 16 ranks, {strategy}", found))
    progress.advance(task)
    return rows


def summary(path: Path, method: str, ratios: list[float]) -> dict[str, Any]:
    mean, p95, worst = float(np.mean(ratios)), float(np.quantile(ratios, 0.95)), max(ratios)
    numbers = {"imbalance_mean": mean, "imbalance_p95": p95, "imbalance_worst": worst}
    return {"lengths": path.stem, "method": method, **numbers}


def pair_ratios(packing: wlb.Packing, strategy: str) -> list[float]:
    """Attention pairs of the heaviest of 16 ranks over their mean, for every micro-batch."""
    pairs = [wlb.shard(batch.lengths, cp_size=16, strategy=strategy).pairs_per_rank for batch in packing.micro_batches]
    return [float(ranks.max() / ranks.mean()) for ranks in pairs if ranks.sum() > 0]


def main() -> None:
    arguments = parse(options(__doc__, lengths=True, record="engine.json"))

    with bars() as progress:
        record: dict[str, Any] = {
            "machine": machine(),
            "speed": speed(progress),
            "balance": [row for path in arguments.lengths for row in balance(path, progress)],
        }
    write_record(arguments.record, record)

    console = Console()
    console.print(speed_table(record["speed"]))
    if record["balance"]:
        print_balance(console, record["balance"])


def speed_table(rows: list[dict[str, Any]]) -> Table:
    """Microseconds, and ratios that hold on other machines."""
    table = Table("work", "goal", "us", "x numpy.sort", "x plain loop", "max / lower bound", title="wlb from Python")
    for row in rows:
        least, bound = min(row["us"]), row.get("over_lower_bound")
        ratios = (
            f"{least / min(row[floor]):.{digits}f}" if row.get(floor) else ""
            for floor, digits in (("sort_us", 1), ("loop_us", 3))
        )
        table.add_row(row["name"], row["goal"], f"{least:.1f}", *ratios, f"{bound:.5f}" if bound else "")
    return table


def print_balance(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table("lengths", "method", "mean", "p95", "worst", "delay", "max", title="Imbalance, delay in iterations")
    for row in rows:
        delays = (f"{row['delay_mean']:.2f}", str(row["delay_max"])) if "delay_mean" in row else ("", "")
        imbalance = [f"{row[key]:.4f}" for key in ("imbalance_mean", "imbalance_p95", "imbalance_worst")]
        table.add_row(row["lengths"], row["method"], *imbalance, *delays)
    console.print(table)


if __name__ == "__main__":
    main()
