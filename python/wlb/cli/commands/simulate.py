"""`wlb simulate`: what each method would give, on a user's documents, model and cluster."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import PositiveInt

import wlb
from wlb.cli.errors import CliError, in_options
from wlb.cli.inputs.cluster import Cluster
from wlb.cli.inputs.options import BATCHES, PANELS, CommandLine, settings
from wlb.cli.inputs.stream import Reading, Source
from wlb.cli.output.console import Output
from wlb.cli.output.simulation import simulation_report
from wlb.cli.words import listed
from wlb.cluster.hardware import GIB
from wlb.simulation import DEFAULT, VARIANTS, defaults
from wlb.simulation.variants import obstacles

_HELP = (
    f"Methods with commas between, the baseline first: {', '.join(VARIANTS)}; by default all but"
    f" {', '.join(name for name in VARIANTS if name not in DEFAULT)}."
)


def simulate(
    source: Source,
    /,
    *,
    reading: Reading = Reading(),
    steps: Annotated[PositiveInt, BATCHES] = 500,
    cluster: Cluster = Cluster(),
    variants: Annotated[str | None, Parameter(group=PANELS["methods"], help=_HELP)] = None,
    output: Output = Output(),
    command_line: CommandLine,
) -> None:
    """Predicts speed, balance, delay and memory on a cluster: Plain-4D, Fixed-4D, WLB, Dynamic-CP, and their parts.

    No GPU is needed. By default the cluster is the paper's for a 7B model with 128K tokens of context. Every
    prediction says what it rests on; docs/simulation.md has the assumptions.

    Args:
        steps: global batches to form.
    """
    given = None if variants is None else _names(variants)
    scenario = cluster.scenario()
    names = given or defaults(scenario)
    with output.progress() as bars:
        stream = reading.stream(source, scenario.setup(), bars, steps=steps)
        output.folder("simulate")
        task = bars.add_task("Simulating", total=len(names))
        simulation = wlb.simulate(
            stream.lengths,
            scenario,
            variants=names,
            progress=lambda title, done, total: bars.update(task, description=f"Simulating: {title}", completed=done),
        )
        report = simulation_report(
            simulation,
            stream,
            shown=max(names[1:] or names, key=simulation.speedup),
            settings=settings(cluster, reading)
            | {"attention_efficiency": cluster.shown_efficiency()}
            | {
                "model": scenario.model.name,
                "schedule": scenario.pipeline_schedule,
                "sync": scenario.waiting,
                "dp": scenario.layout.dp,
                "micro_batches": scenario.micro_batches,
                "max_tokens": scenario.limit,
                "kernel_model": scenario.attention.source,
                "outlier_thresholds": listed(simulation.thresholds, ", ") or None,
                "reserved_gib": scenario.reserved_bytes / GIB,
            },
            remarks=() if given else not_compared(scenario),
        )
    output.write(report, command_line)


def _names(variants: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in variants.split(","))
    for index, name in enumerate(names):
        if name not in VARIANTS:
            raise CliError(f"--variants {name}: must be one of {', '.join(VARIANTS)}")
        if name in names[:index]:
            raise CliError(f"--variants {name}: given twice")
    return names


def not_compared(scenario: wlb.Scenario) -> tuple[str, ...]:
    """What is not compared by default, and why."""
    titles: dict[str, list[str]] = {}
    for name, reason in obstacles(scenario).items():
        titles.setdefault(in_options(reason), []).append(VARIANTS[name].title)
    return tuple(f"Not compared: {' and '.join(names)}, since {reason}." for reason, names in titles.items())
