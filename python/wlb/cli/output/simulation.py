"""The report of a simulation: speed, balance, delay and memory of every method, and steps to look into."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import wlb
from wlb.cli.inputs.documents import Documents
from wlb.cli.inputs.stream import Stream
from wlb.cli.output.documents import describe_documents, document_sentences
from wlb.cli.output.explanation import explanation
from wlb.cli.output.report import Block, Heading, Headline, Paragraphs, Picture, Report, origin
from wlb.cli.output.table import Table
from wlb.cluster.hardware import GIB
from wlb.simulation import Outcome, Scenario
from wlb.simulation.trace import write_chrome_trace

_NOTES = (
    "All times are predictions; the kernel model that they rest on is named above. per-document CP, adaptive CP,"
    " packing, placement: that optimisation alone, on Plain-4D.",
    "tokens/s: all tokens of the stream over the time of all its steps, of the whole cluster, on the same documents;"
    " the steps at the end that empty the queues count in full. MFU: FLOPs of the documents as they are trained over"
    " what the GPUs could do in that time. Methods that cut documents do less attention for the same tokens.",
    "step: seconds of one, and micro-batches of a rank in it, both in the mean. WLB, finer: twice the micro-batches of"
    " the same documents, each half as long. fitted, and all below: costs are fitted to the cluster.",
    "imbalance: MB: predicted time of the heaviest micro-batch over the mean of its step, mean over steps; CP:"
    " attention of the slowest context-parallel rank over the mean rank. Dynamic-CP makes the first and last"
    " micro-batch light, which shortens the pipeline's bubble.",
    "delay: iterations from the arrival of a token's global batch to its training. GiB: the fullest GPU, in its fullest"
    " step.",
)

_TOO_DEEP = "Too many pipeline ranks for a picture; the trace shows them."


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Methods on one stream; the first is the baseline."""

    documents: Documents
    stream: Stream
    simulation: wlb.Simulation
    settings: Mapping[str, str | int | float | None]
    shown: str  # the method that pictures set against the baseline
    remarks: tuple[str, ...] = ()  # what else there is to say

    @property
    def compared(self) -> dict[str, Outcome]:
        """The baseline, and the shown method if it is another, by names for files."""
        baseline, shown = self.simulation.baseline, self.simulation.outcomes[self.shown]
        return {"baseline": baseline} if shown is baseline else {"baseline": baseline, self.shown: shown}


def simulation_report(simulated: Simulated, command: str = "simulate") -> Report:
    """The report; on the page the methods come first, then a typical and the most idle step of two of them."""
    from wlb.cli.output.figures.simulation import draw_simulation

    simulation, scenario = simulated.simulation, simulated.simulation.scenario
    before, shown = simulation.baseline, simulation.outcomes[simulated.shown]
    caption = f"{simulated.documents.source} · {describe(scenario)}"
    overview = draw_simulation(simulation, simulated.shown, f"{caption} · attention {scenario.attention.source}")
    tables = (
        variant_table(simulation, simulated.shown),
        time_table(simulation, simulated.shown),
        Paragraphs(_NOTES, small=True),
    )
    pictures, traces = _steps(simulated)
    documents = describe_documents(simulated.documents, simulated.stream, scenario.context)
    sentences = _sentences(simulated, documents)
    headlines = {
        "tokens/s": [f"{outcome.tokens_per_second:,.0f}" for outcome in (before, shown)],
        "seconds of a mean step": [f"{o.seconds[: o.plan.streamed].mean():.3g}" for o in (before, shown)],
        "of the time idle": [f"{_idle_share(outcome):.0%}" for outcome in (before, shown)],
        "imbalance of CP ranks": [f"{outcome.cp_imbalance:.2f}" for outcome in (before, shown)],
    }
    return Report(
        command=command,
        subject=f"predicted · {caption}",
        title=f"{shown.title}: {simulation.speedup(simulated.shown):.2f}x the speed of {before.title} (predicted)",
        sentences=sentences,
        headlines=[Headline(label, *values) for label, values in headlines.items()],
        page=(
            Picture(overview, "simulate.png"),
            *tables,
            *pictures,
            Paragraphs((f"Traces to look into, at ui.perfetto.dev: {', '.join(traces)}.",), small=True),
        ),
        terminal=(Paragraphs(sentences), *tables),
        numbers={
            "command": command,
            **origin(),
            "settings": simulated.settings,
            "assumptions": assumptions(scenario),
            "documents": documents,
            "gpus": scenario.layout.world_size,
            "explanation": explanation(simulation, simulated.shown),
            **simulation.as_json(),
        },
        facts={"Assumptions": assumptions(scenario), "Settings": simulated.settings, "Documents": documents},
        files=traces,
    )


def _steps(simulated: Simulated) -> tuple[list[Block], dict[str, Any]]:
    """Pictures of steps, and their traces by the names of the files."""
    from wlb.cli.output.figures.simulation import draw_step

    pictures: list[Block] = []
    traces: dict[str, Any] = {}
    for kind, heading, words in (
        ("typical", "Typical steps", "a typical"),
        ("worst", "The most idle steps", "its most idle"),
    ):
        pictures.append(Heading(heading))
        for slug, outcome in simulated.compared.items():
            step = _shown_steps(outcome)[kind]
            figure = draw_step(outcome, step, words)
            pictures.append(Paragraphs((_TOO_DEEP,), small=True) if figure is None else Picture(figure))
            traces[f"step-{kind}-{slug}.trace.json"] = _trace(outcome, step)
    return pictures, traces


def _trace(outcome: Outcome, step: int) -> Any:
    def write(path: Path) -> None:
        pipelines = "DP rank" if outcome.pipelines == "DP" else outcome.pipelines
        write_chrome_trace(outcome.timelines(step), path=path, pipelines=pipelines)

    return write


