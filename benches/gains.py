"""README's table: the predicted time of a step with wlb, for people who train in different ways.

    python -m benches.gains --lengths a.npy b.npy c.npy    # writes the record, docs/results/gains.md and README's table

Every cell compares with what people run without wlb: documents concatenated, cut at the context, and trained in order
of arrival, for the same tokens. The plan is the best of those that wlb makes inside a trainer for such a run
(`wlb_tools.simulation.tune_loader`), which `wlb advise` recommends and pastes.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.table import Table

import wlb
import wlb_tools
from benches.common import DOCS, RECORDS, Lengths, Row, machine, markdown, options, read_lengths
from wlb_tools.command.inputs.stream import Trainer
from wlb_tools.command.output.trainers import ENTRIES
from wlb_tools.simulation import tune_loader

STEPS: Final = 12
"""Global batches of a cell."""

HIDDEN: Final = 0.5
"""Share of communication that computation hides; with less of it hidden, Dynamic-CP gains more."""

NOTHING: Final = 1.01
"""A predicted speed below this is called no gain."""

BEGIN, END = "<!-- written by python -m benches.gains -->", "<!-- end -->"


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        who: how README calls it.
        call: what to call.
        trainer: the trainer whose plans are tried.
        model: a preset.
        context: tokens of the longest document.
        layout: of the GPUs.
        micro_batches: contexts in a global batch.
    """

    who: str
    call: str
    trainer: Trainer
    model: str
    context: int
    layout: dict[str, Any]
    micro_batches: int

    def scenario(self) -> wlb_tools.Scenario:
        """This way to train on H100."""
        return wlb_tools.Scenario(
            model=wlb.ModelConfig.preset(self.model),
            hardware=wlb_tools.Hardware.preset("h100"),
            layout=wlb_tools.ParallelLayout(**self.layout),
            context=self.context,
            num_micro_batches=self.micro_batches,
            cp_overlap=HIDDEN,
            tp_overlap=HIDDEN,
            dp_overlap=HIDDEN,
        )

    @property
    def setting(self) -> str:
        """The run in a few words."""
        ranks = ", ".join(f"{axis.upper()} {size}" for axis, size in self.layout.items() if axis in ("tp", "cp", "pp"))
        gpus = wlb_tools.ParallelLayout(**self.layout).world_size
        tokens = self.micro_batches * self.context / 2**20
        return f"{gpus} GPUs{f', {ranks}' if ranks else ''}, {self.context // 1024}K, {tokens:g}M tokens a step"


CASES: Final = (
    Case(
        "FSDP, one micro-batch a rank",
        "`balance(trainer, ...)`",
        "huggingface",
        "llama3-8b",
        32768,
        {"dp": 32, "fsdp": "zero3", "recompute": "full"},
        32,
    ),
    Case(
        "FSDP, four micro-batches a rank",
        "`balance(trainer, ...)`",
        "huggingface",
        "llama3-8b",
        32768,
        {"dp": 32, "fsdp": "zero3", "recompute": "full"},
        128,
    ),
    Case(
        "tensor and data parallel",
        "`megatron.data_iterator(...)`",
        "megatron",
        "llama2-7b",
        131072,
        {"tp": 8, "dp": 8, "recompute": "full"},
        8,
    ),
    Case(
        "a pipeline",
        "`megatron.data_iterator(..., dynamic_cp=True)`",
        "megatron",
        "llama2-7b",
        131072,
        {"tp": 8, "cp": 2, "pp": 4},
        4,
    ),
    Case(
        "a pipeline, large batch",
        "`megatron.data_iterator(..., dynamic_cp=True)`",
        "megatron",
        "llama2-7b",
        131072,
        {"tp": 8, "cp": 2, "pp": 4},
        32,
    ),
    Case(
        "context parallel",
        "`megatron.data_iterator(..., dynamic_cp=True)`",
        "megatron",
        "llama2-7b",
        131072,
        {"tp": 8, "cp": 8},
        8,
    ),
)


