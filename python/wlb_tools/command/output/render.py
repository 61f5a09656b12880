"""Shows a report on a terminal, as JSON, and as an HTML page."""

from __future__ import annotations

import base64
import gzip
import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

import wlb
from wlb_tools.command.output.columns import Change
from wlb_tools.command.output.report import Interactive, Paragraphs, Picture, Report, Table

if TYPE_CHECKING:
    from markupsafe import Markup

_WIDEST = 1000  # most characters of a line
_CHANGES: dict[Change | None, str] = {"better": "cyan", "worse": "red"}


def show(report: Report, console: Console) -> None:
    """Prints the title and the headlines, then sentences, tables, notes and code."""
    if report.title:
        console.print(report.title, style="bold")
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
            for part in _parts(block, console):
                _print_uncut(part, console)
        else:
            console.print(block.text, style="bold", soft_wrap=True)


def _print_uncut(table: RichTable, console: Console) -> None:
    """Prints a table without cutting it, even if it is wider than the console: half a number would mislead."""
    width = console.width
    console.width = max(width, Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum)
    try:
        console.print(table, crop=False)
    finally:
        console.width = width


def _parts(table: Table, console: Console) -> Iterator[RichTable]:
    """The table in parts of whole columns, each as wide as the console; one part if the table fits."""
    groups = [group for group, width in table.groups for _ in range(width)] or [""] * len(table.columns)
    own = [max(map(len, [column, *(row[k] for row in table.rows)])) for k, column in enumerate(table.columns)]
    room = console.width - 2  # an edge at either side, and two spaces between columns

    def width(k: int, *, first_of_part: bool) -> int:
        """Characters of a column. The heading of a group counts for the first of its columns in a part."""
        return max(own[k], len(groups[k]) if first_of_part or groups[k] != groups[k - 1] else 0) + 2

    widest = max((width(k, first_of_part=True) for k in range(1, len(own))), default=0)
    named = min(own[0], max(room // 3, room - widest))
    parts: list[list[int]] = [[]]
    used = named
    for k in range(1, len(own)):
        if parts[-1] and used + width(k, first_of_part=False) > room:
            parts.append([])
            used = named
        used += width(k, first_of_part=not parts[-1])
        parts[-1].append(k)
    for part in parts:
        yield _for_terminal(table, [0, *part], groups, named)


def _for_terminal(table: Table, columns: Sequence[int], groups: Sequence[str], first: int) -> RichTable:
    """Some columns as a Rich table. Rich has no spanning cells, so a group's heading is over its first column."""
    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    above = ""
    for k in columns:
        group = groups[k]
        heading = f"{'' if group == above else group}\n{table.columns[k]}" if table.groups else table.columns[k]
        above = group
        if k == 0:
            shown.add_column(heading, justify="left", width=first)
        else:
            shown.add_column(heading, justify="right", no_wrap=True)
    for i, row in enumerate(table.rows):
        cells = [Text(row[k], style=_CHANGES.get(table.changes.get((i, k)), "")) for k in columns]
        shown.add_row(*cells, style="bold" if i in table.strong else None)
    return shown


def as_json(report: Report) -> str:
    """The report as JSON: what `--json` prints and `results.json` holds."""
    origin = {"command": report.command, "wlb": wlb.__version__, "machine": machine()}
    facts = {title.lower(): values for title, values in report.facts.items()}
    return json.dumps({**origin, **facts, **report.numbers}, indent=2)


def write(report: Report, folder: Path, command_line: str) -> list[Path]:
    """Writes pictures, page, numbers and further files into an existing folder; returns their paths."""
    from wlb_tools.command.output.figures.style import png

    contents: dict[str, bytes | str | Callable[[Path], object]] = {
        block.file: png(block.wide)
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
    """A self-contained HTML page. `command_line` is shown as the command that made it."""
    import jinja2

    from wlb_tools.command.output.figures.style import themes

    blocks = [*report.blocks, *report.details]
    interactive = any(isinstance(block, Picture) and block.interactive for block in blocks)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        svg=_svg, figure=_figure, value=_value, painted=_painted, kind=lambda block: type(block).__name__
    )
    return environment.get_template("page.html.jinja").render(
        report=report,
        blocks=blocks,
        facts={**report.facts, "Machine": {"wlb": wlb.__version__, **machine()}},
        command_line=command_line,
        themes=themes(),
        plotly=_plotly() if interactive else None,
    )


def _svg(picture: Picture, name: str, narrow: bool) -> str:
    """A picture as SVG, for a screen or (`narrow`) for a phone."""
    from wlb_tools.command.output.figures import style

    figure = picture.draw(True) if narrow else picture.wide
    return style.svg(figure, f"{name}{'n' if narrow else 'w'}", picture.label)


def _figure(interactive: Interactive) -> str:
    """An interactive picture as compressed JSON."""
    return _packed(json.dumps({name: getattr(interactive, name) for name in ("data", "layout", "narrow")}))


def _plotly() -> str:
    """Plotly's script, compressed, so that a page needs no network."""
    from plotly.offline import get_plotlyjs

    return _packed(get_plotlyjs())


def _packed(text: str) -> str:
    """Text, compressed with gzip and encoded in base64; `page.js` unpacks it."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _painted(cell: str, table: Table, row: int, column: int) -> Markup:
    """The class attribute of a cell: better or worse than the cell it is compared with, or none."""
    from markupsafe import Markup

    change = table.changes.get((row, column))
    return Markup("" if change is None else f' class="{change}"')


def _value(value: Any) -> str:
    """A value of `Report.facts` as text."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, int | float):
        return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}"
    return str(value) or "none"


def machine() -> dict[str, str | int | None]:
    """Processor, system and versions, on which planning times depend."""
    info = Path("/proc/cpuinfo")  # only Linux has it; elsewhere the platform module names the processor
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
