"""A report: what a command found, to be read on a terminal, as a page, as pictures and as numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

import wlb
from wlb.cli.output.machine import machine
from wlb.cli.output.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Paragraphs:
    """Sentences, a paragraph each; small ones explain the tables before them."""

    sentences: Sequence[str]
    small: bool = False


@dataclass(frozen=True)
class Heading:
    """A title over what follows on the page."""

    text: str


@dataclass(frozen=True)
class Code:
    """Text to copy, printed as it stands."""

    title: str
    text: str


@dataclass(frozen=True)
class Picture:
    """A figure of matplotlib; with a file name it is also written by itself, as a PNG."""

    figure: Figure
    file: str | None = None


@dataclass(frozen=True)
class Headline:
    """A number that stands out on the page, and what it is compared with."""

    label: str
    before: str
    after: str
    between: str = "→"


Block = Paragraphs | Heading | Code | Picture | Table


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a command has to show.

    Args:
        command: its name; the page is `<command>.html`.
        subject: what the page is about, in a few words above its title.
        title: the chief finding.
        sentences: what was done, in words, below the title of the page.
        headlines: the numbers that stand out on the page.
        page: what the page shows, in this order.
        terminal: what the terminal shows, in this order; it has no pictures and no headings.
        numbers: everything that is shown, as plain JSON values: `results.json`, and what `--json` prints.
        facts: tables of names and values at the end of the page; the machine comes last by itself.
        files: further files by name: text, or a function that writes to a path.
    """

    command: str
    subject: str
    title: str
    sentences: Sequence[str] = ()
    headlines: Sequence[Headline] = ()
    page: Sequence[Block]
    terminal: Sequence[Paragraphs | Table | Code]
    numbers: Mapping[str, Any]
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: Mapping[str, str | Callable[[Path], object]] = field(default_factory=dict)

    def print(self, console: Console) -> None:
        """Prints sentences, tables, notes and code."""
        for index, block in enumerate(self.terminal):
            if isinstance(block, Table):
                console.print(block.for_terminal())
            elif isinstance(block, Code):
                console.print(block.text, style="bold", soft_wrap=True)
            else:
                for sentence in block.sentences:
                    console.print(Text(sentence, style="dim") if block.small else sentence)
                if block.small and index + 1 < len(self.terminal):
                    console.print()

    def write(self, folder: Path, command_line: str) -> list[Path]:
        """Writes pictures, page, numbers and further files into a folder that exists; gives their paths."""
        from wlb.cli.output.figures.style import png

        contents: dict[str, bytes | str | Callable[[Path], object]] = {
            block.file: png(block.figure) for block in self.page if isinstance(block, Picture) and block.file
        }
        contents[f"{self.command}.html"] = self.as_html(command_line)
        contents["results.json"] = json.dumps(self.numbers, indent=2)
        contents.update(self.files)
        for name, content in contents.items():
            path = folder / name
            if callable(content):
                content(path)
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
        return [folder / name for name in contents]

    def as_html(self, command_line: str) -> str:
        """The page: one file that loads nothing; `command_line` is what made it."""
        import jinja2

        from wlb.cli.output.figures.style import svg

        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters.update(svg=svg, value=_value)
        for kind in (Paragraphs, Heading, Code, Picture, Table):
            environment.tests[kind.__name__.lower()] = _is(kind)
        facts = {**self.facts, "Machine": {"wlb": wlb.__version__, **machine()}}
        return environment.get_template("page.html.jinja").render(report=self, command_line=command_line, facts=facts)


def origin() -> dict[str, Any]:
    """The version and machine that numbers come from, as plain JSON values."""
    return {"wlb": wlb.__version__, "machine": machine()}


def _is(kind: type) -> Any:
    """The test `block is picture` of the template."""
    return lambda block: isinstance(block, kind)


def _value(value: Any) -> str:
    """A fact in a cell."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
