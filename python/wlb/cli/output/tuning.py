"""What tuning found: as tables, as JSON, as a picture, and as a configuration to paste."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

import wlb
from wlb.cli.inputs.cluster import assumptions, describe, kernel_sentence
from wlb.cli.inputs.documents import Documents
from wlb.cli.inputs.stream import Stream
from wlb.cli.output.console import counted, written
from wlb.cli.output.packing import describe_documents
from wlb.cli.output.simulation import SimulationReport
from wlb.cli.output.tables import Table, thresholds_choice, waiting_table
from wlb.hardware import GIB
from wlb.models import presets
from wlb.simulation import KINDS, Choice, Scenario, Tuning
from wlb.simulation.plans import MOST_TOKENS

_NOTES = (
    "x: predicted throughput over Plain-4D, on the same documents, as in a long stream. imbalance: predicted time of"
    " the heaviest micro-batch over the mean. delay: iterations that a token waits. GiB: the fullest GPU.",
    "n: micro-batches of a rank in a step, the mean. In brackets: thresholds of queues; the price of delay of adaptive"
    " release, and the packer's micro-batches. A plan beyond the limit of the delay shows what it would give.",
    "Chosen among plans that keep documents whole, one setting after the other, not in all combinations. Methods that"
    " cut documents where a context ends are in the simulation (tune.html, results.json) and may train more tokens a"
    " second.",
    "All choices were made on the documents that they are shown for; on a few global batches tuning overfits.",
)


@dataclass(frozen=True)
class WaitingReport:
    """What may wait, and nothing else: no cluster is known."""

    queued: wlb.TuneResult
    adaptive: wlb.TuneResult
    max_mean_delay: float

    def as_json(self) -> dict[str, Any]:
        """Best choice and Pareto front of the queues, and in `adaptive` of that release, as plain JSON values."""
        return {**_found(self.queued), "adaptive": _found(self.adaptive)}

    def write(self, folder: Path, argv: Sequence[str]) -> list[Path]:
        """Writes the picture."""
        from wlb.cli.output.figures.packing import draw_tuning, png

        picture = folder / "tune.png"
        picture.write_bytes(png(draw_tuning(self.queued, self.adaptive, self.max_mean_delay)))
        return [picture]

    def print(self, console: Console, files: Sequence[Path]) -> None:
        """The fronts, the choices, and the names of the `files` written."""
        console.print(waiting_table("Queues", self.queued).for_terminal())
        console.print(waiting_table("Adaptive release", self.adaptive).for_terminal())
        for choice, found in (
            (f"outlier_thresholds={self.queued.thresholds}", self.queued),
            (f'release="adaptive", delay_price={self.adaptive.delay_price:g}', self.adaptive),
        ):
            best = found.best
            gives = f"imbalance {best.imbalance_mean:.3f} at a mean delay of {best.delay_mean:.2f}"
            console.print(f"{choice}  # {gives}", style="bold", soft_wrap=True)
        console.print(written(files))


@dataclass(frozen=True)
class TuningReport:
    """Settings on a cluster."""

    documents: Documents
    stream: Stream
    tuning: Tuning
    model: str  # a preset's name or a path
    profile: str | None  # of the kernel
    simulation: SimulationReport  # with what was chosen

    def as_json(self) -> dict[str, Any]:
        """Everything the tables say, as plain JSON values; `best` and `pareto` as without a cluster, and `cluster`."""
        scenario, found = self.tuning.scenario, self.tuning.thresholds
        # Of the queues, as without a cluster; what was chosen is in "cluster".
        chosen = self.tuning.best.outlier_thresholds
        best = next((point for point in found.pareto if chosen and point.thresholds == chosen), found.best)
        return {
            **_found(found),
            "best": _point(best),
            "assumptions": assumptions(scenario),
            "documents": describe_documents(self.documents, self.stream, scenario.context),
            "cluster": self.tuning.as_json(),
            "configuration": self.configuration(),
            "simulation": self.simulation.simulation.as_json(),
        }

    def write(self, folder: Path, argv: Sequence[str]) -> list[Path]:
        """Writes the configuration, a picture of the choices, and a page, with a simulation of what was chosen."""
        from wlb.cli.output.figures.packing import png, svg
        from wlb.cli.output.figures.simulation import draw_choices
        from wlb.cli.output.page import notes, table

        picture, configuration = folder / "tune.png", folder / "configuration.py"
        drawn = draw_choices(self.tuning)
        picture.write_bytes(png(drawn))
        configuration.write_text(self.configuration(), encoding="utf-8")
        first = [
            f"<h2>The configuration</h2><pre>{escape(self.configuration())}</pre>",
            svg(drawn),
            *map(table, self.tables()),
            notes(_NOTES),
        ]
        page = self.simulation.write(folder, argv, first=first, results=self.as_json())
        return [configuration, picture, *page]

    def print(self, console: Console, files: Sequence[Path]) -> None:
        """Tables, the configuration, and the names of the `files` written."""
        scenario, tuning = self.tuning.scenario, self.tuning
        name = describe(scenario.model, scenario.layout, scenario.hardware.name, scenario.context)
        console.print(f"{name}; {counted(self.stream.batches, 'global batch')}.")
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
        console.print(self.configuration(), style="bold", soft_wrap=True)
        console.print(written(files))

    def tables(self) -> list[Table]:
        """One for each setting, the chosen row strong."""
        best, tuning = self.tuning.best, self.tuning
        limit = f"{tuning.scenario.max_mean_delay:g}"
        return [
            self._table(
                f"Plans; the mean delay may be {limit}",
                "plan",
                [(self._plan(choice), choice) for choice in tuning.by_plan],
                lambda choice: choice == best,
            ),
            self._table(
                "S_max: memory for balance, with queues",
                "S_max",
                [(f"{choice.max_tokens:,}", choice) for choice in tuning.by_memory],
                lambda choice: choice.max_tokens == tuning.by_delay[0].max_tokens,
            ),
            self._table(
                "Thresholds: waiting for balance, with queues",
                "thresholds",
                [(thresholds_choice(choice.outlier_thresholds), choice) for choice in tuning.by_delay],
                lambda choice: choice.outlier_thresholds == tuning.thresholds.thresholds,
            ),
            self._table(
                f"Sharding over context-parallel ranks, {KINDS[tuning.by_strategy[0].kind]}",
                "strategy",
                [(choice.strategy, choice) for choice in tuning.by_strategy],
                lambda choice: choice in tuning.by_plan,
            ),
        ]

    def _plan(self, choice: Choice) -> str:
        """A kind of plan, with its settings."""
        if choice.outlier_thresholds:
            return f"{KINDS[choice.kind]} ({thresholds_choice(choice.outlier_thresholds)})"
        if choice.delay_price is None:
            return KINDS[choice.kind]
        return f"{KINDS[choice.kind]} ({choice.delay_price:g}, {_micro_batches(self.tuning.scenario, choice)})"

    def _table(self, title: str, column: str, choices: list[tuple[str, Choice]], chosen: Any) -> Table:
        rows = []
        for name, choice in choices:
            s = choice.summary(self.tuning.baseline)
            rows.append(
                (
                    name,
                    f"{s['speedup']:.3f}",
                    f"{s['micro_batches_mean']:.3g}",
                    *(f"{s[key]:.3f}" for key in ("micro_batch_imbalance_mean", "cp_imbalance")),
                    f"{s['delay_mean']:.2f}",
                    f"{s['delay_max']:,}",
                    f"{s['largest_micro_batch']:,}",
                    f"{s['peak_bytes'] / GIB:.1f}",
                )
            )
        return Table(
            title=title,
            groups=(("", 1), ("speed", 1), ("step", 1), ("imbalance", 2), ("delay", 2), ("memory", 2)),
            columns=(column, "x", "n", "MB", "CP", "mean", "max", "tokens", "GiB"),
            rows=tuple(rows),
            strong=frozenset(i for i, (_, choice) in enumerate(choices) if chosen(choice)),
        )

    def configuration(self) -> str:
        """Python that makes the plans."""
        best = self.tuning.best
        if best.kind == "dynamic_cp":
            return _IMPORTS + self._planner() + _LOADER
        if best.kind == "wlb_dynamic_cp":
            return _IMPORTS + self._planner() + self._packer_before() + self._loader_behind()
        return self._static()

    def _static(self) -> str:
        """A packer, and a function that shards its plans."""
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
        cost = f"attention_efficiency={self.tuning.attention_efficiency:.3f}"
        if scenario.layout.recompute == "full":
            cost += ", recompute=True"
        return (
            "import wlb\n\n"
            f"model = wlb.ModelConfig.{model}\n"
            "packer = wlb.Packer(\n"
            f"    num_micro_batches={scenario.micro_batches * best.split},\n"
            f"    max_tokens={int(best.max_tokens)},\n"
            f"    cost_model=model.cost_model({cost}),\n"
            f"{_waiting(best)}"
            f"    max_delay={scenario.max_delay},\n"
            f"    max_document_tokens={scenario.context},\n"
            f")  # for BalancedBatchSampler: tokens_per_batch={scenario.tokens_per_batch}\n"
            f"{kernel}"
            f"\n\ndef shard(lengths):\n    return wlb.shard(lengths, cp_size={scenario.layout.cp}, {shard})\n"
        )

    def _planner(self) -> str:
        options = dict(self.tuning.planner or {})
        cost = options.pop("cost_model")
        attention, linear = float(cost.attention_cost([1])[0]), float(cost.linear_cost([1])[0])
        return (
            f"cost_model = wlb.CostModel(attention={attention!r}, linear={linear!r})  # seconds\n"
            "plan = functools.partial(\n    wlb.plan_dynamic_cp,\n    cost_model=cost_model,\n"
            + "".join(f"    {name}={_plain(value)!r},\n" for name, value in options.items())
            + ")\n"
        )

    def _packer_before(self) -> str:
        scenario, best = self.tuning.scenario, self.tuning.best
        max_tokens = min(scenario.tokens_per_batch, MOST_TOKENS)
        return (
            "packer = wlb.Packer(  # what it lets go is planned\n"
            f"    num_micro_batches={_micro_batches(scenario, best)},\n"
            f"    max_tokens={max_tokens},  # a global batch; memory is the planner's concern\n"
            "    cost_model=cost_model,\n"
            f"{_waiting(best)}"
            f"    max_delay={scenario.max_delay},\n"
            f"    max_document_tokens={scenario.context},\n"
            ")\n"
        )

    def _loader_behind(self) -> str:
        ranks = self.tuning.scenario.layout.size("dp_cp")
        if _micro_batches(self.tuning.scenario, self.tuning.best) % ranks:
            return _RELEASED
        return _LOADER_WITH_STATE.replace("TOKENS", str(self.tuning.scenario.tokens_per_batch))


_IMPORTS = "import functools\n\nimport wlb\n\n"

_LOADER = '''

def loader(batches, ranks):
    """Of every step: a list of the documents that this one of the data x context ranks reads."""
    from wlb.torch.data import DynamicCpLoader

    return DynamicCpLoader(batches, plan=plan, group=ranks.get_group())
'''

_LOADER_WITH_STATE = '''

def loader(dataset, ranks):
    """Shuffled epochs of a dataset; ranks: wlb.torch.data_and_context(mesh)."""
    from torch.utils.data import DataLoader
    from wlb.torch.data import BalancedBatchSampler, Documents, DynamicCpLoader, StepLoader

    sampler = BalancedBatchSampler(
        dataset.lengths, packer=packer, dp_rank=ranks.get_local_rank(), dp_size=ranks.size(), tokens_per_batch=TOKENS
    )
    documents = StepLoader(DataLoader(Documents(dataset), batch_sampler=sampler, collate_fn=list))
    return DynamicCpLoader(documents, plan=plan, group=ranks.get_group())
'''

_RELEASED = '''

def released(dataset, global_batches, rank, ranks):
    """What one of the data x context ranks reads; all of them are given the same global batches of indices."""

    def share(packing):
        indices = sorted(int(index) for micro_batch in packing for index in micro_batch.document_ids)
        return [dataset[index] for index in indices[rank::ranks]]

    for batch in global_batches:
        yield share(packer.push([dataset.lengths[index] for index in batch], batch))
    for packing in packer.flush():
        yield share(packing)


def loader(dataset, global_batches, ranks):
    """ranks: wlb.torch.data_and_context(mesh)."""
    from wlb.torch.data import DynamicCpLoader

    batches = released(dataset, global_batches, ranks.get_local_rank(), ranks.size())
    return DynamicCpLoader(batches, plan=plan, group=ranks.get_group())
'''


def _plain(value: Any) -> Any:
    """A number without numpy's type, whose name Python does not know."""
    return value.item() if isinstance(value, np.generic) else value


