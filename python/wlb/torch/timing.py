"""Times of micro-batches on each rank, and costs that all ranks fit to them during training.

`StepTimer` measures this rank's micro-batches, forward and backward, without waiting for the device. `CostTracker`
gathers the times of all ranks, and all ranks fit the same cost model.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

import wlb
from wlb._errors import check_integer, error
from wlb._shown import explained
from wlb.torch.agreement import check_agreement
from wlb.torch.collectives import device_of
from wlb.torch.groups import ranks_of_step

Span: TypeAlias = float | tuple[Any, Any]
"""Seconds by the clock, or the device events before and after."""

Plan: TypeAlias = wlb.Packing | wlb.DynamicCpPlan
Floats: TypeAlias = NDArray[np.float64]

MOST_SHARE_ERROR = 0.1
"""Largest standard error of a term's share of all time with which a fit is used; above it the fit is a guess."""

_ROUNDING = 1e-9  # part of a predicted time below which a remainder counts as 0

_off_duty: ContextVar[bool] = ContextVar("off_duty", default=False)


@contextmanager
def untimed() -> Iterator[None]:
    """Inside this context, calls of a model are not counted as micro-batches by the hooks of a `StepTimer`."""
    before = _off_duty.set(True)
    try:
        yield
    finally:
        _off_duty.reset(before)


@explained
@dataclass(frozen=True, eq=False)
class TimedStep:
    """Seconds of one step's micro-batches on this rank.

    Attributes:
        number: the step, as it was named, or counted from 0.
        seconds: float64 [micro-batches of this rank]: forward and backward of each; NaN for one that was not timed.
        lengths: tokens of the documents of each; empty where the step was ended without them.
        ranks: number of context-parallel ranks that shared each, for a dynamic plan; else empty.
    """

    number: int
    seconds: NDArray[np.float64]
    lengths: tuple[NDArray[np.int64], ...] = ()
    ranks: tuple[int, ...] = ()


