"""The report of a simulation: speed, balance, delay and memory of every method, and steps to look into."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import wlb
from wlb.cli.inputs.stream import Stream
from wlb.cli.output.documents import describe_documents, document_sentences
from wlb.cli.output.explanation import explanation
from wlb.cli.output.graded import LOST, LOST_NOTE, RATES, ends
from wlb.cli.output.report import Block, Column, Heading, Headline, Paragraphs, Picture, Report, Table
from wlb.cli.words import listed
from wlb.cluster.hardware import GIB
from wlb.simulation import Outcome, Scenario
from wlb.simulation.trace import write_chrome_trace

_NOTES = (
    "All times are predictions; the kernel model that they rest on is named above. per-document CP, adaptive CP,"
    " packing, placement: that optimisation alone, on Plain-4D.",
    "tokens/s: all tokens of the stream over the time of all its steps, of all GPUs, on the same documents;"
    " the steps at the end that empty the queues count in full. MFU: FLOPs of the documents as they are trained over"
    " what the GPUs could do in that time. Methods that cut documents do less attention for the same tokens.",
    "step: seconds of one, and micro-batches of a rank in it, both in the mean. WLB, finer: twice the micro-batches of"
    " the same documents, each half as long. fitted, and all below: costs are fitted to the cluster.",
    "imbalance: MB: predicted time of the heaviest micro-batch over the mean of its step, mean over steps; CP:"
    " attention of the slowest context-parallel rank over the mean rank. Dynamic-CP makes the first and last"
    " micro-batch light, which shortens the pipeline's bubble.",
    "delay: iterations from the reading of a token to its training. GiB: the fullest GPU, in its fullest step.",
    LOST_NOTE,
)

_MEETINGS = {"step": "once a step", "micro_batch": "in every micro-batch"}
_TOO_DEEP = "Too many pipeline ranks for a picture; the trace shows them."

_COLUMNS = (
    Column("speed", "tokens/s", "tokens_per_second", ",.0f"),
    Column("speed", "x", "speedup", ".3f"),
    Column("speed", "MFU", "model_flops_utilization", ".1%"),
    Column("step", "s", "step_seconds_mean", ".3g"),
    Column("step", "n", "micro_batches_mean", ".3g"),
    Column("imbalance", "MB", "micro_batch_imbalance_mean", ".3f"),
    Column("imbalance", "CP", "cp_imbalance", ".3f"),
    Column("delay", "mean", "delay_mean", ".2f"),
    Column("delay", "max", "delay_max"),
    Column("GPU", "GiB", "peak_gib", ".1f"),
)
_GRADED = (
    Column("speed", "x", "speedup", ".3f"),
    Column("speed", "band", "speedup_ends", "s"),
    Column("imbalance", "MB", "micro_batch_imbalance_mean", ".3f"),
    Column("imbalance", "band", "micro_batch_imbalance_ends", "s"),
    *LOST,
)
_PARTS = (
    Column("", "compute", "compute", ".1%"),
    Column("communication", "CP", "cp_communication", ".1%"),
    Column("communication", "TP", "tp_communication", ".1%"),
    Column("communication", "EP", "ep_communication", ".1%"),
    Column("communication", "DP", "dp_communication", ".1%"),
    Column("waiting", "slowest CP", "cp_wait", ".1%"),
    Column("waiting", "slowest EP", "ep_wait", ".1%"),
    Column("waiting", "bubble", "bubble", ".1%"),
    Column("waiting", "slowest DP", "dp_wait", ".1%"),
)


def simulation_report(
    simulation: wlb.Simulation,
    stream: Stream,
    *,
    shown: str,
    settings: Mapping[str, Any],
    remarks: Sequence[str] = (),
) -> Report:
    """Every method; on the page also a typical and the most idle step of two of them.

    Args:
        simulation: of the stream; its first method is the baseline.
        stream: what was simulated.
        shown: the method that pictures set against the baseline.
        settings: of the command.
        remarks: what else there is to say.
    """
    from wlb.cli.output.figures.simulation import draw_simulation

    scenario, before, after = simulation.scenario, simulation.baseline, simulation.outcomes[shown]
    caption = f"{stream.documents.source} · {describe(scenario)}"
    overview = draw_simulation(simulation, shown, f"{caption} · attention {scenario.attention.source}")
    documents = describe_documents(stream, scenario.context)
    basis = assumptions(scenario)
    details, traces = _steps({"baseline": before, shown: after} if after is not before else {"baseline": before})
    headlines = {
        "tokens/s": [f"{outcome.tokens_per_second:,.0f}" for outcome in (before, after)],
        "seconds of a mean step": [f"{o.seconds[: o.run.streamed].mean():.3g}" for o in (before, after)],
        "of the time idle": [f"{o.idle @ o.seconds / o.total_seconds:.0%}" for o in (before, after)],
        "imbalance of CP ranks": [f"{outcome.cp_imbalance:.2f}" for outcome in (before, after)],
    }
    return Report(
        command="simulate",
        subject=f"predicted · {caption}",
        title=f"{after.title}: {simulation.speedup(shown):.2f}x the speed of {before.title} (predicted)",
        sentences=[
            f"{describe(scenario)}.",
            *_sentences(simulation),
            *document_sentences(documents, scenario.setup(), oversize=settings["oversize"]),
            *remarks,
            *_too_large(simulation),
            *explanation(simulation, shown),
        ],
        headlines=[Headline(label, *values) for label, values in headlines.items()],
        blocks=(Picture(overview, "simulate.png"), *_tables(simulation, shown), Paragraphs(_NOTES, small=True)),
        details=details,
        numbers={
            "settings": settings,
            "assumptions": basis,
            "documents": documents,
            "gpus": scenario.layout.world_size,
            "explanation": explanation(simulation, shown),
            **simulation.as_json(),
        },
        facts={"Assumptions": basis, "Settings": settings, "Documents": documents},
        files=traces,
    )


def _tables(simulation: wlb.Simulation, strong: str) -> list[Table]:
    """Speed, balance, delay and memory; shares of a GPU's time, without what nobody spends time on."""
    numbers, shares = [], []
    for name, outcome in simulation.outcomes.items():
        of = outcome.summary()
        of |= {"speedup": simulation.speedup(name), "speedup_band": simulation.speedup_band(name)}
        of |= {"peak_gib": of["peak_bytes"] / GIB}
        numbers.append((outcome.title, ends(of), name == strong))
        shares.append((outcome.title, of["attribution"], name == strong))
    parts = [part for part in _PARTS if any(of[part.key] >= 0.0005 for _, of, _ in shares)]
    return [
        Table.of("Predicted speed, balance and delay", "method", _COLUMNS, numbers),
        Table.of(f"The same plans, {RATES}", "method", _GRADED, numbers),
        Table.of("What a GPU's time goes to", "method", parts, shares),
    ]


