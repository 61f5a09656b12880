"""A plan as files: flat arrays for a program, a line per global batch for a reader."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

import wlb
from wlb.cli.inputs.stream import Stream
from wlb.simulation.methods import Setup
from wlb.simulation.trained import Plan

Deals = list[list[list[int]]]  # [steps][dp_size][micro-batches / dp_size]


def write_npz(path: Path, plan: Plan, stream: Stream, deals: Deals | None) -> None:
    """Flat arrays, a row per piece of a document in training order.

    step, micro_batch, document_id, start, length: int64[pieces]; a piece is tokens start to start + length of
    the source's document.
    offsets: int64[steps * micro-batches + 1]; micro-batch j of step s is rows offsets[k] to offsets[k + 1],
    k = s * micro-batches + j.
    costs: float64[steps, micro-batches]; tokens: int64[steps, micro-batches].
    deal, with a DP size: int64[steps, dp, micro-batches / dp]; the micro-batches of each DP rank in schedule
    order.
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
    if deals is not None:
        arrays["deal"] = np.array(deals)
    with _whole(path) as file:
        np.savez_compressed(file, **arrays)


def write_jsonl(path: Path, plan: Plan, stream: Stream, deals: Deals | None) -> None:
    """A line per global batch: its micro-batches as lists of [document id, start, length], and their figures.

    `digest` is the packing's; the steps of one fixed-length window share it.
    """
    pieces = np.stack([*_of_source(plan, stream), plan.length], axis=1)
    micro_batches = np.split(pieces, _offsets(plan)[1:-1])
    steps, n = plan.costs.shape
    with _whole(path) as file:
        for step in range(steps):
            costs = plan.costs[step]
            line = {
                "step": step,
                "micro_batches": [rows.tolist() for rows in micro_batches[step * n : (step + 1) * n]],
                "tokens": plan.tokens[step].tolist(),
                "costs": costs.tolist(),
                "imbalance": float(costs.max() / costs.mean()),
                "digest": plan.digests[step],
            }
            if deals is not None:
                line["deal"] = deals[step]
            file.write(json.dumps(line).encode() + b"\n")


def write_names(path: Path, names: Sequence[str]) -> None:
    """A line per document id: its path, or in quotation marks, as JSON, what is more than one line of plain text.

    Bytes that are not UTF-8 are the escapes that `os.fsencode` turns back into them.
    """
    lines = (name if name.isprintable() and not name.startswith('"') else json.dumps(name) for name in names)
    with _whole(path) as file:
        file.writelines(f"{line}\n".encode() for line in lines)


@contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its name when all of it is there: half a plan would read as a whole one."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _of_source(plan: Plan, stream: Stream) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """int64[pieces] each: a piece's document in the source, and its first token there."""
    return stream.ids[plan.document], stream.starts[plan.document] + plan.start


def _offsets(plan: Plan) -> NDArray[np.int64]:
    steps, n = plan.costs.shape
    counts = np.bincount(plan.step * n + plan.micro_batch, minlength=steps * n)
    return np.concatenate([[0], counts.cumsum()])


def deal(plan: Plan, setup: Setup, dp_size: int) -> Deals:
    """The micro-batches of each DP rank in schedule order, step by step."""
    ends = np.flatnonzero(np.diff(plan.step)) + 1
    return [
        wlb.Packing.from_assignment(
            lengths,
            assignment,
            num_micro_batches=setup.num_micro_batches,
            max_tokens=setup.max_tokens,
            cost_model=setup.cost_model,
        )
        .deal(dp_size)
        .tolist()
        for lengths, assignment in zip(np.split(plan.length, ends), np.split(plan.micro_batch, ends), strict=True)
    ]
