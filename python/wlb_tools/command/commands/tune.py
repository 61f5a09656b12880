"""`wlb tune`: finds settings for a user's documents; for a cluster also plans, and with --gpus the layout."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import fields
from typing import Annotated

from cyclopts.types import PositiveInt
from rich.progress import Progress

import wlb_tools
from wlb_tools.command.errors import CliError, option
from wlb_tools.command.inputs.cluster import Cluster
from wlb_tools.command.inputs.model import Cost
from wlb_tools.command.inputs.options import BATCHES, CommandLine, NotAnOption, Settings, options, settings
from wlb_tools.command.inputs.packing import Batches, Delay, Held, Limits
from wlb_tools.command.inputs.stream import Reading, Source, Stream
from wlb_tools.command.output.console import Output, reporting
from wlb_tools.command.output.layouts import layouts_report
from wlb_tools.command.output.report import Report
from wlb_tools.command.output.tuning import tuning_report, waiting_report
from wlb_tools.command.packing import tune as tune_waiting
from wlb_tools.command.packing import wlb_plan
from wlb_tools.simulation import Objective, search_layouts
from wlb_tools.simulation import tune as tune_cluster
from wlb_tools.simulation.layouts import SIZES
from wlb_tools.simulation.methods import Setup

_MICRO_BATCHES = 16
_STEPS = 100
_SEARCHED = 1 << 26
"""Tokens on which layouts are compared, in 2 to 8 global batches; the time grows with them."""

_SEARCH = {option(name) for name in SIZES} | {"gpus", "global-batch", "steps"}
_WITHOUT_A_CLUSTER = {field.name for of in (Cost, Limits, Delay) for field in fields(of)} - {"gpu"}
_WITHOUT_A_CLUSTER |= {"num_micro_batches", "num_queues"}
"""Options that do not ask for a cluster; any other option of `TunedCluster` does."""


@options("Cluster")
class TunedCluster(Cluster):
    """A cluster whose thresholds are tuned. By default there is no cluster.

    Args:
        num_micro_batches: micro-batches of a global batch; by default 16, on a cluster pp x dp.
        global_batch: size of a global batch, instead of --micro-batches: tokens, such as 4M, or samples of --context
            tokens, such as 256samples. With --gpus the layout is searched; sizes that are given (--tp, --cp, --pp,
            --dp) name your own layout, to compare with.
    """

    outlier_thresholds: Annotated[tuple[int, ...] | None, NotAnOption] = None
    noise: Annotated[float, NotAnOption] = 0.0
    noise_seed: Annotated[int, NotAnOption] = 0

    @property
    def known(self) -> bool:
        """Whether an option asks for a cluster."""
        return not self.given <= _WITHOUT_A_CLUSTER


def tune(
    sources: Source,
    /,
    *,
    reading: Reading = Reading(),
    steps: Annotated[PositiveInt | None, BATCHES] = None,
    by: Objective = "tokens",
    cluster: TunedCluster = TunedCluster(),
    output: Output = Output(),
    command_line: CommandLine,
) -> None:
    """Finds settings within a limit of the mean delay: for the best balance, or on a cluster for speed.

    Without a cluster: the thresholds of the outlier queues, the price of delay of the adaptive release, and for both
    the Pareto front of imbalance against delay. With any option of the panel "Cluster" but --model and
    --attention-efficiency, the plan: queues, adaptive release, Dynamic-CP or both, `S_max`, the number of
    micro-batches, the sharding strategy and the costs. The report shows what each choice costs in delay and memory, and
    a configuration to paste. It also tries plans that cut documents at the end of a context. Speed is predicted, and
    the report names the sources. --max-mean-delay 0 trains every document in the step in which it arrives. With --gpus
    and --global-batch it searches the layout: tp, cp, pp, virtual stages and dp of these GPUs, each with micro-batches
    and a method that fit into memory, and compares with the best layout without wlb.

    Args:
        steps: global batches to form; by default 100, or for layouts as many as have 64M tokens together.
        by: on a cluster, the rate that the best plan maximizes: tokens a second, or FLOPs a second of the documents as
            they are trained, which are fewer if documents are cut.
    """
    if cluster.global_batch is not None and cluster.gpu_count is not None:
        _search(sources, reading, steps, by, cluster, output, command_line)
        return
    for name in ("attention_efficiency", "cost_file"):
        if cluster.known and name in cluster.given:
            raise CliError(f"--{option(name)}: tuning on a cluster fits the packer's costs to it; leave this out")
    scenario = cluster.scenario(chosen=True) if cluster.known else None
    batches = Batches(
        num_micro_batches=scenario.micro_batches if scenario else cluster.num_micro_batches or _MICRO_BATCHES,
        context=cluster.context,
        max_tokens=cluster.token_limit(),
    )
    delay = Delay(**{field.name: getattr(cluster, field.name) for field in fields(Delay)})
    setup = batches.setup(cluster, delay)
    with output.progress() as bars:
        stream = reading.stream(sources, setup, bars, steps=steps or _STEPS)
        output.folder("tune")
        if scenario is None:
            report = _waiting(stream, setup, delay, cluster.num_queues, bars, settings(batches, reading))
        else:
            tuning = tune_cluster(stream.lengths, scenario, by=by, progress=reporting(bars, "Tuning"))
            report = tuning_report(
                tuning,
                stream,
                settings=settings(cluster, reading)
                | {
                    "steps": steps or _STEPS,
                    "by": by,
                    "sync": scenario.waiting,
                    "dp": scenario.layout.dp,
                    "attention_efficiency": tuning.attention_efficiency,
                },
                model=cluster.model_name,
                profile=cluster.kernel_model,
            )
    output.write(report, command_line)


def _waiting(stream: Stream, setup: Setup, delay: Delay, queues: int, bars: Progress, about: Settings) -> Report:
    """Report of tuning without a cluster: which documents may wait."""
    limit = delay.max_mean_delay
    queued = tune_waiting(stream, setup, limit, bars, queues=queues)
    adaptive = tune_waiting(stream, setup, limit, bars, queues=None)
    choices = (
        Held(outlier_thresholds=queued.thresholds),
        Held(release="adaptive", delay_price=adaptive.delay_price),
    )
    plans = [wlb_plan(stream, setup, choice, bars, tuned_batches=stream.batches)[0] for choice in choices]
    about |= {"steps": stream.batches, "queues": queues} | settings(delay)
    return waiting_report(stream, setup, queued, adaptive, plans, max_mean_delay=limit, settings=about)


def _search(
    sources: Source,
    reading: Reading,
    steps: int | None,
    by: Objective,
    cluster: TunedCluster,
    output: Output,
    command_line: str,
) -> None:
    """Searches the layout of GPUs and reports it."""
    context = cluster.context
    tokens = (cluster.samples() or 0) * context
    batches = Batches(num_micro_batches=tokens // context, context=context, max_tokens=cluster.token_limit())
    steps = steps or min(max(_SEARCHED // tokens, 2), 8)
    layout = cluster.spread()
    with output.progress() as bars:
        stream = reading.stream(sources, batches.setup(cluster, Delay()), bars, steps=steps)
        output.folder("tune")
        search = search_layouts(
            stream.lengths,
            gpus=cluster.gpu_count or 0,
            tokens_per_batch=tokens,
            template=layout,
            own=layout if cluster.layout.given & set(SIZES) else None,
            by=by,
            progress=reporting(bars, "Layouts"),
            **cluster.search(),
        )
    found = search.best.outcome.scenario.layout
    sizes = " ".join(f"--{option(name)} {getattr(found, name)}" for name in SIZES if name != "ep" or found.ep > 1)
    report = layouts_report(
        search,
        stream,
        settings=settings(cluster, reading)
        | {option(name).replace("-", "_"): getattr(found, name) for name in _of_layout(found)}
        | {"steps": steps, "by": by, "micro_batches": tokens // context},
        continued=f"{_without(command_line, _SEARCH)} {sizes} --micro-batches {tokens // context}",
    )
    output.write(report, command_line)


def _of_layout(layout: wlb_tools.ParallelLayout) -> list[str]:
    """Its fields that are plain values, as settings list them."""
    return [each.name for each in fields(layout) if isinstance(getattr(layout, each.name), bool | int | float | str)]


def _without(command_line: str, names: Collection[str]) -> str:
    """The command without these options and their values."""
    kept: list[str] = []
    words = iter(shlex.split(command_line))
    for word in words:
        name, assigned, _ = word.partition("=")
        if name.removeprefix("--") not in names:
            kept.append(word)
        elif not assigned:
            next(words, None)
    return shlex.join(kept)
