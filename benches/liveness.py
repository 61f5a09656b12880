"""What waits where documents do not fit well: with admission (what the readers do) and without.

    python -m benches.liveness                        # lengths close to the paper's histogram
    python -m benches.liveness --lengths x.npy        # real ones; writes benches/records/liveness.json

Two questions. How much waits in a packer, and how long, at a context of 2,048 and memory for 1 and 1.5 contexts, if
full global batches are pushed whatever waits, and if a `BalancedBatchSampler` reads? And how much do a `BalancedStream`
and its state grow while documents of 0.6 of the context are read, of which only 0.6 of a global batch can be trained in
a step?
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

import wlb
from benches.common import COST, options, parse, read_lengths, synthetic, write_record
from wlb.torch.data import BalancedBatchSampler, BalancedStream, collate

CONTEXT, MICRO_BATCHES, STEPS = 2048, 16, 1500


def packer(room: float, release: str) -> wlb.Packer:
    queues = {"outlier_thresholds": (CONTEXT // 2,), "max_delay": 16} if release == "fifo" else {}
    return wlb.Packer(
        num_micro_batches=MICRO_BATCHES,
        max_tokens=int(room * CONTEXT),
        max_document_tokens=CONTEXT,
        oversize="split",
        cost_model=COST,
        release=release,  # type: ignore[arg-type]
        **queues,  # type: ignore[arg-type]
    )


def pushed(lengths: NDArray[np.int64], into: wlb.Packer) -> Iterator[wlb.Packing]:
    """Whole global batches, whatever waits."""
    offsets = wlb.batch_offsets(lengths, tokens_per_batch=MICRO_BATCHES * CONTEXT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", wlb.BacklogWarning)
        for at in range(STEPS):
            first, last = offsets[at % (len(offsets) - 1)], offsets[at % (len(offsets) - 1) + 1]
            yield into.push(lengths[first:last])


def waits(lengths: NDArray[np.int64], room: float, release: str, reader: str) -> dict[str, Any]:
    config = packer(room, release)
    if reader == "sampler":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            planned = BalancedBatchSampler(lengths, packer=config, dp_rank=0, dp_size=1, num_epochs=9).reader.copy()
        packings = []
        while len(packings) < STEPS:
            if planned.ended:
                planned.next_epoch()
            packings.append(planned.next_step())
        pending, oldest, metrics = planned.pending, planned.oldest_wait, planned.metrics()
    else:
        packings = list(pushed(np.random.default_rng(0).permutation(lengths), config))
        pending, oldest, metrics = config.pending, config.oldest_wait, config.metrics()
    tokens = np.array([packing.num_tokens for packing in packings])
    bounds = config.bounds()
    return {
        "max_tokens": room,
        "release": release,
        "reader": reader,
        "documents_pending": pending,
        "backlog_max": metrics.backlog_max / (MICRO_BATCHES * CONTEXT),
        "bound": bounds.tokens / (MICRO_BATCHES * CONTEXT),
        "wait_max": max(metrics.delay_max, oldest),
        "wait_bound": bounds.delay,
        "imbalance_mean": metrics.imbalance_mean,
        "step_tokens_min": float(tokens.min() / tokens.mean()),
    }


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def documents(length: int) -> Iterator[NDArray[np.uint16]]:
    rng = np.random.default_rng(0)
    while True:
        yield rng.integers(0, 32000, length, np.uint16)


def stream() -> list[dict[str, Any]]:
    """What a stream of documents of 0.6 context holds as steps go by."""
    rows = []
    steps = BalancedStream(
        [documents(int(0.6 * CONTEXT))], packer=packer(1.0, "adaptive"), collate_fn=functools.partial(collate)
    )
    for step in track(steps, "a stream", total=STEPS):
        if step.number in (20, STEPS // 2, STEPS):
            state = len(json.dumps(step.state))
            rows.append({"step": step.number, "resident_mb": resident() / 2**20, "state_mb": state / 2**20})
        if step.number == STEPS:
            break
    steps.close()
    return rows


def main() -> None:
    parser = options(__doc__, record="liveness.json")
    parser.add_argument("--lengths", type=Path, help=".npy file of document lengths; synthetic ones without")
    arguments = parse(parser)
    lengths = read_lengths(arguments.lengths) if arguments.lengths else synthetic(60_000)
    console = Console()
    cases = [
        (room, release, reader)
        for room in (1.0, 1.5)
        for release in ("adaptive", "fifo")
        for reader in ("whole batches", "sampler")
    ]
    rows = [waits(lengths, *case) for case in track(cases, "what waits")]
    table = Table(title=f"{STEPS} steps, context {CONTEXT}, {MICRO_BATCHES} micro-batches; tokens in global batches")
    for name in (
        "max_tokens",
        "release",
        "reader",
        "pending",
        "most tokens",
        "bound",
        "longest wait",
        "bound",
        "imbalance",
    ):
        table.add_column(name)
    for row in rows:
        table.add_row(
            f"{row['max_tokens']:.1f}",
            row["release"],
            row["reader"],
            str(row["documents_pending"]),
            f"{row['backlog_max']:.2f}",
            f"{row['bound']:.2f}",
            str(row["wait_max"]),
            str(row["wait_bound"]),
            f"{row['imbalance_mean']:.3f}",
        )
    console.print(table)
    grown = stream()
    table = Table("step", "resident, MB", "state, MB", title="A stream of documents of 0.6 context, memory for one")
    for row in grown:
        table.add_row(str(row["step"]), f"{row['resident_mb']:.0f}", f"{row['state_mb']:.2f}")
    console.print(table)
    source = arguments.lengths.name if arguments.lengths else "synthetic"
    write_record(arguments.record, {"lengths": source, "waits": rows, "stream": grown})


if __name__ == "__main__":
    main()
