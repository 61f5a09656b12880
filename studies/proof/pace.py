"""How fast the machine is while a run lasts, by micro-batches that no method trains, timed in turn with the methods.

A processor that other machines share is faster in one minute than in the next: what was profiled before a run says
little about its seconds. Steps whose micro-batches are all alike show it, of one document, of few and of many. So much
longer as they take than predicted, the methods are predicted to take; the ratios between methods do not change. Nothing
is fitted to what is predicted.
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


def of(took: Floats, predicted: Sequence[float]) -> float:
    """How many times as long as predicted everything takes: the geometric mean over sorts.

    Args:
        took: float64[sorts] seconds of each of `KINDS`.
        predicted: seconds of each.
    """
    return float(np.exp(np.log(took / predicted).mean()))


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
