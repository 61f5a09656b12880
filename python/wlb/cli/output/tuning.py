"""The reports of tuning: without a cluster what may wait, with one every setting and a configuration to paste."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import wlb
from wlb.cli.output.choices import thresholds_choice, waiting_choice
from wlb.cli.output.configuration import configuration, packer_micro_batches
from wlb.cli.output.report import Code, Paragraphs, Picture, Report
from wlb.cli.output.simulation import Simulated, assumptions, describe, kernel_sentence, simulation_report
from wlb.cli.output.table import Table
from wlb.cli.words import counted
from wlb.cluster.hardware import GIB
from wlb.simulation import KINDS, Choice, Tuning

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


def waiting_report(queued: wlb.TuneResult, adaptive: wlb.TuneResult, max_mean_delay: float) -> Report:
    """What may wait, and nothing else: no cluster is known."""
    from wlb.cli.output.figures.tuning import draw_waiting

    chosen = (
        (f"outlier_thresholds={queued.thresholds}", queued),
        (f'release="adaptive", delay_price={adaptive.delay_price:g}', adaptive),
    )
    lines = (
        f"{choice}  # imbalance {found.best.imbalance_mean:.3f} at a mean delay of {found.best.delay_mean:.2f}"
        for choice, found in chosen
    )
    blocks = (
        _waiting_table("Queues", queued),
        _waiting_table("Adaptive release", adaptive),
        Code("Arguments of a packer", "\n".join(lines)),
    )
    imbalances = [f"{found.best.imbalance_mean:.3f}" for found in (queued, adaptive)]
    return Report(
        command="tune",
        subject="what may wait",
        title=f"Mean imbalance {imbalances[0]} with queues, {imbalances[1]} with adaptive release",
        page=(Picture(draw_waiting(queued, adaptive, max_mean_delay), "tune.png"), *blocks),
        terminal=blocks,
        numbers={**_found(queued), "adaptive": _found(adaptive)},
    )


def tuning_report(simulated: Simulated, tuning: Tuning, *, model: str, profile: str | None) -> Report:
    """Every setting on a cluster, what was chosen, and a simulation of it.

    Args:
        simulated: what was chosen, beside the baseline.
        tuning: what was tried.
        model: a preset's name or a path.
        profile: of the kernel, if it was measured.
    """
    from wlb.cli.output.figures.tuning import draw_choices

    scenario = tuning.scenario
    code = Code("The configuration", configuration(tuning, model=model, profile=profile))
    tables: list[Paragraphs | Table] = [*_tables(tuning), Paragraphs(_NOTES, small=True)]
    simulation = simulation_report(simulated, "tune")
    words = (
        f"{describe(scenario)}; {counted(simulated.stream.batches, 'global batch')}.",
        kernel_sentence(scenario),
        f"The packer's costs: FLOPs with attention_efficiency {tuning.attention_efficiency:.2f}, which fits this"
        " cluster, communication included.",
    )
    # Of the queues, as without a cluster; what was chosen is in "cluster".
    chosen, found = tuning.best.outlier_thresholds, tuning.thresholds
    best = next((point for point in found.pareto if chosen and point.thresholds == chosen), found.best)
    return dataclasses.replace(
        simulation,
        page=(code, Picture(draw_choices(tuning), "tune.png"), *tables, *simulation.page),
        terminal=(Paragraphs(words), *tables, code),
        numbers={
            **simulation.numbers,
            **_found(found),
            "best": _point(best),
            "assumptions": assumptions(scenario),
            "cluster": tuning.as_json(),
            "configuration": code.text,
            "simulation": simulated.simulation.as_json(),
        },
        files={"configuration.py": code.text, **simulation.files},
    )


def _tables(tuning: Tuning) -> list[Table]:
    """One for each setting, the chosen row strong."""
    plans = [(_plan(tuning, choice), choice) for choice in tuning.by_plan]
    limits = [(f"{choice.max_tokens:,}", choice) for choice in tuning.by_memory]
    thresholds = [(thresholds_choice(choice.outlier_thresholds), choice) for choice in tuning.by_delay]
    strategies = [(choice.strategy, choice) for choice in tuning.by_strategy]

    def table(title: str, column: str, rows: Sequence[tuple[str, Choice]], chosen: Callable[[Choice], bool]) -> Table:
        return Table(
            title=title,
            groups=(("", 1), ("speed", 1), ("step", 1), ("imbalance", 2), ("delay", 2), ("memory", 2)),
            columns=(column, "x", "n", "MB", "CP", "mean", "max", "tokens", "GiB"),
            rows=tuple((name, *_cells(tuning, choice)) for name, choice in rows),
            strong=frozenset(i for i, (_, choice) in enumerate(rows) if chosen(choice)),
        )

    return [
        table(
            f"Plans; the mean delay may be {tuning.scenario.max_mean_delay:g}",
            "plan",
            plans,
            lambda choice: choice == tuning.best,
        ),
        table(
            "S_max: memory for balance, with queues",
            "S_max",
            limits,
            lambda choice: choice.max_tokens == tuning.by_delay[0].max_tokens,
        ),
        table(
            "Thresholds: waiting for balance, with queues",
            "thresholds",
            thresholds,
            lambda choice: choice.outlier_thresholds == tuning.thresholds.thresholds,
        ),
        table(
            f"Sharding over context-parallel ranks, {KINDS[tuning.by_strategy[0].kind]}",
            "strategy",
            strategies,
            lambda choice: choice in tuning.by_plan,
        ),
    ]


def _plan(tuning: Tuning, choice: Choice) -> str:
    """A kind of plan, with its settings."""
    if choice.outlier_thresholds:
        return f"{KINDS[choice.kind]} ({thresholds_choice(choice.outlier_thresholds)})"
    if choice.delay_price is None:
        return KINDS[choice.kind]
    return f"{KINDS[choice.kind]} ({choice.delay_price:g}, {packer_micro_batches(tuning.scenario, choice)})"


def _cells(tuning: Tuning, choice: Choice) -> tuple[str, ...]:
    s = choice.summary(tuning.baseline)
    return (
        f"{s['speedup']:.3f}",
        f"{s['micro_batches_mean']:.3g}",
        *(f"{s[key]:.3f}" for key in ("micro_batch_imbalance_mean", "cp_imbalance")),
        f"{s['delay_mean']:.2f}",
        f"{s['delay_max']:,}",
        f"{s['largest_micro_batch']:,}",
        f"{s['peak_bytes'] / GIB:.1f}",
    )


def _waiting_table(title: str, found: wlb.TuneResult) -> Table:
    """The Pareto front of thresholds or prices: no other choice has both less delay and less imbalance."""
    return Table(
        title=f"{title}: less delay or less imbalance",
        groups=(("", 1), ("imbalance", 3), ("delay", 2), ("memory", 1)),
        columns=(
            "thresholds" if found.delay_price is None else "price of delay",
            "mean",
            "p95",
            "worst",
            "mean",
            "max",
            "skew",
        ),
        rows=tuple(
            (
                waiting_choice(point),
                *(f"{x:.3f}" for x in (point.imbalance_mean, point.imbalance_p95, point.imbalance_worst)),
                f"{point.delay_mean:.2f}",
                f"{point.delay_max:,}",
                f"{point.memory_skew_mean:.2f}",
            )
            for point in found.pareto
        ),
        strong=frozenset(i for i, point in enumerate(found.pareto) if point == found.best),
    )


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
