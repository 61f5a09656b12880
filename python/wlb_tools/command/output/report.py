"""The contents of a command's report. `render` shows it on a terminal, as JSON and as an HTML page."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wlb_tools.command.output.columns import COLUMNS, Change, Column

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Paragraphs:
    """Paragraphs of text. Small ones explain the tables before them."""

    sentences: Sequence[str]
    small: bool = False


@dataclass(frozen=True)
class Heading:
    """A heading over the blocks that follow."""

    text: str


@dataclass(frozen=True)
class Code:
    """Text to copy, printed without wrapping."""

    title: str
    text: str


@dataclass(frozen=True)
class Interactive:
    """An interactive plotly picture, in the colours of the light scheme.

    Args:
        title: title over the picture.
        data: Plotly's traces.
        layout: Plotly's layout for a screen.
        narrow: entries that replace entries of the layout on a phone.
        hint: text that says what a reader can do with the picture.
    """

    title: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    narrow: Mapping[str, Any]
    hint: str


@dataclass(frozen=True)
class Picture:
    """A matplotlib figure on the page. A terminal does not show it.

    Args:
        draw: draws the figure: for a screen, or for a phone if its argument is True.
        label: description for screen readers.
        file: name of a PNG file to write as well; None: no file.
        interactively: makes an interactive version for browsers that run scripts. It returns None if there is too much
            to draw.
    """

    draw: Callable[[bool], Figure]
    label: str
    file: str | None = None
    interactively: Callable[[], Interactive | None] | None = None

    @cached_property
    def wide(self) -> Figure:
        """The figure for a screen, which the page and the PNG file show."""
        return self.draw(False)

    @cached_property
    def interactive(self) -> Interactive | None:
        """The interactive version, or None."""
        return None if self.interactively is None else self.interactively()


@dataclass(frozen=True)
class Table:
    """A table of text. The first column names the row; the others are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    groups: Sequence[tuple[str, int]] = ()  # headings over several columns: text, number of columns
    strong: Collection[int] = ()  # indices of rows in bold
    changes: Mapping[tuple[int, int], Change] = field(default_factory=dict)  # by row and column

    @classmethod
    def of(
        cls,
        title: str,
        names: str,
        keys: Iterable[str],
        rows: Iterable[tuple[str, Mapping[str, Any], bool]],
        columns: Mapping[str, Column] = COLUMNS,
        *,
        against_first: bool = False,
    ) -> Table:
        """Makes a table from rows of values by key. A cell whose value is None is empty.

        Args:
            title: title of the table.
            names: heading of the first column.
            keys: keys of the other columns.
            rows: for each row its name, its values, and whether it is bold.
            columns: columns by key.
            against_first: whether to mark cells of bold rows as better or worse than those of the first row.
        """
        rows, shown = list(rows), {key: columns[key] for key in keys}
        groups = itertools.groupby(column.group for column in shown.values())
        strong = {i for i, (_, _, strong) in enumerate(rows) if strong}
        changes: dict[tuple[int, int], Change] = {}
        for i in strong if against_first else ():
            for k, (key, column) in enumerate(shown.items(), 1):
                change = column.change(rows[0][1][key], rows[i][1][key])
                if change is not None:
                    changes[i, k] = change
        return cls(
            title=title,
            columns=(names, *(column.heading for column in shown.values())),
            rows=[(name, *(column.cell(values[key]) for key, column in shown.items())) for name, values, _ in rows],
            groups=(("", 1), *((group, len(list(members))) for group, members in groups)),
            strong=strong,
            changes=changes,
        )


@dataclass(frozen=True)
class Headline:
    """A large number on the page, with the number that it is compared with."""

    label: str
    before: str
    after: str
    between: str = "→"
    change: Change | None = None

    @classmethod
    def of(cls, label: str, before: float, after: float, column: Column) -> Headline:
        """Formats two numbers as `column` does, and marks whether the second is better or worse."""
        return cls(label, column.cell(before), column.cell(after), change=column.change(before, after))


Block = Paragraphs | Heading | Code | Picture | Table


@dataclass(frozen=True, kw_only=True)
class Report:
    """Contents of a command's report.

    Args:
        command: name of the command; the page is `<command>.html`.
        subject: a few words above the title of the page.
        title: the main result.
        sentences: sentences before the blocks: what was done.
        headlines: large numbers at the top of the page.
        blocks: blocks on the terminal and on the page, in order.
        details: blocks that follow on the page only.
        facts: tables of names and values at the end of the page. The machine's table is added.
        numbers: results as plain JSON values, for `--json` and `results.json`.
        files: further files by name: text, or a function that writes to a path.
    """

    command: str
    subject: str = ""
    title: str = ""
    sentences: Sequence[str] = ()
    headlines: Sequence[Headline] = ()
    blocks: Sequence[Block]
    details: Sequence[Block] = ()
    numbers: Mapping[str, Any]
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: Mapping[str, str | Callable[[Path], object]] = field(default_factory=dict)
