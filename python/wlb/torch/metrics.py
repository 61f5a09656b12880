"""Figures of a run for loggers: how even its planned steps are."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import wlb
from wlb._errors import check_integer, error

Write = Callable[[dict[str, float], int], Any]


class StepMetrics:
    """Figures of each step's plan and of the waiting documents.

        metrics = StepMetrics(loader, SummaryWriter())
        for step in loader:
            ...                              # forward, backward, optimizer
            metrics.end_step(step)           # every rank

    | name | meaning |
    | --- | --- |
    | `imbalance` | heaviest over mean micro-batch, by the plan's costs; over ranks with Dynamic-CP and with `dp_size` |
    | `padding` | padding as a share of the step's tokens, if micro-batches are padded |
    | `lost_time` | sum of the heaviest over sum of the means of all steps so far: the run's time lost to waiting |
    | `step_work` | the step's work over the mean of the steps so far |
    | `tokens` | tokens of the step, on all ranks |
    | `delay_mean`, `delay_max` | steps that tokens waited so far: mean and longest |
    | `backlog_tokens` | tokens that wait after the step |
    | `planning_ms` | time to plan the step |

    Nothing here communicates or waits for a device. `CostTracker` reports the measured times of micro-batches.

    Args:
        loader: the loader of the steps: its `metrics()` knows the delays. None: no delays.
        sinks: destinations of lines on this rank: a TensorBoard `SummaryWriter`, a Weights & Biases run (or the
            module), a
            Lightning logger, an `Accelerator`, or a function of a dictionary and the number of the step. Pass none on
            other ranks.
        every: steps between two lines.

    Raises:
        WlbError: a sink is none of those; `every` is below 1.
    """

    def __init__(
        self,
        loader: Any = None,
        *sinks: Any,
        every: int = 1,
    ) -> None:
        check_integer("every", every, minimum=1)
        self._loader = loader
        self._writes = [writes_to(sink, index) for index, sink in enumerate(sinks)]
        self._every = every
        self._heaviest = self._mean = self._work = 0.0
        self._steps = 0

    def end_step(self, step: Any) -> dict[str, float]:
        """Notes a trained step, and writes a line after every `every` of them, by the number of the step.

        Args:
            step: a `Step` or a `DynamicCpStep`.

        Returns:
            The line, by names that begin with "wlb/"; empty where none is due.

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
        if (number + 1) % self._every:
            return {}
        line = {"imbalance": heaviest / mean if mean else 1.0, "tokens": float(tokens)}
        if added := _padding(plan, tokens):
            line["padding"] = added / (tokens + added)
        if self._mean:
            line |= {"lost_time": self._heaviest / self._mean, "step_work": work * self._steps / self._work}
        line |= self._waiting(step) | {"planning_ms": 1e3 * step.planning_seconds}
        line = {f"wlb/{name}": value for name, value in line.items()}
        for write in self._writes:
            write(line, number)
        return line

    def _waiting(self, step: Any) -> dict[str, float]:
        line: dict[str, float] = {}
        if hasattr(self._loader, "metrics"):
            # A `DynamicCpLoader` over batches without a packer has no delays: nothing waits.
            with contextlib.suppress(wlb.WlbError):
                metrics = self._loader.metrics()
                line |= {"delay_mean": metrics.delay_mean, "delay_max": float(metrics.delay_max)}
        if step.snapshot is not None and step.snapshot.progress.tokens is not None:
            line["backlog_tokens"] = float(step.snapshot.progress.tokens)
        return line


def _of_plan(plan: wlb.Packing | wlb.DynamicCpPlan) -> tuple[float, float, float, int]:
    """Work of the heaviest and of the mean micro-batch (or rank), total work, and tokens.

    If documents bring costs in columns, the heaviest is the sum of each column's heaviest, as in `Packing.imbalance`.
    For a plan for ranks it is the work that decides the time of the step: `Packing.rank_imbalance` times the mean.
    """
    if isinstance(plan, wlb.Packing):
        costs = plan.costs
        mean = float(costs.mean())
        heaviest = plan.step_cost if plan.dp_size is None else plan.rank_imbalance * mean
        return heaviest, mean, float(costs.sum()), plan.num_tokens
    seconds = plan.rank_seconds
    tokens = sum(micro_batch.tokens for micro_batch in plan)
    work = seconds.sum(axis=0)
    heaviest = seconds.max(axis=1).sum() if plan.sync == "micro_batch" else work.max()
    return float(heaviest), float(work.mean()), float(work.sum()), tokens


def writes_to(sink: Any, index: int = 0) -> Write:
    """The function that writes a line to a logger.

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
