"""``python -m studies.paper``: the papers' tables and figures beside ours.

Every row says how ours came about: *measured* on this machine, *simulated* for the paper's cluster, or *emulated*. What
the papers do not publish is stated, and swept: the band is the least and greatest over the sweep.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wlb
from studies.paper import RESULTS, Study
from studies.paper.figures import draw
from studies.paper.page import report
from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.documents import read_documents, wanted
from wlb_tools.command.output.console import Output

PROGRAM = "python -m studies.paper"
ALL = "all"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the study; `argv` are the words after the program, by default those of the process."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        reproduce(_parser().parse_args(words), shlex.join([*PROGRAM.split(), *words]))
    except (wlb.WlbError, CliError, OSError) as error:
        sys.exit(f"{PROGRAM}: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", nargs="?", choices=[*RESULTS, ALL], default=ALL)
    parser.add_argument("--lengths", type=Path, help="documents instead of generated ones: .npy, a directory, .jsonl")
    parser.add_argument("--field", default="text", help="field of a .jsonl with the text")
    parser.add_argument("--pattern", default="*", help="files of a directory")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; by default bytes are counted")
    parser.add_argument("--steps", type=_at_least_one, default=100, help="global batches")
    parser.add_argument("--kernel-profile", help="measured kernel that runs, from `wlb profile`; default: assumed")
    parser.add_argument(
        "--sweep",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="sweep the inputs that are not published; without, only their central values",
    )
    parser.add_argument("--workers", type=_at_least_one, default=os.cpu_count(), help="processes; default: all cores")
    parser.add_argument("--solver-seconds", type=float, default=10.0, help="of the exact solver, a window; 0: none")
    parser.add_argument("--solver-samples", type=_at_least_one, default=2, help="windows of each size that it solves")
    parser.add_argument("--output-dir", type=Path, default=Path("wlb-reproduce"))
    parser.add_argument("--json", action="store_true", help="print JSON, not tables")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    return parser


def _at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def reproduce(options: argparse.Namespace, command: str) -> None:
    """Makes the tables and figures, prints them and writes them."""
    output = Output(output=options.output_dir, json=options.json, quiet=options.quiet)
    output.folder("reproduce")  # before the long work, so that it fails early
    with output.progress() as bars:
        source = None
        if options.lengths is not None:
            source = read_documents(
                [str(options.lengths)],
                wanted=wanted(options.field, options.tokenizer),
                pattern=options.pattern,
                cache=None,
                progress=bars,
            )
        task = bars.add_task("", total=None)
        study = Study(
            steps=options.steps,
            source=None if source is None else source.lengths,
            sweep=options.sweep,
            workers=options.workers,
            solver_seconds=options.solver_seconds,
            solver_samples=options.solver_samples,
            profile=options.kernel_profile,
            progress=lambda title, done, total: bars.update(task, description=title, completed=done, total=total),
        )
        made = [make(study) for name, make in RESULTS.items() if options.what in (ALL, name)]
    settings: dict[str, Any] = {
        "documents": "generated, see the inputs" if source is None else f"{source.source} ({source.unit})",
        "global_batches": options.steps,
        "sweep": options.sweep,
        "kernel": options.kernel_profile or "assumed",
    }
    output.write(report(made, draw, settings), command)


if __name__ == "__main__":
    main()
