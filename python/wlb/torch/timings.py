"""The timed parts of a plan, their times on all ranks, and ranks that are slower than comparable ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

import wlb
from wlb._shown import explained

_ROUNDING = 1e-9  # part of a predicted time below which a remainder counts as 0

Plan: TypeAlias = wlb.Packing | wlb.DynamicCpPlan

LEVELS = ("dp", "pp", "cp")
"""Levels at which ranks are compared: replicas, pipeline stages, and ranks with parts of the same documents."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Part:
    """Documents that run together: a micro-batch, or the documents of one group of ranks in it.

    Attributes:
        lengths: Int [documents], tokens.
        ranks: Number of ranks that share the pairs and tokens; each has a part of every document.
        first_rank: The first of these ranks among the data x context ranks; None if the plan does not say.
        other: Seconds that are no cost of documents: the exchange between its ranks.
    """

    lengths: NDArray[np.integer[Any]]
    ranks: int = 1
    first_rank: int | None = None
    other: float = 0.0

    def seconds(self, cost_model: wlb.CostModel) -> float:
        """Seconds of each of the part's ranks, in the unit of the costs."""
        try:
            terms = cost_model.terms
        except wlb.WlbError:  # models from measured tables have no terms
            terms = {}
        documents = terms.get("documents", 0.0) * self.lengths.size
        shared = float(cost_model.cost(self.lengths).sum()) - documents if self.lengths.size else 0.0
        return shared / self.ranks + documents + terms.get("micro_batches", 0.0) + self.other


@dataclass(frozen=True, eq=False)
class PlannedWork:
    """The parts of a plan.

    Attributes:
        plan: The plan of a step.
        parts: Micro-batches of a packing; for a dynamic plan the groups of each micro-batch, one micro-batch after
            another.
    """

    plan: Plan
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, plan: Plan, planned_by: wlb.CostModel) -> PlannedWork:
        """Work of a plan's parts; `planned_by` separates a dynamic plan's work from its exchange."""
        if isinstance(plan, wlb.Packing):
            return cls(plan, tuple(Part(micro_batch.lengths) for micro_batch in plan))
        parts = []
        for group in (group for micro_batch in plan for group in micro_batch):
            alone = Part(group.lengths, group.cp_size, group.first_rank)
            other = group.seconds - alone.seconds(planned_by)
            rounding = other <= _ROUNDING * group.seconds
            parts.append(Part(group.lengths, group.cp_size, group.first_rank, 0.0 if rounding else other))
        return cls(plan, tuple(parts))

    def parts_of(self, rank: int) -> NDArray[np.int64]:
        """int64 [micro-batches]: this data x context rank's part in each micro-batch, if the plan says who has what."""
        return np.array([at for at, part in enumerate(self.parts) if 0 <= rank - (part.first_rank or 0) < part.ranks])

    def imbalance(self, cost_model: wlb.CostModel) -> float:
        """Time of the step over the time of perfectly even work; NaN without work.

        For a packing, the heaviest micro-batch over the mean. For a packing for ranks, the time of the slowest rank (or
        of the slowest in every round) over the mean rank, without the pipeline. For a dynamic plan, the time of the
        pipeline, in which the ranks of a group wait for one another, over the documents' costs on the mean rank of all
        stages: exchange and waiting count as time, not as work.
        """
        seconds = [part.seconds(cost_model) for part in self.parts]
        if isinstance(self.plan, wlb.Packing) and self.plan.dp_size is not None:
            ranks = np.array(seconds)[self.plan.deal(self.plan.dp_size)]
            longest = ranks.max(axis=0).sum() if self.plan.sync == "micro_batch" else ranks.sum(axis=1).max()
            mean = ranks.sum(axis=1).mean()
        elif isinstance(self.plan, wlb.Packing):
            longest, mean = max(seconds), sum(seconds) / len(seconds)
        else:
            costs = (cost_model.cost(part.lengths).sum() for part in self.parts if part.lengths.size)
            longest = self.plan.step_seconds(seconds)
            mean = float(sum(costs)) / (self.plan.world_size * self.plan.num_stages)
        return float(longest / mean) if mean > 0 else float("nan")


def median_error(cost_model: wlb.CostModel, rows: Iterable[tuple[Part, float]]) -> float:
    """Median relative error of costs, in any unit, over measured parts.

    Exchange between ranks is neither in the costs nor in the seconds.
    """
    costs, seconds = np.array([(part.seconds(cost_model) - part.other, seconds) for part, seconds in rows]).T
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = costs / seconds
    return float(np.median(np.abs(ratios / np.median(ratios) - 1)))


@explained
@dataclass(frozen=True)
class LevelReport:
    """Slowdown of one replica, stage or rank against the others, which no cost model of documents can explain.

    Attributes:
        residual: How much longer the slowest took than the mean of its level, over the window: 0.03 is 3 %. For dp,
            each replica's time over the prediction; for pp, each stage's; for cp, each rank's within a micro-batch.
            With dynamic plans, whose groups change, dp compares the single data x context ranks, and there is no cp.
        drift: Growth of the residual from the first half of the window to the second.
        slowest: Index of the slowest in the level.
    """

    residual: float
    drift: float
    slowest: int


class RankPlace(NamedTuple):
    """A rank's index in each level, and among the data x context ranks."""

    dp: int
    pp: int
    cp: int
    tp: int
    data: int


class Measured(NamedTuple):
    """A part of a plan that all its ranks have measured.

    Attributes:
        part: The part.
        dp: Index of the replica; for a dynamic plan, of the first data x context rank.
        seconds: float64 [pp, ranks that share the part].
    """

    part: Part
    dp: int
    seconds: Floats

    @property
    def whole(self) -> float:
        """Seconds through the whole model: for each stage the slowest of the ranks that share the part, summed."""
        return float(self.seconds.max(axis=1).sum())


@dataclass(frozen=True, eq=False)
class TimedPlan:
    """A step and the times of its parts on every rank.

    Attributes:
        work: The parts of its plan.
        times: float64 [ranks, micro-batches of a rank, 2]: index of the part in the plan, and its seconds.
        ranks: The ranks that measured.
    """

    work: PlannedWork
    times: Floats
    ranks: tuple[RankPlace, ...]

    def measured(self) -> Iterator[Measured]:
        """Parts for which all of their ranks have reported times."""
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
                #                 # Tensor-parallel ranks do the same work, so take the slowest; NaN stays NaN.
                cube[rank.pp, place] = np.maximum(cube[rank.pp, place], seconds)
        for index, (dp, cube) in sorted(found.items()):
            if np.isfinite(cube).all() and (cube > 0).all():
                yield Measured(self.work.parts[index], dp, cube)

    def rows(self) -> list[tuple[Part, float]]:
        """Parts and their seconds, without the exchange between their ranks."""
        rows = [(measured.part, measured.whole - measured.part.other) for measured in self.measured()]
        return [row for row in rows if row[1] > 0]


def level_reports(plans: list[TimedPlan], ranks: list[RankPlace], cost_model: wlb.CostModel) -> dict[str, LevelReport]:
    """Compares the ranks of each level that has more than one."""
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
    """Index of the slowest rank, and how far it is above the mean."""
    typical = np.array([np.median(rank) if rank else np.nan for rank in times])
    if np.isnan(typical).any():
        return 0, math.nan
    return int(typical.argmax()), float(typical.max() / typical.mean()) - 1.0
