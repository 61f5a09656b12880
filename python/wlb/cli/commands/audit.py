"""`wlb audit`: what a run trained, proved from its ledger."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from wlb.audit import Audit
from wlb.audit import audit as audit_ledger
from wlb.cli.errors import CliError
from wlb.cli.output.console import Printing
from wlb.cli.output.report import Column, Paragraphs, Report, Table
from wlb.cli.words import counted


def audit(
    run: Path,
    /,
    *,
    state: Path | None = None,
    lengths: Path | None = None,
    printing: Printing = Printing(),
) -> None:
    """Proves from a run's ledger that every document was trained once an epoch.

    Or names the first step and rank that diverge, and the documents that are missing or were trained twice. The ledger
    is what `wlb.torch.Ledger` writes, a line a step and rank. After a crash: from which state on the run is sound.
    Exits with 1 if something does not hold.

    Args:
        run: folder of a ledger, or with one in RUN/ledger.
        state: a state that the run saved, as JSON: proves everything up to it, what waits included.
        lengths: lengths of all documents, .npy: proves the end of every document.
    """
    folder = next((place for place in (run, run / "ledger") if (place / "ledger-00000.jsonl").exists()), run)
    found = audit_ledger(
        folder,
        state=None if state is None else _read_state(state),
        lengths=None if lengths is None else _read_lengths(lengths),
    )
    sentences = Paragraphs(_sentences(found))
    printing.give(Report(command="audit", blocks=[*_table(found), sentences], numbers=found.as_dict()))
    if not found.sound:
        sys.exit(1)


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text())
    except ValueError as error:
        raise CliError(f"{path} is no JSON: {error}") from None
    if not isinstance(state, dict):
        raise CliError(f"{path} holds no state")
    return state


def _read_lengths(path: Path) -> Any:
    try:
        return np.load(path, mmap_mode="r")
    except ValueError as error:
        raise CliError(f"{path} is no array of numpy: {error}") from None


def _table(found: Audit) -> list[Table]:
    columns = (
        Column("documents", "read", "read"),
        Column("documents", "trained once", "trained"),
        Column("documents", "waiting", "waiting"),
        Column("", "tokens trained", "tokens"),
    )
    rows = [(f"{epoch.epoch}", vars(epoch), False) for epoch in found.epochs]
    return [Table.of("Documents", "epoch", columns, rows)] if rows else []


def _sentences(found: Audit) -> list[str]:
    sentences = []
    for finding in found.findings:
        sentences.append(f"✗ {finding}")
        sentences += (f"    document {document} of epoch {epoch}" for epoch, document in finding.documents)
    if found.sound:
        sentences.append(f"✓ Sound: {found.proof}.")
    if found.superseded:
        sentences.append(f"{counted(found.superseded, 'step')} trained anew after going back to a checkpoint.")
    if not found.num_steps:
        return [*sentences, "No step holds: go on from nothing that this run has saved."]
    last = found.first_step + found.num_steps - 1
    return [
        *sentences,
        f"Steps {found.first_step} to {last} hold. A run may go on from the state after step {last}, {found.state}, or"
        " from one before it.",
    ]
