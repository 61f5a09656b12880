"""One page of what was measured last: what, when, on which machine, at which commit.

    python -m benches.results     # reads benches/records/, writes docs/results.md

`make compare`, `make bench` and `make proof` end with it. It measures nothing and copies no figure by hand: what they
found stands in their records, which are its only source.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from rich.table import Table

from benches.common import DOCS, RECORDS, Row, markdown, options
from benches.engine import speed_table


def comparison(record: Row) -> Iterator[str]:
    """Goals met and missed, by what they are about."""
    table = Table("goals about", "met", "missed", "no verdict")
    sections: dict[str, Counter[str]] = {}
    for line in record["lines"]:
        sections.setdefault(line["section"], Counter())[line["verdict"]] += 1
    for name, counts in sections.items():
        rest = counts.total() - counts["met"] - counts["missed"]
        table.add_row(name, str(counts["met"]), str(counts["missed"]), str(rest))
    yield from markdown(table)
    missed = Table("missed", "what")
    for line in record["lines"]:
        if line["verdict"] == "missed":
            missed.add_row(line["section"], line["what"])
    if missed.row_count:
        yield ""
        yield from markdown(missed)


def engine(record: Row) -> Iterator[str]:
    """Microseconds and ratios."""
    yield from markdown(speed_table(record["speed"]))


def refined(record: Row) -> Iterator[str]:
    """How long "refined" takes beside "var_length", and how near to the bound both are."""
    table = Table("method", "us, median", "x numpy.sort, median", "instances")
    times: dict[str, list[float]] = {}
    for row in record["rows"]:
        for name, found in row["us"].items():
            if found:
                times.setdefault(name, []).append(min(found))
    ratios = {
        name: [min(row["us"][name]) / min(row["us"]["sort"]) for row in record["rows"] if row["us"].get(name)]
        for name in times
    }
    for name, found in times.items():
        table.add_row(name, f"{np.median(found):.1f}", f"{np.median(ratios[name]):.1f}", str(len(found)))
    yield from markdown(table)


def proof(record: Row) -> Iterator[str]:
    """Gains by the clock over order of arrival, and what was predicted."""
    for layout in record["found"]:
        table = Table(f"{layout['layout']} ({layout['kind']})", "model FLOP/s over original", "interval", "predicted")
        for name, one in layout["gains"].items():
            interval = f"{one['low']:.3f} to {one['high']:.3f}"
            table.add_row(name, f"{one['ratio']:.3f}", interval, f"{one['predicted']:.3f}")
        errors = layout["errors"]
        yield from markdown(table)
        yield ""
        yield (
            f"The prediction errs by {errors['step_median']:.1%} of a step in the median, and by "
            f"{errors['ratio_median']:.1%} of the ratio between two methods, {errors['ratio_worst']:.1%} at most."
        )
        yield ""


SECTIONS: dict[str, tuple[str, str, str, Callable[[Row], Iterator[str]]]] = {
    "comparison": ("Beside peers", "make compare", "[all of it](comparison.md)", comparison),
    "engine": ("The engine", "make bench", "[what it means](measured.md)", engine),
    "refined": ('`method="refined"`', "make bench", "[what it means](measured.md)", refined),
    "proof": ("On a clock", "make proof", "[all of it](proof.md)", proof),
}
"""By record: title, command, where more stands, and the figures."""


def described(about: Row) -> str:
    """The machine, in a sentence."""
    system = f", {about['os']}" if "os" in about else ""
    return f"{about['cpu']}, {about['cores']} cores{system}, Python {about['python']}, numpy {about['numpy']}"


def page(records: Path) -> str:
    """docs/results.md."""
    overview = Table("what", "command", "when (UTC)", "commit", "machine", "more")
    sections: list[str] = []
    for name, (title, command, more, figures) in SECTIONS.items():
        path = records / f"{name}.json"
        if not path.exists():
            overview.add_row(title, f"`{command}`", "never", "", "", more)
            continue
        record = json.loads(path.read_text())
        about = record["machine"]
        when = about["time"].replace("T", " ").removesuffix("Z")[:16]
        overview.add_row(title, f"`{command}`", when, about["commit"] or "unknown", described(about), more)
        sections += ["", f"## {title}", "", *figures(record)]
    text = [
        "# Results",
        "",
        "`make compare`, `make bench` and `make proof` write this page, each with what it found last; do not edit. All",
        "figures are measured. They are of the machine, the day and the commit that stand beside them.",
        "",
        *markdown(overview),
        *sections,
    ]
    lines = "\n".join(text).split("\n")
    kept = [line.rstrip() for at, line in enumerate(lines) if line or (at + 1 < len(lines) and lines[at + 1])]
    return "\n".join(kept).rstrip() + "\n"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--records", type=Path, default=RECORDS, help="where the records are")
    parser.add_argument("--page", type=Path, default=DOCS / "results.md", help="where the page goes")
    arguments = parser.parse_args()
    arguments.page.write_text(page(arguments.records))


if __name__ == "__main__":
    main()