class StepTimer:
    """Times each micro-batch of a step on this rank: all that it computes there, forward and backward.

    On CUDA it records two events around each part and reads them once they are complete, so that neither the device nor
    the host ever waits for it; elsewhere it reads the clock. One use costs some microseconds.

    A timer must know what belongs to a micro-batch; micro-batches are numbered from 0 in every step, in the order of
    `step.micro_batches`. There are three ways:

        with timer.micro_batch(index):    # in a loop of your own, around forward and backward
            ...
        timer.attach_stages(stages)       # stages of a pipeline, where forwards and backwards alternate
        timer.attach(model)               # hooks, for a loop that you do not own; the n-th forward is micro-batch n

    Call `timer.end_step(step)` after each step. Then `timer.read()` returns the steps whose times are known.

    Waiting inside a part counts as its time, for example for keys and values of a slower context-parallel rank. Waiting
    between pipeline stages does not.

    Args:
        device: where the micro-batches are computed; by default CUDA where there is one.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        kind = torch.device(device).type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
        if kind not in ("cpu", "cuda"):
            raise error("device", f"= {kind!r}: is timed on cpu and cuda", value=kind)
        self._part: type[_ClockPart] | type[_EventPart] = _EventPart if kind == "cuda" else _ClockPart
        self._spans: dict[int, list[Span]] = {}
        self._ended: deque[tuple[TimedStep, dict[int, list[Span]]]] = deque()
        self._forwards = 0  # of a model with hooks, in this step
        self._steps = 0
        self._optimizers: list[_Hooks] = []  # that end steps by themselves

    def micro_batch(self, index: int) -> AbstractContextManager[None]:
        """Times its body as part of micro-batch `index` of this step. It may be entered several times, not nested.

        A part that raises is not counted.

        Raises:
            WlbError: `index` is negative, or no integer.
        """
        check_integer("index", index, minimum=0)
        return self._part(self._spans.setdefault(index, []))

    def attach_stages(self, stages: Iterable[Any]) -> None:
        """Times what pipeline stages compute (`VarlenPipelineStage`), the loss on the last one included."""
        for stage in stages:
            stage.timer = self.micro_batch

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Callable[[], None]:
        """Times a model by hooks: each call of it, and its backward pass from the gradient of its output on.

        The n-th call with gradients in a step is micro-batch n. What runs between the two passes (a loss outside of the
        model) is not seen.

        Args:
            model: the outermost module, as the loop calls it.
            optimizer: its `step` ends the timed step, for loops to which no line can be added. Not for use with a
                `CostTracker`, which ends steps itself.

        Returns:
            A function that removes the hooks.
        """
        hooks = _Hooks(self, model)
        if optimizer is not None:
            hooks.handles.append(optimizer.register_step_post_hook(lambda *_: self._end_step(None, None)))
            self._optimizers.append(hooks)

        def remove() -> None:
            hooks.remove()
            self._optimizers = [other for other in self._optimizers if other is not hooks]

        return remove

    def next_forward(self) -> int:
        """The micro-batch that begins now, where they are only counted."""
        self._forwards += 1
        return self._forwards - 1

    def end_step(self, step: Any = None, *, lengths: Sequence[ArrayLike] | None = None) -> None:
        """Ends a step: later calls belong to the next.

        Args:
            step: a `Step` or `DynamicCpStep`, for its number and the lengths of its micro-batches.
            lengths: instead of `step`: int [documents] for each micro-batch, if a log is to be written.

        Raises:
            WlbError: a micro-batch was timed that the step does not have; an attached optimizer has ended the step
                already; or the step is of a forest, whose nodes are no documents.
        """
        if self._optimizers:
            message = "was ended by the optimizer already: attach the model without the optimizer"
            raise error("step", message, value=self._steps)
        self._end_step(step, lengths)

    def _end_step(self, step: Any, lengths: Sequence[ArrayLike] | None) -> None:
        number = self._steps
        ranks: tuple[int, ...] = ()
        if step is not None:
            number = int(step.number)
            if hasattr(step, "groups"):
                lengths, ranks = [group.lengths for group in step.groups], tuple(len(group) for group in step.groups)
            elif step.packing.forest is not None:
                message = (
                    f"{number} is of a forest: costs are fitted to documents, not to nodes behind others. End it with "
                    "end_step() alone, which keeps its seconds"
                )
                raise error("step", message, value=number)
            else:
                lengths = [step.packing[index].lengths for index in step.indices.tolist()]
        arrays = tuple(np.asarray(row, np.int64) for row in lengths or ())
        spans, self._spans, self._forwards = self._spans, {}, 0
        self._steps = number + 1
        if arrays and spans and max(spans) >= len(arrays):
            message = f"has {len(arrays)} micro-batches, and micro-batch {max(spans)} was timed"
            raise error("step", message, value=number)
        self._ended.append((TimedStep(number, np.empty(0), arrays, ranks), spans))

    def read(self) -> list[TimedStep]:
        """The ended steps whose times are all known, oldest first; each is given once. Waits for nothing."""
        steps = []
        while self._ended:
            ended, spans = self._ended[0]
            if not all(_is_complete(span) for parts in spans.values() for span in parts):
                break
            self._ended.popleft()
            seconds = np.full(len(ended.lengths) or max(spans, default=-1) + 1, np.nan)
            for index, parts in spans.items():
                if parts:
                    seconds[index] = sum(map(_seconds, parts))
            steps.append(replace(ended, seconds=seconds))
        return steps

    def write(self, path: str | os.PathLike[str]) -> int:
        """Appends the steps of `read` to a log for `wlb fit`, one JSON object a micro-batch. Returns their number.

        Raises:
            WlbError: a step was ended without the lengths of its micro-batches.
        """
        rows = []
        for step in self.read():
            if step.seconds.size and not step.lengths:
                raise error(
                    "path", f"cannot tell of step {step.number}: it was ended without lengths", value=step.number
                )
            for index, (seconds, lengths) in enumerate(zip(step.seconds.tolist(), step.lengths, strict=True)):
                if seconds == seconds:
                    row = {"step": step.number, "micro_batch": index, "seconds": seconds, "lengths": lengths.tolist()}
                    shared = {"ranks": step.ranks[index]} if step.ranks else {}
                    rows.append(json.dumps({**row, **shared}) + "\n")
        with Path(path).open("a") as log:
            log.write("".join(rows))
        return len(rows)


class _ClockPart:
    __slots__ = ("_parts", "_started")

    def __init__(self, parts: list[Span]) -> None:
        self._parts = parts

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, failure: object, *_: object) -> None:
        if failure is None:
            self._parts.append(time.perf_counter() - self._started)


class _EventPart:
    __slots__ = ("_parts", "_started")

    def __init__(self, parts: list[Span]) -> None:
        self._parts = parts

    def __enter__(self) -> None:
        self._started = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._started.record()

    def __exit__(self, failure: object, *_: object) -> None:
        if failure is not None:
            return
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended.record()
        self._parts.append((self._started, ended))


def _is_complete(span: Span) -> bool:
    return isinstance(span, float) or bool(span[1].query())


def _seconds(span: Span) -> float:
    return span if isinstance(span, float) else 1e-3 * float(span[0].elapsed_time(span[1]))


class _Hooks:
    """Hooks of one model."""

    def __init__(self, timer: StepTimer, model: nn.Module) -> None:
        self._timer = timer
        self._forward: list[tuple[int, AbstractContextManager[None]]] = []  # the call that runs
        self.handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._before),
            model.register_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _before(self, *_: Any) -> None:
        # A call inside a backward pass is a recomputed one, whose time is in that pass already.
        if torch.is_grad_enabled() and not torch._C._current_graph_task_id() + 1 and not _off_duty.get():
            index = self._timer.next_forward()
            part = self._timer.micro_batch(index)
            part.__enter__()
            self._forward.append((index, part))

    def _after(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if not self._forward:
            return
        index, part = self._forward.pop()
        part.__exit__(None, None, None)
        began: list[AbstractContextManager[None]] = []

        def end() -> None:
            began.pop().__exit__(None, None, None)

        def begin(gradient: Tensor) -> None:
            if not began:
                backward = self._timer.micro_batch(index)
                backward.__enter__()
                began.append(backward)
                torch.autograd.Variable._execution_engine.queue_callback(end)

        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(begin)  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


@dataclass(frozen=True, eq=False)
class Part:
    """Documents that run together: a micro-batch, or the documents of one group of ranks in it.

    Attributes:
        lengths: int [documents], tokens.
        ranks: number of ranks that share the pairs and tokens; each has a part of every document.
        first_rank: the first of these ranks among the data x context ranks; None if the plan does not say.
        other: seconds that are no cost of documents: the exchange between its ranks.
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
        plan: the plan of a step.
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


