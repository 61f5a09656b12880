"""Writes a plan as flat arrays (NPZ) and as one JSON line per step."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from wlb_tools.command.inputs.stream import Stream
from wlb_tools.simulation.trained import PackedRun


def plan_files(plan: PackedRun, stream: Stream, *, dealt: bool) -> dict[str, Callable[[Path], None]]:
    """Functions that write the files of a plan, by file name.

    Args:
        plan: plan of the stream.
        stream: maps documents of the plan to documents of the source.
        dealt: whether to write which data-parallel rank trains which micro-batch.
    """
    files: dict[str, Callable[[Path], None]] = {
        "plans.npz": functools.partial(write_npz, plan=plan, stream=stream, dealt=dealt),
        "plans.jsonl": functools.partial(write_jsonl, plan=plan, stream=stream, dealt=dealt),
    }
    if stream.documents.names is not None:
        files["documents.txt"] = functools.partial(write_names, names=stream.documents.names)
    return files


def write_npz(path: Path, plan: PackedRun, stream: Stream, dealt: bool) -> None:
    """Writes flat arrays with a row for each piece of a document, in training order.

    step, micro_batch, document_id, start, length: int64[pieces]; a piece is tokens start to start + length of
    the source's document.
    offsets: int64[steps * micro-batches + 1]; micro-batch j of step s is rows offsets[k] to offsets[k + 1],
    k = s * micro-batches + j.
    costs: float64[steps, micro-batches]; tokens: int64[steps, micro-batches].
    column_costs, if documents bring their costs: float64[steps, micro-batches, columns].
    deal, if dealt: int64[steps, dp, micro-batches / dp]; the micro-batches of each DP rank in schedule order.
    """
    document_id, start = _of_source(plan, stream)
    arrays: dict[str, Any] = {
        "step": plan.step,
        "micro_batch": plan.micro_batch,
        "document_id": document_id,
        "start": start,
        "length": plan.length,
        "offsets": _offsets(plan),
        "costs": plan.costs,
        "tokens": plan.tokens,
    }
    if plan.column_costs is not None:
        arrays["column_costs"] = plan.column_costs
    if dealt:
        arrays["deal"] = plan.order
    with at_once(path) as file:
        np.savez_compressed(file, **arrays)


def write_jsonl(path: Path, plan: PackedRun, stream: Stream, dealt: bool) -> None:
    """Writes a JSON line for each step: its micro-batches as lists of [document id, start, length], costs and tokens.

    `digest` is the packing's digest; steps of one window of the fixed-length greedy share it.
    """
    pieces = np.stack([*_of_source(plan, stream), plan.length], axis=1)
    micro_batches = np.split(pieces, _offsets(plan)[1:-1])
    steps, n = plan.costs.shape
    imbalance = plan.all_balance.imbalance.tolist()
    with at_once(path) as file:
        for step in range(steps):
            line = {
                "step": step,
                "micro_batches": [rows.tolist() for rows in micro_batches[step * n : (step + 1) * n]],
                "tokens": plan.tokens[step].tolist(),
                "costs": plan.costs[step].tolist(),
                "imbalance": imbalance[step],
                "digest": plan.digests[step],
            }
            if plan.column_costs is not None:
                line["column_costs"] = plan.column_costs[step].tolist()
            if dealt:
                line["deal"] = plan.order[step].tolist()
            file.write(json.dumps(line).encode() + b"\n")


def write_names(path: Path, names: Sequence[str]) -> None:
    """Writes a line for each document id: its name, or the name as a JSON string.

    A JSON string is used if a name has characters that do not print or begins with a quotation mark. Bytes that are not
    UTF-8 appear as escapes, which `os.fsencode` turns back into the bytes.
    """
    lines = (name if name.isprintable() and not name.startswith('"') else json.dumps(name) for name in names)
    with at_once(path) as file:
        file.writelines(f"{line}\n".encode() for line in lines)


@contextmanager
def at_once(path: Path) -> Iterator[BinaryIO]:
    """Opens a file under a temporary name and renames it at the end, so that an incomplete file is never read."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _of_source(plan: PackedRun, stream: Stream) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The source document of each piece and the piece's first token in it, int64[pieces] each."""
    return stream.ids[plan.document], stream.starts[plan.document] + plan.start


def _offsets(plan: PackedRun) -> NDArray[np.int64]:
    steps, n = plan.costs.shape
    counts = np.bincount(plan.step * n + plan.micro_batch, minlength=steps * n)
    return np.concatenate([[0], counts.cumsum()])
