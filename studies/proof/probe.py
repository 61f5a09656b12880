"""What a trainer takes beside its layers and links, measured on micro-batches and steps that no method trains.

A profile times kernels and a layer by themselves. A stage also launches, embeds, gathers and copies keys, and has a
loss. Micro-batches of documents of all lengths show what that takes. Nothing is fitted to what is predicted.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import wlb
import wlb_tools
from studies.gpu import echo
from studies.proof import Bench, uneven
from studies.proof.batches import Text
from studies.proof.pace import parts_of
from studies.proof.slices import Stages, clock_of
from wlb_tools.cluster.overhead import Overhead, copied
from wlb_tools.cluster.step_time import StageSeconds

Floats = NDArray[np.float64]
REPEATS = 11
ROUNDS = 200
SMALL = 1e-4
"""An error, of what is measured, that is no smaller than others to `least_absolute`."""

_PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Passes:
    """Of a micro-batch on the slowest of the ranks that share its documents."""

    seconds: Floats  # [stages, 3]
    p2p: float  # between its stages


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
) -> Probed:
    """Runs every shape's first two ranks by themselves, in turn and again, and fits what is beside the prediction.

    Of each stage and pass the seconds beyond the profile's layers are a constant and so much for each token of the
    rank; of each layer a share of attention's seconds, and so much for each token that attends in two calls and for
    each key that is picked from gathered ones (`wlb_tools.cluster.Overhead.copies`); for the least sum of
    relative errors.

    Sharded document by document all tokens of a first rank attend in two calls, and no others do.

    Args:
        bench: the model.
        scenario: the layout, and the profile; without overhead.
        sizes: of groups of context-parallel ranks.
        device: where.
        thread_clock: see `studies.proof.slices.measure`.
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

    with echo.ranks(max(sizes)):
        once(seconds[0])  # to warm up
        for repeat in range(REPEATS):
            once(seconds[repeat])
    return fit(np.median(seconds, axis=0), predicted, terms, scenario.layout.layers_of_stages(bench.model))


def fit(measured: Floats, predicted: Floats, terms: Floats, layers: NDArray[np.int64]) -> Probed:
    """See `stages`.

    Args:
        measured: float64[parts, stages, 2] seconds of forward and backward.
        predicted: float64[parts, stages, 2] of layers and output projection by the profile.
        terms: float64[parts, 2, 4] by pass: tokens of the rank; of a layer seconds of attention, tokens whose keys are
            exchanged, and keys that are picked.
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


def pipeline_seconds(scenario: wlb_tools.Scenario, passes: Passes, count: int) -> float:
    """Predicted seconds of a step of `count` micro-batches that are all alike."""
    timeline = wlb.simulate_pipeline(
        np.repeat(passes.seconds[None], count, axis=0),
        num_stages=scenario.layout.pp,
        p2p_seconds=np.repeat(passes.p2p, count),
    )
    return float(timeline.seconds) + scenario.step_end


def pass_seconds(scenario: wlb_tools.Scenario, lengths: list[int]) -> Passes:
    """Of a micro-batch of these documents, which a group of context-parallel ranks shares."""
    shard = _sharded(scenario, lengths)
    attention = _attention(scenario, shard)
    tokens, keys = int(shard.tokens_per_rank.max()), scenario.keys_exchanged(shard)

    def of(forward: Floats, backward: Floats) -> StageSeconds:
        return scenario.stage_seconds(
            [tokens],
            attention_forward=forward[None],
            attention_backward=backward[None],
            keys_gathered=[keys[0]],
            keys_moved=[keys[1]],
        )

    slowest = of(*attention.max(axis=1))
    return Passes(seconds=(slowest.seconds + scenario.exposed_dp(slowest.seconds))[0], p2p=float(slowest.p2p[0]))


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
