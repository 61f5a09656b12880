"""A plan as costs see it: the parts that are timed one by one, what each costs, and how level they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import wlb

Plan: TypeAlias = wlb.Packing | wlb.DynamicCpPlan
Replan: TypeAlias = Callable[[NDArray[np.int64], wlb.CostModel, Any], Plan]
"""Plans documents of these lengths by other costs, as the plan that is given was made; it may leave some over."""

_ROUNDING = 1e-9  # of a predicted time: what is left of it is nothing


@dataclass(frozen=True, eq=False)
class Part:
    """Documents that run together: a micro-batch, or what a group of ranks has in one.

    Attributes:
        lengths: Int [documents], tokens.
        ranks: That share the pairs and tokens, each of them a part of every document.
        first_rank: The first of them among the data x context ranks; None where the plan does not say who they are.
        other: Seconds of it that are no cost of documents: what its ranks exchange.
    """

    lengths: NDArray[np.integer[Any]]
    ranks: int = 1
    first_rank: int | None = None
    other: float = 0.0

    def seconds(self, cost_model: wlb.CostModel) -> float:
        """What each of its ranks takes, in the unit of the costs."""
        try:
            terms = cost_model.terms
        except wlb.WlbError:  # measured tables have none
            terms = {}
        documents = terms.get("documents", 0.0) * self.lengths.size
        shared = float(cost_model.cost(self.lengths).sum()) - documents if self.lengths.size else 0.0
        return shared / self.ranks + documents + terms.get("micro_batches", 0.0) + self.other


@dataclass(frozen=True, eq=False)
class PlannedWork:
    """The parts of a plan.

    Attributes:
        plan: Of a step.
        parts: Micro-batches of a packing; of a dynamic plan the groups of each, micro-batch by micro-batch.
    """

    plan: Plan
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, plan: Plan, planned_by: wlb.CostModel) -> PlannedWork:
        """Of a plan and the costs that made it, which tell a dynamic plan's work from what its ranks exchange."""
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
        """int64 [micro-batches]: the part that a data x context rank has of each, where the plan says who has what."""
        return np.array([at for at, part in enumerate(self.parts) if 0 <= rank - (part.first_rank or 0) < part.ranks])

    def imbalance(self, cost_model: wlb.CostModel) -> float:
        """How much longer the step takes than all work spread evenly; NaN without any.

        Of a packing, the heaviest micro-batch over the mean; of one for ranks, the time of the slowest rank, or of the
        slowest in every round, over that of the mean rank; their pipeline is left out. Of a dynamic plan the pipeline,
        in which the ranks of a group wait for one another, over the documents' costs on the mean rank of all stages:
        what ranks exchange, and where they wait for each other, counts as time, and not as work.
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

    def shares(self, cost_model: wlb.CostModel) -> NDArray[np.float64]:
        """float64 [parts]: of what they take together."""
        seconds = np.array([part.seconds(cost_model) for part in self.parts])
        return np.asarray(seconds / seconds.sum())

    def again(self, replan: Replan, cost_model: wlb.CostModel) -> float:
        """The imbalance of the same documents planned anew by these costs; infinite where they do not fit so."""
        lengths = np.concatenate([part.lengths for part in self.parts]).astype(np.int64)
        try:
            plan = replan(lengths, cost_model, self.plan)
        except wlb.WlbError:
            return float("inf")
        if isinstance(plan, wlb.Packing) and plan.leftover.size:
            return float("inf")
        return PlannedWork.of(plan, cost_model).imbalance(cost_model)


def replan_as(packer: wlb.Packer) -> Replan:
    """Plans the documents of one of this packer's steps anew."""
    options: dict[str, Any] = {"max_tokens": packer.max_tokens, "method": packer.method}
    if packer.dp_size is None and packer.max_documents is None:
        options["leftover"] = "return"
    else:
        options |= {"dp_size": packer.dp_size, "max_documents": packer.max_documents}
    if packer.sync is not None:
        options["sync"] = packer.sync
    return functools.partial(_pack_again, **options)


def _pack_again(
    lengths: NDArray[np.int64], cost_model: wlb.CostModel, plan: wlb.Packing, *, max_tokens: int, **options: Any
) -> wlb.Packing:
    largest = max(int(plan.tokens.max()), max_tokens)
    return wlb.pack(lengths, num_micro_batches=len(plan), max_tokens=largest, cost_model=cost_model, **options)


def median_error(cost_model: wlb.CostModel, rows: Iterable[tuple[Part, float]]) -> float:
    """Median relative error of costs, in any unit, over measured parts.

    What ranks exchange is no cost, and neither is it in the seconds.
    """
    costs, seconds = np.array([(part.seconds(cost_model) - part.other, seconds) for part, seconds in rows]).T
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = costs / seconds
    return float(np.median(np.abs(ratios / np.median(ratios) - 1)))
