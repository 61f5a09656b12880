"""The pages of results: an index of what was measured when, and how fast plans are made.

    python -m benches.results     # reads benches/records/, writes docs/results/index.md and docs/results/engine.md

`make compare` and `make bench` end with it. It measures nothing: the records are its only source.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.table import Table

from benches.common import DOCS, RECORDS, Row, markdown, options
from benches.engine import speed_table


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


PAGES: dict[str, tuple[str, str, str]] = {
    "gains": ("gains.md", "What wlb gains, by how you train", "python -m benches.gains"),
    "compare": ("compare.md", "Packers that people use, beside wlb", "make compare"),
    "forests": ("forests.md", "Planners that share prefixes, beside wlb", "python -m benches.forests"),
    "rl": ("rl.md", "Rounds of reinforcement learning", "python -m benches.rl"),
    "scale": ("scale.md", "Thousands of ranks", "make scale"),
    "engine": ("engine.md", "How fast plans are made", "make bench"),
    "proof": ("proof.md", "Gains by the clock, beside the prediction", "make proof of commit 78a1bdd8"),
    "gpu": ("gpu.md", "One H200", "make gpu"),
    "papers": ("papers.md", "The papers' tables, beside ours", "make reproduce"),
    "loss_curves": ("loss_curves.md", "Does packing change what is learnt?", "make loss-curves of commit f21b21d7"),
    "models": ("families.md", "Families of models, beside transformers", "python -m benches.models"),
}
"""By record: its page, what it shows, and the command."""


def described(about: Row) -> str:
    """The machine, in a sentence."""
    system = f", {about['os']}" if "os" in about else ""
    return f"{about['cpu']}, {about['cores']} cores{system}, Python {about['python']}, numpy {about['numpy']}"


def index(records: Path) -> str:
    """docs/results/index.md."""
    table = Table("page", "command", "when (UTC)", "commit", "machine")
    for name, (page, title, command) in PAGES.items():
        path = records / f"{name}.json"
        about = json.loads(path.read_text()).get("machine", {}) if path.exists() else {}
        when = about.get("time", "").replace("T", " ").removesuffix("Z")[:16]
        machine = described(about) if about else "on the page"
        table.add_row(f"[{title}]({page})", f"`{command}`", when, about.get("commit") or "", machine)
    text = [
        "Written by `python -m benches.results` from the records; do not edit.",
        "",
        "# Results",
        "",
        "Each page is written by a command or from its record. Figures hold for the machine and the commit that the",
        "page or this table names.",
        "",
        *markdown(table),
    ]
    return "\n".join(text) + "\n"


def speed(records: Path) -> str:
    """docs/results/engine.md."""
    record = json.loads((records / "engine.json").read_text())
    row = next(row for row in record["speed"] if "8,700 documents, 64 micro-batches" in row["name"])
    us, sort, about = min(row["us"]), min(row["sort_us"]), record["machine"]
    text = [
        "Written by `make bench` from benches/records/engine.json and refined.json; do not edit.",
        "",
        "# How fast plans are made",
        "",
        f"A plan of 8,700 documents in 64 micro-batches takes {us:.0f} microseconds, {us / sort:.1f} times as long as",
        "`numpy.sort` of the same lengths. All times are of calls from Python, the least of many; read the ratios,",
        "because shared machines are noisy. *plain loop* is longest first with a heap, in Python.",
        "",
        f"Measured {about['time'][:10]} on {described(about)}, commit {about['commit']}.",
        "",
        *engine(record),
    ]
    path = records / "refined.json"
    if path.exists():
        text += [
            "",
            '## `method="refined"`',
            "",
            "The longest micro-batch where `max_tokens` binds; times in microseconds, medians of the instances.",
            "",
            *refined(json.loads(path.read_text())),
        ]
    return "\n".join(line.rstrip() for line in "\n".join(text).split("\n")) + "\n"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--records", type=Path, default=RECORDS, help="where the records are")
    parser.add_argument("--pages", type=Path, default=DOCS / "results", help="where the pages go")
    arguments = parser.parse_args()
    (arguments.pages / "index.md").write_text(index(arguments.records))
    (arguments.pages / "engine.md").write_text(speed(arguments.records))


if __name__ == "__main__":
    main()
