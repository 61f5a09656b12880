"""A report: what a command found. A command makes one; `render` shows it on a terminal, as JSON and as a page."""

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
    """Sentences, a paragraph each; small ones explain the tables before them."""

    sentences: Sequence[str]
    small: bool = False


@dataclass(frozen=True)
class Heading:
    """A title over what follows."""

    text: str


@dataclass(frozen=True)
class Code:
    """Text to copy, printed as it stands."""

    title: str
    text: str


@dataclass(frozen=True)
class Interactive:
    """A picture to point at and to zoom into, as plotly takes it. Colours are those of the light scheme.

    Args:
        title: Over it.
        data: Plotly's traces.
        layout: Plotly's layout for a screen.
        narrow: Entries of the layout that are other ones on a phone.
        hint: What can be done with it.
    """

    title: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    narrow: Mapping[str, Any]
    hint: str


@dataclass(frozen=True)
class Picture:
    """A figure of matplotlib; with a file name it is also written by itself, as a PNG. A terminal shows none.

    Args:
        draw: Draws it for a screen, or with True for a phone.
        label: What it shows, for whom does not see it.
        file: Name of the PNG.
        interactively: Makes the same to point at, for browsers that run scripts; or None, of too many things.
    """

    draw: Callable[[bool], Figure]
    label: str
    file: str | None = None
    interactively: Callable[[], Interactive | None] | None = None

    @cached_property
    def wide(self) -> Figure:
        """The picture for a screen: on the page, and by itself."""
        return self.draw(False)

    @cached_property
    def interactive(self) -> Interactive | None:
        """The picture to point at, on the page."""
        return None if self.interactively is None else self.interactively()


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column names the row, the others are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    groups: Sequence[tuple[str, int]] = ()  # a heading over the columns, and how many it covers
    strong: Collection[int] = ()  # rows to make stand out
    changes: Mapping[tuple[int, int], Change] = field(default_factory=dict)  # by row and column of a cell

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
        """A table of numbers by keys; what is None stays empty.

        Args:
            title: of the table.
            names: heading of the first column.
            keys: of the others.
            rows: name and values of each, and whether it is to stand out.
            columns: what the keys mean.
            against_first: whether cells of the rows that stand out are better or worse than those of the first row.
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
    """A number that stands out on the page, and what it is compared with."""

    label: str
    before: str
    after: str
    between: str = "→"
    change: Change | None = None

    @classmethod
    def of(cls, label: str, before: float, after: float, column: Column) -> Headline:
        """Two numbers in the form of a column, which also says which of them is better."""
        return cls(label, column.cell(before), column.cell(after), change=column.change(before, after))


Block = Paragraphs | Heading | Code | Picture | Table


@dataclass(frozen=True, kw_only=True)
class Report:
    """Contents of a command's report.

    Args:
        command: its name; the page is `<command>.html`.
        subject: what the page is about, in a few words above its title.
        title: the chief finding.
        sentences: what was done, in words, before everything else.
        headlines: the numbers that stand out on the page.
        blocks: what a terminal and the page show, in this order.
        details: what only the page shows, after that.
        facts: tables of names and values at the end of the page; the machine comes last by itself.
        numbers: what else is shown, as plain JSON values.
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
