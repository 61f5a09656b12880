"""Timings of all ranks, put together: what each part of a plan took, and which rank is slower than its like."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import wlb
from wlb.torch.data.work import Part, PlannedWork

LEVELS = ("dp", "pp", "cp")
"""Ranks that differ in this: replicas, pipeline stages, parts of the same documents."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LevelReport:
    """How much slower one replica, stage or rank is than the others: a cost model, which knows documents, cannot say.

    Attributes:
        residual: How much longer the slowest took than the mean of its level, over the window: 0.03 is 3 %. Of dp: time
            over what the fit predicts, replica by replica; of pp: stage by stage; of cp: rank by rank of a micro-batch.
            Under dynamic plans, whose groups change, dp are the data x context ranks, one by one, and there is no cp.
        drift: By how much that grew from the first half of the window to the second.
        slowest: Which of the level it is.
    """

    residual: float
    drift: float
    slowest: int


class RankPlace(NamedTuple):
    """A rank's place in each level, and among the data x context ranks."""

    dp: int
    pp: int
    cp: int
    tp: int
    data: int


class Measured(NamedTuple):
    """A part of a plan that all its ranks have measured.

    Attributes:
        part: Which.
        dp: The replica; of a dynamic plan the first of the data x context ranks.
        seconds: float64 [pp, ranks that share it].
    """

    part: Part
    dp: int
    seconds: Floats

    @property
    def whole(self) -> float:
        """Seconds through the whole model: the slowest of the ranks that share it, and its stages one by one."""
        return float(self.seconds.max(axis=1).sum())


@dataclass(frozen=True, eq=False)
class TimedPlan:
    """A step and what its parts took on every rank.

    Attributes:
        work: Its plan.
        times: float64 [ranks, micro-batches of a rank, 2]: which part of the plan, and its seconds.
        ranks: Who measured.
    """

    work: PlannedWork
    times: Floats
    ranks: tuple[RankPlace, ...]

    def measured(self) -> Iterator[Measured]:
        """Those parts that every rank of theirs has told of."""
        stages, width = (1 + max(getattr(rank, name) for rank in self.ranks) for name in ("pp", "cp"))
        found: dict[int, tuple[int, Floats]] = {}
        for rank, rows in zip(self.ranks, self.times, strict=True):
            for index, seconds in rows[~np.isnan(rows[:, 0])].tolist():
                part = self.work.parts[int(index)]
                if part.first_rank is None:
                    dp, place, shared_by = rank.dp, rank.cp, width
                else:
                    dp, place, shared_by = part.first_rank, rank.data - part.first_rank, part.ranks
                _, cube = found.setdefault(int(index), (dp, np.zeros((stages, shared_by))))
                # Tensor-parallel ranks do the same; NaN stays NaN.
                cube[rank.pp, place] = np.maximum(cube[rank.pp, place], seconds)
        for index, (dp, cube) in sorted(found.items()):
            if np.isfinite(cube).all() and (cube > 0).all():
                yield Measured(self.work.parts[index], dp, cube)

    def rows(self) -> list[tuple[Part, float]]:
        """Parts and their seconds, without what their ranks exchange."""
        rows = [(measured.part, measured.whole - measured.part.other) for measured in self.measured()]
        return [row for row in rows if row[1] > 0]


def level_reports(plans: list[TimedPlan], ranks: list[RankPlace], cost_model: wlb.CostModel) -> dict[str, LevelReport]:
    """What each level's ranks take beside each other, of levels that have several."""
    dynamic = any(isinstance(plan.work.plan, wlb.DynamicCpPlan) for plan in plans)
    sizes = {name: 1 + max(getattr(rank, name) for rank in ranks) for name in LEVELS}
    if dynamic:
        sizes |= {"dp": 1 + max(rank.data for rank in ranks), "cp": 1}
    halves = []
    for half in np.array_split(np.arange(len(plans)), 2):
        times: dict[str, list[list[float]]] = {name: [[] for _ in range(size)] for name, size in sizes.items()}
        for measured in (measured for at in half.tolist() for measured in plans[at].measured()):
            by_rank, by_stage = measured.seconds.sum(axis=0), measured.seconds.max(axis=1)
            expected = measured.part.seconds(cost_model)
            if expected > 0:
                for at, seconds in enumerate(by_rank if dynamic else [measured.whole]):
                    times["dp"][measured.dp + at].append(float(seconds) / expected)
            for name, seconds_of in (("pp", by_stage), ("cp", by_rank)):
                if sizes[name] > 1:
                    for at, share in enumerate((seconds_of / seconds_of.mean()).tolist()):
                        times[name][at].append(share)
        halves.append(times)
    reports = {}
    for name in (name for name, size in sizes.items() if size > 1):
        both = [[first + second for first, second in zip(*(half[name] for half in halves), strict=True)]]
        found = [_slowest(times) for times in (*both, *(half[name] for half in halves))]
        (slowest, residual), (_, before), (_, after) = found
        reports[name] = LevelReport(residual, after - before, slowest)
    return reports


def _slowest(times: list[list[float]]) -> tuple[int, float]:
    """Which of some ranks is slowest, and by how much it is above their mean."""
    typical = np.array([np.median(rank) if rank else np.nan for rank in times])
    if np.isnan(typical).any():
        return 0, math.nan
    return int(typical.argmax()), float(typical.max() / typical.mean()) - 1.0
