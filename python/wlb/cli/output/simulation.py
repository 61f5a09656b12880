"""What a simulation has to show: on the terminal, as JSON, as pictures, as traces and as a page."""

from __future__ import annotations

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
from wlb.cli.inputs.cluster import assumptions, describe, kernel_sentence
from wlb.cli.inputs.documents import Documents
from wlb.cli.inputs.stream import Stream
from wlb.cli.output.console import written
from wlb.cli.output.explanation import explanation
from wlb.cli.output.machine import machine
from wlb.cli.output.packing import Settings, describe_documents, document_sentences
from wlb.cli.output.simulation_tables import NOTES, time_table, variant_table
from wlb.hardware import GIB
from wlb.schedule import write_chrome_trace
from wlb.simulation import Outcome

_TOO_DEEP = "Too many pipeline ranks for a picture; the trace shows them."


@dataclass(frozen=True)
class SimulationReport:
    """Variants of one stream, side by side; the first is the baseline."""

    documents: Documents
    stream: Stream
    simulation: wlb.Simulation
    settings: Settings
    shown: str  # the variant that pictures set against the baseline
    name: str = "simulate"  # of the command, and of the page
    remarks: tuple[str, ...] = ()  # what else there is to say

    @property
    def compared(self) -> tuple[Outcome, ...]:
        """The baseline, and the shown variant if it is another."""
        baseline, shown = self.simulation.baseline, self.simulation.outcomes[self.shown]
        return (baseline,) if shown is baseline else (baseline, shown)

    def as_json(self) -> dict[str, Any]:
        """Everything the tables and the page say, as plain JSON values."""
        scenario = self.simulation.scenario
        return {
            "command": self.name,
            "wlb": wlb.__version__,
            "machine": machine(),
            "settings": self.settings,
            "assumptions": assumptions(scenario),
            "documents": self._documents(),
            "gpus": scenario.layout.world_size,
            "explanation": explanation(self.simulation, self.shown),
            **self.simulation.as_json(),
        }

    def _documents(self) -> dict[str, Any]:
        return describe_documents(self.documents, self.stream, self.simulation.scenario.context)

    def sentences(self) -> list[str]:
        """What was simulated, in words."""
        scenario = self.simulation.scenario
        oversize = str(self.settings["oversize"])
        thresholds = " and ".join(f"{threshold:,}" for threshold in self.simulation.thresholds)
        bubble = scenario.equal_bubble
        return [
            f"{describe(scenario.model, scenario.layout, scenario.hardware.name, scenario.context)}.",
            kernel_sentence(scenario),
            f"With micro-batches of equal time this pipeline ({scenario.pipeline_schedule}, {scenario.micro_batches}"
            f" micro-batches a step) would still idle {bubble:.1%} of its time.",
            f"Assumed: computation hides {scenario.cp_overlap:.0%} of CP, {scenario.tp_overlap:.0%} of TP and"
            f" {scenario.dp_overlap:.0%} of DP communication. Gains rest on this and on the number of micro-batches,"
            " those of Dynamic-CP most: try --cp-overlap, --tp-overlap and --micro-batches, and other layouts.",
            *document_sentences(self._documents(), scenario.setup(), oversize=oversize),
            f"Micro-batches of variable length have at most {scenario.limit:,} tokens; "
            + (
                f"in queues wait documents from {thresholds} tokens on."
                if thresholds
                else "no document waits in a queue."
            ),
            *self.remarks,
            *self._too_large(),
            *explanation(self.simulation, self.shown),
        ]

    def _too_large(self) -> list[str]:
        """Methods that would run out of memory: possible only under a limit that was given."""
        hardware = self.simulation.scenario.hardware
        needs = {outcome.title: outcome.memory.total.max() for outcome in self.simulation.outcomes.values()}
        return [
            f"{title} does not fit: it needs {need / GIB:.1f} GiB,"
            f" {(need - hardware.memory_bytes) / GIB:.1f} GiB more than {hardware.name} has."
            for title, need in needs.items()
            if need > hardware.memory_bytes
        ]

    def print(self, console: Console, files: Sequence[Path]) -> None:
        """Sentences, tables with their notes, and the names of the `files` written."""
        for sentence in self.sentences():
            console.print(sentence)
        console.print(variant_table(self.simulation, self.shown).for_terminal())
        console.print(time_table(self.simulation, self.shown).for_terminal())
        for note in NOTES:
            console.print(Text(note, style="dim"))
        console.print(written(files))

    def write(
        self,
        folder: Path,
        argv: Sequence[str],
        *,
        first: Sequence[str] = (),
        results: dict[str, Any] | None = None,
    ) -> list[Path]:
        """Writes pictures, page, numbers, and traces of the two steps into a folder that exists.

        `first` is HTML that comes before the tables, `results` the numbers where they are more than these.
        """
        from wlb.cli.output.figures.packing import png, svg
        from wlb.cli.output.figures.simulation import draw_simulation, draw_step
        from wlb.cli.output.page import document, figure, notes, table

        scenario, shown = self.simulation.scenario, self.simulation.outcomes[self.shown]
        caption = f"{self.documents.source} · " + describe(
            scenario.model, scenario.layout, scenario.hardware.name, scenario.context
        )
        overview = draw_simulation(self.simulation, self.shown, f"{caption} · attention {scenario.attention.source}")
        contents: dict[Path, bytes] = {folder / "simulate.png": png(overview)}
        traces, pictures = [], []
        for kind, heading in (("typical", "Typical steps"), ("worst", "The most idle steps")):
            pictures.append(f"<h2>{heading}</h2>")
            for outcome in self.compared:
                step = _shown_steps(outcome)[kind]
                slug = f"{kind}-{'baseline' if outcome is self.simulation.baseline else self.shown}"
                drawn = draw_step(outcome, step, "a typical" if kind == "typical" else "its most idle")
                pictures.append(notes((_TOO_DEEP,)) if drawn is None else svg(drawn))
                traces.append(folder / f"step-{slug}.trace.json")
                pipelines = "DP rank" if outcome.pipelines == "DP" else outcome.pipelines
                write_chrome_trace(outcome.timelines(step), path=traces[-1], pipelines=pipelines)
        results = {**self.as_json(), **(results or {})}
        before = self.simulation.baseline
        step_seconds = [f"{o.seconds[: o.plan.streamed].mean():.3g}" for o in (before, shown)]
        contents[folder / f"{self.name}.html"] = document(
            name=self.name,
            subject=f"predicted · {caption}",
            title=f"{shown.title}: {self.simulation.speedup(self.shown):.2f}x the speed of {before.title} (predicted)",
            sentences=self.sentences(),
            figures=[
                figure(label, old, new, "→")
                for label, old, new in (
                    ("tokens/s", f"{before.tokens_per_second:,.0f}", f"{shown.tokens_per_second:,.0f}"),
                    ("seconds of a mean step", *step_seconds),
                    ("of the time idle", *(f"{_idle_share(o):.0%}" for o in (before, shown))),
                    ("imbalance of CP ranks", *(f"{o.cp_imbalance:.2f}" for o in (before, shown))),
                )
            ],
            body=[
                *first,
                svg(overview),
                table(variant_table(self.simulation, self.shown)),
                table(time_table(self.simulation, self.shown)),
                notes(NOTES),
                *pictures,
                notes((f"Traces to look into, at ui.perfetto.dev: {', '.join(path.name for path in traces)}.",)),
            ],
            command_line=shlex.join(["wlb", *argv]),
            facts={
                "Assumptions": assumptions(scenario),
                "Settings": self.settings,
                "Documents": results["documents"],
                "Machine": {"wlb": wlb.__version__, **results["machine"]},
            },
        ).encode()
        contents[folder / "results.json"] = json.dumps(results, indent=2).encode()
        for path, content in contents.items():
            path.write_bytes(content)
        return [*contents, *traces]


def _idle_share(outcome: Outcome) -> float:
    """Of the time of all steps."""
    return float(outcome.idle @ outcome.seconds) / outcome.total_seconds


def _shown_steps(outcome: Outcome) -> dict[str, int]:
    """Steps to look at, by how much of them is idle: the median and the most, before any flush."""
    ranked = np.argsort(outcome.idle[: outcome.plan.streamed], kind="stable")
    return {"typical": int(ranked[ranked.size // 2]), "worst": int(ranked[-1])}
