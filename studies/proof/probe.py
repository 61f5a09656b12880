"""What a trainer takes beside its layers and links, measured on micro-batches and steps that no method trains.

A profile times kernels and a layer by themselves. A stage also launches, embeds, gathers and copies keys, has a loss;
a step has an optimizer, and the code between its passes. Micro-batches of documents of all lengths show the first
(:func:`stages`), steps of few tokens the second (:func:`of_steps`): not of hardly any, in which nothing would hide what
is sent beside the work. Nothing is fitted to what is predicted.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import wlb
import wlb_tools
from studies.proof import Bench, Layout, echo, shared, system, unaligned, uneven
from studies.proof.batches import Text
from studies.proof.pace import parts_of
from studies.proof.slices import Stages, clock_of
from wlb_tools.cluster.overhead import Overhead, copied
from wlb_tools.cluster.step_time import StageSeconds
from wlb_tools.simulation.planner import of_size

Floats = NDArray[np.float64]
REPEATS = 11
SHORT = 16
"""A context has so many times the tokens that a rank has in the steps that show what an op and a step take beside."""

ROUNDS = 200
SMALL = 1e-4
"""An error, of what is measured, that is no smaller than others to :func:`least_absolute`."""

TURNS = 6
"""So often the pace of short steps and what an op takes are found, one from the other: a tenth of the error is left
each time, or less."""

_PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Passes:
    """Of a micro-batch on the slowest of the ranks that share its documents."""

    seconds: Floats  # [stages, 3]
    p2p: float  # between its stages
    waits: float  # seconds, over all stages, that the mean one of these ranks waits for it


@dataclass(frozen=True)
class Probed:
    """What a probe of stages says."""

    overhead: Overhead
    attention: tuple[float, float]  # forward and backward in the trainer, over what the profile has
    error: float  # of the probe's own micro-batches, predicted with these: median, without sign


def shapes(bench: Bench, sizes: list[int]) -> list[tuple[int, list[int], str]]:
    """Groups of ranks, and the documents of a micro-batch of theirs: from few tokens to two contexts, few or many.

    Sharded document by document, in which case half of a first rank's tokens see gathered keys, and as one sequence, in
    which case few do: else what copying keys takes would not be told from what tokens take.

    By the tokens of a rank: a micro-batch comes after others of about its size, as in a step, not after one that leaves
    none of it in the caches.
    """
    tokens = [bench.context >> power for power in (6, 4, 2, 1, 0)] + [2 * bench.context]
    cases = itertools.product(sizes, tokens, (1, 4, 16), ("per_document", "per_sequence"))
    found = [(size, uneven(count, many), strategy) for size, count, many, strategy in cases]
    possible = [
        (size, lengths, strategy)
        for size, lengths, strategy in found
        if 2 * size <= lengths[-1] and lengths[0] <= bench.context
        # One rank, or one document, is sharded in the same way by both.
        if strategy == "per_document" or (size > 1 and len(lengths) > 1)
    ]
    return sorted(possible, key=lambda case: sum(case[1]) / case[0])


def stages(
    bench: Bench,
    scenario: wlb_tools.Scenario,
    sizes: list[int],
    *,
    device: torch.device,
    thread_clock: bool,
    neighbours: int = 0,
) -> Probed:
    """Runs every shape's first two ranks by themselves, in turn and again, and fits what is beside the prediction.

    Of each stage and pass the seconds beyond the profile's layers are a constant and so much for each token of the
    rank; of each layer a share of attention's seconds, and so much for each token that attends in two calls and for
    each key that is picked from gathered ones (:attr:`wlb_tools.cluster.Overhead.copies`); for the least sum of
    relative errors.

    Sharded document by document all tokens of a first rank attend in two calls, and no others do.

    Args:
        bench: the model.
        scenario: the layout, and the profile; without overhead.
        sizes: of groups of context-parallel ranks.
        device: where.
        thread_clock: see :func:`studies.proof.slices.measure`.
        neighbours: processes that run the same meanwhile, as the other ranks of a machine do when it trains: they share
            its caches and its memory.
    """
    count = scenario.layout.num_stages
    runner, text = Stages(bench, count, device, clock_of(device, thread=thread_clock)), Text()
    parts = [
        part
        for size, lengths, strategy in shapes(bench, sizes)
        for part in parts_of(lengths, size, strategy=strategy)[:2]
    ]
    seconds = np.zeros((REPEATS, len(parts), count, 2))
    terms = np.zeros((len(parts), 2, 4))  # see fit
    predicted = np.zeros((len(parts), count, 2))
    for index, part in enumerate(parts):
        attention = _attention(scenario, part.shard)[:, part.rank]
        tokens = int(part.shard.tokens_per_rank[part.rank])
        computing = _computing(scenario, tokens, attention)
        predicted[index] = np.stack([computing[:, 0], computing[:, 1:].sum(axis=1)], axis=1)
        for one in range(2):
            terms[index, one] = tokens, attention[one].sum(), *copied(part.shard)[part.rank]

    def once(seconds: Floats) -> None:
        runner.run(text.batch(parts[0], device), parts[0].cp_size)  # finds no gradients yet, and cold caches
        for index, part in enumerate(parts):
            seconds[index] = runner.run(text.batch(part, device), part.cp_size)
        runner.forget()

    def endlessly(index: int) -> None:
        system.take_processor(1 + index, of=1 + neighbours)
        torch.set_num_threads(1)
        with echo.ranks(max(sizes)):
            while True:
                once(seconds[0])

    with system.on_a_processor(device.type), busy(neighbours, endlessly), echo.ranks(max(sizes)):
        once(seconds[0])  # to warm up
        for repeat in range(REPEATS):
            once(seconds[repeat])
    return fit(np.median(seconds, axis=0), predicted, terms, scenario.layout.layers_of_stages(bench.model))


@contextmanager
def busy(count: int, work: Callable[[int], None]) -> Iterator[None]:
    """So many processes that do some work without an end meanwhile, each told which it is."""
    fork = get_context("fork")
    others = [fork.Process(target=work, args=(index,), daemon=True) for index in range(count)]
    try:
        for other in others:
            other.start()
        yield
    finally:
        for other in others:
            other.kill()
            other.join()


def fit(measured: Floats, predicted: Floats, terms: Floats, layers: NDArray[np.int64]) -> Probed:
    """See :func:`stages`.

    Args:
        measured: float64[parts, stages, 2] seconds of forward and backward.
        predicted: float64[parts, stages, 2] of layers and output projection by the profile.
        terms: float64[parts, 2, 4] by pass: tokens of the rank; of a layer seconds of attention, tokens that attend in
            two calls, and keys that are picked.
        layers: int64[stages].
    """
    width = measured.shape[1]
    lines: list[list[tuple[float, float]]] = []
    shares, copies, errors = [], [], []
    for one in range(2):
        # A constant and tokens of every stage; what is of each layer is that of all stages.
        columns = np.zeros((*measured.shape[:2], 2 * width + 3))
        for stage in range(width):
            columns[:, stage, 2 * stage] = 1.0
            columns[:, stage, 2 * stage + 1] = terms[:, one, 0]
            columns[:, stage, 2 * width :] = layers[stage] * terms[:, one, 1:]
        weights = 1 / measured[..., one]
        rows = (columns * weights[..., None]).reshape(-1, columns.shape[-1])
        beyond = ((measured - predicted)[..., one] * weights).ravel()
        # Without groups nothing is copied.
        found = np.zeros(rows.shape[1])
        some = rows.any(axis=0)
        found[some] = least_absolute(rows[:, some], beyond)
        errors.append(np.abs(rows @ found - beyond))
        *of_stages, share, split, picked = found.tolist()
        lines.append(list(zip(of_stages[::2], of_stages[1::2], strict=True)))
        shares.append(1 + share)
        copies.append((split, picked))
    overhead = Overhead(forward=tuple(lines[0]), backward=tuple(lines[1]), copies=(copies[0], copies[1]))
    return Probed(overhead, (shares[0], shares[1]), float(np.median(errors)))


def least_absolute(rows: Floats, wanted: Floats) -> Floats:
    """Factors of the columns for the least sum of absolute errors, by least squares with weights, again and again.

    For the least sum of squares one shape in thirty that took a sixth longer would move all others by some per cents,
    and which one does changes from run to run.
    """
    weights = np.ones(len(wanted))
    for _ in range(ROUNDS):
        found: Floats = np.linalg.lstsq(rows * weights[:, None], wanted * weights, rcond=None)[0]
        weights = 1 / np.sqrt(np.maximum(np.abs(rows @ found - wanted), SMALL))
    return found


def corrected(profile: Path, attention: tuple[float, float], path: Path) -> Path:
    """A profile with attention as long as it takes in the trainer."""
    measured = json.loads(profile.read_text())
    for one, share in zip(_PASSES, attention, strict=True):
        for name, table in measured[one].items():
            if name.endswith("seconds"):
                measured[one][name] = _times(table, share)
    path.write_text(json.dumps(measured) + "\n")
    return path


def _times(table: Any, share: float) -> Any:
    """Of nested lists of seconds, in which some are not measured."""
    if isinstance(table, list):
        return [_times(row, share) for row in table]
    return None if table is None else table * share


def few_tokens(context: int) -> int:
    """Of a rank, in a micro-batch of the steps that :func:`of_steps` looks at: one document's."""
    return unaligned(context // SHORT)


def group_sizes(layout: Layout) -> tuple[int, ...]:
    """Ranks of the groups in the steps that :func:`of_steps` looks at: one, and as many as gather keys, if any can."""
    ranks = layout.sizes["dp"] * layout.sizes["cp"]
    together = layout.sizes["cp"] if layout.sizes["cp"] > 1 else ranks
    return (1, together) if together > 1 else (1,)


def of_steps(
    probed: Overhead,
    scenario: wlb_tools.Scenario,
    tokens: int,
    seconds: Mapping[int, Mapping[int, float]],
    machine: Callable[[wlb_tools.Scenario], tuple[float, float]],
) -> Overhead:
    """With what an op, gathering and a step take beside: from steps of few and of more micro-batches of few tokens.

    A micro-batch more in a step is a forward and a backward more on the longest path: what these take beyond their
    prediction is an op's where every rank has documents of its own, and gathering's where groups share them. The
    machine may have been slower in these steps than in the profile's minutes, or faster, by more than an op is of them:
    they count at the pace of micro-batches that were timed in turn with them, which in turn hold a few ops.

    Args:
        probed: what stages take by themselves.
        scenario: the layout, and what is predicted of it; without overhead.
        tokens: of a rank in each micro-batch of these steps, as :func:`few_tokens`.
        seconds: of a step, by the size of its groups (:func:`group_sizes`) and how many micro-batches a rank has.
        machine: how many times as long as predicted micro-batches took that were timed in turn with these steps, and
            what waiting saves (:mod:`studies.proof.shared`).
    """
    found = probed
    for _ in range(TURNS):
        slower, alone = machine(dataclasses.replace(scenario, overhead=found))
        steadied = {
            size: {count: each / slower for count, each in took.items()} for size, took in sorted(seconds.items())
        }
        found = probed
        for size, took in steadied.items():
            found = _of_groups(found, scenario, size, tokens * size, took, alone)
    return found


def _of_groups(
    known: Overhead, scenario: wlb_tools.Scenario, size: int, length: int, took: Mapping[int, float], alone: float
) -> Overhead:
    """What these steps say: of an op from groups of one rank, of gathering from larger ones, of a step from its own."""
    (few, many), layout = sorted(took), of_size(scenario.layout, size)
    case = dataclasses.replace(scenario, layout=layout, overhead=known)
    passes = pass_seconds(case, [length])

    def predicted(count: int, more: float = 0.0) -> float:
        each = dataclasses.replace(passes, seconds=passes.seconds + np.array([more, more, 0.0]))
        return pipeline_seconds(case, each, count, alone)

    more = ((took[many] - took[few]) - (predicted(many) - predicted(few))) / (2 * (many - few))
    computing = first_rank_seconds(case, [length])
    more = max(more, -float(min(computing[:, 0].min(), computing[:, 1:].sum(axis=1).min())))
    if size == 1:
        lines: list[Any] = [tuple((once + more, *rest) for once, *rest in of) for of in (known.forward, known.backward)]
        known = dataclasses.replace(known, forward=lines[0], backward=lines[1])
    else:
        known = dataclasses.replace(known, gather=more)
    if size == scenario.layout.cp:
        known = dataclasses.replace(known, step=max(0.0, took[few] - predicted(few, more)))
    return known


def pipeline_seconds(scenario: wlb_tools.Scenario, passes: Passes, count: int, alone: float = 1.0) -> float:
    """Predicted seconds of a step of `count` micro-batches that are all alike.

    With what ranks save that share a machine, of which others wait (:mod:`studies.proof.shared`).
    """
    layout = scenario.layout
    timeline = wlb.simulate_pipeline(
        np.repeat(passes.seconds[None], count, axis=0),
        num_stages=layout.pp,
        p2p_seconds=np.repeat(passes.p2p, count),
    )
    works = float(passes.seconds.sum()) - passes.waits
    waits = float(timeline.seconds) - count * works / layout.pp
    return shared.less(float(timeline.seconds), waits, alone, ranks=layout.world_size) + scenario.step_end


def waiting_seconds(scenario: wlb_tools.Scenario, lengths: list[int], count: int) -> Floats:
    """The two steps of :func:`studies.proof.processes.waiting`, predicted.

    Returns:
        float64[2, 2]: of each the seconds that it takes if ranks are no faster while others wait, and how many of them
        are saved if what a rank does then takes no time at all.
    """
    layout = scenario.layout
    if layout.pp > 1:
        passes = pass_seconds(scenario, lengths)
        steps = [
            [pipeline_seconds(scenario, passes, many, alone) for alone in (1.0, 0.0)] for many in (count, 2 * count)
        ]
        return np.array([[full, full - saved] for full, saved in steps])
    alone = dataclasses.replace(scenario, layout=of_size(layout, 1))
    full, few = (
        count * float(pass_seconds(alone, of).seconds.sum()) for of in (lengths, [few_tokens(scenario.context)])
    )
    return np.array([[full + alone.step_end, full - few], [full + alone.step_end, 0.0]])


def pass_seconds(scenario: wlb_tools.Scenario, lengths: list[int]) -> Passes:
    """Of a micro-batch of these documents, which a group of context-parallel ranks shares."""
    shard = _sharded(scenario, lengths)
    attention = _attention(scenario, shard)
    tokens, keys = int(shard.tokens_per_rank.max()), scenario.keys_gathered(shard)

    def of(forward: Floats, backward: Floats) -> StageSeconds:
        return scenario.stage_seconds(
            [tokens], attention_forward=forward[None], attention_backward=backward[None], keys_gathered=[keys]
        )

    slowest, mean = of(*attention.max(axis=1)), of(*attention.mean(axis=1))
    return Passes(
        seconds=(slowest.seconds + scenario.exposed_dp(slowest.seconds))[0],
        p2p=float(slowest.p2p[0]),
        waits=float((slowest.seconds - mean.seconds).sum()),
    )


def first_rank_seconds(scenario: wlb_tools.Scenario, lengths: list[int]) -> Floats:
    """float64[stages, 3]: what the first rank of the group computes of it, without what it sends or waits for."""
    shard = _sharded(scenario, lengths)
    return _computing(scenario, int(shard.tokens_per_rank[0]), _attention(scenario, shard)[:, 0])


def _sharded(scenario: wlb_tools.Scenario, lengths: list[int]) -> wlb.Shard:
    return wlb.shard(lengths, cp_size=scenario.layout.cp, strategy="per_document")


def _attention(scenario: wlb_tools.Scenario, shard: wlb.Shard) -> Floats:
    """float64[2, ranks, kinds] of forward and backward in a layer, with what ranks copy."""
    seconds = np.stack([scenario.rank_seconds(shard, passes=one) for one in _PASSES])  # type: ignore[arg-type]
    return np.asarray(seconds + scenario.overhead.copying(copied(shard))[..., None])


def _computing(scenario: wlb_tools.Scenario, tokens: int, attention: Floats) -> Floats:
    """float64[stages, 3]: what a rank of so many tokens computes, whose `attention` is float64[2, kinds]."""
    forward, backward = attention
    each = scenario.stage_seconds([tokens], attention_forward=forward[None], attention_backward=backward[None])
    return np.asarray(each.computing[0])
