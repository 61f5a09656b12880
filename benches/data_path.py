"""What the data path costs beside a training step: 16 micro-batches of 128K tokens, all on one data-parallel rank.

    python benches/data_path.py                  # prints the tables, writes benches/records/data_path.json
    python benches/data_path.py --step 0.5       # a shorter step to hide the work behind

Three questions. What do planning and `collate` take, as a share of a step? How long does a step wait for its
micro-batches when one worker prepares them while the step before runs? And what does one micro-batch take from rows of
Hugging Face's datasets (where they are installed), read from their tables and item by item? Documents are tokens in
memory, so that the numbers are those of this code and not of a disk. Tables show the least and the median, the record
keeps every sample. What is waited for is measured by a clock, all else by the time of the CPU, which other programs on
the machine lengthen less. The training step is a sleep: like a GPU's, it leaves the CPU to others.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from common import CONTEXT, COST, machine, options, parse, synthetic, write_record
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

import wlb
from wlb.torch.data import BalancedBatchSampler, Documents, PackedBatch, StepLoader, collate

MICRO_BATCHES = 16
CP_SIZES = (1, 4, 16)


class Tokens:
    """Documents of given lengths: windows of one array of 16-bit tokens."""

    def __init__(self, lengths: NDArray[np.int64]) -> None:
        self.lengths = lengths
        self.tokens = np.random.default_rng(0).integers(0, 32000, int(lengths.max()) + 4096).astype(np.uint16)

    def __len__(self) -> int:
        return self.lengths.size

    def __getitem__(self, number: int) -> NDArray[np.uint16]:
        first = number % 4096
        return self.tokens[first : first + self.lengths[number]]


def sampler(lengths: NDArray[np.int64]) -> BalancedBatchSampler:
    packer = wlb.Packer(
        num_micro_batches=MICRO_BATCHES,
        max_tokens=CONTEXT * 3 // 2,
        max_document_tokens=CONTEXT,
        cost_model=COST,
        outlier_thresholds=(CONTEXT * 3 // 8, CONTEXT * 3 // 4),
    )
    return BalancedBatchSampler(lengths, packer=packer, dp_rank=0, dp_size=1)


def work_per_step(lengths: NDArray[np.int64], cp_size: int, steps: int) -> dict[str, list[float]]:
    """Seconds of the CPU for planning, reading and collating in each step, in one process."""
    of = sampler(lengths)
    elements, documents = iter(of), Documents(Tokens(lengths))
    planning, reading, collating = [], [], []
    for _ in range(steps):
        started = time.process_time()
        parts = [next(elements) for _ in range(MICRO_BATCHES)]
        planned = time.process_time()
        micro_batches = [[documents[element] for element in part] for part in parts]
        read = time.process_time()
        for micro_batch in micro_batches:
            collate(micro_batch, cp_size=cp_size)
        planning.append(planned - started)
        reading.append(read - planned)
        collating.append(time.process_time() - read)
    return {"planning": planning, "reading": reading, "collate": collating}


def stalls(lengths: NDArray[np.int64], cp_size: int, steps: int, step_seconds: float, workers: int) -> list[float]:
    """Seconds that each step waits for its micro-batches, the first ones (start of the workers) left out."""
    inner: DataLoader[PackedBatch] = DataLoader(
        Documents(Tokens(lengths)),
        batch_sampler=sampler(lengths),
        collate_fn=functools.partial(collate, cp_size=cp_size),
        num_workers=workers,
        prefetch_factor=MICRO_BATCHES if workers else None,  # a whole step ahead
    )
    loader: StepLoader[PackedBatch] = StepLoader(inner)
    batches = iter(loader)
    next(batches)
    waited = []
    for _ in range(steps):
        time.sleep(step_seconds)
        started = time.perf_counter()
        next(batches)
        waited.append(time.perf_counter() - started)
    return waited


def from_rows(lengths: NDArray[np.int64], rounds: int) -> dict[str, list[float]]:
    """Seconds of the CPU for reading and collating one micro-batch, round by round in turn."""
    datasets = import_module("datasets")
    documents = lengths[: np.searchsorted(np.cumsum(lengths), CONTEXT, side="right")]
    # What is asked for lies scattered among others, as a plan asks for it.
    numbers = np.random.default_rng(0).permutation(8 * documents.size)[: documents.size].tolist()
    of_number = dict(zip(numbers, documents.tolist(), strict=True))
    dataset = datasets.Dataset.from_dict(
        {"input_ids": [[number % 32000] * of_number.get(number, 100) for number in range(8 * documents.size)]}
    )
    read_together = Documents(dataset).__getitems__
    rows: dict[str, Callable[[], Any]] = {
        "from tables": lambda: read_together(numbers),
        "item by item": lambda: [dataset[i] for i in numbers],
    }
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, read in rows.items():
            started = time.process_time()
            collate(read())
            seconds[name].append(time.process_time() - started)
    return seconds


def main() -> None:
    parser = options(__doc__, record="data_path.json")
    parser.add_argument("--step", type=float, default=3.0, help="seconds of a training step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="measured for the costs (default: %(default)s)")
    parser.add_argument("--stall-steps", type=int, default=5, help="measured for stalls (default: %(default)s)")
    arguments = parse(parser)
    console = Console()
    lengths = synthetic(200_000)

    costs = {cp_size: work_per_step(lengths, cp_size, arguments.steps) for cp_size in CP_SIZES}
    table = Table(title=f"{MICRO_BATCHES} micro-batches of {CONTEXT} tokens: ms of a step, least / median")
    for column in ("CP", "planning", "reading", "collate", f"planning + collate, % of {arguments.step:g} s"):
        table.add_column(column, justify="right")
    for cp_size, cost in costs.items():
        cells = [f"{min(cost[name]) * 1e3:.2f} / {statistics.median(cost[name]) * 1e3:.2f}" for name in cost]
        both = [sum(pair) / arguments.step for pair in zip(cost["planning"], cost["collate"], strict=True)]
        table.add_row(str(cp_size), *cells, f"{min(both):.2%} / {statistics.median(both):.2%}")
    console.print(table)

    waited = {workers: stalls(lengths, 4, arguments.stall_steps, arguments.step, workers) for workers in (0, 1)}
    table = Table(title=f"Waiting for a step's micro-batches, {arguments.step:g} s steps, CP 4: ms")
    for column in ("workers", "least", "median", "worst", "median, % of a step"):
        table.add_column(column, justify="right")
    for workers, seconds in waited.items():
        middle = statistics.median(seconds)
        cells = [f"{value * 1e3:.2f}" for value in (min(seconds), middle, max(seconds))]
        table.add_row(str(workers), *cells, f"{middle / arguments.step:.3%}")
    console.print(table)

    rows = from_rows(lengths, arguments.steps) if find_spec("datasets") else {}
    if rows:
        table = Table(title=f"{CONTEXT} tokens in rows of Hugging Face's datasets: reading and collate, ms")
        for column in ("rows", "least", "median"):
            table.add_column(column, justify="right")
        for name, seconds in rows.items():
            table.add_row(name, f"{min(seconds) * 1e3:.2f}", f"{statistics.median(seconds) * 1e3:.2f}")
        console.print(table)

    record = {
        "rows_seconds": rows,
        "machine": machine(["torch"]),
        "context": CONTEXT,
        "micro_batches": MICRO_BATCHES,
        "step_seconds": arguments.step,
        "seconds": {str(cp_size): cost for cp_size, cost in costs.items()},
        "waited_seconds": {str(workers): seconds for workers, seconds in waited.items()},
    }
    write_record(arguments.record, record, indent=1)
    console.print(f"wrote {arguments.record}")


if __name__ == "__main__":
    main()
