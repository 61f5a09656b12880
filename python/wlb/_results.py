"""What the core answers with: numbers and arrays in frozen dataclasses, which print, compare and pickle by themselves.

The core makes them. It knows each class by its name, which :func:`wlb._core.result` tells it, and imports nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from wlb._choices import Schedule
from wlb._core import CostModel, result
from wlb._errors import error

_LONGEST_HISTOGRAM = 1_000_000
"""Iterations: 8 MB of histogram."""


@result
@dataclass(frozen=True)
class Bounds:
    """What a packer promises as long as no push brings more than it admits.

    Attributes:
        tokens: Most tokens that ever wait after a push.
        delay: Most iterations that a document waits while documents come; ``None``: nothing limits it (queues without
            ``max_delay``). Draining the rest at the end of the stream adds ``drain`` at most.
        drain: Most iterations that it takes to drain what waits: the global batches of a flush.
    """

    tokens: int
    delay: int | None
    drain: int


@result
@dataclass(frozen=True, repr=False)
class PackerMetrics:
    """Balance, delay and memory of a stream of packings.

    Imbalance, tokens per step and memory skew are over the push steps that emitted a document; delays, documents and
    tokens over everything emitted, flushed batches included. Delays are in iterations, weighted by tokens.

    Attributes:
        steps: Push steps that emitted a document.
        documents: Documents (or pieces of split ones) emitted.
        tokens: Tokens emitted.
        imbalance_mean: Mean of ``max cost * N / total cost`` over steps; of a range of cost models, that of the worst.
        imbalance_p95: 95th percentile of the imbalance, to 0.001.
        imbalance_p99: 99th percentile of the imbalance, to 0.001.
        imbalance_worst: Imbalance of the worst step.
        delay_mean: Mean wait of a token, in iterations.
        delay_p99: The wait that 99 % of the tokens do not exceed, in iterations.
        delay_max: Longest wait of a document, in iterations.
        backlog_mean: Mean over pushes of the tokens that waited after them.
        backlog_max: Most tokens that waited after a push.
        tokens_per_step_cv: Standard deviation over mean of the tokens in a step.
        memory_skew_mean: Most over mean tokens of a step's micro-batches, mean over steps.
        memory_skew_worst: Most over mean tokens of a step's micro-batches, worst step.
        length_fallbacks: Documents placed by token count instead of by cost, because they did not fit where the
            cost was least.
        carried_over: Documents that did not fit in their iteration, counted once for each such iteration.
    """

    steps: int
    documents: int
    tokens: int
    imbalance_mean: float
    imbalance_p95: float
    imbalance_p99: float
    imbalance_worst: float
    delay_mean: float
    delay_p99: int
    delay_max: int
    backlog_mean: float
    backlog_max: int
    tokens_per_step_cv: float
    memory_skew_mean: float
    memory_skew_worst: float
    length_fallbacks: int
    carried_over: int
    _delays: tuple[tuple[int, int], ...]  # (iterations, tokens that waited so many), ascending
    _imbalances: tuple[float, ...]  # mean under each model of a range

    @property
    def imbalance_mean_by_model(self) -> NDArray[np.float64]:
        """float64[models]: the mean imbalance under each cost model of a range, over the steps since it was set.

        Empty under a single cost model, and before the first step.
        """
        return np.array(self._imbalances, np.float64)

    @property
    def delay_histogram(self) -> NDArray[np.int64]:
        """int64[delay_max + 1]: tokens emitted after each number of iterations.

        Raises:
            WlbError: a document waited a million iterations or more; the histogram would not fit in memory.
        """
        longest = self.delay_max
        if longest >= _LONGEST_HISTOGRAM:
            raise error("delay_max", f"= {longest}: is too long a wait for a histogram", value=longest)
        histogram = np.zeros(longest + 1 if self._delays else 0, np.int64)
        for delay, tokens in self._delays:
            histogram[delay] = tokens
        return histogram

    def as_dict(self) -> dict[str, float | int]:
        """All of the above but the histogram."""
        names = (each.name for each in dataclasses.fields(self) if not each.name.startswith("_"))
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        return (
            f"PackerMetrics(steps={self.steps}, imbalance_mean={self.imbalance_mean:.4f}, "
            f"imbalance_p95={self.imbalance_p95:.3f}, imbalance_worst={self.imbalance_worst:.3f}, "
            f"delay_mean={self.delay_mean:.3f}, delay_p99={self.delay_p99}, delay_max={self.delay_max}, "
            f"memory_skew_mean={self.memory_skew_mean:.3f})"
        )


@result
@dataclass(frozen=True, repr=False)
class TunedPoint:
    """One choice of thresholds, or of a price, and what it gives on the sample.

    Attributes:
        thresholds: Tokens, ascending; () with a price.
        delay_price: The price of delay; None with thresholds.
        imbalance_mean: Mean imbalance over steps.
        imbalance_p95: 95th percentile of the imbalance.
        imbalance_worst: Imbalance of the worst step.
        delay_mean: Mean wait of a token, in iterations, documents flushed at the end of the sample included.
        delay_max: Longest wait of a document, in iterations.
        memory_skew_mean: Most over mean tokens of a step's micro-batches, mean over steps.
    """

    thresholds: tuple[int, ...]
    delay_price: float | None
    imbalance_mean: float
    imbalance_p95: float
    imbalance_worst: float
    delay_mean: float
    delay_max: int
    memory_skew_mean: float

    def __repr__(self) -> str:
        by_price = self.delay_price is not None
        choice = f"delay_price={self.delay_price}" if by_price else f"thresholds={list(self.thresholds)}"
        return (
            f"TunedPoint({choice}, imbalance_mean={self.imbalance_mean:.4f}, delay_mean={self.delay_mean:.3f}, "
            f"delay_max={self.delay_max})"
        )


@result
@dataclass(frozen=True, repr=False)
class TuneResult:
    """What waits, chosen on a sample, and what else could be had.

    Attributes:
        best: The best choice, and what it gives on the sample.
        pareto: Choices that no other beats in both mean imbalance and mean delay, by ascending delay.
        evaluated: Number of choices tried.
    """

    best: TunedPoint
    pareto: tuple[TunedPoint, ...]
    evaluated: int

    @property
    def thresholds(self) -> tuple[int, ...]:
        """The best thresholds: tokens, ascending; () where a price was tuned."""
        return self.best.thresholds

    @property
    def delay_price(self) -> float | None:
        """The best price of delay; None where thresholds were tuned."""
        return self.best.delay_price

    def __repr__(self) -> str:
        return f"TuneResult(best={self.best!r}, pareto of {len(self.pareto)} points)"


@dataclass(frozen=True, eq=False, repr=False)
class _Simulated:
    """A simulation's result: equal to any other of the same question; its arrays are handed out as copies."""

    _schedule: Schedule
    _question: bytes  # all other arguments, to the bit

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self._asked == other._asked

    def __hash__(self) -> int:
        return hash(self._asked)

    @property
    def _asked(self) -> tuple[str, bytes]:
        return self._schedule, self._question

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        return value.copy() if isinstance(value, np.ndarray) else value


