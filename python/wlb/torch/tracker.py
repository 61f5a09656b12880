"""Costs learnt while training: ranks gather what micro-batches took, fit one model, and plan by it where it pays."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

import wlb
from wlb._errors import check_integer, check_positive, error
from wlb.torch.agreement import check_agreement
from wlb.torch.data.costs import CostSwitches
from wlb.torch.data.work import PlannedWork, median_error, replan_as
from wlb.torch.timing import StepTimer, TimedStep
from wlb.torch.timings import LEVELS, LevelReport, RankPlace, TimedPlan, level_reports

MOST_SHARE_ERROR = 0.1
"""Standard error of a term's share of all time above which a fit is a guess, and changes nothing."""


@dataclass(frozen=True)
class CostUpdate:
    """What one look at the timings said; the same on every rank.

    Attributes:
        step: Steps that were trained.
        fit: The costs that the timings show; None if there were too few of them.
        error_in_use: Median relative error of the costs in use over the same rows, times the factor that suits best.
        problem: Why there is no fit, or why it is not good enough to plan by.
        imbalance: Mean imbalance of the steps since the last look, as the fitted costs show it.
        believed: The same as the costs in use show it.
        attainable: What it would be if the documents of each step were packed by the fitted costs.
        drift: How far the costs in use are off: by how much a micro-batch's share of its step's work changes in the
            mean, relative to the mean share.
        levels: By "dp", "pp" and "cp", where there is more than one rank of it.
        switched_from: The first step that is planned by the new costs; None if the costs stay.
    """

    step: int
    fit: wlb.CostFit | None = None
    error_in_use: float = math.nan
    problem: str = ""
    imbalance: float = math.nan
    believed: float = math.nan
    attainable: float = math.nan
    drift: float = math.nan
    levels: dict[str, LevelReport] | None = None
    switched_from: int | None = None

    def report(self) -> str:
        """A few lines for a log."""
        if self.fit is None:
            return f"costs after step {self.step}: no fit: {self.problem}"
        change = "stay" if self.switched_from is None else f"change from step {self.switched_from} on"
        lines = [
            f"costs after step {self.step} {change}: imbalance {self.imbalance:.4f} by what was measured, "
            f"{self.believed:.4f} by the costs in use, {self.attainable:.4f} attainable; "
            f"shares of work are off by {self.drift:.1%}",
            *(
                f"  {name}: {level.slowest} is slowest, {level.residual:+.1%} over the mean, drift {level.drift:+.1%}"
                for name, level in (self.levels or {}).items()
            ),
        ]
        if self.problem:
            lines.append(f"  {self.problem}")
        return "\n".join([*lines, self.fit.report()])


