"""The reports of `wlb tune`: delay settings without a cluster; with a cluster all settings, and code to paste."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import wlb
from wlb_tools.command.inputs.stream import Stream
from wlb_tools.command.output.columns import COLUMNS, LOST_NOTE
from wlb_tools.command.output.configuration import configuration, packer_micro_batches
from wlb_tools.command.output.packing import graded_table
from wlb_tools.command.output.report import Code, Heading, Headline, Paragraphs, Picture, Report, Table
from wlb_tools.command.output.simulation import simulation_report
from wlb_tools.command.words import counted, thresholds, waits
from wlb_tools.simulation import Choice, Tuning
from wlb_tools.simulation.methods import Setup
from wlb_tools.simulation.trained import PackedRun
from wlb_tools.simulation.words import assumptions, describe, kernel_sentence, model_sentences

_NOTES = (
    "x: predicted tokens/s over those of the original order, in a long stream of the same documents. FLOPs: the ratio"
    " of FLOPs per second; plans that cut documents have fewer FLOPs for the same tokens. imbalance, MB: time of the"
    " heaviest micro-batch over the mean; CP: attention of the slowest context-parallel rank over the mean. delay:"
    " steps that a token waits, and steps by which it is early; the limit is on their sum. tokens: the largest"
    " micro-batch. GiB: memory of the fullest GPU.",
    LOST_NOTE,
    "n: mean micro-batches of a rank in a step. In brackets: thresholds of queues, or price of delay of wlb"
    " and micro-batches of the packer. Plans beyond the limit of the delay show what longer waits would gain.",
)
_LIMITS = (
    "Settings were chosen one after the other, not in all combinations.",
    "Settings were chosen on the documents that the tables show; with few global batches they may overfit.",
)


_FRONT = (
    *("imbalance_mean", "imbalance_p95", "imbalance_worst", "delay_mean", "delay_max"),
    *("memory_skew_mean", "lost_time"),
)
_SHOWN = (
    *("speedup", "speedup_flops", "speedup_band", "micro_batches_mean", "micro_batch_imbalance_mean", "cp_imbalance"),
    *("lost_time", "delay_mean", "delay_max", "early_mean", "largest_micro_batch", "peak_bytes"),
)


def waiting_report(
    stream: Stream,
    setup: Setup,
    queued: wlb.TuneResult,
    adaptive: wlb.TuneResult,
    plans: Sequence[PackedRun],
    *,
    max_mean_delay: float,
    settings: Mapping[str, Any],
) -> Report:
    """Report of the delay settings, without a cluster.

    Args:
        stream: documents that were packed.
        setup: settings that all plans share.
        queued: result with queues.
        adaptive: result with release="adaptive".
        plans: plans of both choices.
        max_mean_delay: limit of the mean delay, in steps.
        settings: settings of the command.
    """
    from wlb_tools.command.output.figures.tuning import draw_waiting

    assert setup.cost_model is not None  # only `wlb pack` knows documents that bring their costs
    graded, table = graded_table(plans, setup.cost_model)
    chosen = {
        f"outlier_thresholds={queued.thresholds}": queued.best,
        f'release="adaptive", delay_price={adaptive.delay_price:g}': adaptive.best,
    }
    lines = (
        f"{choice}  # imbalance {best.imbalance_mean:.3f} at a mean delay of {best.delay_mean:.2f}"
        for choice, best in chosen.items()
    )
    before, after = (f"{best.imbalance_mean:.3f}" for best in chosen.values())
    return Report(
        command="tune",
        subject="what may wait",
        title=f"Mean imbalance {before} with queues, {after} with wlb",
        sentences=stream.in_words(),
        blocks=(
            Picture(
                lambda narrow: draw_waiting(queued, adaptive, max_mean_delay, narrow=narrow),
                "Imbalance against mean delay, for queues (WLB-LLM) and for wlb",
                "tune.png",
            ),
            _front("Queues", "thresholds", queued),
            _front("Adaptive release", "price of delay", adaptive),
            table,
            Paragraphs((LOST_NOTE,), small=True),
            Code("Arguments of a packer", "\n".join(lines)),
        ),
        facts={"Settings": settings, "Documents": stream.described()},
        numbers={**_found(queued), "adaptive": _found(adaptive), "methods": graded},
    )


def _front(title: str, names: str, found: wlb.TuneResult) -> Table:
    """Table of the Pareto front of thresholds or delay prices in mean delay and imbalance, with the choice in bold."""
    points = sorted({*found.pareto, found.best}, key=lambda point: (point.delay_mean, point.imbalance_mean))
    rows = [(waits(point), dataclasses.asdict(point), point == found.best) for point in points]
    return Table.of(f"{title}: less delay or less imbalance. Chosen: {waits(found.best)}", names, _FRONT, rows)


def tuning_report(
    tuning: Tuning, stream: Stream, *, settings: Mapping[str, Any], model: str, profile: str | None
) -> Report:
    """Report of all settings on a cluster, with the chosen configuration and its simulation.

    Args:
        tuning: result of tuning.
        stream: documents that were simulated.
        settings: settings of the command.
        model: value of `--model`.
        profile: path of the measured kernel profile; None: the kernel model is analytic.
    """
    from wlb_tools.command.output.figures.tuning import draw_choices

    scenario = tuning.scenario
    simulation = simulation_report(tuning.simulation, stream, shown=tuning.best.kind, settings=settings)
    code = Code("The configuration", configuration(tuning, model=model, profile=profile))
    # "best" is a choice of thresholds, as without a cluster. The chosen plan is in "cluster".
    chosen, found = tuning.best.outlier_thresholds, tuning.thresholds
    best = next((point for point in found.pareto if chosen and point.thresholds == chosen), found.best)
    now = tuning.best.summary(tuning.baseline)
    was = next(choice.summary(tuning.baseline) for choice in tuning.by_plan if choice.outcome is tuning.baseline)
    figures = {
        "tokens/s, over the original order's": "speedup",
        "steps that a token waits, mean": "delay_mean",
        "steps that a token waits, most": "delay_max",
        "tokens of the largest micro-batch": "largest_micro_batch",
    }
    return dataclasses.replace(
        simulation,
        command="tune",
        title=f"{_plan(tuning, tuning.best)}: {now['speedup']:.3f} times the speed of the original order (predicted)",
        sentences=(f"{describe(scenario)}; {counted(stream.batches, 'global batch')}.",),
        headlines=[Headline.of(label, was[key], now[key], COLUMNS[key]) for label, key in figures.items()],
        blocks=(
            Picture(
                lambda narrow: draw_choices(tuning, narrow=narrow),
                "Predicted speed against memory with queues, and against mean delay for every plan",
                "tune.png",
            ),
            *_tables(tuning),
            Heading("What this rests on"),
            Paragraphs(
                (
                    kernel_sentence(scenario),
                    *model_sentences(scenario),
                    "The packer's costs: FLOPs with attention_efficiency"
                    f" {tuning.attention_efficiency:.2f}, which fits this cluster, communication included.",
                    *_LIMITS,
                )
            ),
            Heading("What the columns mean"),
            Paragraphs(_NOTES, small=True),
            code,
        ),
        details=(Heading("The simulation"), Paragraphs(simulation.sentences), *simulation.blocks, *simulation.details),
        numbers={
            **simulation.numbers,
            **_found(found),
            "best": dataclasses.asdict(best),
            "assumptions": assumptions(scenario),
            "cluster": tuning.as_json(),
            "configuration": code.text,
            "simulation": tuning.simulation.as_json(),
        },
        files={"configuration.py": code.text},
    )


def _tables(tuning: Tuning) -> list[Table]:
    """A table for each setting, with the chosen row in bold."""
    limit, levels = tuning.by_delay[0].max_tokens, tuning.thresholds.thresholds

    def table(
        title: str,
        setting: str,
        choices: Sequence[Choice],
        name: Callable[[Choice], str],
        chosen: Callable[[Choice], bool],
    ) -> Table:
        rows = [(name(choice), choice.summary(tuning.baseline), chosen(choice)) for choice in choices]
        taken = " and ".join(dict.fromkeys(title for title, _, of in rows if of))
        return Table.of(f"{title}. Chosen: {taken}", setting, _SHOWN, rows)

    return [
        table(
            f"Plans; the mean delay may be {tuning.scenario.max_mean_delay:g}; fastest by"
            f" {'tokens' if tuning.by == 'tokens' else 'FLOPs'}",
            "plan",
            tuning.by_plan,
            name=lambda choice: _plan(tuning, choice),
            chosen=lambda choice: choice == tuning.best,
        ),
        table(
            "S_max: memory for balance, with queues",
            "S_max",
            tuning.by_memory,
            name=lambda choice: f"{choice.max_tokens:,}",
            chosen=lambda choice: choice.max_tokens == limit,
        ),
        table(
            "Thresholds: waiting for balance, with queues",
            "thresholds",
            tuning.by_delay,
            name=lambda choice: thresholds(choice.outlier_thresholds),
            chosen=lambda choice: choice.outlier_thresholds == levels,
        ),
        table(
            f"Sharding over context-parallel ranks, {tuning.by_strategy[0].title}",
            "strategy",
            tuning.by_strategy,
            name=lambda choice: choice.strategy,
            chosen=lambda choice: choice in tuning.by_plan,
        ),
    ]


def _plan(tuning: Tuning, choice: Choice) -> str:
    """The name of a choice's kind of plan, with its thresholds, or its delay price and micro-batches of the packer."""
    if choice.outlier_thresholds:
        return f"{choice.title} ({thresholds(choice.outlier_thresholds)})"
    if choice.delay_price is None:
        return choice.title
    return f"{choice.title} ({choice.delay_price:g}, {packer_micro_batches(tuning.scenario, choice)})"


def _found(result: wlb.TuneResult) -> dict[str, Any]:
    """The best choice and the Pareto front, as plain JSON values."""
    pareto = [dataclasses.asdict(point) for point in result.pareto]
    return {"best": dataclasses.asdict(result.best), "pareto": pareto, "evaluated": result.evaluated}
