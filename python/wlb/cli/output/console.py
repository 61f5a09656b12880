"""The terminal: results on stdout, progress on stderr, a wrong input as one line."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class CliError(Exception):
    """What the user has to change, in one line."""


def counted(number: float, noun: str) -> str:
    """`1 queue`, `2 queues`, `2 batches`."""
    ending = "es" if noun.endswith("tch") else "s"
    return f"{number:,g} {noun}{'' if number == 1 else ending}"


def readable(name: str) -> str:
    """A name with what is not UTF-8 in it replaced: nothing can draw or print that."""
    return os.fsencode(name).decode("utf-8", "replace")


def written(files: Iterable[Path]) -> str:
    """The last line of a report."""
    return readable(f"Wrote {', '.join(map(str, files))}")


def results() -> Console:
    """Where tables go. Piped output gets a fixed width, so that a file reads like the screen."""
    return Console(width=None if sys.stdout.isatty() else 100, highlight=False, markup=False)


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
