"""Fits costs during training: ranks gather the times of micro-batches, and all fit the same cost model."""

from __future__ import annotations

import hashlib
import math
import re
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

import wlb
from wlb._errors import check_integer, error
from wlb._shown import explained
from wlb.torch.agreement import check_agreement
from wlb.torch.collectives import device_of
from wlb.torch.groups import ranks_of_step
from wlb.torch.timing import StepTimer, TimedStep
from wlb.torch.timings import LEVELS, LevelReport, PlannedWork, RankPlace, TimedPlan, level_reports, median_error

MOST_SHARE_ERROR = 0.1
"""Largest standard error of a term's share of all time with which a fit is used; above it the fit is a guess."""


@explained
@dataclass(frozen=True)
class CostUpdate:
    """Result of one fit to the timings, equal on every rank.

    Attributes:
        step: Number of steps that were trained.
        fit: The fitted costs; None if there were too few timings.
        error_in_use: Median relative error of the costs in use over the same rows, after the best common factor.
        problem: Why there is no fit, or why it is not good enough to plan with; "" for a good one.
        imbalance: Mean imbalance of the steps since the last update, by the fitted costs.
        believed: Mean imbalance of these steps by the costs in use.
        levels: Reports for "dp", "pp" and "cp", where there is more than one rank.
    """

    step: int
    fit: wlb.CostFit | None = None
    error_in_use: float = math.nan
    problem: str = ""
    imbalance: float = math.nan
    believed: float = math.nan
    levels: dict[str, LevelReport] | None = None

    @property
    def cost_model(self) -> wlb.CostModel | None:
        """The fitted costs, for `packer.set_cost_model`; None if there is no fit that is good enough."""
        return None if self.fit is None or self.problem else self.fit.cost_model

    def report(self) -> str:
        """A few lines for a log."""
        if self.fit is None:
            return f"costs after step {self.step}: no fit: {self.problem}"
        lines = [
            f"costs after step {self.step}: imbalance {self.imbalance:.4f} by what was measured, "
            f"{self.believed:.4f} by the costs in use",
            *(
                f"  {name}: {level.slowest} is slowest, {level.residual:+.1%} over the mean, drift {level.drift:+.1%}"
                for name, level in (self.levels or {}).items()
            ),
        ]
        if self.problem:
            lines.append(f"  {self.problem}")
        return "\n".join([*lines, self.fit.report()])