def documents(lengths: Lengths, case: Case) -> Lengths:
    """A stream of global batches: documents in random order, cut to the context."""
    rng, tokens = np.random.default_rng(0), STEPS * case.micro_batches * case.context
    order = np.concatenate([rng.permutation(lengths) for _ in range(-(-tokens // int(lengths.sum())))])
    _, _, pieces = wlb.split_documents(order, max_document_tokens=case.context)
    return np.asarray(pieces[: int(np.searchsorted(pieces.cumsum(), tokens))], np.int64)


def measured(paths: list[Path]) -> Iterator[Row]:
    """A row for each case and corpus."""
    for case, path in itertools.product(CASES, paths):
        entry, stream = ENTRIES[case.trainer], documents(read_lengths(path), case)
        tuned = tune_loader(stream, case.scenario(), dynamic=entry.dynamic)
        best = tuned.best.summary(tuned.baseline)
        row = {"who": case.who, "setting": case.setting, "call": case.call, "corpus": path.stem}
        row |= {name: best[name] for name in ("kind", "speedup", "speedup_band", "max_tokens", "delay_mean")}
        before = tuned.baseline.summary()["micro_batch_imbalance_mean"]
        print(f"{case.who}, {path.stem}: {best['speedup']:.2f} ({best['kind']}), imbalance before {before:.2f}")
        yield row | {"imbalance_before": before, "imbalance_after": best["micro_batch_imbalance_mean"]}


def cell(row: Row) -> str:
    """A predicted speed; "none" where there is no gain."""
    return f"{row['speedup']:.2f}" if row["speedup"] >= NOTHING else "none"


def table(rows: list[Row]) -> Iterator[str]:
    """README's table in Markdown."""
    corpora = list(dict.fromkeys(row["corpus"] for row in rows))
    made = Table("you train with", *corpora, "in wlb")
    for case in CASES:
        found = {row["corpus"]: cell(row) for row in rows if row["who"] == case.who}
        made.add_row(f"{case.who} ({case.setting})", *(found[name] for name in corpora), case.call)
    yield from markdown(made)


def page(record: Row) -> str:
    """docs/results/gains.md."""
    rows = record["rows"]
    made = Table("you train with", "corpus", "speed", "range", "plan", "most tokens", "wait", "before", "after")
    for row in rows:
        low, high = row["speedup_band"]
        cells = f"{row['speedup']:.3f}", f"{low:.2f} to {high:.2f}", row["kind"], f"{row['max_tokens']:,}"
        waits = f"{row['delay_mean']:.2f}", f"{row['imbalance_before']:.2f}", f"{row['imbalance_after']:.2f}"
        made.add_row(f"{row['who']} ({row['setting']})", row["corpus"], *cells, *waits)
    gains = sum(row["speedup"] >= NOTHING for row in rows)
    return "\n".join(
        [
            "Written by `python -m benches.gains` from benches/records/gains.json; do not edit.",
            "",
            "# What wlb gains, by how you train",
            "",
            "Speed: predicted time of a step without wlb over that with it, for the same tokens on H100s, on the",
            f"layout that the row names, with {HIDDEN:.0%} of communication hidden. Without wlb, documents are",
            "concatenated, cut at the context and trained in order of arrival. With wlb they stay whole, so their",
            "tokens attend to more, and a speed below 1 can be a more even plan. Range: attention at 0.35 to 2.5 times",
            f"the assumed rate. {gains} of {len(rows)} cells gain at least 1 %. Before, after: time of the heaviest",
            "micro-batch over the mean. With a pipeline or several micro-batches a rank, a step is not as long as its",
            "heaviest micro-batch, so these two say less there. Wait: steps, in the mean of tokens.",
            "",
            *markdown(made),
            "",
            "Nothing here was measured on a GPU; see [how good predictions are](../simulation.md).",
            "",
        ]
    )


def write(record: Row) -> None:
    """Writes the page and README's table."""
    (DOCS / "results" / "gains.md").write_text(page(record))
    readme = DOCS.parent / "README.md"
    text = "\n".join([BEGIN, "", *table(record["rows"]), "", END])
    readme.write_text(re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: text, readme.read_text(), flags=re.S))


def main() -> None:
    """Predicts every cell and writes record, page and README."""
    parser = options(__doc__, lengths=True)
    given = parser.parse_args()
    if not given.lengths:
        write(json.loads((RECORDS / "gains.json").read_text()))
        return
    record = {"machine": machine(), "steps": STEPS, "rows": list(measured(given.lengths))}
    (RECORDS / "gains.json").write_text(json.dumps(record, indent=1))
    write(record)


if __name__ == "__main__":
    main()
