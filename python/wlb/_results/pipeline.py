"""Results of simulating a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from wlb._choices import Schedule
from wlb._core import result
from wlb._results.copied import Copied
from wlb._shown import Shown


@dataclass(frozen=True, eq=False, repr=False)
class _Simulated(Copied, Shown):
    """Result of a simulation; two results are equal if their arguments were."""

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
        KINDS: what the numbers in ``kinds`` stand for.
        num_stages: pipeline ranks, p.
        num_virtual_stages: stages on each rank, v.
        num_micro_batches: Micro-batches of the step.
        seconds: end of the last op: the time of the step, if the ranks wait for each other at its end.
        period_seconds: seconds from one step to the next if no rank waits for the others at the end of a step: the
            longest of the spans. The zero-bubble schedules are made for this (Qi et al. 2023, section 4).
        bubble_ratio: idle time over busy time, summed over all ranks: (p - 1) / m for equal micro-batches under "gpipe"
            and "1f1b".
        busy: float64[p]: seconds that each rank computes, or communicates without anything that hides it.
        exposed: float64[p]: the part of ``busy`` that is exposed communication.
        bubble: float64[p]: seconds that each rank is idle before the end of the last op of all ranks.
        spans: float64[p]: seconds from each rank's first op to the end of its last.
        peak_activation: float64[p]: most activation that each rank holds at one time, in the unit of ``activation``.
        ranks: int32[ops]: the rank of each op. An op comes after the ops that it waited for, and the ops of a rank are
            in the order in which it ran them.
        stages: int32[ops]: the stage of each op, from 0 to p * v - 1.
        micro_batches: int32[ops]: the micro-batch of each op.
        kinds: uint8[ops]: what each op computes: indices into ``KINDS``.
        starts: float64[ops]: when each op starts.
        ends: float64[ops]: when each op ends.
        critical_path: int64[...]: indices of a chain of ops that takes the whole step, each waiting for the one before.
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

    def summary(self) -> dict[str, Any]:
        """Schedule, sizes, seconds of the step, its bubble (a share of busy time) and its largest activation."""
        return {
            "schedule": self.schedule,
            "stages": self.num_stages * self.num_virtual_stages,
            "micro_batches": self.num_micro_batches,
            "seconds": self.seconds,
            "period_seconds": self.period_seconds,
            "bubble_ratio": self.bubble_ratio,
            "peak_activation": float(self.peak_activation.max(initial=0.0)),
        }

    def _columns(self) -> dict[str, Any]:
        critical = np.zeros(len(self), np.bool_)
        critical[self.critical_path] = True
        return {
            "rank": self.ranks,
            "stage": self.stages,
            "micro_batch": self.micro_batches,
            "kind": [self.KINDS[kind] for kind in self.kinds.tolist()],
            "start": self.starts,
            "end": self.ends,
            "critical": critical,
        }

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
        seconds: float64[steps]: time until the slowest replica has finished.
        compute: float64[steps]: time of computing.
        exposed: float64[steps]: time of communication that nothing hides.
        bubble: float64[steps]: idle time before the rank's own replica has finished.
        dp_wait: float64[steps]: idle time after that, until the slowest replica has finished.
        pipeline_seconds: float64[steps, dp]: time until each replica has finished.
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

    def summary(self) -> dict[str, Any]:
        """Schedule, sizes, seconds of all steps, and the shares of the ranks' time by cause."""
        steps, dp = self.pipeline_seconds.shape
        parts = {name: float(getattr(self, name).sum()) for name in ("compute", "exposed", "bubble", "dp_wait")}
        whole = sum(parts.values()) or 1.0
        figures = {"schedule": self._schedule, "steps": steps, "dp": dp, "seconds": float(self.seconds.sum())}
        return figures | {name: part / whole for name, part in parts.items()}

    def _columns(self) -> dict[str, Any]:
        names = ("seconds", "compute", "exposed", "bubble", "dp_wait")
        return {"step": np.arange(len(self)), **{name: getattr(self, name) for name in names}}

    def __repr__(self) -> str:
        steps, dp = self.pipeline_seconds.shape
        seconds = float(self.seconds.sum())
        return f'PipelineSteps(schedule="{self._schedule}", steps={steps}, dp={dp}, seconds={seconds})'
