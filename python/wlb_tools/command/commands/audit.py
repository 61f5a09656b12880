"""`wlb audit`: proves from its ledger what a run trained."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from wlb_tools.audit import audit as audit_ledger
from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.formats import load_numbers
from wlb_tools.command.inputs.options import OUTPUT
from wlb_tools.command.output.console import Printing
from wlb_tools.command.output.report import Block, Paragraphs, Report, Table


def audit(
    run: Path,
    /,
    *,
    state: Path | None = None,
    lengths: Path | None = None,
    printing: Annotated[Printing, OUTPUT] = Printing(),
) -> None:
    """Proves from a run's ledger that every document was trained once an epoch.

    Otherwise it names the first step and rank that differ, and the documents that are missing or were trained twice.
    The ledger is what `wlb.torch.Ledger` writes, a line for each step and rank. After a crash it says from which state
    on the run is sound. Exits with 1 if something is wrong.

    Args:
        run: folder of a ledger, or a folder with RUN/ledger.
        state: a state that the run saved, as JSON: proves everything up to it, with the documents that wait.
        lengths: lengths of all documents, .npy: proves the end of every document.
    """
    folder = next((place for place in (run, run / "ledger") if (place / "ledger-00000.jsonl").exists()), run)
    found = audit_ledger(
        folder,
        state=None if state is None else _read_state(state),
        lengths=None if lengths is None else load_numbers(lengths, mapped=True),
    )
    blocks: list[Block] = [Paragraphs(found.sentences())]
    if found.epochs:
        rows = [(f"{epoch.epoch}", vars(epoch), False) for epoch in found.epochs]
        blocks.insert(0, Table.of("Documents", "epoch", ("read", "trained", "waiting", "tokens"), rows))
    printing.give(Report(command="audit", blocks=blocks, numbers=found.as_dict()))
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