def _steps(outcomes: Mapping[str, Outcome]) -> tuple[list[Block], dict[str, Any]]:
    """Pictures of the median and the most idle step before any flush, and their traces by the names of the files."""
    from wlb.cli.output.figures.simulation import draw_step

    details: list[Block] = []
    traces: dict[str, Any] = {}
    for kind, heading, which, place in (
        ("typical", "Typical steps", "a typical", 0.5),
        ("worst", "The most idle steps", "its most idle", 1.0),
    ):
        details.append(Heading(heading))
        for name, outcome in outcomes.items():
            ranked = np.argsort(outcome.idle[: outcome.run.streamed], kind="stable")
            step = int(ranked[min(int(place * ranked.size), ranked.size - 1)])
            figure = draw_step(outcome, step, which)
            details.append(Paragraphs([_TOO_DEEP], small=True) if figure is None else Picture(figure))
            traces[f"step-{kind}-{name}.trace.json"] = functools.partial(_write_trace, outcome, step)
    details.append(Paragraphs([f"Traces to look into, at ui.perfetto.dev: {', '.join(traces)}."], small=True))
    return details, traces


def _write_trace(outcome: Outcome, step: int, path: Path) -> None:
    pipelines = "DP rank" if outcome.pipelines == "DP" else outcome.pipelines
    write_chrome_trace(outcome.timelines(step), path=path, pipelines=pipelines)


def _sentences(simulation: wlb.Simulation) -> list[str]:
    """What was simulated, in words."""
    scenario = simulation.scenario
    thresholds = listed(simulation.thresholds, " and ")
    return [
        kernel_sentence(scenario),
        f"With micro-batches of equal time this pipeline ({scenario.pipeline_schedule}, {scenario.micro_batches}"
        f" micro-batches a step) would still idle {scenario.equal_bubble:.1%} of its time.",
        f"Assumed: computation hides {scenario.cp_overlap:.0%} of CP, {scenario.tp_overlap:.0%} of TP and"
        f" {scenario.dp_overlap:.0%} of DP communication{_experts(scenario)}. Gains rest on this and on the number of"
        " micro-batches, those of Dynamic-CP most: try --cp-overlap, --tp-overlap and --micro-batches, and other"
        " layouts.",
        f"Micro-batches of variable length have at most {scenario.limit:,} tokens; "
        + (f"in queues wait documents from {thresholds} tokens on." if thresholds else "no document waits in a queue."),
    ]


