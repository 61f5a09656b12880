"""Writes a line for every trained step, from which `wlb audit` proves what a run trained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

import wlb
from wlb._errors import check_integer, error
from wlb.ledger import FORMAT, VERSION, Pieces, Share, as_line, ledger_file, plan_hash, read_line
from wlb.reading.state import Snapshot
from wlb.torch.data.batch import PackedBatch


class _Source(Protocol):
    def describe(self) -> dict[str, Any]: ...


class _Step(Protocol):
    """A `Step` or a `DynamicCpStep`."""

    @property
    def number(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def plan(self) -> wlb.Packing | wlb.DynamicCpPlan: ...
    @property
    def micro_batches(self) -> list[Any]: ...
    @property
    def snapshot(self) -> Snapshot | None: ...
    @property
    def pieces(self) -> Pieces | None: ...


class Ledger:
    """Writes what this rank trained, step by step, into a file of its own in `folder`.

        ledger = Ledger(run / "ledger", dp_rank=dp_rank, dp_size=dp_size, source=loader)
        for step in loader:
            ...
            optimizer.step()
            ledger.record(step)

    `wlb audit run` then proves that every document was trained once an epoch, or names the first step that differs.

    Among the pipeline-, context- and tensor-parallel ranks of each data-parallel rank, which train the same documents,
    one writes. Under a `DynamicCpLoader` every rank of its group writes, and `dp_rank` is the rank in that group.

    A run that resumes from a checkpoint makes a new ledger on the same folder, on the same or another number of ranks.
    The first step that it records says from which state the run resumed. Earlier lines of that step and of later ones
    no longer count.

    Record a step before a checkpoint of it is saved: if ranks save together, all have their lines then. A checkpoint of
    a step without a line of some rank leaves a gap that the audit names.

    When `record` returns, the operating system has the line, so it survives the death of the process. The audit ignores
    a line that was cut off.

    Args:
        folder: made if it does not exist. Shared by all ranks, or gathered before the audit.
        dp_rank: this data-parallel rank.
        dp_size: data-parallel ranks.
        source: the loader of the steps: a `StepLoader`, `BalancedStream` or `DynamicCpLoader`.

    Attributes:
        path: the file.

    Raises:
        wlb.WlbError: a rank is invalid.
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str], *, dp_rank: int, dp_size: int, source: _Source) -> None:
        check_integer("dp_size", dp_size, minimum=1)
        check_integer("dp_rank", dp_rank, minimum=0, maximum=dp_size - 1)
        self._about = {"dp_rank": int(dp_rank), "dp_size": int(dp_size), **source.describe()}
        self._last: int | None = None
        self._after: str | None = None  # the hash of the last line that was read or written
        self.path = ledger_file(Path(folder), dp_rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def record(self, step: _Step) -> None:
        """Appends the line of a step. Call it for every step, once the optimizer has taken it.

        O(documents of this rank); no communication.

        Raises:
            wlb.WlbError: a step was left out, so its documents were lost, or were trained and not recorded. Or the
                step's loader keeps no states.
            OSError: the file cannot be written.
        """
        lines: list[dict[str, Any]] = []
        snapshot, pieces = step.snapshot, step.pieces
        if snapshot is None:
            raise error("step", "has no state: its loader keeps none", value=step.number)
        if self._last is None or step.number <= self._last:
            begins = {"step": step.number, "previous": snapshot.previous}
            lines.append({"format": FORMAT, "version": VERSION, **begins, **self._about})
        elif step.number != self._last + 1:
            message = f"{step.number} comes after {self._last}: record every step, also one in which nothing is learnt"
            raise error("step", message, value=step.number)
        progress = snapshot.progress
        packed = all(isinstance(batch, PackedBatch) for batch in step.micro_batches)
        lines.append(
            {
                "step": step.number,
                "epoch": step.epoch,
                "plan": step.plan.digest(),
                "micro_batches": None,
                "places": None,
                "previous": snapshot.previous,
                "state": snapshot.digest,
                "read": progress.documents,
                "waiting": [progress.pieces, progress.tokens],
                "tokens": None if pieces is None else pieces.tokens,
                "labels": sum(batch.num_valid_tokens for batch in step.micro_batches) if packed else None,
                "pieces": None if pieces is None else pieces.encode(),
                **self._planned(step),
            }
        )
        self._append(lines)
        self._last = step.number

    def _planned(self, step: _Step) -> dict[str, Any]:
        """Fields from which the hash of the plan can be computed; none if its digest is the hash (Dynamic-CP, forests).

        Raises:
            wlb.WlbError: the step has the micro-batches of another rank.
        """
        plan, indices = step.plan, getattr(step, "indices", None)
        if not isinstance(plan, wlb.Packing) or plan.forest is not None or indices is None:
            return {}
        dp_rank, dp_size = self._about["dp_rank"], self._about["dp_size"]
        deal = plan.deal(dp_size) if len(plan) % dp_size == 0 else np.empty((dp_size, 0), np.int64)
        if not np.array_equal(deal[dp_rank], indices):
            message = f"= {dp_rank} of {dp_size}: the step has micro-batches {indices.tolist()}, and this rank "
            raise error("dp_rank", f"{message}{deal[dp_rank].tolist()}", value=dp_rank)
        shares = [_share(plan, numbers) for numbers in deal]
        return {"plan": plan_hash(shares), **shares[dp_rank].encode()}

    def _append(self, contents: list[dict[str, Any]]) -> None:
        with self.path.open("ab+", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            text = ""
            if end:
                file.seek(end - 1)
                if file.read(1) != b"\n":  # killed in the middle of a line, or the disk was full
                    text = "\n"
            if end and self._after is None:
                self._after = _last_check(file, end)
            after = self._after
            for content in contents:
                line, after = as_line(content, after)
                text += line
            data = text.encode()
            if file.write(data) != len(data):
                raise OSError(f"{self.path}: a line could not be written whole")
            self._after = after


def _last_check(file: BinaryIO, end: int) -> str | None:
    """The hash of the last whole line of a file of `end` bytes, read from its end; None if there is none."""
    size = 0
    while size < end:
        size = min(max(2 * size, 1 << 16), end)
        file.seek(end - size)
        lines = file.read(size).split(b"\n")
        for line in reversed(lines if size == end else lines[1:]):
            if (whole := read_line(line)) is not None:
                return whole[1]
    return None


def _share(plan: wlb.Packing, numbers: NDArray[np.int64]) -> Share:
    """The share of a rank with these micro-batches of a plan."""
    parts = [plan[number] for number in numbers.tolist()]
    return Share.of(numbers, [Pieces.of([part.document_ids], [part.starts], [part.lengths]) for part in parts])
