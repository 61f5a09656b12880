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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import wlb
from studies.proof import Bench, Layout, echo, shared, system, unaligned, uneven
from studies.proof.batches import Text
from studies.proof.pace import parts_of
from studies.proof.slices import Stages, clock_of
from wlb.cluster.overhead import Overhead, of_group
from wlb.simulation.planner import of_size

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
class Probed:
    """What a probe of stages says."""

    overhead: Overhead
    attention: tuple[float, float]  # forward and backward in the trainer, over what the profile has
    error: float  # of the probe's own micro-batches, predicted with these: median, without sign


def shapes(bench: Bench, sizes: list[int]) -> list[tuple[int, list[int], str]]:
    """Groups of ranks, and the documents of a micro-batch of theirs: from few tokens to two contexts, few or many.

    Sharded document by document, in which case a rank gathers keys for all its tokens, and as one sequence, in which
    case for few of them: else what gathering takes would not be told from what tokens take.

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
    scenario: wlb.Scenario,
    sizes: list[int],
    *,
    device: torch.device,
    thread_clock: bool,
    neighbours: int = 0,
) -> Probed:
    """Runs every shape's first rank by itself, in turn and again, and fits what is beside the prediction.

    Of each stage and pass the seconds beyond the profile's layers are a constant, so much for each token of the rank,
    so much for each token that its group gathers keys of, and a share of attention's seconds, for the least sum
    of relative errors.

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
    made = shapes(bench, sizes)
    seconds = np.zeros((REPEATS, len(made), count, 2))
    terms = np.zeros((len(made), 2, 3))  # tokens of the rank, those whose keys are gathered, a layer's attention
    predicted = np.zeros((len(made), count, 2))
    parts = []
    for index, (size, lengths, strategy) in enumerate(made):
        parts.append(parts_of(lengths, size, strategy=strategy)[0])
        shard = parts[-1].shard
        tokens = int(shard.tokens_per_rank[0])
        attention = [scenario.rank_seconds(shard, passes=one)[0] for one in _PASSES]  # type: ignore[arg-type]
        keys = min(tokens, scenario.keys_gathered(shard))  # the fullest rank may have a token more
        each = scenario.stage_seconds(
            [tokens],
            attention_forward=attention[0][None],
            attention_backward=attention[1][None],
            keys_gathered=[keys],
        )
        computing = each.computing[0]
        predicted[index] = np.stack([computing[:, 0], computing[:, 1:].sum(axis=1)], axis=1)
        for one in range(2):
            terms[index, one] = tokens, float(of_group(keys, size)), float(attention[one].sum())

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
        measured: float64[shapes, stages, 2] seconds of forward and backward.
        predicted: float64[shapes, stages, 2] of layers and output projection by the profile.
        terms: float64[shapes, 2, 3] by pass: tokens of the rank, tokens whose keys are gathered, seconds of attention
            in one layer.
        layers: int64[stages].
    """
    lines: list[list[tuple[float, float, float]]] = [[], []]
    shares, errors = [], []
    for one in range(2):
        # A constant, tokens and keys of every stage; the share of attention is that of all stages.
        width = measured.shape[1]
        columns = np.zeros((*measured.shape[:2], 3 * width + 1))
        for stage in range(width):
            columns[:, stage, 3 * stage] = 1.0
            columns[:, stage, 3 * stage + 1 : 3 * stage + 3] = terms[:, one, :2]
            columns[:, stage, -1] = layers[stage] * terms[:, one, 2]
        weights = 1 / measured[..., one]
        rows = (columns * weights[..., None]).reshape(-1, columns.shape[-1])
        beyond = ((measured - predicted)[..., one] * weights).ravel()
        found = least_absolute(rows, beyond)
        lines[one] = [tuple(found[3 * stage : 3 * stage + 3].tolist()) for stage in range(width)]
        shares.append(1 + float(found[-1]))
        errors.append(np.abs(rows @ found - beyond))
    overhead = Overhead(forward=tuple(lines[0]), backward=tuple(lines[1]))
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
    scenario: wlb.Scenario,
    tokens: int,
    seconds: Mapping[int, Mapping[int, float]],
    machine: Callable[[wlb.Scenario], tuple[float, float]],
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
    known: Overhead, scenario: wlb.Scenario, size: int, length: int, took: Mapping[int, float], alone: float
) -> Overhead:
    """What these steps say: of an op from groups of one rank, of gathering from larger ones, of a step from its own."""
    (few, many), layout = sorted(took), of_size(scenario.layout, size)
    case = dataclasses.replace(scenario, layout=layout, overhead=known)
    costs, p2p = pass_seconds(case, [length])

    def predicted(count: int, more: float = 0.0) -> float:
        each = costs.copy()
        each[..., :2] += more
        return pipeline_seconds(case, each, p2p, count, alone)

    more = ((took[many] - took[few]) - (predicted(many) - predicted(few))) / (2 * (many - few))
    (computing,), _ = pass_seconds(case, [length], computing=True)
    more = max(more, -float(min(computing[:, 0].min(), computing[:, 1:].sum(axis=1).min())))
    if size == 1:
        lines: list[Any] = [tuple((once + more, *rest) for once, *rest in of) for of in (known.forward, known.backward)]
        known = dataclasses.replace(known, forward=lines[0], backward=lines[1])
    else:
        known = dataclasses.replace(known, gather=more)
    if size == scenario.layout.cp:
        known = dataclasses.replace(known, step=max(0.0, took[few] - predicted(few, more)))
    return known


def pipeline_seconds(scenario: wlb.Scenario, costs: Floats, p2p: Floats, count: int, alone: float = 1.0) -> float:
    """Predicted seconds of a step of `count` micro-batches that are all alike, by :func:`pass_seconds` of one.

    With what ranks save that share a machine, of which others wait (:mod:`studies.proof.shared`).
    """
    timeline = wlb.simulate_pipeline(
        np.repeat(costs, count, axis=0), num_stages=scenario.layout.pp, p2p_seconds=np.repeat(p2p, count)
    )
    layout = scenario.layout
    waits = float(timeline.seconds) - count * float(costs.sum()) / layout.pp
    return shared.less(float(timeline.seconds), waits, alone, ranks=layout.world_size) + scenario.step_end


def waiting_seconds(scenario: wlb.Scenario, lengths: list[int], count: int) -> Floats:
    """The two steps of :func:`studies.proof.processes.waiting`, predicted.

    Returns:
        float64[2, 2]: of each the seconds that it takes if ranks are no faster while others wait, and how many of them
        are saved if what a rank does then takes no time at all.
    """
    layout = scenario.layout
    if layout.pp > 1:
        passes = pass_seconds(scenario, lengths)
        steps = [
            [pipeline_seconds(scenario, *passes, many, alone) for alone in (1.0, 0.0)] for many in (count, 2 * count)
        ]
        return np.array([[full, full - saved] for full, saved in steps])
    alone = dataclasses.replace(scenario, layout=of_size(layout, 1))
    full, few = (count * float(pass_seconds(alone, of)[0].sum()) for of in (lengths, [few_tokens(scenario.context)]))
    return np.array([[full + alone.step_end, full - few], [full + alone.step_end, 0.0]])


def pass_seconds(scenario: wlb.Scenario, lengths: Sequence[int], *, computing: bool = False) -> tuple[Floats, Floats]:
    """float64[1, stages, 3] of a micro-batch, float64[1] between its stages.

    Args:
        scenario: the layout, and what is predicted of it.
        lengths: of the documents that a group of context-parallel ranks shares.
        computing: what the slowest rank computes, without what it sends or waits for.
    """
    shard = wlb.shard(lengths, cp_size=scenario.layout.cp, strategy="per_document")
    forward, backward = (scenario.rank_seconds(shard, passes=one).max(axis=0)[None] for one in ("forward", "backward"))
    tokens = [int(shard.tokens_per_rank.max())]
    keys = [scenario.keys_gathered(shard)]
    each = scenario.stage_seconds(tokens, attention_forward=forward, attention_backward=backward, keys_gathered=keys)
    if computing:
        return each.computing, each.p2p
    return each.seconds + scenario.exposed_dp(each.seconds), each.p2p