@result
@dataclass(frozen=True, eq=False, repr=False)
class PipelineTimeline(_Simulated):
    """One step of one pipeline, op by op. Times are in seconds since the step began.

    Every array is a fresh copy that the caller may keep or change. Timelines of the same arguments are equal.

    Attributes:
        KINDS: What the numbers in ``kinds`` stand for.
        num_stages: Pipeline ranks, p.
        num_virtual_stages: Stages on each rank, v.
        num_micro_batches: Micro-batches of the step.
        seconds: When the last op ends: the step, if the ranks wait for each other at its end.
        period_seconds: Seconds from step to step if no rank waits for the others at the end of one: the longest of the
            spans. What the zero-bubble schedules are made for (Qi et al. 2023, section 4).
        bubble_ratio: Idle time over busy time, of all ranks: (p - 1) / m for equal micro-batches under "gpipe" and
            "1f1b".
        busy: float64[p]: seconds that each rank computes, or communicates with nothing to hide it.
        exposed: float64[p]: the part of ``busy`` that is exposed communication.
        bubble: float64[p]: seconds that each rank is idle before the last op of all ends.
        spans: float64[p]: seconds from each rank's first op to the end of its last.
        peak_activation: float64[p]: the most activation that each rank holds at a time, in the unit of ``activation``.
        ranks: int32[ops]: the rank of each op. Ops stand behind what they waited for, and those of a rank in its order.
        stages: int32[ops]: the stage of each op, from 0 to p * v - 1.
        micro_batches: int32[ops]: the micro-batch of each op.
        kinds: uint8[ops]: what each op computes: indices into ``KINDS``.
        starts: float64[ops]: when each op starts.
        ends: float64[ops]: when each op ends.
        critical_path: int64[...]: indices of ops that, one after the other, take the whole step.
    """

    KINDS: ClassVar[tuple[str, str, str, str]] = ("forward", "backward", "input_gradient", "weight_gradient")

    num_stages: int
    num_virtual_stages: int
    num_micro_batches: int
    seconds: float
    period_seconds: float
    bubble_ratio: float
    busy: NDArray[np.float64]
    exposed: NDArray[np.float64]
    bubble: NDArray[np.float64]
    spans: NDArray[np.float64]
    peak_activation: NDArray[np.float64]
    ranks: NDArray[np.int32]
    stages: NDArray[np.int32]
    micro_batches: NDArray[np.int32]
    kinds: NDArray[np.uint8]
    starts: NDArray[np.float64]
    ends: NDArray[np.float64]
    critical_path: NDArray[np.int64]

    @property
    def schedule(self) -> Schedule:
        """The schedule's name."""
        return self._schedule

    def __len__(self) -> int:
        """Number of ops."""
        return len(self.kinds)

    def __repr__(self) -> str:
        return (
            f'PipelineTimeline(schedule="{self.schedule}", num_stages={self.num_stages}, '
            f"num_virtual_stages={self.num_virtual_stages}, num_micro_batches={self.num_micro_batches}, "
            f"seconds={self.seconds}, bubble_ratio={self.bubble_ratio:.4f})"
        )


