"""How fast the machine is while a run lasts, by micro-batches that no method trains, timed in turn with the methods.

A processor that other machines share is faster in one minute than in the next: what was profiled before a run says
little about its seconds. Even micro-batches show it, of few long documents and of many short ones. So much longer as
they take than predicted, the methods are predicted to take; the ratios between methods do not change. Nothing is fitted
to what is predicted. And where the machine is slow for some turns only, what was measured in them counts for as much
less where predictions are graded (:func:`local`); gains are those of the clock as it ran.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import wlb
from studies.proof.batches import Part

Floats = NDArray[np.float64]

KINDS = (4, 16)
"""Documents of a micro-batch that together fill a context."""

NEIGHBOURS = 1
"""Turns before and after one that tell, with it, how fast the machine was in it."""


def of(took: Floats, predicted: Sequence[float]) -> float:
    """How many times as long as predicted everything takes: the geometric mean over sorts.

    Args:
        took: float64[sorts, repetitions, turns] seconds of each of :data:`KINDS`.
        predicted: seconds of each.
    """
    return float(np.exp(np.log(np.median(took, axis=(1, 2)) / predicted).mean()))


def local(took: Floats) -> Floats:
    """float64[repetitions, turns]: how many times as long as usual everything took around each turn.

    The median of what both sorts took in a turn and its :data:`NEIGHBOURS`, each over its median in the whole run.

    Args:
        took: float64[sorts, repetitions, turns] seconds.
    """
    usual = took / np.median(took, axis=(1, 2), keepdims=True)
    turns = range(took.shape[2])
    around = [usual[:, :, max(0, turn - NEIGHBOURS) : turn + NEIGHBOURS + 1] for turn in turns]
    return np.stack([np.median(window, axis=(0, 2)) for window in around], axis=1)


def parts(context: int, cp_size: int) -> list[list[Part]]:
    """Of each sort, the part of every context-parallel rank."""
    return [parts_of(lengths, cp_size) for lengths in documents(context)]


def documents(context: int) -> list[list[int]]:
    """Lengths of the documents of a micro-batch of each sort."""
    return [[context // many] * many for many in KINDS]


def parts_of(lengths: list[int], cp_size: int) -> list[Part]:
    """Of a micro-batch of these documents, the part of every context-parallel rank."""
    shard = wlb.shard(lengths, cp_size=cp_size, strategy="per_document")
    rows = np.arange(len(lengths)), np.zeros(len(lengths), np.int64), np.array(lengths)
    return [Part(*rows, shard, rank, cp_size, None) for rank in range(cp_size)]


def step_seconds(scenario: wlb.Scenario, lengths: Sequence[int], count: int) -> float:
    """Predicted seconds of a step in which every data-parallel rank has `count` micro-batches of these documents."""
    return pipeline_seconds(scenario, *pass_seconds(scenario, lengths), count)


def pipeline_seconds(scenario: wlb.Scenario, costs: Floats, p2p: Floats, count: int) -> float:
    """Predicted seconds of a step of `count` micro-batches that are all alike, by :func:`pass_seconds` of one."""
    timeline = wlb.simulate_pipeline(
        np.repeat(costs, count, axis=0), num_stages=scenario.layout.pp, p2p_seconds=np.repeat(p2p, count)
    )
    return float(timeline.seconds) + scenario.step_end


def pass_seconds(scenario: wlb.Scenario, lengths: Sequence[int], *, alone: bool = False) -> tuple[Floats, Floats]:
    """float64[1, stages, 3] of a micro-batch, float64[1] between its stages.

    Args:
        scenario: the layout, and what is predicted of it.
        lengths: of the documents that a group of context-parallel ranks shares.
        alone: what the slowest rank computes, without what it sends or waits for.
    """
    shard = wlb.shard(lengths, cp_size=scenario.layout.cp, strategy="per_document")
    forward, backward = (scenario.rank_seconds(shard, passes=one).max(axis=0)[None] for one in ("forward", "backward"))
    tokens = [int(shard.tokens_per_rank.max())]
    each = scenario.stage_seconds(tokens, attention_forward=forward, attention_backward=backward)
    if alone:
        return each.computing, each.p2p
    return each.seconds + scenario.exposed_dp(each.seconds), each.p2p
