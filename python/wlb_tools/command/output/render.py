"""A report on a terminal, as JSON, and as a page."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

import wlb
from wlb_tools.command.output.report import Paragraphs, Picture, Report, Table

_WIDEST = 1000  # columns of a terminal


def show(report: Report, console: Console) -> None:
    """Prints the title and the headlines, then sentences, tables, notes and code."""
    if report.title:
        console.print(report.title, style="bold cyan")
        for headline in report.headlines:
            console.print(f"  {headline.label}: {headline.before} {headline.between} {headline.after}")
        console.print()
    blocks = [Paragraphs(report.sentences), *(block for block in report.blocks if not isinstance(block, Picture))]
    for index, block in enumerate(blocks):
        if isinstance(block, Paragraphs):
            for sentence in block.sentences:
                console.print(Text(sentence, style="dim") if block.small else sentence)
            if block.small and index + 1 < len(blocks):
                console.print()
        elif isinstance(block, Table):
            console.print(block.title, style="bold")
            _print_uncut(_for_terminal(block), console)
        else:
            console.print(block.text, style="bold", soft_wrap=True)


def _print_uncut(table: RichTable, console: Console) -> None:
    """Prints a table that runs over where it is wider than the console: half a number is none."""
    width = console.width
    console.width = max(width, Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum)
    try:
        console.print(table, crop=False)
    finally:
        console.width = width


def _for_terminal(table: Table) -> RichTable:
    """Rich has no cells that span columns: a group's heading stands over the first of its columns."""
    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)  # fits 80 columns
    headings = [f"{text}\n" for group, width in table.groups for text in [group, *[""] * (width - 1)]]
    for i, column in enumerate(table.columns):
        heading = f"{headings[i] if headings else ''}{column}"
        shown.add_column(heading, justify="left" if i == 0 else "right", no_wrap=True)
    for i, row in enumerate(table.rows):
        shown.add_row(*row, style="bold cyan" if i in table.strong else None)
    return shown


def as_json(report: Report) -> str:
    """The report as JSON: what `--json` prints and `results.json` holds."""
    origin = {"command": report.command, "wlb": wlb.__version__, "machine": machine()}
    facts = {title.lower(): values for title, values in report.facts.items()}
    return json.dumps({**origin, **facts, **report.numbers}, indent=2)


def write(report: Report, folder: Path, command_line: str) -> list[Path]:
    """Writes pictures, page, numbers and further files into a folder that exists; gives their paths."""
    from wlb_tools.command.output.figures.style import png

    contents: dict[str, bytes | str | Callable[[Path], object]] = {
        block.file: png(block.figure)
        for block in (*report.blocks, *report.details)
        if isinstance(block, Picture) and block.file
    }
    contents[f"{report.command}.html"] = page(report, command_line)
    contents["results.json"] = as_json(report)
    contents.update(report.files)
    for name, content in contents.items():
        path = folder / name
        if callable(content):
            content(path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    return [folder / name for name in contents]


def page(report: Report, command_line: str) -> str:
    """HTML that loads nothing; `command_line` is what made it."""
    import jinja2

    from wlb_tools.command.output.figures.style import svg

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(svg=svg, value=_value, kind=lambda block: type(block).__name__)
    return environment.get_template("page.html.jinja").render(
        report=report,
        blocks=[*report.blocks, *report.details],
        facts={**report.facts, "Machine": {"wlb": wlb.__version__, **machine()}},
        command_line=command_line,
    )


def _value(value: Any) -> str:
    """A fact in a cell."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def machine() -> dict[str, str | int | None]:
    """Processor, system and versions, as far as planning times depend on them."""
    info = Path("/proc/cpuinfo")  # elsewhere than on Linux, the platform module knows more
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or "unknown",
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "wlb_build": wlb.BUILD_PROFILE,
    }
