"""Output of a command: a report or JSON on stdout, progress on stderr, files in a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from wlb_tools.command.inputs.options import Flag, Options, options
from wlb_tools.command.output import render
from wlb_tools.command.output.report import Report
from wlb_tools.command.words import readable


def progress(quiet: bool) -> Progress:
    """Bars that vanish when the work is done, and never appear where nobody looks."""
    return Progress(
        TextColumn("{task.description:<34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=quiet or not sys.stderr.isatty(),
    )


def reporting(bars: Progress, work: str) -> Callable[[str, int, int], None]:
    """A bar for long work of the library, which calls this with what it does, how much is done, and of how much."""
    task = bars.add_task(work, total=None)
    return lambda what, done, total: bars.update(task, description=f"{work}: {what}", completed=done, total=total)


@options("Output")
class Printing(Options):
    """Options for what a command prints.

    Args:
        json: print the results as JSON and nothing else.
        quiet: print nothing but errors.
    """

    json: Annotated[bool, Flag] = False
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative="")] = False

    def progress(self) -> Progress:
        """Bars for the work under way."""
        return progress(self.quiet)

    def give(self, report: Report, files: Iterable[Path] = ()) -> None:
        """Prints the report, and last the names of the files that were written."""
        if self.json:
            print(render.as_json(report))
        elif not self.quiet:
            # Piped output gets a fixed width, so that a file reads like the screen.
            console = Console(width=None if sys.stdout.isatty() else 100, highlight=False, markup=False)
            render.show(report, console)
            if written := ", ".join(map(str, files)):
                console.print(readable(f"Wrote {written}"))


@options("Output")
class Output(Printing):
    """Options for what a command prints and where its files go.

    Args:
        output_dir: folder to write to, made if missing; by default `wlb-` and the name of the command.
    """

    output_dir: Path | None = None

    def write(self, report: Report, command_line: str) -> None:
        """Writes the report's files, and gives it."""
        self.give(report, render.write(report, self.folder(report.command), command_line))

    def folder(self, command: str) -> Path:
        """The folder, made if missing; called before long work, so that what is wrong with it is known early."""
        folder = self.output_dir or Path(f"wlb-{command}")
        folder.mkdir(parents=True, exist_ok=True)
        return folder