class RankPlace(NamedTuple):
    """A rank's index among stages, context-parallel ranks, and the data x context ranks of dynamic plans."""

    pp: int
    cp: int
    data: int


@dataclass(frozen=True, eq=False)
class TimedPlan:
    """A step and the times of its parts on every rank.

    Attributes:
        work: the parts of its plan.
        times: float64 [ranks, micro-batches of a rank, 2]: index of the part in the plan, and its seconds.
        ranks: the ranks that measured.
    """

    work: PlannedWork
    times: Floats
    ranks: tuple[RankPlace, ...]

    def rows(self) -> list[tuple[Part, float]]:
        """Parts that all of their ranks have timed, with their seconds through the whole model.

        Seconds are those of the slowest of the ranks that share a part, summed over the stages, without the exchange
        between the ranks.
        """
        stages, width = 1 + max(rank.pp for rank in self.ranks), 1 + max(rank.cp for rank in self.ranks)
        found: dict[int, Floats] = {}
        for rank, rows in zip(self.ranks, self.times, strict=True):
            for index, seconds in rows[~np.isnan(rows[:, 0])].tolist():
                part = self.work.parts[int(index)]
                planned = part.first_rank is not None
                place = rank.data - (part.first_rank or 0) if planned else rank.cp
                by_rank = found.setdefault(int(index), np.zeros((stages, part.ranks if planned else width)))
                # Tensor-parallel ranks do the same work, so the slowest counts; NaN stays NaN.
                by_rank[rank.pp, place] = np.maximum(by_rank[rank.pp, place], seconds)
        timed = []
        for index, by_rank in sorted(found.items()):
            if np.isfinite(by_rank).all() and (by_rank > 0).all():
                part = self.work.parts[index]
                timed.append((part, float(by_rank.max(axis=1).sum()) - part.other))
        return [(part, seconds) for part, seconds in timed if seconds > 0]