def _waiting(choice: Choice) -> str:
    """Arguments of a packer that say what waits."""
    if choice.delay_price is not None:
        return f'    release="adaptive",\n    delay_price={choice.delay_price!r},\n'
    return f"    outlier_thresholds={choice.outlier_thresholds},\n"


def _micro_batches(scenario: Scenario, choice: Choice) -> int:
    """Of the packer: in front of Dynamic-CP each is as wide as the pipeline stage."""
    return scenario.micro_batches * choice.split // (scenario.layout.dp if choice.dynamic else 1)


def _found(result: wlb.TuneResult) -> dict[str, Any]:
    """The best choice and the Pareto front, as plain JSON values."""
    return {
        "best": _point(result.best),
        "pareto": [_point(point) for point in result.pareto],
        "evaluated": result.evaluated,
    }


def _point(point: wlb.TunedPoint) -> dict[str, Any]:
    """One choice of thresholds, or of a price, and what it gives, as plain JSON values."""
    return {
        **({"thresholds": list(point.thresholds)} if point.delay_price is None else {"delay_price": point.delay_price}),
        "imbalance_mean": point.imbalance_mean,
        "imbalance_p95": point.imbalance_p95,
        "imbalance_worst": point.imbalance_worst,
        "delay_mean": point.delay_mean,
        "delay_max": point.delay_max,
        "memory_skew_mean": point.memory_skew_mean,
    }
