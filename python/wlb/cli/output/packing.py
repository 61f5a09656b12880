"""What a run has to show: on the terminal, as JSON, as a picture and as a page."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

import wlb
from wlb.cli.inputs.documents import Documents
from wlb.cli.inputs.stream import Stream
from wlb.cli.output.console import counted, written
from wlb.cli.output.context_parallel import CpBalance
from wlb.cli.output.machine import machine
from wlb.cli.output.tables import METHOD_NOTES, cp_table, method_table
from wlb.cli.packing import Plan, Setup

Settings = dict[str, str | int | float | None]


@dataclass(frozen=True)
class Report:
    """Plans of one stream, side by side; the first is the original."""

    name: str  # of the command, and of the files
    documents: Documents
    stream: Stream
    setup: Setup
    settings: Settings
    plans: tuple[Plan, ...]
    shown: Plan  # the one that the picture sets against the original
    balances: tuple[CpBalance, ...]  # of `shown`
    remark: str  # on the queues, in words

    def as_json(self) -> dict[str, Any]:
        """Everything the tables and the page say, as plain JSON values."""
        return {
            "command": self.name,
            "wlb": wlb.__version__,
            "machine": machine(),
            "settings": self.settings,
            "documents": self.describe_documents(),
            "methods": [plan.summary() for plan in self.plans],
            "context_parallel": {"method": self.shown.name, "balance": [b.summary() for b in self.balances]},
        }

    def describe_documents(self) -> dict[str, Any]:
        """The documents of the source and what the stream took of them; lengths in `unit`."""
        return describe_documents(self.documents, self.stream, self.setup.context)

    def sentences(self) -> list[str]:
        """What was packed, in words."""
        fate = str(self.settings["oversize"])
        described = document_sentences(self.describe_documents(), self.setup, oversize=fate)
        return [*described, self.remark]

    def print(self, console: Console, files: Sequence[Path]) -> None:
        """Sentences, tables with their notes, and the names of the `files` written."""
        for sentence in self.sentences():
            console.print(sentence)
        console.print(method_table(self.plans).for_terminal())
        for note in METHOD_NOTES:
            console.print(Text(note, style="dim"))
        console.print()
        console.print(cp_table(self.balances, self.shown).for_terminal())
        console.print(written(files))

    def write(self, folder: Path, argv: Sequence[str]) -> list[Path]:
        """Writes `<name>.png`, `<name>.html` and `results.json` into a folder that exists."""
        from wlb.cli.output.figures.packing import draw_report, png, svg
        from wlb.cli.output.page import page

        figure = draw_report(self)
        files = {
            folder / f"{self.name}.png": png(figure),
            folder / f"{self.name}.html": page(self, svg(figure), shlex.join(["wlb", *argv])).encode(),
            folder / "results.json": json.dumps(self.as_json(), indent=2).encode(),
        }
        for path, content in files.items():
            path.write_bytes(content)
        return list(files)


def describe_documents(documents: Documents, stream: Stream, context: int) -> dict[str, Any]:
    """The documents of a source and what the stream took of them; lengths in `unit`."""
    lengths = documents.lengths
    return {
        "source": documents.source,
        "unit": documents.unit,
        "distinct": lengths.size,
        "distinct_used": np.unique(stream.ids).size,
        "empty": documents.empty,
        "tokens": documents.tokens,
        "mean": float(lengths.mean()),
        "median": float(np.median(lengths)),
        "p99": float(np.quantile(lengths, 0.99)),
        "longest": int(lengths.max()),
        "longer_than_context": int((lengths > context).sum()),
        "epochs": stream.epochs,
        "global_batches": stream.batches,
        "streamed_tokens": int(stream.lengths.sum()),
        "streamed_documents": stream.lengths.size,
    }


def document_sentences(described: dict[str, Any], setup: Setup, *, oversize: str) -> list[str]:
    """What `describe_documents` found, in words."""
    d = described
    sentences = [
        f"{d['source']}: {d['distinct']:,} documents, {d['tokens']:,} {d['unit']}"
        f" (median {d['median']:,.0f}, p99 {d['p99']:,.0f}, longest {d['longest']:,})."
        f"{' A byte counts as a token.' if d['unit'] == 'bytes' else ''}",
        f"{d['global_batches']:,} global batches of up to {setup.tokens_per_batch:,} tokens"
        f" ({setup.num_micro_batches} micro-batches x {setup.context:,}), from"
        f" {d['distinct_used']:,} distinct documents in {counted(d['epochs'], 'epoch')}.",
    ]
    if d["longer_than_context"]:
        fate = {"split": "split", "truncate": "truncated"}[oversize]
        sentences.append(f"{d['longer_than_context']:,} documents longer than the context are {fate} to fit it.")
    return sentences
