"""Table 2: how even each packing method leaves the micro-batches of 7B-128K, and what packing takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from studies.paper.inputs import Inputs, documents, scenario
from studies.paper.needed import needed
from studies.paper.published import CONFIGURATIONS, MEAN_DELAY, TABLE_2
from studies.paper.results import Facts, Kind, Result, Row, row
from studies.paper.solver import solved
from studies.paper.study import CHOICE, Source, Study, run
from wlb._core import batch_offsets
from wlb_tools.simulation import Variant
from wlb_tools.simulation.static import StaticOutcome, score, shard_run, static
from wlb_tools.simulation.stream import GlobalBatches
from wlb_tools.simulation.trained import PackedRun

LATENCY = "imbalance of forward latency"
ATTENTION = "imbalance of attention work"
MILLISECONDS = "packing, ms a global batch"
DELAY = "mean delay of a token, iterations"


def _batches(method: str, window: int) -> str:
    return f"{method}, {window} batch{'es' * (window > 1)}"


_STATIC = {"original": Variant(title="original", strategies=CHOICE)} | {
    _batches("fixed-length greedy", window): Variant(
        title="fixed-length greedy", packing="fixed_length", window=window, strategies=CHOICE
    )
    for window in (1, 2, 4, 8)
}
_QUEUED = {f"WLB-LLM, {queues} queue{'s' * (queues > 1)}": queues for queues in (1, 2, 3)}
_SOLVED = {_batches("solver", window): window for window in (1, 2, 4)}


def table_2(study: Study) -> Result:
    """Every method of table 2 on the same documents."""
    configuration = CONFIGURATIONS["7B-128K"]
    points = study.points("num_queues")
    latency: dict[str, dict[str, float]] = {}
    attention: dict[str, dict[str, float]] = {}
    delay: dict[str, dict[str, float]] = {}
    made = study.map("Table 2", _methods, [(point.inputs,) for point in points])
    for point, found in zip(points, made, strict=True):
        for name, one in found.items():
            latency.setdefault(name, {})[point.label] = one.latency
            attention.setdefault(name, {})[point.label] = one.attention
            if name in _QUEUED:
                delay.setdefault(name, {})[point.label] = one.delay

    rows = [row(LATENCY, name, "simulated", TABLE_2[name].imbalance, series) for name, series in latency.items()]
    rows += [row(ATTENTION, name, "measured", None, series) for name, series in attention.items()]
    rows += [
        _sampled(MILLISECONDS, name, "measured", TABLE_2[name].milliseconds, one.seconds * 1e3)
        for name, one in made[0].items()
        if one.seconds.size
    ]
    rows += [
        row(DELAY, name, "measured", MEAN_DELAY if name == "WLB-LLM, 2 queues" else None, series, ratio=False)
        for name, series in delay.items()
    ]
    notes = [
        "Imbalance of forward latency is the paper's measure, greatest x PP / total, on predicted latencies. That of"
        " attention work is the same of (query, key) pairs, counted in the plans: it needs no model of a GPU.",
        f"Packing was timed on this machine, {study.steps} global batches of the central inputs: median, 5 % and 95 %.",
    ]
    if made[0]["original"].attention > 1:
        notes.append(_share_note(made[0]["original"]))
    for name, window in _SOLVED.items() if study.solver_seconds > 0 else ():
        if find_spec("highspy") is None:
            notes.append("No solver: run pip install highspy.")
            break
        study.progress(f"Table 2: {name}", len(points), len(points))
        lengths = documents(configuration, study.central, steps=study.solver_samples * window, source=study.source)
        world = scenario(configuration, study.central, lengths)
        stream = GlobalBatches(lengths, batch_offsets(lengths, tokens_per_batch=world.tokens_per_batch))
        result = solved(stream, world.setup(), window=window, samples=study.solver_samples, limit=study.solver_seconds)
        notes.append(result.note(name))
        if result.run is not None:
            outcome = score(name, result.run, shard_run(result.run, world, CHOICE), world)
            paper, packed = TABLE_2[name], result.run
            rows += [
                _sampled(LATENCY, name, "simulated", paper.imbalance, forward_latency(outcome)),
                _sampled(ATTENTION, name, "measured", None, _attention(packed)),
                _sampled(MILLISECONDS, name, "measured", paper.milliseconds, packed.seconds * 1e3),
            ]
    quantities, names = (LATENCY, ATTENTION, MILLISECONDS, DELAY), list(TABLE_2)
    rows.sort(key=lambda one: (quantities.index(one.quantity), names.index(one.name)))
    return Result(
        name="table2",
        title="Table 2: packing imbalance and packing time, 7B-128K",
        rows=tuple(rows),
        notes=tuple(notes),
        facts=_needed(study, list(latency)),
    )


def _needed(study: Study, names: list[str]) -> tuple[Facts, ...]:
    """For the published imbalances of these methods."""

    def evaluate(every: Sequence[Inputs]) -> list[dict[str, float]]:
        made = study.map("Table 2: what would have to be true", _methods, [(inputs,) for inputs in every])
        return [{name: one.latency for name, one in found.items()} for found in made]

    return needed(study, {name: TABLE_2[name].imbalance for name in names}, evaluate, without=("num_queues",))


def _share_note(original: _Method) -> str:
    needed = (TABLE_2["original"].imbalance - 1) / (original.attention - 1)
    return (
        f"Original packing: micro-batches of equal tokens differ by attention alone, whose work is"
        f" {original.attention:.2f} times the mean in the heaviest one, and whose share of the forward latency is"
        f" {original.attention_share:.0%} here. On these documents the paper's {TABLE_2['original'].imbalance} needs"
        f" {needed:.0%}."
    )


@dataclass(frozen=True)
class _Method:
    """What table 2 says of one method; means over steps."""

    latency: float
    attention: float
    attention_share: float  # of all micro-batches' forward latency
    delay: float
    seconds: NDArray[np.float64]  # [steps] of packing


def _methods(steps: int, source: Source, inputs: Inputs) -> dict[str, _Method]:
    configuration = CONFIGURATIONS["7B-128K"]
    made = dict(run(steps, source, configuration, inputs, _STATIC).outcomes)
    for name, queues in _QUEUED.items():
        wlb = Variant(title=name, packing="var_length", strategies=CHOICE)
        made |= run(steps, source, configuration, replace(inputs, num_queues=queues), {name: wlb}).outcomes
    return {
        name: _Method(
            latency=float(forward_latency(outcome).mean()),
            attention=float(_attention(outcome.run).mean()),
            attention_share=_attention_share(outcome),
            delay=outcome.run.delay_mean,
            seconds=outcome.run.seconds,
        )
        for name, outcome in ((name, static(one)) for name, one in made.items())
    }


def forward_latency(outcome: StaticOutcome) -> NDArray[np.float64]:
    """float64[streamed]: forward latency of the slowest micro-batch over the mean of its step."""
    latency = outcome.costs[: outcome.run.streamed, ..., 0].sum(axis=-1)
    latency = latency.reshape(len(latency), -1)
    return np.asarray(latency.max(axis=1) / latency.mean(axis=1))


def _attention_share(outcome: StaticOutcome) -> float:
    attention = float(outcome.sharded.forward.max(axis=1).sum()) * outcome.scenario.model.num_layers
    return attention / float(outcome.costs[..., 0].sum())


def _attention(packed: PackedRun) -> NDArray[np.float64]:
    """float64[streamed]: pairs of the heaviest micro-batch over the mean of its step."""
    index = packed.step * packed.tokens.shape[1] + packed.micro_batch
    work = np.bincount(index, weights=packed.length * (packed.length + 1) / 2, minlength=packed.tokens.size)
    work = work.reshape(packed.tokens.shape)[: packed.streamed]
    return np.asarray(work.max(axis=1) / work.mean(axis=1))


def _sampled(quantity: str, name: str, kind: Kind, paper: float | None, samples: NDArray[np.float64]) -> Row:
    """A row of samples: times by their median, the rest by its mean as everywhere; 5 % and 95 % of them."""
    low, median, high = np.quantile(samples, (0.05, 0.5, 0.95))
    ours = median if quantity == MILLISECONDS else samples.mean()
    ratio = quantity != MILLISECONDS
    return Row(quantity, name, kind, paper, float(ours), float(low), float(high), ratio=ratio)