def _experts(scenario: Scenario) -> str:
    """What is assumed of expert parallelism, where there is some."""
    if scenario.layout.ep == 1:
        return ""
    busiest = f"{scenario.expert_imbalance:g} times the visits of the mean EP rank"
    return f"; {scenario.ep_overlap:.0%} of EP communication, and the busiest has {busiest}"


def _too_large(simulation: wlb.Simulation) -> list[str]:
    """Methods that would run out of memory: possible only under a limit that was given."""
    hardware = simulation.scenario.hardware
    needs = {outcome.title: outcome.memory.total.max() for outcome in simulation.outcomes.values()}
    return [
        f"{title} does not fit: it needs {need / GIB:.1f} GiB,"
        f" {(need - hardware.memory_bytes) / GIB:.1f} GiB more than {hardware.name} has."
        for title, need in needs.items()
        if need > hardware.memory_bytes
    ]


def describe(scenario: Scenario) -> str:
    """A model on a cluster in one line."""
    layout, context = scenario.layout, scenario.context
    sizes = ", ".join(f"{name} {getattr(layout, name.lower())}" for name in ("TP", "CP", "PP", "DP"))
    window = f"{context // 1024}K" if context % 1024 == 0 else f"{context:,}"
    return f"{scenario.model.name}, {window} context, {layout.world_size} x {scenario.hardware.name} ({sizes})"


def kernel_sentence(scenario: Scenario) -> str:
    """What attention's times rest on, with a warning where that is another GPU."""
    source = scenario.attention.source
    label = "measured on a GPU" if source.startswith("measured") else "an assumption, measured nowhere"
    warning = (
        f" Warning: that is another GPU than --gpu {scenario.hardware.name}." if scenario.measured_elsewhere else ""
    )
    return f"Every time is predicted. Attention: {source} ({label}).{warning}"


def _packer_costs(scenario: Scenario) -> str:
    if scenario.cost_model is None:
        rate = scenario.hardware.attention_efficiency
        return f"FLOPs, attention at {rate:g} of the linear part's rate (assumed)"
    models = len(scenario.cost_model.models)
    return f"given, any of {models} models" if models > 1 else "given"


def assumptions(scenario: Scenario) -> dict[str, str]:
    """What the predictions rest on, in words; the first says whether attention was measured."""
    hardware, layout = scenario.hardware, scenario.layout
    layers = layout.layers_of_stages(scenario.model).tolist()
    memory = hardware.memory_bytes / GIB
    return {
        "attention": f"{scenario.attention.source}, {scenario.attention.num_heads} heads of a GPU",
        "linear part": f"{hardware.gemm_efficiency:.0%} of {hardware.peak_flops / 1e12:,.0f} TFLOP/s (assumed)"
        if scenario.linear is None
        else f"measured: {scenario.profile}",
        "packer's costs": _packer_costs(scenario),
        "links": f"{hardware.intra_node.bandwidth / 1e9:.0f} GB/s between {hardware.gpus_per_node} GPUs of a node,"
        f" {hardware.inter_node.bandwidth / 1e9:.0f} GB/s between nodes",
        "hidden communication": f"CP {scenario.cp_overlap:.0%}, TP {scenario.tp_overlap:.0%},"
        f" DP {scenario.dp_overlap:.0%}{_experts(scenario)}",
        "pipeline": f"{scenario.pipeline_schedule}, {layout.pp} ranks x {layout.virtual_stages} stages,"
        f" {scenario.micro_batches} micro-batches a step",
        "data parallelism": f"ranks wait for each other {_MEETINGS[scenario.waiting]}",
        "memory": f"{memory:.1f} GiB, {scenario.reserved_bytes / GIB:g} of them reserved; fsdp {layout.fsdp},"
        f" recompute {layout.recompute}",
        **({"layers of the stages": ", ".join(map(str, layers))} if len(set(layers)) > 1 else {}),
        "S_max": f"{scenario.limit:,} tokens ({'given' if scenario.max_tokens is not None else 'what fits'})",
        "noise": f"{scenario.noise:.1%} of every pass, seed {scenario.noise_seed}" if scenario.noise else "none",
        "not modelled": "optimizer step, kernel launches between layers, stragglers, loading",
    }
