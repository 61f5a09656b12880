"""`wlb fit`: what documents cost, from the log of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

import wlb
from wlb.cli.errors import CliError
from wlb.cli.inputs.options import Flag, Numbers
from wlb.cli.inputs.timings import read_timings
from wlb.cli.output.console import Printing
from wlb.cli.output.report import Paragraphs, Report, Table


def fit(
    log: Path,
    /,
    *,
    windows: Annotated[tuple[int, ...], Numbers] = (),
    chunks: Annotated[tuple[int, ...], Numbers] = (),
    full: Annotated[bool, Flag] = False,
    cost_model: Annotated[Path | None, Parameter(name="--output")] = None,
    printing: Printing = Printing(),
) -> None:
    """Fits the costs of documents to what micro-batches took, and writes them to a file.

    LOG is a .jsonl or .csv with a row per micro-batch: lengths, the tokens of its documents, and seconds, what its
    forward and backward took on the slowest of the ranks that share it. `wlb.torch.StepTimer` writes one, and any
    trainer can. Where the ranks that share one differ in number (Dynamic-CP), a row has ranks, too. The file that comes
    out is for --cost-model of the other commands, and for `wlb.CostModel.from_json`. What is
    minimised, and how to read the report: docs/costs.md.

    Args:
        windows: sliding windows of the model's layers, such as 1024,4096.
        chunks: chunks of the model's layers.
        full: attention is bidirectional, not causal.
        cost_model: file to write; by default LOG with the ending .cost.json.
    """
    file = cost_model or log.with_suffix(".cost.json")
    if file.resolve() == log.resolve():
        raise CliError(f"--output {file}: is the log itself, and would be lost")
    timings = read_timings(log)
    try:
        fitted = wlb.CostModel.fit(
            timings.micro_batches,
            timings.seconds,
            windows=windows,
            chunks=chunks,
            causal=not full,
            ranks=timings.ranks,
        )
    except wlb.WlbError as error:
        if error.argument in ("windows", "chunks"):
            raise
        raise CliError(f"{log}: {error}") from None
    file.write_text(fitted.cost_model.to_json() + "\n")
    numbers = {
        "rates": fitted.rates,
        "shares": fitted.shares,
        "share_errors": {name: error if error < 1e9 else None for name, error in fitted.share_errors.items()},
        "merged": [list(group) for group in fitted.merged],
        "residual": fitted.residual,
        "held_out_error": fitted.held_out_error,
        "held_out": fitted.held_out,
        "micro_batches": fitted.rows,
        "outlier_lines": [timings.lines[row] for row in fitted.outliers.tolist()],
        "cost_model": json.loads(fitted.cost_model.to_json()),
    }
    printing.give(
        Report(command="fit", blocks=[_table(fitted), Paragraphs(_sentences(fitted, timings.lines))], numbers=numbers),
        [file],
    )


def _table(fitted: wlb.CostFit) -> Table:
    rows = []
    for name, rate in fitted.rates.items():
        seen = bool(rate)
        share = f"{fitted.shares[name]:.1%} ± {fitted.share_errors[name]:.1%}" if seen else ""
        rows.append((name, f"{rate:.6g}" if seen else "", share))
    return Table("Costs", ("term", "seconds per unit", "share of time"), rows)


def _sentences(fitted: wlb.CostFit, lines: list[int]) -> list[str]:
    sentences = []
    for group in fitted.merged:
        kept = [name for name in group if fitted.rates[name]]
        sentences.append(
            f"{', '.join(group)} cannot be told apart by this log: their time stands with"
            f" {' and '.join(kept) or 'the others'}."
            " Micro-batches that differ in one of them alone would show which it is."
        )
    unseen = [
        name for name, rate in fitted.rates.items() if not rate and not any(name in group for group in fitted.merged)
    ]
    if unseen:
        sentences.append(f"Nothing seen of {', '.join(unseen)}.")
    if fitted.outliers.size:
        shown = ", ".join(str(lines[row]) for row in fitted.outliers.tolist()[:10])
        more = ", ..." if fitted.outliers.size > 10 else ""
        sentences.append(
            f"{fitted.outliers.size:,} of {fitted.rows:,} micro-batches are outliers and count for nothing: lines"
            f" {shown}{more}."
        )
    sentences.append(
        f"Half of the micro-batches are off by at most {fitted.residual:.1%}; of {fitted.held_out:,} that a fit to the"
        f" others did not see, by {fitted.held_out_error:.1%}, their own noise included."
    )
    return sentences