class CostTracker:
    """Fits the cost of documents to times that the run itself measures.

        tracker = wt.CostTracker(packer.cost_model, every=50, mesh=mesh)
        for number in range(steps):
            step = ...                               # packer.push(...), and which of its micro-batches are this rank's
            for index, batch in enumerate(step.micro_batches):
                with tracker.timer.micro_batch(index):
                    ...                              # forward and backward
            optimizer.step()
            update = tracker.step(step)
            if update is not None and update.cost_model is not None:
                packer.set_cost_model(update.cost_model)
                tracker.cost_model = update.cost_model

    After every `every` steps the ranks gather the times of their micro-batches, and all fit the same costs
    (`CostModel.fit`) to the last four gatherings. `CostUpdate.cost_model` is None if the fit explains the times no
    better than the costs in use, or if a share has a standard error of more than a tenth of all time. The tracker
    changes no
    plan: the caller decides. A loader plans ahead of training, so its costs cannot change meanwhile: make a new loader
    whose packer has the new costs, and call `load_state_dict(step.state, allow_config_change=True)`.

    With a `DynamicCpLoader`, groups of ranks that share documents are timed. The imbalance is then the step's time
    through all micro-batches and stages (`DynamicCpPlan.step_seconds`) over the work of the mean rank. Exchange between
    ranks, as the planner was told, is subtracted from the times first.

    Args:
        cost_model: The costs that plans use now: `packer.cost_model`. Its sizes of sliding windows and chunks are the
            ones that are fitted.
        every: Steps between two updates.
        mesh: From `build_mesh`, where ranks have other roles than data parallelism. All ranks call `step` together.
        timer: Timer of this rank, if one is in use already.

    Attributes:
        cost_model: The costs in use. Set it when plans change theirs, on all ranks at the same step.
        timer: Times the micro-batches of this rank.
        updates: The latest 100 updates.

    Raises:
        WlbError: An argument makes no sense.
    """

    def __init__(
        self,
        cost_model: wlb.CostModel,
        *,
        every: int = 50,
        mesh: DeviceMesh | None = None,
        timer: StepTimer | None = None,
    ) -> None:
        check_integer("every", every, minimum=1)
        if not isinstance(cost_model, wlb.CostModel):
            message = f"is a {type(cost_model).__name__}: give the CostModel that plans are made by"
            raise error("cost_model", message, value=type(cost_model).__name__)
        self.cost_model = cost_model
        self._every = every
        self._windows, self._chunks = _local_attention(cost_model, "window"), _local_attention(cost_model, "chunk")
        self._mesh = mesh
        self.timer = timer or StepTimer()
        self.updates: deque[CostUpdate] = deque(maxlen=100)
        self._plans: dict[int, PlannedWork] = {}  # of steps whose timings were not gathered
        self._mine: dict[int, NDArray[np.int64]] = {}  # which parts of these are this rank's
        self._data = 0  # this rank's place in dynamic plans
        self._timed: dict[int, TimedStep] = {}
        self._gathered: deque[TimedPlan] = deque(maxlen=4 * every)
        self._steps = 0

    def step(self, step: Any) -> CostUpdate | None:
        """Ends a trained step; a collective after every `every` of them, by the number of the step.

        Args:
            step: The `Step` that was trained: its number, its plan and which of its micro-batches are this rank's. Or
                the `DynamicCpStep`, which has the rank instead.

        Returns:
            The update, in a step that made one.

        Raises:
            WlbError: The step has no plan of wlb; without a mesh, not all ranks share the step; or ranks differ in the
                number of the step, the settings, the costs in use or the fitted costs, and are named.
        """
        plan = getattr(step, "packing", None) or getattr(step, "plan", None)
        if not isinstance(plan, wlb.Packing | wlb.DynamicCpPlan):
            raise error("step", f"is a {type(step).__name__} without a Packing: its costs are not the packer's")
        if self._mesh is None and hasattr(step, "num_ranks"):
            ranks_of_step(step)
        number = int(step.number)
        self.timer.end_step(step)
        self._plans[number] = work = PlannedWork.of(plan, self.cost_model)
        if isinstance(plan, wlb.Packing):
            self._mine[number] = step.indices
        else:
            self._data, self._mine[number] = step.rank, work.parts_of(step.rank)
        self._steps = number + 1
        self._timed.update((timed.number, timed) for timed in self.timer.read())
        if self._steps % self._every:
            return None
        update = self._look()
        self.updates.append(update)
        return update

    def _look(self) -> CostUpdate:
        steps, ranks = self._gather()
        self._gathered.extend(steps)
        rows = [row for step in self._gathered for row in step.rows()]
        lengths, shared = [part.lengths for part, _ in rows], np.array([part.ranks for part, _ in rows], np.int64)
        seconds = [seconds for _, seconds in rows]
        now = self.cost_model
        try:
            fit = wlb.CostModel.fit(
                lengths, seconds, ranks=shared, windows=self._windows, chunks=self._chunks, causal=now.causal
            )
        except wlb.WlbError as cause:
            fit, update = None, CostUpdate(self._steps, problem=str(cause))
        if fit is not None:
            error_in_use = median_error(now, rows)
            update = self._judged(fit, [step.work for step in steps], ranks)
            update = replace(update, error_in_use=error_in_use, problem=_problem(fit, error_in_use))
        if dist.is_initialized():
            content = repr((now, fit and fit.cost_model))
            digest = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
            check_agreement(digest, step=self._steps)
        return update

    def _judged(self, fit: wlb.CostFit, plans: list[PlannedWork], ranks: list[RankPlace]) -> CostUpdate:
        both = np.array([[work.imbalance(fit.cost_model), work.imbalance(self.cost_model)] for work in plans])
        both = both[~np.isnan(both).any(axis=1)]
        shown, believed = both.mean(axis=0).tolist() if len(both) else (math.nan, math.nan)
        levels = level_reports(list(self._gathered), ranks, fit.cost_model)
        return CostUpdate(self._steps, fit, imbalance=shown, believed=believed, levels=levels)

    def _gather(self) -> tuple[list[TimedPlan], list[RankPlace]]:
        """Timings of all ranks since the last update, by step; timings that a rank does not know yet are missing."""
        numbers = sorted(self._plans)
        per_rank = max((self._mine[number].size for number in numbers), default=0)
        role = [0, 0, 0, 0] if self._mesh is None else [self._mesh[name].get_local_rank() for name in (*LEVELS, "tp")]
        alone = not dist.is_initialized()
        if self._mesh is None and not alone:
            role[0] = dist.get_rank()
        settings = hashlib.blake2b(repr((self._every, self._windows, self._chunks)).encode(), digest_size=6)
        known = int.from_bytes(settings.digest(), "little")
        head = [self._steps, len(numbers), per_rank, known, *role, self._data]
        heads = self._all_gather(torch.tensor(head, dtype=torch.int64))
        for what, column in (
            ("steps trained", 0),
            ("steps since the last look", 1),
            ("micro-batches", 2),
            ("settings", 3),
        ):
            found = heads[:, column]
            if (found != found[0]).any():
                values, counts = np.unique(found, return_counts=True)
                common = values[counts.argmax()]
                others = np.flatnonzero(found != common).tolist()
                message = f"differs between ranks: ranks {others} have other {what}"
                raise error("step", message, value=self._steps)
        times = np.full((len(numbers), per_rank, 2), np.nan)
        for at, number in enumerate(numbers):
            mine, timed = self._mine[number], self._timed.get(number)
            times[at, : mine.size, 0] = mine
            if timed is not None:
                times[at, : mine.size, 1] = timed.seconds
        everyone = self._all_gather(torch.from_numpy(times).flatten()).reshape(len(heads), *times.shape)
        ranks = [RankPlace(*row[4:].tolist()) for row in heads]
        gathered = [TimedPlan(self._plans[number], everyone[:, at], tuple(ranks)) for at, number in enumerate(numbers)]
        self._plans, self._mine, self._timed = {}, {}, {}
        return gathered, ranks

    def _all_gather(self, mine: torch.Tensor) -> NDArray[Any]:
        if not dist.is_initialized():
            return mine.numpy()[None]
        size, device = dist.get_world_size(), device_of()
        everyone = torch.empty(size * mine.numel(), dtype=mine.dtype, device=device)
        dist.all_gather_into_tensor(everyone, mine.to(device))
        return everyone.cpu().numpy().reshape(size, mine.numel())


def _local_attention(cost_model: wlb.CostModel, kind: str) -> tuple[int, ...]:
    """Sizes of the sliding windows ("window") or chunks ("chunk") in the terms of a cost model.

    Measured tables have none: their rates of attention hold for all layers together.
    """
    try:
        names = cost_model.terms
    except wlb.WlbError:
        return ()
    found = (re.fullmatch(rf"{kind}_pairs\[(\d+)\]", name) for name in names)
    return tuple(int(size[1]) for size in found if size is not None)


def _problem(fit: wlb.CostFit, error_in_use: float) -> str:
    """Why a fit should not be used for planning; empty if there is no reason."""
    worst = max(fit.rates, key=lambda name: fit.share_errors[name] if fit.rates[name] else 0.0)
    if fit.share_errors[worst] > MOST_SHARE_ERROR:
        return f"the share of {worst} is not known well enough: +- {fit.share_errors[worst]:.0%}"
    if fit.held_out_error >= error_in_use:
        return f"the fit is off by {fit.held_out_error:.1%}, the costs in use by {error_in_use:.1%}: no better"
    return ""
