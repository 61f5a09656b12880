"""What a micro-batch of 128K tokens takes from rows of Hugging Face's datasets: from their tables, and item by item.

    python -m benches.data_path                  # prints the table, writes benches/records/data_path.json

Tables show the least and the median, the record keeps every sample, in time of the CPU, which other programs on the
machine lengthen less. What planning and collating take beside a step: `overhead.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benches.common import CONTEXT, machine, options, parse, synthetic, write_record
from wlb.torch.data import Documents, collate


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
    parser.add_argument("--rounds", type=int, default=30, help="samples of each way (default: %(default)s)")
    arguments = parse(parser)
    console = Console()
    rows = from_rows(synthetic(200_000), arguments.rounds)
    table = Table(title=f"{CONTEXT} tokens in rows of Hugging Face's datasets: reading and collate, ms")
    for column in ("rows", "least", "median"):
        table.add_column(column, justify="right")
    for name, seconds in rows.items():
        table.add_row(name, f"{min(seconds) * 1e3:.2f}", f"{statistics.median(seconds) * 1e3:.2f}")
    console.print(table)
    write_record(arguments.record, {"machine": machine(["torch"]), "context": CONTEXT, "rows_seconds": rows})
    console.print(f"wrote {arguments.record}")


if __name__ == "__main__":
    main()