def _sentences(simulated: Simulated, documents: Mapping[str, Any]) -> Sequence[str]:
    """What was simulated, in words."""
    simulation, scenario = simulated.simulation, simulated.simulation.scenario
    thresholds = " and ".join(f"{threshold:,}" for threshold in simulation.thresholds)
    return [
        f"{describe(scenario)}.",
        kernel_sentence(scenario),
        f"With micro-batches of equal time this pipeline ({scenario.pipeline_schedule}, {scenario.micro_batches}"
        f" micro-batches a step) would still idle {scenario.equal_bubble:.1%} of its time.",
        f"Assumed: computation hides {scenario.cp_overlap:.0%} of CP, {scenario.tp_overlap:.0%} of TP and"
        f" {scenario.dp_overlap:.0%} of DP communication. Gains rest on this and on the number of micro-batches,"
        " those of Dynamic-CP most: try --cp-overlap, --tp-overlap and --micro-batches, and other layouts.",
        *document_sentences(documents, scenario.setup(), oversize=str(simulated.settings["oversize"])),
        f"Micro-batches of variable length have at most {scenario.limit:,} tokens; "
        + (f"in queues wait documents from {thresholds} tokens on." if thresholds else "no document waits in a queue."),
        *simulated.remarks,
        *_too_large(simulation),
        *explanation(simulation, simulated.shown),
    ]


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


def _idle_share(outcome: Outcome) -> float:
    """Of the time of all steps."""
    return float(outcome.idle @ outcome.seconds) / outcome.total_seconds


def _shown_steps(outcome: Outcome) -> dict[str, int]:
    """Steps to look at, by how much of them is idle: the median and the most, before any flush."""
    ranked = np.argsort(outcome.idle[: outcome.plan.streamed], kind="stable")
    return {"typical": int(ranked[ranked.size // 2]), "worst": int(ranked[-1])}


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
        "links": f"{hardware.intra_node.bandwidth / 1e9:.0f} GB/s between {hardware.gpus_per_node} GPUs of a node,"
        f" {hardware.inter_node.bandwidth / 1e9:.0f} GB/s between nodes",
        "hidden communication": f"CP {scenario.cp_overlap:.0%}, TP {scenario.tp_overlap:.0%},"
        f" DP {scenario.dp_overlap:.0%}",
        "pipeline": f"{scenario.pipeline_schedule}, {layout.pp} ranks x {layout.virtual_stages} stages,"
        f" {scenario.micro_batches} micro-batches a step",
        "memory": f"{memory:.1f} GiB, {scenario.reserved_bytes / GIB:g} of them reserved; fsdp {layout.fsdp},"
        f" recompute {layout.recompute}",
        **({"layers of the stages": ", ".join(map(str, layers))} if len(set(layers)) > 1 else {}),
        "S_max": f"{scenario.limit:,} tokens ({'given' if scenario.max_tokens is not None else 'what fits'})",
        "noise": f"{scenario.noise:.1%} of every pass, seed {scenario.noise_seed}" if scenario.noise else "none",
        "not modelled": "optimizer step, kernel launches between layers, stragglers, loading",
    }


def variant_table(simulation: wlb.Simulation, strong: str) -> Table:
    """Speed, balance, delay and memory."""
    rows = []
    for name, outcome in simulation.outcomes.items():
        s = outcome.summary()
        rows.append(
            (
                outcome.title,
                f"{s['tokens_per_second']:,.0f}",
                f"{simulation.speedup(name):.3f}",
                f"{s['model_flops_utilization']:.1%}",
                f"{s['step_seconds_mean']:.3g}",
                f"{s['micro_batches_mean']:.3g}",
                f"{s['micro_batch_imbalance_mean']:.3f}",
                f"{s['cp_imbalance']:.3f}",
                f"{s['delay_mean']:.2f}",
                f"{s['delay_max']:,}",
                f"{s['peak_bytes'] / GIB:.1f}",
            )
        )
    return Table(
        title="Predicted speed, balance and delay",
        groups=(("", 1), ("throughput", 3), ("step", 2), ("imbalance", 2), ("delay", 2), ("memory", 1)),
        columns=("method", "tokens/s", "x", "MFU", "s", "n", "MB", "CP", "mean", "max", "GiB"),
        rows=tuple(rows),
        strong=frozenset(i for i, name in enumerate(simulation.outcomes) if name == strong),
    )


_PARTS = {
    "compute": ("", "compute"),
    "cp_communication": ("communication", "CP"),
    "tp_communication": ("communication", "TP"),
    "dp_communication": ("communication", "DP"),
    "cp_wait": ("waiting", "slowest CP"),
    "bubble": ("waiting", "bubble"),
    "dp_wait": ("waiting", "slowest DP"),
}
"""A group and a column for each part of the time."""


def time_table(simulation: wlb.Simulation, strong: str) -> Table:
    """Shares of a GPU's time, in per cent; what nobody spends time on is left out."""
    shares = {name: outcome.summary()["attribution"] for name, outcome in simulation.outcomes.items()}
    shown = [part for part in _PARTS if any(of[part] >= 0.0005 for of in shares.values())]
    groups = itertools.groupby(_PARTS[part][0] for part in shown)
    return Table(
        title="What a GPU's time goes to (%)",
        groups=(("", 1), *((group, len(list(members))) for group, members in groups)),
        columns=("method", *(_PARTS[part][1] for part in shown)),
        rows=tuple(
            (simulation.outcomes[name].title, *(f"{100 * of[part]:.1f}" for part in shown))
            for name, of in shares.items()
        ),
        strong=frozenset(i for i, name in enumerate(shares) if name == strong),
    )
