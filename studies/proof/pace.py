"""How fast the machine is while a run lasts, by micro-batches that no method trains, timed in turn with the methods.

A processor that other machines share is faster in one minute than in the next: what was profiled before a run says
little about its seconds. Steps whose micro-batches are all alike show it, of one document, of few and of many. So much
longer as they take than predicted, the methods are predicted to take; the ratios between methods do not change. Nothing
is fitted to what is predicted.

Predictions are graded by what is left of a measurement without the machine's unrest: by the quickest repetitions of a
step (:func:`quiet`), and at the pace of the quickest ones of even micro-batches. Whatever else is in the way only makes
a step longer, by a third or more for some seconds, and medians tell how often it was. Gains are medians of the clock as
it ran.
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

QUICKEST = 2
"""Repetitions of which the mean says what a step takes by itself. The very least may be of one lucky moment."""


def of(took: Floats, predicted: Sequence[float]) -> float:
    """How many times as long as predicted everything takes: the geometric mean over sorts.

    Args:
        took: float64[sorts] seconds of each of :data:`KINDS`.
        predicted: seconds of each.
    """
    return float(np.exp(np.log(took / predicted).mean()))


def quiet(seconds: Floats, axis: int = 0) -> Floats:
    """The mean of the :data:`QUICKEST` repetitions, which are this axis.

    Args:
        seconds: as the clock ran.
        axis: over which.
    """
    return np.asarray(np.sort(seconds, axis=axis).take(range(min(QUICKEST, seconds.shape[axis])), axis).mean(axis))


def alike(took: Floats) -> Floats:
    """float64[...]: what a step takes that is run in all turns of a repetition, as :func:`quiet` says it of another.

    Args:
        took: float64[..., repetitions, turns] seconds.
    """
    return np.asarray(np.median(quiet(took, axis=-2), axis=-1))


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