class CostTracker:
    """Learns what documents cost from the run itself, and lets the loader plan by it where it pays.

        tracker = wt.CostTracker(loader, every=50, switch_above=0.01, mesh=mesh)
        for step in loader:
            for index, batch in enumerate(step.micro_batches):
                with tracker.timer.micro_batch(index):
                    ...                              # forward and backward
            optimizer.step()
            tracker.step(step)                       # before step.state is saved
            save(step.state)

    After every `every` steps the ranks gather what their micro-batches took and fit the same costs (`CostModel.fit`).
    The costs in use are replaced if the imbalance that the new ones show for the steps since the last look is more than
    `switch_above` over what the old ones showed for them, or over what packing their documents anew gives. So costs
    that are off but pack as well, and steps that no costs could balance, change nothing. Nor does a fit that explains
    the times no better than the costs in use, or whose shares have a standard error of more than a tenth of all time.

    Under a `DynamicCpLoader` groups of ranks that share documents are timed, and the imbalance is the step's way
    through all micro-batches and stages (`DynamicCpPlan.step_seconds`) over the work of the mean rank. What the planner
    was told that ranks exchange is taken off the times first. A packer in front of it keeps its costs.

    A change takes effect at a step of which no rank has begun to plan, whatever was fetched ahead: every rank plans the
    steps before it by the old costs, and from it on by the new. `step.state` has it from the decision on, so that a run
    that is resumed makes the same plans. Who resumes makes the packer with the costs of the first start.

    Args:
        packer: What plans: a `StepLoader`, `BalancedBatchSampler`, `BalancedStream`, or a `DynamicCpLoader` whose
            `plan` is a `functools.partial` with a `cost_model`; or the `wlb.Packer` itself in a loop that pushes into
            it right before each step.
        every: Steps between two looks.
        switch_above: Imbalance that a change must gain.
        window: Steps that a fit is made from, the latest; by default four times `every`.
        windows: Of the model's attention layers, as in `CostModel.fit`.
        chunks: As in `CostModel.fit`.
        mesh: From `build_mesh`, where ranks have other roles than data parallelism. Its ranks call `step` together.
        group: Without a mesh, the data-parallel group; None: all ranks, or one process.
        device: Where collectives run ("cuda" for NCCL); by default that of the mesh.
        timer: Of this rank, if one is in use already.

    Attributes:
        timer: Times the micro-batches of this rank.
        updates: What the looks said, the latest 100.

    Raises:
        WlbError: An argument makes no sense.
    """

    def __init__(
        self,
        packer: Any,
        *,
        every: int = 50,
        switch_above: float = 0.01,
        window: int | None = None,
        windows: Sequence[int] = (),
        chunks: Sequence[int] = (),
        mesh: DeviceMesh | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        timer: StepTimer | None = None,
    ) -> None:
        check_integer("every", every, minimum=1)
        if window is not None:
            check_integer("window", window, minimum=every)
        if switch_above != 0:
            check_positive("switch_above", switch_above)
        self._switches: CostSwitches | None = getattr(packer, "cost_switches", None)
        if self._switches is None and not isinstance(packer, wlb.Packer):
            message = (
                f"is a {type(packer).__name__}: give a StepLoader, BalancedBatchSampler, BalancedStream or Packer, or a"
                " DynamicCpLoader whose plan is a functools.partial with cost_model="
            )
            raise error("packer", message, value=type(packer).__name__)
        self._packer = packer
        if self._latest() is None:
            message = "documents bring their costs to it, and there is no cost model to correct"
            raise error("packer", message)
        self._every = every
        self._switch_above = switch_above
        self._terms: dict[str, Any] = {"windows": tuple(windows), "chunks": tuple(chunks)}
        self._mesh, self._group = mesh, group
        self._device = torch.device(device or (mesh.device_type if mesh is not None else "cpu"))
        self.timer = timer or StepTimer()
        self.updates: deque[CostUpdate] = deque(maxlen=100)
        self._plans: dict[int, PlannedWork] = {}  # of steps whose timings were not gathered
        self._mine: dict[int, NDArray[np.int64]] = {}  # which parts of these are this rank's
        self._data = 0  # this rank's place in dynamic plans
        self._timed: dict[int, TimedStep] = {}
        self._gathered: deque[TimedPlan] = deque(maxlen=window or 4 * every)
        self._steps = 0

    def step(self, step: Any) -> CostUpdate | None:
        """Ends a trained step; a collective after every `every` of them, by the number of the step.

        Args:
            step: The `Step` that was trained: its number, its plan and which of its micro-batches are this rank's. Or
                the `DynamicCpStep`, which has the rank instead.

        Returns:
            What the timings said, in a step that looked at them.

        Raises:
            WlbError: The step's plan is none of wlb's; or ranks differ, which are named: in the number of the step,
                the settings, the costs in use or those that were fitted.
        """
        plan = getattr(step, "packing", None) or getattr(step, "plan", None)
        if not isinstance(plan, wlb.Packing | wlb.DynamicCpPlan):
            raise error("step", f"is a {type(step).__name__} without a Packing: its costs are not the packer's")
        number = int(step.number)
        self.timer.end_step(step)
        planned_by = self._packer.cost_model if self._switches is None else self._switches.of(number)
        assert planned_by is not None  # it was looked at first
        self._plans[number] = work = PlannedWork.of(plan, planned_by)
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
        switches = self._switches
        if switches is None:
            return self._looked(self._steps)
        with switches.held() as begun:
            return self._looked(begun)

    def _looked(self, begun: int) -> CostUpdate:
        steps, ranks, begun = self._gather(begun)
        self._gathered.extend(steps)
        rows = [row for step in self._gathered for row in step.rows()]
        lengths, shared = [part.lengths for part, _ in rows], np.array([part.ranks for part, _ in rows], np.int64)
        seconds = [seconds for _, seconds in rows]
        now = self._cost_model()
        try:
            fit = wlb.CostModel.fit(lengths, seconds, ranks=shared, causal=now.causal, **self._terms)
        except wlb.WlbError as cause:
            fit, update = None, CostUpdate(self._steps, problem=str(cause))
        if fit is not None:
            error_in_use = median_error(now, rows)
            problem = _problem(fit, error_in_use)
            update = self._judged(fit, now, [step.work for step in steps], begun, ranks, problem)
            update = dataclasses.replace(update, error_in_use=error_in_use)
        if dist.is_initialized():
            content = repr((now, fit and fit.cost_model, update.switched_from))
            digest = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
            check_agreement(digest, step=self._steps, group=self._group, device=self._device)
        if fit is not None and update.switched_from is not None:
            if self._switches is None:
                self._packer.set_cost_model(fit.cost_model)
            else:
                self._switches.switch(update.switched_from, fit.cost_model)
        return update

    def _judged(
        self,
        fit: wlb.CostFit,
        now: wlb.CostModel,
        plans: list[PlannedWork],
        begun: int,
        ranks: list[RankPlace],
        problem: str,
    ) -> CostUpdate:
        new = fit.cost_model
        replan = replan_as(self._packer) if self._switches is None else self._switches.replan
        imbalance, believed, attainable, drift = [], [], [], []
        for work in plans:
            planned, shown = work.imbalance(now), work.imbalance(new)
            if math.isnan(planned) or math.isnan(shown):
                continue
            believed.append(planned)
            imbalance.append(shown)
            drift.append(float(np.abs(work.shares(new) - work.shares(now)).mean()) * len(work.parts))
            attainable.append(min(shown, work.again(replan, new)))
        if not imbalance:
            return CostUpdate(self._steps, problem="nothing was trained since the last look")
        shown, planned, possible = (float(np.mean(values)) for values in (imbalance, believed, attainable))
        # What is held back is chosen by the costs too: by wrong ones a step may hold what no packing can balance.
        switched = shown - min(planned, possible) > self._switch_above and new != now and not problem
        return CostUpdate(
            self._steps,
            fit,
            problem=problem,
            imbalance=shown,
            believed=planned,
            attainable=possible,
            drift=float(np.mean(drift)),
            levels=level_reports(list(self._gathered), ranks, new),
            switched_from=begun if switched else None,
        )

    def _cost_model(self) -> wlb.CostModel:
        """What the latest plans were, or will be, made by."""
        latest = self._latest()
        assert latest is not None  # it was looked at first
        return latest

    def _latest(self) -> wlb.CostModel | None:
        latest: wlb.CostModel | None = self._packer.cost_model if self._switches is None else self._switches.latest
        return latest

    def _gather(self, begun: int) -> tuple[list[TimedPlan], list[RankPlace], int]:
        """Timings of all ranks since the last look, by step; those of a rank that are not known yet are missing."""
        numbers = sorted(self._plans)
        per_rank = max((self._mine[number].size for number in numbers), default=0)
        role = [0, 0, 0, 0] if self._mesh is None else [self._mesh[name].get_local_rank() for name in (*LEVELS, "tp")]
        alone = not dist.is_initialized()
        if self._mesh is None and not alone:
            role[0] = dist.get_rank(self._group)
        settings = hashlib.blake2b(repr((self._every, self._switch_above, self._terms)).encode(), digest_size=6)
        known = int.from_bytes(settings.digest(), "little")
        head = [self._steps, len(numbers), per_rank, known, begun, *role, self._data]
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
                message = f"differs between ranks: ranks {[self._global(rank) for rank in others]} have other {what}"
                raise error("step", message, value=self._steps)
        times = np.full((len(numbers), per_rank, 2), np.nan)
        for at, number in enumerate(numbers):
            mine, timed = self._mine[number], self._timed.get(number)
            times[at, : mine.size, 0] = mine
            if timed is not None:
                times[at, : mine.size, 1] = timed.seconds
        everyone = self._all_gather(torch.from_numpy(times).flatten()).reshape(len(heads), *times.shape)
        ranks = [RankPlace(*row[5:].tolist()) for row in heads]
        gathered = [TimedPlan(self._plans[number], everyone[:, at], tuple(ranks)) for at, number in enumerate(numbers)]
        self._plans, self._mine, self._timed = {}, {}, {}
        return gathered, ranks, int(heads[:, 4].max())

    def _all_gather(self, mine: torch.Tensor) -> NDArray[Any]:
        if not dist.is_initialized():
            return mine.numpy()[None]
        size = dist.get_world_size(self._group)
        everyone = torch.empty(size * mine.numel(), dtype=mine.dtype, device=self._device)
        dist.all_gather_into_tensor(everyone, mine.to(self._device), group=self._group)
        return everyone.cpu().numpy().reshape(size, mine.numel())

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)


def _problem(fit: wlb.CostFit, error_in_use: float) -> str:
    """Why nobody should plan by a fit; empty if nothing speaks against it."""
    worst = max(fit.rates, key=lambda name: fit.share_errors[name] if fit.rates[name] else 0.0)
    if fit.share_errors[worst] > MOST_SHARE_ERROR:
        return f"the share of {worst} is not known well enough: +- {fit.share_errors[worst]:.0%}"
    if fit.held_out_error >= error_in_use:
        return f"the fit is off by {fit.held_out_error:.1%}, the costs in use by {error_in_use:.1%}: no better"
    return ""
