"""Results of simulating a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from wlb._choices import Schedule
from wlb._core import result
from wlb._results.copied import Copied


@dataclass(frozen=True, eq=False, repr=False)
class _Simulated(Copied):
    """A simulation's result: equal to any other of the same question."""

    _schedule: Schedule
    _question: bytes  # the arguments of the simulation, for comparing results bit by bit

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self._asked == other._asked

    def __hash__(self) -> int:
        return hash(self._asked)

    @property
    def _asked(self) -> tuple[str, bytes]:
        return self._schedule, self._question


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
        busy: float64[steps, dp, p]: see `PipelineTimeline.busy`.
        spans: float64[steps, dp, p]: see `PipelineTimeline.spans`.
        peak_activation: float64[steps, dp, p]: see `PipelineTimeline.peak_activation`.
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
