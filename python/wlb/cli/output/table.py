"""A table: made once, shown on the terminal and on the page."""

from dataclasses import dataclass

from rich import box
from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column names the row, the others are numbers."""

    title: str
    groups: tuple[tuple[str, int], ...]  # a heading over the columns, and how many it covers
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: frozenset[int] = frozenset()  # rows to make stand out

    def for_terminal(self) -> RichTable:
        """Rich has no cells that span columns: a group's heading stands over the first of its columns."""
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)  # fits 80 columns
        table.title, table.title_style, table.title_justify = self.title, "bold", "left"
        headings = [text for group, width in self.groups for text in [group, *[""] * (width - 1)]]
        for i, (heading, column) in enumerate(zip(headings, self.columns, strict=True)):
            table.add_column(f"{heading}\n{column}", justify="left" if i == 0 else "right", no_wrap=True)
        for i, row in enumerate(self.rows):
            table.add_row(*row, style="bold cyan" if i in self.strong else None)
        return table
