"""Results of a packer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wlb._core import result
from wlb._errors import error
from wlb._shown import explained

_LONGEST_HISTOGRAM = 1_000_000
"""Iterations: 8 MB of histogram."""


@result
@explained
@dataclass(frozen=True)
class Bounds:
    """The limits that a packer keeps from now on, if no push brings more documents than it admits.

    Attributes:
        tokens: most tokens that ever wait after a push.
        delay: most steps that a document waits while documents come; ``None``: no limit (queues without
            ``max_delay``). Draining the rest at the end of the stream adds at most ``drain``.
        drain: most steps that it takes to drain the waiting documents.
        settles: most steps until the other three are those of an empty packer; 0 if they are. It is above 0 after a
            change of configuration while documents waited; until then none of the three rises.
    """

    tokens: int
    delay: int | None
    drain: int
    settles: int


@result
@dataclass(frozen=True, repr=False)
class PackerMetrics:
    """Balance, delay and memory of a stream of packings.

    Imbalance, tokens per step and memory skew are over the push steps that trained a document; delays, documents and
    tokens also count flushed steps. Delays are in steps, weighted by tokens.

    Attributes:
        steps: push steps that trained a document.
        documents: documents (or pieces of split ones) that left the packer.
        tokens: tokens that left the packer.
        imbalance_mean: mean over steps of ``max cost * N / total cost``; with ``dp_size``, of ``rank_imbalance``.
        imbalance_p95: 95th percentile of the imbalance, to 0.001.
        imbalance_p99: 99th percentile of the imbalance, to 0.001.
        imbalance_worst: imbalance of the worst step.
        delay_mean: mean wait of a token, in steps.
        delay_p99: the wait that 99 % of the tokens do not exceed, in steps.
        delay_max: longest wait of a document, in steps.
        early_mean: mean steps by which a token is trained before its turn; 0 unless documents come early
            (``push(early=...)``). The sum of this and ``delay_mean``, which counts from the turn on, is the mean
            displacement.
        backlog_mean: mean over pushes of the tokens that waited after the push.
        backlog_max: most tokens that waited after a push.
        tokens_per_step_cv: standard deviation over mean of the tokens of a step.
        step_work_cv: standard deviation over mean of the work of a step, since the last change of costs.
        step_work_heaviest: work of the heaviest step over the mean step (see ``max_step_cost``).
        steps_over_max_cost: steps whose documents cost more than ``max_step_cost`` allows, because they were due or
            because the step had too few tokens.
        memory_skew_mean: most over mean tokens of a step's micro-batches, mean over steps.
        memory_skew_worst: most over mean tokens of a step's micro-batches, worst step.
        length_fallbacks: documents placed by token count instead of by cost, because they did not fit where the
            cost was least.
        carried_over: documents that did not fit into a step, counted once for each such step.
        padding_tokens: tokens of padding in all micro-batches (``multiple_of_tokens``, ``token_buckets``), flushed ones
            included.
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
    early_mean: float
    backlog_mean: float
    backlog_max: int
    tokens_per_step_cv: float
    step_work_cv: float
    step_work_heaviest: float
    steps_over_max_cost: int
    memory_skew_mean: float
    memory_skew_worst: float
    length_fallbacks: int
    carried_over: int
    padding_tokens: int
    _delays: tuple[tuple[int, int], ...]  # (delay in steps, tokens with this delay), ascending

    @property
    def delay_histogram(self) -> NDArray[np.int64]:
        """int64[delay_max + 1]: tokens that left after each number of steps of waiting.

        Raises:
            WlbError: a document waited a million steps or more; the histogram would not fit in memory.
        """
        longest = self.delay_max
        if longest >= _LONGEST_HISTOGRAM:
            raise error("delay_max", f"= {longest}: is too long a wait for a histogram", value=longest)
        histogram = np.zeros(longest + 1 if self._delays else 0, np.int64)
        for delay, tokens in self._delays:
            histogram[delay] = tokens
        return histogram

    def as_dict(self) -> dict[str, float | int]:
        """All figures but the histogram, by name."""
        names = (each.name for each in dataclasses.fields(self) if not each.name.startswith("_"))
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        return (
            f"PackerMetrics(steps={self.steps}, imbalance_mean={self.imbalance_mean:.4f}, "
            f"imbalance_p95={self.imbalance_p95:.3f}, imbalance_worst={self.imbalance_worst:.3f}, "
            f"delay_mean={self.delay_mean:.3f}, delay_p99={self.delay_p99}, delay_max={self.delay_max}, "
            f"backlog_max={self.backlog_max}, step_work_cv={self.step_work_cv:.2f}, "
            f"step_work_heaviest={self.step_work_heaviest:.2f}, memory_skew_mean={self.memory_skew_mean:.3f})"
        )
