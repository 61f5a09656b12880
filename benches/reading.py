"""Rows of 50 KB through wlb's loaders and through a plain `DataLoader`, with 2 workers: rows read in a second.

    python -m benches.reading                    # prints the table, writes benches/records/reading.json

All read the same rows from one mapped file. The plain loader joins as many rows of a random order as a micro-batch of
wlb has, into one tensor of token ids, and another of labels that are a copy, as trainers of Hugging Face have them.
Nothing is trained, so that a loader is never ahead. The record keeps every round; ratios are of rounds side by side.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import wlb
import wlb.torch as wt
from benches.common import machine, options, parse, write_record

ROW = 12_500  # tokens of 4 bytes on average: 50 KB
ROWS = 8  # of a micro-batch
WORKERS = 2
COST = wlb.CostModel(attention=1.0, linear=20_000.0)


class Rows(Dataset[NDArray[np.int32]]):
    """Rows of a mapped file, each copied into memory when it is read."""

    def __init__(self, path: Path, lengths: NDArray[np.int64]) -> None:
        self._path, self._ends = path, np.cumsum(lengths)
        self._starts = self._ends - lengths
        self._tokens: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return self._ends.size

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        if self._tokens is None:
            self._tokens = np.memmap(self._path, np.int32, "r")
        return np.array(self._tokens[self._starts[index] : self._ends[index]])


def joined(rows: list[NDArray[np.int32]]) -> tuple[Tensor, Tensor]:
    tokens = torch.from_numpy(np.concatenate(rows).astype(np.int64))
    return tokens, tokens.clone()


def plain(rows: Rows, lengths: NDArray[np.int64]) -> Iterator[Any]:
    yield from DataLoader(rows, batch_size=ROWS, shuffle=True, num_workers=WORKERS, collate_fn=joined)


def known(rows: Rows, lengths: NDArray[np.int64]) -> Iterator[Any]:
    sizes = {"max_tokens": 10 * ROW, "max_document_tokens": 8 * ROW, "tokens_per_batch": 8 * ROWS * ROW}
    loader = wt.balanced_loader(rows, lengths=lengths, cost_model=COST, num_workers=WORKERS, **sizes)
    for step in loader:
        yield from step.micro_batches


def as_it_is(row: NDArray[np.int32]) -> NDArray[np.int32]:
    return row


def processed(rows: Rows, lengths: NDArray[np.int64]) -> Iterator[Any]:
    sizes = {"max_tokens": 10 * ROW, "max_document_tokens": 8 * ROW, "tokens_per_batch": 8 * ROWS * ROW}
    loader = wt.balanced_loader(wt.ProcessedRows(rows, as_it_is, num_workers=WORKERS), cost_model=COST, **sizes)
    for step in loader:
        yield from step.micro_batches
    loader.close()


LOADERS: dict[str, Callable[[Rows, NDArray[np.int64]], Iterator[Any]]] = {
    "plain DataLoader": plain,
    "balanced_loader": known,
    "balanced_loader(ProcessedRows)": processed,
}


def seconds(loader: Iterator[Any]) -> float:
    """From the first micro-batch to the last, so that the start of processes is not counted."""
    next(loader)
    started = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - started


def measure(count: int, rounds: int) -> dict[str, list[float]]:
    """Seconds for all rows but those of the first micro-batch, round by round in turn."""
    lengths = np.random.default_rng(0).lognormal(np.log(ROW) - 0.18, 0.6, count).astype(np.int64).clip(1, 8 * ROW)
    found: dict[str, list[float]] = {name: [] for name in LOADERS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        np.random.default_rng(1).integers(0, 32000, int(lengths.sum()), np.int32).tofile(path)
        rows = Rows(path, lengths)
        for _ in range(rounds):
            for name, make in LOADERS.items():
                found[name].append(seconds(make(rows, lengths)))
    return found


def main() -> None:
    parser = options(__doc__, record="reading.json")
    parser.add_argument("--rows", type=int, default=4000, help="rows of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each loader (default: %(default)s)")
    arguments = parse(parser)
    found = measure(arguments.rows, arguments.rounds)
    console = Console()
    table = Table(title=f"rows of 50 KB, {WORKERS} workers")
    for column in ("loader", "rows a second, median", "plain's time over its own, median"):
        table.add_column(column, justify="right")
    ratios = {}
    for name, times in found.items():
        ratios[name] = [base / own for base, own in zip(found["plain DataLoader"], times, strict=True)]
        speed = arguments.rows / statistics.median(times)
        table.add_row(name, f"{speed:,.0f}", f"{statistics.median(ratios[name]):.2f}")
    console.print(table)
    record = {"rows": arguments.rows, "workers": WORKERS, "seconds": found, "ratios": ratios}
    write_record(arguments.record, {"machine": machine(["torch"]), **record})
    console.print(f"wrote {arguments.record}")


if __name__ == "__main__":
    main()
