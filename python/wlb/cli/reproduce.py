"""`wlb reproduce`: the papers' tables and figures beside ours."""

import json as jsonlib
import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

import wlb
from wlb.cli.inputs import cluster, options
from wlb.cli.inputs.documents import read_documents
from wlb.cli.output.console import CliError, progress, results, written
from wlb.cli.output.machine import machine

ALL = "all"
NAMES = ("table2", "fig12", "fig13", "fig14", "fig15", "dynamic_cp")
"""Of `wlb.reproduce.RESULTS`, which no other command has to wait for."""


def reproduce(
    context_: typer.Context,
    what: Annotated[str, typer.Argument(help=f"{', '.join(NAMES)}, or {ALL}.")] = ALL,
    lengths: Annotated[
        Path | None,
        typer.Option(
            help="Documents to use instead of generated lengths: a .npy of lengths, a directory, a .jsonl or .txt.",
            show_default=False,
            rich_help_panel="Documents",
        ),
    ] = None,
    field: options.Field = "text",
    pattern: options.Pattern = "*",
    tokenizer: options.TokenizerFile = None,
    steps: options.Steps = 100,
    kernel_profile: Annotated[
        str | None,
        typer.Option(
            help="Measured kernel that runs, from `wlb profile`: a name or a .json; by default an assumption.",
            show_default=False,
            rich_help_panel="Runs",
        ),
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep/--no-sweep",
            help="Sweep the inputs that are not published; without, only their central values.",
            rich_help_panel="Runs",
        ),
    ] = True,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes; by default as many as cores.", rich_help_panel="Runs")
    ] = os.cpu_count() or 1,
    solver_seconds: Annotated[
        float,
        typer.Option(min=0.0, help="Limit of the exact solver for one window; 0: no solver.", rich_help_panel="Runs"),
    ] = 10.0,
    solver_samples: Annotated[
        int, typer.Option(min=1, help="Windows of each size that it solves.", rich_help_panel="Runs")
    ] = 2,
    output_dir: options.OutputDir = Path("wlb-reproduce"),
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Prints the tables and figures of WLB-LLM and Dynamic-CP beside ours.

    Every row says how ours came about: *measured* on this machine, *simulated* for the paper's cluster, or *emulated*.
    What the papers do not publish is stated, and swept: the band is the least and greatest over the sweep.
    """
    if what not in (ALL, *NAMES):
        raise CliError(f"{what}: must be one of {', '.join(NAMES)}, {ALL}")
    from wlb.reproduce import RESULTS, Study

    output_dir.mkdir(parents=True, exist_ok=True)  # before the long work, so that it fails early
    with progress(quiet) as bars:
        source = None
        if lengths is not None:
            source = read_documents(lengths, field=field, pattern=pattern, tokenizer=tokenizer, progress=bars)
        task = bars.add_task("", total=None)
        study = Study(
            steps=steps,
            source=None if source is None else source.lengths,
            sweep=sweep,
            workers=workers,
            solver_seconds=solver_seconds,
            solver_samples=solver_samples,
            profile=cluster.profile(kernel_profile),
            progress=lambda title, done, total: bars.update(task, description=title, completed=done, total=total),
        )
        made = [make(study) for name, make in RESULTS.items() if what in (ALL, name)]

    from wlb.cli.output.figures.packing import png, svg
    from wlb.cli.reproduce_figures import draw
    from wlb.cli.reproduce_page import HOW, misses, page, tables

    documents = "generated, see the inputs" if source is None else f"{source.source} ({source.unit})"
    settings: dict[str, Any] = {
        "documents": documents,
        "global_batches": steps,
        "sweep": sweep,
        "kernel": kernel_profile or "assumed",
    }
    contents: dict[str, Any] = {
        "settings": settings,
        "machine": {"wlb": wlb.__version__, **machine()},
        "results": [result.as_json() for result in made],
    }
    drawn = {result.name: draw(result) for result in made}
    command = shlex.join(["wlb", *context_.obj])
    files = {f"{name}.png": png(figure) for name, figure in drawn.items()}
    pictures = {name: svg(figure) for name, figure in drawn.items()}
    files["reproduce.html"] = page(
        made, pictures, command_line=command, facts={"Settings": settings, "Machine": contents["machine"]}
    ).encode()
    files["results.json"] = jsonlib.dumps(contents, indent=2).encode()
    for name, content in files.items():
        (output_dir / name).write_bytes(content)
    if json:
        print(jsonlib.dumps(contents, indent=2))
    elif not quiet:
        console = results()
        for result in made:
            for table in tables(result):
                console.print(table.for_terminal())
            for note in result.notes:
                console.print(Text(note, style="dim"))
            console.print()
        for sentence in (*HOW, *misses(made)):
            console.print(Text(sentence, style="dim"))
        console.print(written(output_dir / name for name in files))