@explained
@dataclass(frozen=True)
class CostUpdate:
    """Result of one fit to the timings, equal on every rank.

    Attributes:
        step: number of steps that were trained.
        fit: the fitted costs; None if there were too few timings.
        error_in_use: median relative error of the costs in use over the same rows, after the best common factor.
        problem: why there is no fit, or why it is not good enough to plan with; "" for a good one.
        imbalance: mean imbalance of the steps since the last update, by the fitted costs.
        believed: mean imbalance of these steps by the costs in use.
    """

    step: int
    fit: wlb.CostFit | None = None
    error_in_use: float = math.nan
    problem: str = ""
    imbalance: float = math.nan
    believed: float = math.nan

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
    changes no plan: the caller decides. A loader plans ahead of training, so its costs cannot change meanwhile: make a
    new loader whose packer has the new costs, and call `load_state_dict(step.state, allow_config_change=True)`.

    With a `DynamicCpLoader`, groups of ranks that share documents are timed. The imbalance is then the step's time
    through all micro-batches and stages (`DynamicCpPlan.step_seconds`) over the work of the mean rank. Exchange between
    ranks, as the planner was told, is subtracted from the times first.

    Args:
        cost_model: the costs that plans use now: `packer.cost_model`. Its sizes of sliding windows and chunks are the
            ones that are fitted.
        every: steps between two updates.
        mesh: from `build_mesh`, where ranks have other roles than data parallelism. All ranks call `step` together.
        timer: timer of this rank, if one is in use already.

    Attributes:
        cost_model: the costs in use. Set it when plans change theirs, on all ranks at the same step.
        timer: times the micro-batches of this rank.
        updates: the latest 100 updates.

    Raises:
        WlbError: an argument makes no sense.
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
            step: the `Step` that was trained: its number, its plan and which of its micro-batches are this rank's. Or
                the `DynamicCpStep`, which has the rank instead.

        Returns:
            The update, in a step that made one.

        Raises:
            WlbError: the step has no plan of wlb; without a mesh, not all ranks share the step; or ranks differ in the
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
        steps = self._gather()
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
            update = self._judged(fit, [step.work for step in steps])
            update = replace(update, error_in_use=error_in_use, problem=_problem(fit, error_in_use))
        if dist.is_initialized():
            content = repr((now, fit and fit.cost_model))
            digest = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
            check_agreement(digest, step=self._steps)
        return update

    def _judged(self, fit: wlb.CostFit, plans: list[PlannedWork]) -> CostUpdate:
        both = np.array([[work.imbalance(fit.cost_model), work.imbalance(self.cost_model)] for work in plans])
        both = both[~np.isnan(both).any(axis=1)]
        shown, believed = both.mean(axis=0).tolist() if len(both) else (math.nan, math.nan)
        return CostUpdate(self._steps, fit, imbalance=shown, believed=believed)

    def _gather(self) -> list[TimedPlan]:
        """Timings of all ranks since the last update, by step; timings that a rank does not know yet are missing."""
        numbers = sorted(self._plans)
        per_rank = max((self._mine[number].size for number in numbers), default=0)
        place = [0, 0] if self._mesh is None else [self._mesh[name].get_local_rank() for name in ("pp", "cp")]
        settings = hashlib.blake2b(repr((self._every, self._windows, self._chunks)).encode(), digest_size=6)
        known = int.from_bytes(settings.digest(), "little")
        head = [self._steps, len(numbers), per_rank, known, *place, self._data]
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
        ranks = tuple(RankPlace(*row[4:].tolist()) for row in heads)
        gathered = [TimedPlan(self._plans[number], everyone[:, at], ranks) for at, number in enumerate(numbers)]
        self._plans, self._mine, self._timed = {}, {}, {}
        return gathered

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
