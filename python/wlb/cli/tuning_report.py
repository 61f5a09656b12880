"""What tuning found: as tables, as JSON, as a picture, and as a configuration to paste."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

import wlb
from wlb.cli.cluster import assumptions, describe, kernel_sentence
from wlb.cli.console import counted
from wlb.cli.report import describe_documents
from wlb.cli.sources import Documents
from wlb.cli.stream import Stream
from wlb.cli.tables import Table, tuning_table
from wlb.hardware import GIB
from wlb.models import presets
from wlb.simulation import Choice, Tuning

_NOTES = (
    "x: predicted throughput over Plain-4D, on the same documents, as in a long stream. imbalance: predicted time of"
    " the heaviest micro-batch over the mean. delay: iterations that a token waits. GiB: the fullest GPU.",
    "All choices were made on the documents that they are shown for; on a few global batches tuning overfits.",
)


@dataclass(frozen=True)
class ThresholdReport:
    """Thresholds alone: no cluster is known."""

    result: wlb.TuneResult
    max_mean_delay: float

    def as_json(self) -> dict[str, Any]:
        """The best choice and the Pareto front, as plain JSON values."""
        return {
            "best": _point(self.result.best),
            "pareto": [_point(point) for point in self.result.pareto],
            "evaluated": self.result.evaluated,
        }

    def write(self, folder: Path) -> list[Path]:
        """Writes the picture."""
        from wlb.cli.figures import draw_tuning, png

        picture = folder / "tune.png"
        picture.write_bytes(png(draw_tuning(self.result, self.max_mean_delay)))
        return [picture]

    def print(self, console: Console, files: Sequence[Path]) -> None:
        """The front, the choice, and the names of the `files` written."""
        console.print(tuning_table(self.result.pareto, self.result.best).for_terminal())
        console.print(f"outlier_thresholds={self.result.thresholds}", style="bold")
        console.print(f"Wrote {', '.join(map(str, files))}")


@dataclass(frozen=True)
class TuningReport:
    """Settings on a cluster."""

    documents: Documents
    stream: Stream
    tuning: Tuning
    model: str  # a preset's name or a path
    profile: str | None  # of the kernel

    def as_json(self) -> dict[str, Any]:
        """Everything the tables say, as plain JSON values; `best` and `pareto` as without a cluster, and `cluster`."""
        scenario, found = self.tuning.scenario, self.tuning.thresholds
        best = next(point for point in found.pareto if point.thresholds == self.tuning.best.outlier_thresholds)
        return {
            "best": _point(best),
            "pareto": [_point(point) for point in found.pareto],
            "evaluated": found.evaluated,
            "assumptions": assumptions(scenario),
            "documents": describe_documents(self.documents, self.stream, scenario.context),
            "cluster": self.tuning.as_json(),
            "configuration": self.configuration(),
        }

    def write(self, folder: Path) -> list[Path]:
        """Writes the picture and the configuration."""
        from wlb.cli.figures import png
        from wlb.cli.simulation_figures import draw_choices

        picture, configuration = folder / "tune.png", folder / "configuration.py"
        picture.write_bytes(png(draw_choices(self.tuning)))
        configuration.write_text(self.configuration(), encoding="utf-8")
        return [picture, configuration]

    def print(self, console: Console, files: Sequence[Path]) -> None:
        """Tables, the configuration, and the names of the `files` written."""
        scenario, tuning = self.tuning.scenario, self.tuning
        name = describe(scenario.model, scenario.layout, scenario.hardware.name, scenario.context)
        console.print(f"{name}; {counted(self.stream.batches, 'global batch').replace('batchs', 'batches')}.")
        console.print(kernel_sentence(scenario))
        console.print(
            f"The packer's costs: FLOPs with attention_efficiency {tuning.attention_efficiency:.2f}, which fits this"
            " cluster, communication included."
        )
        for table in self.tables():
            console.print(table.for_terminal())
        for note in _NOTES:
            console.print(Text(note, style="dim"))
        console.print()
        console.print(self.configuration(), style="bold")
        console.print(f"Wrote {', '.join(map(str, files))}")

    def tables(self) -> list[Table]:
        """One for each setting, the chosen row strong."""
        best = self.tuning.best
        return [
            self._table(
                "S_max: memory for balance",
                "S_max",
                [(f"{choice.max_tokens:,}", choice) for choice in self.tuning.by_memory],
                lambda choice: choice.max_tokens == best.max_tokens,
            ),
            self._table(
                "Thresholds: waiting for balance",
                "thresholds",
                [(_thresholds(choice), choice) for choice in self.tuning.by_delay],
                lambda choice: choice.outlier_thresholds == best.outlier_thresholds,
            ),
            self._table(
                "Sharding over context-parallel ranks",
                "strategy",
                [(choice.strategy, choice) for choice in self.tuning.by_strategy],
                lambda choice: choice.strategy == best.strategy,
            ),
        ]

    def _table(self, title: str, column: str, choices: list[tuple[str, Choice]], chosen: Any) -> Table:
        rows = []
        for name, choice in choices:
            s = choice.summary(self.tuning.baseline)
            rows.append(
                (
                    name,
                    f"{s['speedup']:.3f}",
                    *(f"{s[key]:.3f}" for key in ("micro_batch_imbalance_mean", "cp_imbalance")),
                    f"{s['delay_mean']:.2f}",
                    f"{s['delay_max']:,}",
                    f"{s['largest_micro_batch']:,}",
                    f"{s['peak_bytes'] / GIB:.1f}",
                )
            )
        return Table(
            title=title,
            groups=(("", 1), ("speed", 1), ("imbalance", 2), ("delay", 2), ("memory", 2)),
            columns=(column, "x", "MB", "CP", "mean", "max", "tokens", "GiB"),
            rows=tuple(rows),
            strong=frozenset(i for i, (_, choice) in enumerate(choices) if chosen(choice)),
        )

    def configuration(self) -> str:
        """Python that makes the packer and shards its plans."""
        scenario, best = self.tuning.scenario, self.tuning.best
        preset = self.model in presets()
        model = f"preset({self.model!r})" if preset else f"from_hugging_face({self.model!r})"
        kernel = ""
        if best.strategy == "adaptive":
            heads = scenario.attention.num_heads
            kernel = (
                f"kernel = wlb.KernelModel.from_profile({self.profile!r}, num_heads={heads})\n"
                if self.profile is not None
                else f"kernel = wlb.KernelModel.analytic(\n    {scenario.attention.source.split(': ')[1]!r},"
                f" num_heads={heads}, num_kv_heads={scenario.attention.num_kv_heads},"
                f" head_dim={scenario.attention.head_dim}\n)\n"
            )
        shard = f'strategy="{best.strategy}"' + (", kernel_model=kernel" if kernel else "")
        return (
            "import wlb\n\n"
            f"model = wlb.ModelConfig.{model}\n"
            "packer = wlb.Packer(\n"
            f"    num_micro_batches={scenario.micro_batches},\n"
            f"    max_tokens={best.max_tokens},\n"
            f"    cost_model=model.cost_model(attention_efficiency={self.tuning.attention_efficiency:.3f}),\n"
            f"    outlier_thresholds={best.outlier_thresholds},\n"
            f"    max_delay={scenario.max_delay},\n"
            f"    max_document_tokens={scenario.context},\n"
            ")\n"
            f"{kernel}"
            f"\n\ndef shard(lengths):\n    return wlb.shard(lengths, cp_size={scenario.layout.cp}, {shard})\n"
        )


def _thresholds(choice: Choice) -> str:
    return " ".join(f"{threshold:,}" for threshold in choice.outlier_thresholds) or "none"


def _point(point: wlb.TunedPoint) -> dict[str, float | int | list[int]]:
    """One choice of thresholds and what it gives, as plain JSON values."""
    return {
        "thresholds": list(point.thresholds),
        "imbalance_mean": point.imbalance_mean,
        "imbalance_p95": point.imbalance_p95,
        "imbalance_worst": point.imbalance_worst,
        "delay_mean": point.delay_mean,
        "delay_max": point.delay_max,
        "memory_skew_mean": point.memory_skew_mean,
    }
