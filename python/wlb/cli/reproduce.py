"""`wlb reproduce`: the papers' tables and figures beside ours."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, PositiveInt

from wlb.cli.errors import CliError
from wlb.cli.inputs.documents import Reading
from wlb.cli.inputs.options import CommandLine, Options, options
from wlb.cli.output.console import Output

ALL = "all"
NAMES = ("table2", "fig12", "fig13", "fig14", "fig15", "dynamic_cp")
"""Of `wlb.reproduce.RESULTS`, which no other command has to wait for."""


@options("Runs")
@dataclass(frozen=True, kw_only=True)
class Runs(Options):
    """What is run.

    Args:
        kernel_profile: measured kernel that runs, from `wlb profile`: a name or a .json; by default an assumption.
        sweep: sweep the inputs that are not published; without, only their central values.
        workers: processes; by default as many as cores.
        solver_seconds: limit of the exact solver for one window; 0: no solver.
        solver_samples: windows of each size that it solves.
    """

    kernel_profile: str | None = None
    sweep: bool = True
    workers: PositiveInt = os.cpu_count() or 1
    solver_seconds: NonNegativeFloat = 10.0
    solver_samples: PositiveInt = 2


def reproduce(
    what: str = ALL,
    /,
    *,
    lengths: Annotated[Path | None, Parameter(group="Documents")] = None,
    reading: Reading = Reading(),
    steps: PositiveInt = 100,
    runs: Runs = Runs(),
    output: Output = Output(),
    command_line: CommandLine,
) -> None:
    """Prints the tables and figures of WLB-LLM and Dynamic-CP beside ours.

    Every row says how ours came about: *measured* on this machine, *simulated* for the paper's cluster, or *emulated*.
    What the papers do not publish is stated, and swept: the band is the least and greatest over the sweep.

    Args:
        what: table2, fig12, fig13, fig14, fig15, dynamic_cp, or all.
        lengths: documents to use instead of generated lengths: a .npy of lengths, a directory, a .jsonl or .txt.
        steps: global batches to form.
    """
    if what not in (ALL, *NAMES):
        raise CliError(f"{what}: must be one of {', '.join(NAMES)}, {ALL}")
    profile = runs.kernel_profile
    if profile is not None and profile.endswith(".json") and not Path(profile).is_file():
        raise CliError(f"--kernel-profile {profile}: no such file")
    from wlb.cli.reproduce_figures import draw
    from wlb.cli.reproduce_page import report
    from wlb.reproduce import RESULTS, Study

    output.folder("reproduce")
    with output.progress() as bars:
        source = None if lengths is None else reading.documents(lengths, bars)
        task = bars.add_task("", total=None)
        study = Study(
            steps=steps,
            source=None if source is None else source.lengths,
            sweep=runs.sweep,
            workers=runs.workers,
            solver_seconds=runs.solver_seconds,
            solver_samples=runs.solver_samples,
            profile=profile,
            progress=lambda title, done, total: bars.update(task, description=title, completed=done, total=total),
        )
        made = [make(study) for name, make in RESULTS.items() if what in (ALL, name)]
    settings: dict[str, Any] = {
        "documents": "generated, see the inputs" if source is None else f"{source.source} ({source.unit})",
        "global_batches": steps,
        "sweep": runs.sweep,
        "kernel": profile or "assumed",
    }
    output.give(report(made, {result.name: draw(result) for result in made}, settings), command_line)
