"""What a run tells while it trains: how even its steps are and what that costs, in the loggers that people use."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

import wlb
from wlb._errors import check_integer, error
from wlb.torch.timing import StepTimer

_MOST_OPEN = 1000
"""Steps of which times may be missing; those before are given up."""

Write = Callable[[dict[str, float], int], Any]


class StepMetrics:
    """Figures of each step's plan, of what waits, and of what the micro-batches really took.

        metrics = StepMetrics(loader, SummaryWriter(), timer=timer)
        for step in loader:
            ...                              # forward, backward, optimizer
            metrics.end_step(step)           # every rank

    | name | what |
    | --- | --- |
    | `imbalance` | heaviest over mean micro-batch, by the plan's costs; of ranks with Dynamic-CP and with `dp_size` |
    | `padding` | part of the step's tokens that fills micro-batches up, where there are such |
    | `lost_time` | sum of the heaviest over sum of the means of all steps so far: what waiting costs the run |
    | `step_work` | the step's work over the mean of the steps so far |
    | `tokens` | of the step, on all ranks |
    | `delay_mean`, `delay_max` | steps that tokens waited so far, the mean and the longest |
    | `backlog_tokens` | tokens that wait after the step |
    | `planning_ms` | what its plan took |
    | `measured_imbalance` | as `imbalance`, by the seconds that `timer` measured, over all ranks |
    | `measured_lost_time` | as `lost_time`, by these |
    | `planned_error` | median relative error of the plan's costs over these seconds, in the unit that suits best |

    The last three need a timer, and are of the steps since the last line. Ranks gather them in a collective of a few
    numbers; nothing else here communicates or waits for a device.

    Args:
        loader: What gives the steps: its `metrics()` knows the delays. None: no delays.
        sinks: Where lines go on this rank: a TensorBoard `SummaryWriter`, a Weights & Biases run (or the module), one
            of Lightning's loggers, an `Accelerator`, or a function of a dictionary and the number of the step. On other
            ranks give none.
        timer: Of this rank's micro-batches. If nobody else ends its steps, `end_step` does.
        ends_steps: Whether `end_step` ends the timer's steps too; False beside a `CostTracker`.
        every: Steps between two lines.
        group: Ranks whose times belong together; None: all ranks, or one process.
        device: Where the collective runs ("cuda" for NCCL).
        prefix: Before every name.

    Raises:
        WlbError: A sink is none of those; `every` is below 1.
    """

    def __init__(
        self,
        loader: Any = None,
        *sinks: Any,
        timer: StepTimer | None = None,
        ends_steps: bool = True,
        every: int = 1,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        prefix: str = "wlb/",
    ) -> None:
        check_integer("every", every, minimum=1)
        self._loader, self._timer, self._ends_steps = loader, timer, ends_steps
        self._writes = [writes_to(sink, index) for index, sink in enumerate(sinks)]
        self._every, self._group, self._device, self._prefix = every, group, device, prefix
        self._heaviest = self._mean = self._work = 0.0
        self._measured = np.zeros(2)  # sums of the slowest and of the mean micro-batches
        self._steps = 0
        # Of steps whose times are not known yet: costs of this rank's micro-batches, and what other ranks measured.
        self._planned: dict[int, NDArray[np.float64]] = {}
        self._measuring: dict[int, list[NDArray[np.float64]]] = {}

    def end_step(self, step: Any) -> dict[str, float]:
        """Notes a trained step, and writes a line after every `every` of them, by the number of the step.

        Args:
            step: a `Step` or a `DynamicCpStep`.

        Returns:
            The line, by names with their prefix; empty where none is due.

        Raises:
            WlbError: it has no plan.
        """
        plan = getattr(step, "plan", None)
        if not isinstance(plan, wlb.Packing | wlb.DynamicCpPlan):
            raise error("step", f"is a {type(step).__name__} without a plan", value=type(step).__name__)
        heaviest, mean, work, tokens = _of_plan(plan)
        self._heaviest, self._mean, self._work = self._heaviest + heaviest, self._mean + mean, self._work + work
        self._steps += 1
        number = int(step.number)
        if self._timer is not None:
            if self._ends_steps:
                self._timer.end_step(step)
            if isinstance(plan, wlb.Packing):
                self._planned[number] = plan.costs[step.indices]
        if (number + 1) % self._every:
            return {}
        line = {"imbalance": heaviest / mean if mean else 1.0, "tokens": float(tokens)}
        if added := _padding(plan, tokens):
            line["padding"] = added / (tokens + added)
        if self._mean:
            line |= {"lost_time": self._heaviest / self._mean, "step_work": work * self._steps / self._work}
        line |= self._waiting(step) | {"planning_ms": 1e3 * step.planning_seconds} | self._timed()
        line = {self._prefix + name: value for name, value in line.items()}
        for write in self._writes:
            write(line, number)
        return line

    def _waiting(self, step: Any) -> dict[str, float]:
        line: dict[str, float] = {}
        if hasattr(self._loader, "metrics"):
            # A `DynamicCpLoader` over batches without a packer has none to tell: there nothing waits.
            with contextlib.suppress(wlb.WlbError):
                metrics = self._loader.metrics()
                line |= {"delay_mean": metrics.delay_mean, "delay_max": float(metrics.delay_max)}
        if step.snapshot is not None and step.snapshot.progress.tokens is not None:
            line["backlog_tokens"] = float(step.snapshot.progress.tokens)
        return line

    def _timed(self) -> dict[str, float]:
        """What all ranks measured since the last line; a collective."""
        if self._timer is None:
            return {}
        line: dict[str, float] = {}
        ratios: list[float] = []
        mine = []
        for timed in self._timer.read():
            costs = self._planned.pop(timed.number, None)
            if not timed.seconds.size or not np.isfinite(timed.seconds).all():
                continue
            mine.append([timed.number, timed.seconds.max(), timed.seconds.sum(), timed.seconds.size])
            if costs is not None and costs.size == timed.seconds.size:
                ratios += (costs / timed.seconds).tolist()
        if ratios and np.median(ratios) > 0:
            line["planned_error"] = float(np.median(np.abs(np.array(ratios) / np.median(ratios) - 1)))
        everyone = _gathered(np.array(mine, np.float64).reshape(-1, 4), self._group, self._device)
        size = dist.get_world_size(self._group) if dist.is_initialized() else 1
        imbalance = []
        for row in everyone:
            rows = self._measuring.setdefault(int(row[0]), [])
            rows.append(row)
            if len(rows) == size:
                _, slowest, total, count = np.stack(self._measuring.pop(int(row[0]))).T
                imbalance.append(slowest.max() * count.sum() / total.sum())
                self._measured += slowest.max(), total.sum() / count.sum()
        open_steps: tuple[dict[int, Any], ...] = (self._planned, self._measuring)
        for steps in open_steps:  # of a step that some rank never timed
            while len(steps) > _MOST_OPEN:
                del steps[next(iter(steps))]
        if imbalance:
            line["measured_imbalance"] = float(np.mean(imbalance))
            line["measured_lost_time"] = float(self._measured[0] / self._measured[1])
        return line


def _of_plan(plan: wlb.Packing | wlb.DynamicCpPlan) -> tuple[float, float, float, int]:
    """Work of the heaviest and of the mean micro-batch (or rank), of all, and tokens.

    Where documents bring costs in columns, each column has a heaviest: these together, as in `Packing.imbalance`. Of a
    plan for ranks it is what makes their step as long as it is: `Packing.rank_imbalance` times the mean.
    """
    if isinstance(plan, wlb.Packing):
        costs = plan.costs
        mean = float(costs.mean())
        heaviest = plan.step_cost if plan.dp_size is None else plan.rank_imbalance * mean
        return heaviest, mean, float(costs.sum()), int(plan.tokens.sum())
    seconds = plan.rank_seconds
    tokens = sum(micro_batch.tokens for micro_batch in plan)
    work = seconds.sum(axis=0)
    heaviest = seconds.max(axis=1).sum() if plan.sync == "micro_batch" else work.max()
    return float(heaviest), float(work.mean()), float(work.sum()), tokens


def _gathered(
    rows: NDArray[np.float64], group: dist.ProcessGroup | None, device: torch.device | str
) -> NDArray[np.float64]:
    """The rows of all ranks, which may have different numbers of them."""
    if not dist.is_initialized():
        return rows
    size = dist.get_world_size(group)
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([len(rows)], device=device), group=group)
    most = max(int(count) for count in counts)
    padded = torch.full((most, 4), torch.nan, dtype=torch.float64)
    padded[: len(rows)] = torch.from_numpy(rows)
    everyone = [torch.empty_like(padded, device=device) for _ in range(size)]
    if most:
        dist.all_gather(everyone, padded.to(device), group=group)
    return np.concatenate([part[: int(count)].cpu().numpy() for part, count in zip(everyone, counts, strict=True)])


def writes_to(sink: Any, index: int = 0) -> Write:
    """How a logger takes a line.

    Raises:
        WlbError: it is none of those that `StepMetrics` knows.
    """
    if hasattr(sink, "add_scalar"):  # TensorBoard

        def scalars(line: dict[str, float], number: int) -> None:
            for name, value in line.items():
                sink.add_scalar(name, value, number)

        return scalars
    if hasattr(sink, "log_metrics"):  # Lightning
        return lambda line, number: sink.log_metrics(line, step=number)
    if callable(getattr(sink, "log", None)) and not isinstance(sink, logging.Logger):  # Weights & Biases, accelerate
        return lambda line, number: sink.log(line, step=number)
    if callable(sink):
        written: Write = sink
        return written
    message = f"is a {type(sink).__name__}: has none of add_scalar, log_metrics and log, and is no function"
    raise error("sinks", message, index=index, value=type(sink).__name__)


def _padding(plan: wlb.Packing | wlb.DynamicCpPlan, tokens: int) -> int:
    """Tokens that fill its micro-batches up."""
    if isinstance(plan, wlb.Packing):
        return int(plan.padded_tokens.sum()) - tokens
    return plan.padding_tokens
