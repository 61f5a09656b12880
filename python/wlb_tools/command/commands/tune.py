"""`wlb tune`: finds settings for a user's documents; for a cluster also plans, and with --gpus the layout."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Annotated

from cyclopts.types import PositiveInt
from rich.progress import Progress

from wlb_tools.command.errors import CliError, option, setting
from wlb_tools.command.inputs.cluster import Cluster, described
from wlb_tools.command.inputs.options import BATCHES, CLUSTER, DOCUMENTS, OUTPUT, CommandLine, Settings, settings
from wlb_tools.command.inputs.packing import Batches, Delay, Held
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

_OF_A_CLUSTER = {"gpu", "gpu_count", "tp", "cp", "pp", "dp", "launch_file", "changes", "kernel_model"}
_OF_A_CLUSTER |= {"micro_batch_size", "global_batch"}
"""Options that ask for a cluster."""


def tune(
    sources: Source,
    /,
    *,
    reading: Annotated[Reading, DOCUMENTS] = Reading(),
    steps: Annotated[PositiveInt | None, BATCHES] = None,
    by: Objective = "tokens",
    cluster: Annotated[Cluster, CLUSTER] = Cluster(),
    output: Annotated[Output, OUTPUT] = Output(),
    command_line: CommandLine,
) -> None:
    """Finds settings within a limit of the mean delay: for the best balance, or on a cluster for speed.

    Without a cluster: the thresholds of the outlier queues, the price of delay of wlb, and for both
    the Pareto front of imbalance against delay. With an option of the panel "Cluster" other than --model, the
    plan: WLB-LLM, wlb, Dynamic-CP or both, `S_max`, the number of
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
    run = cluster.read() if cluster.given & _OF_A_CLUSTER else None
    for name in ("attention_efficiency", "cost_file"):
        if run is not None and name in cluster.given:
            raise CliError(f"--{option(name)}: tuning on a cluster fits the packer's costs to it; leave this out")
    scenario = run.scenario(chosen=True) if run else None
    batches = Batches(
        num_micro_batches=scenario.micro_batches if scenario else cluster.num_micro_batches or _MICRO_BATCHES,
        context=scenario.context if scenario else cluster.context,
        max_tokens=scenario.max_tokens if scenario else cluster.token_limit(),
    )
    delay = Delay(**{field.name: getattr(cluster, field.name) for field in fields(Delay)})
    setup = batches.setup(cluster, delay)
    with output.progress() as bars:
        stream = reading.stream(sources, setup, bars, steps=steps or _STEPS)
        output.folder("tune")
        if run is None or scenario is None:
            report = _waiting(stream, setup, delay, cluster.num_queues, bars, settings(batches, reading))
        else:
            tuning = tune_cluster(stream.lengths, scenario, by=by, progress=reporting(bars, "Tuning"))
            report = tuning_report(
                tuning,
                stream,
                settings=described(scenario)
                | settings(reading)
                | {
                    "steps": steps or _STEPS,
                    "by": by,
                    "sync": scenario.waiting,
                    "attention_efficiency": tuning.attention_efficiency,
                },
                model=run.model_name,
                profile=None if scenario.profile is None else str(scenario.profile),
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
    cluster: Cluster,
    output: Output,
    command_line: str,
) -> None:
    """Searches the layout of GPUs and reports it."""
    run = cluster.read()
    context, layout = run.context, run.layout
    tokens = (run.samples() or 0) * context
    batches = Batches(num_micro_batches=tokens // context, context=context, max_tokens=cluster.token_limit())
    steps = steps or min(max(_SEARCHED // tokens, 2), 8)
    with output.progress() as bars:
        stream = reading.stream(sources, batches.setup(cluster, Delay()), bars, steps=steps)
        output.folder("tune")
        search = search_layouts(
            stream.lengths,
            gpus=run.gpus or 0,
            tokens_per_batch=tokens,
            template=layout,
            own=layout if run.said & {f"layout.{name}" for name in SIZES} else None,
            by=by,
            progress=reporting(bars, "Layouts"),
            **run.search(),
        )
    scenario = search.best.outcome.scenario
    found = scenario.layout
    sizes = " ".join(
        setting(name, getattr(found, name))
        for name in SIZES
        if name in ("tp", "cp", "pp", "dp") or getattr(found, name) > 1
    )
    report = layouts_report(
        search,
        stream,
        settings=described(scenario) | settings(reading) | {"steps": steps, "by": by},
        continued=f"{_without(command_line)} {sizes} --micro-batches {tokens // context}",
    )
    output.write(report, command_line)


def _without(command_line: str) -> str:
    """The command without the options that a search answers, and their values."""
    kept: list[str] = []
    words = iter(shlex.split(command_line))
    for word in words:
        name, assigned, value = word.partition("=")
        if name not in ("--tp", "--cp", "--pp", "--dp", "--gpus", "--global-batch", "--steps", "--set"):
            kept.append(word)
            continue
        value = value if assigned else next(words, "")
        if name == "--set" and value.partition("=")[0].removeprefix("layout.") not in SIZES:
            kept += [name, value]
    return shlex.join(kept)
