"""How fast the machine is while a run lasts, by micro-batches that no method trains, timed in turn with the methods.

A processor that other machines share is faster in one minute than in the next: what was profiled before a run says
little about its seconds. Steps whose micro-batches are all alike show it, of one document, of few and of many. So much
longer as they take than predicted, the methods are predicted to take; the ratios between methods do not change. Nothing
is fitted to what is predicted.

Predictions are graded by what is left of a measurement without the machine's unrest. Where it is slow for some turns,
what was measured in them counts for as much less (:func:`local`). And of repetitions the lower quartile counts
(:func:`quiet`): whatever else is in the way only makes a step longer, so that medians differ by how often it was, from
step to step and from run to run. Gains are medians of the clock as it ran.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import wlb
from studies.proof import uneven
from studies.proof.batches import Part

Floats = NDArray[np.float64]

KINDS = (1, 4, 16)
"""Documents of a micro-batch that together nearly fill a context."""

QUIET = 0.25
"""The quantile of repetitions that says what a step takes by itself. The least of all would be that of a turn which
looked slower than it was."""

NEIGHBOURS = 1
"""Turns before and after one that tell, with it, how fast the machine was in it."""


def of(took: Floats, predicted: Sequence[float]) -> float:
    """How many times as long as predicted everything takes: the geometric mean over sorts.

    Args:
        took: float64[sorts] seconds of each of :data:`KINDS`.
        predicted: seconds of each.
    """
    return float(np.exp(np.log(took / predicted).mean()))


def usual(took: Floats) -> Floats:
    """float64[sorts]: medians, of float64[sorts, repetitions, turns] seconds."""
    return np.asarray(np.median(took, axis=(1, 2)))


def quiet(seconds: Floats, axis: int | tuple[int, ...] = 0) -> Floats:
    """The lower quartile over repetitions, which are this axis.

    Args:
        seconds: each repetition over how slow the machine was around it (:func:`local`).
        axis: over which.
    """
    return np.asarray(np.quantile(seconds, QUIET, axis=axis))


def quieter(took: Floats) -> float:
    """How many times as long as usual everything takes without the machine's unrest; as :func:`of`, below 1.

    Args:
        took: float64[sorts, repetitions, turns] seconds.
    """
    return of(quiet(took / local(took), axis=(1, 2)), usual(took).tolist())


def local(took: Floats) -> Floats:
    """float64[repetitions, turns]: how many times as long as usual everything took around each turn.

    The median of what all sorts took in a turn and its :data:`NEIGHBOURS`, each over its median in the whole run.

    Args:
        took: float64[sorts, repetitions, turns] seconds.
    """
    relative = took / usual(took)[:, None, None]
    turns = range(took.shape[2])
    around = [relative[:, :, max(0, turn - NEIGHBOURS) : turn + NEIGHBOURS + 1] for turn in turns]
    return np.stack([np.median(window, axis=(0, 2)) for window in around], axis=1)


def documents(context: int) -> list[list[int]]:
    """Lengths of the documents of a micro-batch of each sort."""
    return [uneven(context, many) for many in KINDS]


def parts_of(
    lengths: list[int], cp_size: int, first_rank: int | None = None, *, strategy: str = "per_document"
) -> list[Part]:
    """Of a micro-batch of these documents, the part of every context-parallel rank.

    Args:
        lengths: of the documents.
        cp_size: ranks of the group.
        first_rank: of the group, where a plan chooses groups.
        strategy: of sharding.
    """
    shard = wlb.shard(lengths, cp_size=cp_size, strategy=strategy)
    rows = np.arange(len(lengths)), np.zeros(len(lengths), np.int64), np.array(lengths)
    return [Part(*rows, shard, rank, cp_size, first_rank) for rank in range(cp_size)]