@result
@dataclass(frozen=True, eq=False, repr=False)
class PipelineSteps(_Simulated):
    """Steps of data-parallel replicas of a pipeline. Times are in seconds.

    ``compute``, ``exposed``, ``bubble`` and ``dp_wait`` are summed over all ranks of a step, and add up to ``seconds``
    times ``dp * num_stages``. Every array is a fresh copy that the caller may keep or change. Results of the
    same arguments are equal.

    Attributes:
        seconds: float64[steps]: until the slowest replica is done.
        compute: float64[steps]: computing.
        exposed: float64[steps]: communicating with nothing to hide it.
        bubble: float64[steps]: idle before the own replica is done.
        dp_wait: float64[steps]: waiting for the slowest replica after that.
        pipeline_seconds: float64[steps, dp]: until each replica is done.
        busy: float64[steps, dp, p]: see :attr:`PipelineTimeline.busy`.
        spans: float64[steps, dp, p]: see :attr:`PipelineTimeline.spans`.
        peak_activation: float64[steps, dp, p]: see :attr:`PipelineTimeline.peak_activation`.
    """

    seconds: NDArray[np.float64]
    compute: NDArray[np.float64]
    exposed: NDArray[np.float64]
    bubble: NDArray[np.float64]
    dp_wait: NDArray[np.float64]
    pipeline_seconds: NDArray[np.float64]
    busy: NDArray[np.float64]
    spans: NDArray[np.float64]
    peak_activation: NDArray[np.float64]

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.seconds)

    def __repr__(self) -> str:
        steps, dp = self.pipeline_seconds.shape
        seconds = float(self.seconds.sum())
        return f'PipelineSteps(schedule="{self._schedule}", steps={steps}, dp={dp}, seconds={seconds})'


@result
@dataclass(frozen=True, eq=False, repr=False)
class CostFit:
    """Costs that measured times show: what :meth:`CostModel.fit` gives.

    Attributes:
        cost_model: what documents cost, in seconds.
        rates: seconds for one unit of each term that was asked for; 0 for one that was not kept.
        shares: of each term: its part of all time.
        share_errors: standard error of each share: the truth is off by more in about one of three fits.
        merged: terms that the times could not tell apart, group by group. Their time stands with those of the group
            that were kept; the others have the rate 0.
        residual: median of ``|predicted - measured| / measured`` over the rows.
        held_out_error: the same, of rows that a fit to the others did not see: what new micro-batches will be off by,
            their own noise included.
        held_out: how many rows that were.
        outliers: int64, rows that count for nothing because the others contradict them.
        rows: micro-batches in all.
    """

    cost_model: CostModel
    rates: dict[str, float]
    shares: dict[str, float]
    share_errors: dict[str, float]
    merged: tuple[tuple[str, ...], ...]
    residual: float
    held_out_error: float
    held_out: int
    outliers: NDArray[np.int64]
    rows: int

    def report(self) -> str:
        """A table of the terms, and what to know of them, for people."""
        width = max(map(len, self.rates))
        lines = [f"{'term':<{width}}   seconds per unit   share of time"]
        for name, rate in self.rates.items():
            gone = next((group for group in self.merged if name in group and not rate), None)
            kept = [other for other in gone or () if self.rates[other]]
            if rate:
                share = f"{self.shares[name]:>6.1%} +- {self.share_errors[name]:.1%}"
                lines.append(f"{name:<{width}}   {rate:<16.6g}   {share}")
            elif gone:
                lines.append(f"{name:<{width}}   in {' and '.join(kept) or 'the others'}")
            else:
                lines.append(f"{name:<{width}}   nothing seen")
        lines += [
            f"could not be told apart: {', '.join(group)}; vary one of them without the others to see which it is"
            for group in self.merged
        ]
        lines.append(
            f"{self.rows} micro-batches, {len(self.outliers)} of them outliers; half are off by at most "
            f"{self.residual:.1%}, of {self.held_out} held out {self.held_out_error:.1%}"
        )
        return "\n".join(lines)

    def __repr__(self) -> str:
        terms = ", ".join(f"{name}={rate:.4g}" for name, rate in self.rates.items() if rate)
        return f"CostFit({terms}, held_out_error={self.held_out_error:.4f}, rows={self.rows}, merged={self.merged})"
