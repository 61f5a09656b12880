"""The report of `wlb simulate`: speed, balance, delay and memory of every method, and timelines of some steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import wlb_tools
from wlb_tools.command.inputs.stream import Stream
from wlb_tools.command.output.columns import COLUMNS, LOST_NOTE, RATES, Column
from wlb_tools.command.output.report import Block, Heading, Headline, Paragraphs, Picture, Report, Table
from wlb_tools.simulation import ATTRIBUTION, Outcome
from wlb_tools.simulation.words import assumptions, describe, explanation, premises

_NOTES = (
    "method: the original order cuts documents as they arrive. Per-document CP, adaptive CP and WLB-LLM's packing add"
    " one optimisation to it. From fitted costs on, the packer knows this cluster's costs. finer makes twice as many"
    " micro-batches.",
    "tokens/s: all tokens of the stream over the time of all its steps, on all GPUs. x: the same over the first method."
    " MFU: FLOPs of the documents as trained over what the GPUs could do in that time; methods that cut documents have"
    " fewer FLOPs for the same tokens.",
    "step: mean seconds of a step (s) and micro-batches of a rank in it (n).",
    "imbalance, MB: time of the heaviest micro-batch over the mean of its step, mean over steps. CP: attention of the"
    " slowest context-parallel rank over the mean rank. Dynamic-CP makes the first and last micro-batch light on"
    " purpose, because that shortens the pipeline's bubble.",
    "delay: steps that a token waits. GiB: memory of the fullest GPU in its fullest step.",
    LOST_NOTE,
)

_IDLE = Column("", "idle", ".0%", better="less")
_TOO_DEEP = "Too many pipeline ranks for a picture."

_SHOWN = (
    *("tokens_per_second", "speedup", "model_flops_utilization", "step_seconds_mean", "micro_batches_mean"),
    *("micro_batch_imbalance_mean", "cp_imbalance", "delay_mean", "delay_max", "peak_bytes"),
)
_GRADED = (
    *("speedup", "speedup_band", "micro_batch_imbalance_mean", "micro_batch_imbalance_band"),
    *("lost_time", "step_work_cv", "step_work_heaviest"),
)


def simulation_report(
    simulation: wlb_tools.Simulation,
    stream: Stream,
    *,
    shown: str,
    settings: Mapping[str, Any],
    remarks: Sequence[str] = (),
) -> Report:
    """Makes the report. The page also shows a typical and the most idle step of the baseline and of `shown`.

    Args:
        simulation: simulation of the stream; its first method is the baseline.
        stream: documents that were simulated.
        shown: method that pictures compare with the baseline.
        settings: settings of the command.
        remarks: further sentences.
    """
    from wlb_tools.command.output.figures.simulation import draw_simulation

    scenario, before, after = simulation.scenario, simulation.baseline, simulation.outcomes[shown]
    caption = f"{stream.documents.source} · {describe(scenario)}"
    about = f"{caption} · attention {scenario.attention.source}"
    overview = Picture(
        lambda narrow: draw_simulation(simulation, shown, about, narrow=narrow),
        f"What a GPU's time goes to under each method, and how idle steps are. {about}",
        "simulate.png",
    )
    details = _steps([before, after] if after is not before else [before])
    both = (before, after)
    headlines = (
        ("tokens/s", [outcome.tokens_per_second for outcome in both], COLUMNS["tokens_per_second"]),
        ("seconds of a mean step", [o.seconds[: o.run.streamed].mean() for o in both], COLUMNS["step_seconds_mean"]),
        ("of the time idle", [o.idle @ o.seconds / o.total_seconds for o in both], _IDLE),
        ("imbalance of CP ranks", [outcome.cp_imbalance for outcome in both], COLUMNS["cp_imbalance"]),
    )
    reasons = explanation(simulation, shown)
    warnings = [reason for reason in reasons if reason.startswith("Warning:")]
    answer, *further = _tables(simulation, shown)
    return Report(
        command="simulate",
        subject=f"predicted · {caption}",
        title=f"{after.title}: {simulation.speedup(shown):.3f} times the speed of {before.title} (predicted)",
        sentences=[f"{describe(scenario)}.", *warnings],
        headlines=[Headline.of(label, float(a), float(b), column) for label, (a, b), column in headlines],
        blocks=(
            overview,
            answer,
            Heading("Why"),
            Paragraphs([reason for reason in reasons if reason not in warnings]),
            *further,
            Heading("What this rests on"),
            Paragraphs([*premises(simulation), *stream.in_words(), *remarks]),
            Heading("What the columns mean"),
            Paragraphs(_NOTES, small=True),
        ),
        details=details,
        facts={"Assumptions": assumptions(scenario), "Settings": settings, "Documents": stream.described()},
        numbers={"gpus": scenario.layout.world_size, "explanation": reasons, **simulation.as_json()},
    )


def _tables(simulation: wlb_tools.Simulation, strong: str) -> list[Table]:
    """Tables of speed, balance and delay, of the bands, and of the shares of a GPU's time. Zero shares are left out."""
    variants = simulation.as_json()["variants"]
    numbers = [(of["title"], of, name == strong) for name, of in variants.items()]
    shares = [(title, of["attribution"], bold) for title, of, bold in numbers]
    parts = [key for key in COLUMNS if key in ATTRIBUTION and any(of[key] >= 0.0005 for _, of, _ in shares)]
    return [
        Table.of("Predicted speed, balance and delay", "method", _SHOWN, numbers, against_first=True),
        Table.of(f"The same plans, {RATES}", "method", _GRADED, numbers, against_first=True),
        Table.of("What a GPU's time goes to", "method", parts, shares, against_first=True),
    ]


def _steps(outcomes: Sequence[Outcome]) -> list[Block]:
    """Pictures of the median and the most idle step before the flush."""
    from wlb_tools.command.output.figures.simulation import draw_step

    details: list[Block] = []
    for heading, which, place in (("Typical steps", "a typical", 0.5), ("The most idle steps", "its most idle", 1.0)):
        details.append(Heading(heading))
        for outcome in outcomes:
            ranked = np.argsort(outcome.idle[: outcome.run.streamed], kind="stable")
            step = int(ranked[min(int(place * ranked.size), ranked.size - 1)])
            details.append(draw_step(outcome, step, which) or Paragraphs([_TOO_DEEP], small=True))
    return details
