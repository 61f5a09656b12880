"""Output of a command: a report or JSON on stdout, progress on stderr, files in a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.options import Flag, Options, options
from wlb_tools.command.output import render
from wlb_tools.command.output.report import Report
from wlb_tools.command.output.written import check_folder
from wlb_tools.command.words import readable


class Bars(Progress):
    """Progress bars of tasks that run one after the other. A finished bar is full even if its total was an estimate."""

    def add_task(self, *args: Any, **kwargs: Any) -> TaskID:
        """Adds a bar for the next task, and fills the bars before it."""
        self._fill()
        return super().add_task(*args, **kwargs)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Also raises the total if more is done than it says."""
        super().update(task_id, **changes)
        self._raise(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Also raises the total if more is done than it says."""
        super().advance(task_id, advance)
        self._raise(task_id)

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        """Fills all bars, unless there was an exception."""
        if kind is None:
            self._fill()
        super().__exit__(kind, *rest)

    def _fill(self) -> None:
        for task in self.tasks:
            if task.total is not None:
                super().update(task.id, completed=task.total)

    def _raise(self, task_id: TaskID) -> None:
        task = self._tasks[task_id]
        if task.total is not None and task.completed > task.total:
            super().update(task_id, total=task.completed)


def progress(quiet: bool) -> Progress:
    """Progress bars on stderr that vanish at the end. They appear only on a terminal, and not if `quiet`."""
    return Bars(
        TextColumn("{task.description:<34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=quiet or not sys.stderr.isatty(),
    )


def reporting(bars: Progress, work: str) -> Callable[[str, int, int], None]:
    """Adds a bar for `work`; returns a callback `(what, done, total)` that updates it."""
    task = bars.add_task(work, total=None)
    return lambda what, done, total: bars.update(task, description=f"{work}: {what}", completed=done, total=total)


@options
class Printing(Options):
    """Options for what a command prints.

    Args:
        json: print the results as JSON and nothing else.
        quiet: print nothing but errors.
    """

    json: Annotated[bool, Flag] = False
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative="")] = False

    def progress(self) -> Progress:
        """Progress bars of the command."""
        return progress(self.quiet)

    def give(self, report: Report, files: Iterable[Path] = (), *, replaced: Collection[Path] = ()) -> None:
        """Prints the report, then the names of the files that were written and of those that were replaced."""
        if self.json:
            print(render.as_json(report))
        elif not self.quiet:
            # Piped output gets a fixed width, so that a file reads like the screen.
            console = Console(width=None if sys.stdout.isatty() else 100, highlight=False, markup=False)
            render.show(report, console)
            for did, names in (
                ("Wrote", [str(file) for file in files if file not in replaced]),
                ("Replaced", list(map(str, replaced))),
            ):
                if names:
                    console.print(readable(f"{did} {', '.join(names)}"))


@options
class Output(Printing):
    """Options for what a command prints and where its files go.

    Args:
        output: folder to write to, made if missing; by default `wlb-` and the name of the command.
    """

    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None

    def write(self, report: Report, command_line: str) -> None:
        """Writes the report's files, and prints the report."""
        folder = self.folder(report.command)
        before = {path.name for path in folder.iterdir()}
        files = render.write(report, folder, command_line)
        self.give(report, files, replaced=[file for file in files if file.name in before])

    def folder(self, command: str) -> Path:
        """The output folder, which is made if missing. Call it before long work, so that its errors come first.

        Raises:
            CliError: it is a file, or has files with the names of a report that are not from one.
        """
        folder = self.output or Path(f"wlb-{command}")
        if folder.exists() and not folder.is_dir():
            raise CliError(f"--output {folder}: is a file; {command} writes several, into a folder")
        folder.mkdir(parents=True, exist_ok=True)
        check_folder(folder)
        return folder
