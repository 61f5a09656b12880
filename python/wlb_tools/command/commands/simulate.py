"""`wlb simulate`: predicts every method for a user's documents, model and cluster."""

from __future__ import annotations

from typing import Annotated

from cyclopts.types import PositiveInt

import wlb_tools
from wlb_tools.command.errors import in_options
from wlb_tools.command.inputs.cluster import Cluster, described
from wlb_tools.command.inputs.options import BATCHES, CLUSTER, DOCUMENTS, OUTPUT, PANELS, CommandLine, commas, settings
from wlb_tools.command.inputs.stream import Reading, Source
from wlb_tools.command.output.console import Output, reporting
from wlb_tools.command.output.simulation import simulation_report
from wlb_tools.command.words import listed
from wlb_tools.simulation import DEFAULT, VARIANTS, defaults
from wlb_tools.simulation.variants import chosen, obstacles

_HELP = (
    f"Methods with commas between, the baseline first: {', '.join(VARIANTS)}; by default all but"
    f" {', '.join(name for name in VARIANTS if name not in DEFAULT)}."
)
Variants = Annotated[tuple[str, ...] | None, commas(str.strip, "names", group=PANELS["methods"], help=_HELP)]


def simulate(
    sources: Source,
    /,
    *,
    reading: Annotated[Reading, DOCUMENTS] = Reading(),
    steps: Annotated[PositiveInt, BATCHES] = 500,
    cluster: Annotated[Cluster, CLUSTER] = Cluster(),
    variants: Variants = None,
    output: Annotated[Output, OUTPUT] = Output(),
    command_line: CommandLine,
) -> None:
    """Predicts speed, balance, delay and memory on a cluster: original order, WLB-LLM, wlb, Dynamic-CP, their parts.

    No GPU is needed. By default the cluster is that of the paper for a 7B model with 128K tokens of context. The report
    names the source of every prediction; docs/simulation.md lists the assumptions.

    Args:
        steps: global batches to form.
    """
    run = cluster.read()
    scenario = run.scenario()
    names = tuple(chosen(defaults(scenario) if variants is None else variants))  # checks names before the long work
    with output.progress() as bars:
        stream = reading.stream(sources, scenario.setup(), bars, steps=steps, longest=run.context)
        output.folder("simulate")
        simulation = wlb_tools.simulate(
            stream.lengths, scenario, variants=names, progress=reporting(bars, "Simulating")
        )
        report = simulation_report(
            simulation,
            stream,
            shown=max(names[1:] or names, key=simulation.speedup),
            settings=described(scenario)
            | settings(reading)
            | ({} if cluster.cost_file is None else {"cost_model": str(cluster.cost_file)})
            | {
                "schedule": scenario.pipeline_schedule,
                "sync": scenario.waiting,
                "num_micro_batches": scenario.micro_batches,
                "max_tokens": scenario.limit,
                "outlier_thresholds": listed(simulation.thresholds, ", ") or None,
            },
            remarks=() if variants else not_compared(scenario),
        )
    output.write(report, command_line)


def not_compared(scenario: wlb_tools.Scenario) -> tuple[str, ...]:
    """Sentences about methods that are not compared by default, and the reason."""
    titles: dict[str, list[str]] = {}
    for name, reason in obstacles(scenario).items():
        titles.setdefault(in_options(reason), []).append(VARIANTS[name].title)
    return tuple(f"Not compared: {' and '.join(names)}, since {reason}." for reason, names in titles.items())
