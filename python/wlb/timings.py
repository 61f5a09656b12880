"""Logs of measured micro-batches: JSON lines or CSV, each row with `lengths`, `seconds` and perhaps `ranks`.

| file | a row | lengths |
| --- | --- | --- |
| `*.jsonl` | a JSON object | a list of integers |
| `*.csv` | a line under a line of names | integers with spaces or semicolons between, or a JSON list |

`ranks` is the number of context-parallel ranks that shared the micro-batch, if it differs between rows. Other columns
are ignored. `wt.StepTimer.write` writes such a log.

    log = wlb.timings.read("timings.jsonl")
    fit = wlb.CostModel.fit(log.micro_batches, log.seconds, ranks=log.ranks)
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb._core import MAX_TOKENS, MAX_WORLD_SIZE, WlbError


@dataclass(frozen=True, eq=False)
class Timings:
    """Timings of micro-batches, read from a log."""

    micro_batches: list[NDArray[np.int64]]  # for each micro-batch, the tokens of its documents
    seconds: NDArray[np.float64]  # time of each micro-batch
    ranks: NDArray[np.int64]  # number of ranks that shared each micro-batch
    lines: list[int]  # for each micro-batch, its line in the file


def read(path: str | os.PathLike[str]) -> Timings:
    """Reads a log.

    Raises:
        WlbError: there is no such file, or a line has the wrong form; the message names the line.
    """
    path = Path(path)
    if not path.is_file():
        raise WlbError(f"{path}: no such file")
    if path.suffix not in (".jsonl", ".csv"):
        raise WlbError(f"{path}: give a .jsonl or a .csv with lengths and seconds of a micro-batch in each line")
    micro_batches, seconds, ranks, lines = [], [], [], []
    for line, row in _rows(path):
        where = f"{path}, line {line}"
        micro_batches.append(_lengths(where, row.get("lengths")))
        seconds.append(_seconds(where, row.get("seconds")))
        ranks.append(_ranks(where, row.get("ranks")))
        lines.append(line)
    return Timings(micro_batches, np.array(seconds), np.array(ranks, np.int64), lines)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        if path.suffix == ".csv":
            reader = csv.DictReader(file)
            if missing := {"lengths", "seconds"} - set(reader.fieldnames or ()):
                raise WlbError(f"{path}, line 1: has no column {' and no column '.join(sorted(missing))}")
            for row in reader:
                yield reader.line_num, row
            return
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except ValueError as cause:
                cut = "" if text.endswith("\n") else " (it is the last, and may be cut)"
                raise WlbError(f"{path}, line {line}: is no JSON{cut}: {cause}") from None
            if not isinstance(row, dict):
                raise WlbError(f"{path}, line {line}: is no JSON object")
            yield line, row


def _lengths(where: str, value: Any) -> NDArray[np.int64]:
    if isinstance(value, str):
        try:
            value = (
                json.loads(value)
                if value.lstrip().startswith("[")
                else [int(v) for v in value.replace(";", " ").split()]
            )
        except ValueError:
            raise WlbError(f"{where}: lengths = {value!r}: give integers with spaces between") from None
    if not isinstance(value, list):
        raise WlbError(f"{where}: has no lengths" if value is None else f"{where}: lengths = {value!r}: must be a list")
    for length in value:
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= MAX_TOKENS:
            raise WlbError(f"{where}: lengths hold {length!r}: a document has from 1 to {MAX_TOKENS} tokens")
    return np.array(value, np.int64)


def _ranks(where: str, value: Any) -> int:
    if value is None or value == "":
        return 1
    try:
        ranks = int(value) if isinstance(value, str) else value
    except ValueError:
        ranks = None
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= MAX_WORLD_SIZE:
        raise WlbError(f"{where}: ranks = {value!r}: must be an integer from 1 to {MAX_WORLD_SIZE}")
    return ranks


def _seconds(where: str, value: Any) -> float:
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise WlbError(
            f"{where}: seconds = {value!r}: must be a number above 0"
            if value is not None
            else f"{where}: has no seconds"
        )
    return seconds
