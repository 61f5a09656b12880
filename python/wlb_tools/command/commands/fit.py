"""`wlb fit`: fits what documents cost to the log of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

import wlb
from wlb import timings
from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.options import OUTPUT, Flag, Numbers
from wlb_tools.command.output.console import Printing
from wlb_tools.command.output.report import Block, Code, Paragraphs, Report
from wlb_tools.command.output.written import costs_file, replaces

_SHOWN = 10  # most lines of outliers


def fit(
    log: Path,
    /,
    *,
    windows: Annotated[tuple[int, ...], Numbers] = (),
    chunks: Annotated[tuple[int, ...], Numbers] = (),
    full: Annotated[bool, Flag] = False,
    cost_model: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    printing: Annotated[Printing, OUTPUT] = Printing(),
) -> None:
    """Fits the costs of documents to the times of micro-batches, and writes them to a file.

    LOG is a .jsonl or .csv with a row for each micro-batch: lengths, the tokens of its documents, and seconds, the time
    of its forward and backward pass on the slowest of the ranks that share it. `wlb.torch.StepTimer` writes one, and
    any trainer can. If different numbers of ranks share micro-batches (Dynamic-CP), rows also have ranks. The written
    file is for --cost-model of the other commands, and for `wlb.CostModel.from_json`. docs/costs.md explains the fit
    and the report.

    Args:
        windows: sliding windows of the model's layers, such as 1024,4096.
        chunks: chunks of the model's layers.
        full: attention is bidirectional instead of causal.
        cost_model: file to write; by default LOG with the ending .cost.json.
    """
    file = cost_model or log.with_suffix(".cost.json")
    if file.resolve() == log.resolve():
        raise CliError(f"--output {file}: is the log itself, and would be lost")
    replaced = [file] if replaces(file, costs_file) else []
    rows = timings.read(log)
    try:
        fitted = wlb.CostModel.fit(
            rows.micro_batches,
            rows.seconds,
            windows=windows,
            chunks=chunks,
            causal=not full,
            ranks=rows.ranks,
        )
    except wlb.WlbError as error:
        if error.argument in ("windows", "chunks"):
            raise
        raise CliError(f"{log}: {error}") from None
    file.write_text(fitted.cost_model.to_json() + "\n")
    outliers = [rows.lines[row] for row in fitted.outliers.tolist()]
    numbers = {
        "rates": fitted.rates,
        "shares": fitted.shares,
        "share_errors": {name: error if error < 1e9 else None for name, error in fitted.share_errors.items()},
        "merged": [list(group) for group in fitted.merged],
        "residual": fitted.residual,
        "held_out_error": fitted.held_out_error,
        "held_out": fitted.held_out,
        "micro_batches": fitted.rows,
        "outlier_lines": outliers,
        "cost_model": json.loads(fitted.cost_model.to_json()),
    }
    blocks: list[Block] = [Code("Costs", fitted.report())]
    if outliers:
        more = ", ..." if len(outliers) > _SHOWN else ""
        blocks.append(Paragraphs([f"Outliers are in lines {', '.join(map(str, outliers[:_SHOWN]))}{more}."]))
    printing.give(Report(command="fit", blocks=blocks, numbers=numbers), [file], replaced=replaced)
