"""The training of a stream under one method, and its time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb._core import Shard
from wlb._results import PipelineTimeline
from wlb._shown import Shown, explained
from wlb_tools.cluster.memory import RankMemory
from wlb_tools.cluster.step_time import StageSeconds
from wlb_tools.simulation.balance import ATTENTION_RATES, Balance, Floats, Swept, band, imbalance_percentile, percentile
from wlb_tools.simulation.scenario import Scenario
from wlb_tools.simulation.trained import Trained

ATTRIBUTION = (
    "compute",
    "cp_wait",
    "cp_communication",
    "tp_communication",
    "ep_wait",
    "ep_communication",
    "bubble",
    "dp_wait",
    "dp_communication",
)
"""Parts of a GPU's time: computing; waiting for the slowest context-parallel rank's attention; context- and
tensor-parallel communication that nothing hides; waiting for the slowest of the ranks that divide experts, in each of
their micro-batches, and the exchange with experts that nothing hides; idle in the pipeline; waiting for the slowest
data-parallel replica; the gradient reduction that nothing hides."""

IDLE = ("ep_wait", "bubble", "dp_wait")
"""Parts in which ranks wait for other stages or replicas."""


def exposed_parts(made: StageSeconds) -> dict[str, Floats]:
    """By `ATTRIBUTION`, what stages wait for inside their passes; adds up to `made.exposed`."""
    return {
        "cp_communication": made.exposed_cp,
        "tp_communication": made.exposed_tp,
        "ep_communication": made.exposed_ep,
        "bubble": made.exposed_pp,
    }


@dataclass(frozen=True)
class RankPart:
    """The part of a micro-batch that one rank of a pipeline stage computes."""

    step: int
    pieces: slice  # rows of the run: the documents of the micro-batch, or of the group of ranks
    shard: Shard  # of these documents
    rank: int  # in the group
    cp_size: int  # ranks of the group
    first_rank: int | None  # first rank of the group among the dp x cp ranks, if the plan chose it


@dataclass(frozen=True)
class Contents:
    """Documents that a pipeline trains together in a micro-batch."""

    tokens: int
    documents: int
    longest: int  # tokens
    cp_size: int  # ranks that share them

    @classmethod
    def of(cls, lengths: NDArray[np.int64], cp_size: int) -> Contents:
        """Counts documents.

        Args:
            lengths: int64[documents], maybe none.
            cp_size: ranks that share them.
        """
        return cls(int(lengths.sum()), lengths.size, int(lengths.max(initial=0)), cp_size)


@explained
@dataclass(frozen=True)
class Outcome(Shown, ABC):
    """Times of training a stream under one method, step by step."""

    title: str
    run: Trained
    seconds: Floats  # [steps]
    attribution: dict[str, Floats]  # by ATTRIBUTION: [steps] seconds of the mean GPU; they add up to `seconds`
    work: Floats  # [steps] seconds of all micro-batches over all stages, without waiting
    all_balance: Balance  # [steps] seconds of the heaviest micro-batch and of the mean one
    largest_micro_batch: int  # tokens on all `layout.cp` ranks
    memory: RankMemory  # [pp] the most over all steps
    scenario: Scenario

    @property
    @abstractmethod
    def cp_imbalance(self) -> float:
        """Attention of the slowest context-parallel rank over the mean rank's, weighted by time."""

    @property
    @abstractmethod
    def strategies(self) -> dict[str, int]:
        """The number of micro-batches for which each sharding was chosen."""

    @property
    @abstractmethod
    def cp_sizes(self) -> dict[int, float]:
        """Share of the tokens by the number of their context-parallel ranks."""

    @property
    @abstractmethod
    def micro_batches(self) -> float:
        """Micro-batches of a rank in a step, mean over steps."""

    @property
    def pipelines(self) -> str:
        """The unit of `timelines`: one pipeline for each data-parallel rank, or one for each rank."""
        return "DP"

    @abstractmethod
    def at_attention_rate(self, rate: float) -> Outcome:
        """This outcome with attention `rate` times as fast as the kernel model predicts, for the same shards."""

    @abstractmethod
    def parts(self) -> Iterator[RankPart]:
        """The parts of ranks, rank by rank of every group, micro-batch after micro-batch.

        `at_measured` takes them in this order.
        """

    @abstractmethod
    def placement(self, step: int) -> NDArray[np.int64]:
        """int64[dp * cp, micro-batches]: indices in `parts` that every rank of a pipeline stage runs, in order."""

    @abstractmethod
    def at_measured(self, seconds: Floats) -> Outcome:
        """This outcome with measured seconds of computation; plan, shards and predicted communication stay the same.

        Args:
            seconds: float64[parts, stages, 3] of each part alone: forward pass, gradient of inputs and gradient of
                weights (if the schedule does not split the backward pass, all of it is in one of the two).
        """

    @cached_property
    def swept(self) -> tuple[Swept, ...]:
        """Times and balance of the same plan at each of `ATTENTION_RATES`; it was made for rate 1."""
        graded = ((rate, self if rate == 1 else self.at_attention_rate(rate)) for rate in ATTENTION_RATES)
        return tuple(Swept(rate, of.total_seconds, of.steady_seconds, of.balance) for rate, of in graded)

    @property
    def imbalance_band(self) -> tuple[float, float]:
        """The least and the most of the mean imbalance over these rates."""
        return band([float(at.balance.imbalance.mean()) for at in self.swept])

    @property
    def lost_time_band(self) -> tuple[float, float]:
        """The least and the most lost time over these rates."""
        return band([at.balance.lost_time for at in self.swept])

    @abstractmethod
    def timelines(self, step: int) -> list[PipelineTimeline]:
        """One step op by op, for each pipeline."""

    @abstractmethod
    def contents(self, step: int) -> list[list[Contents]]:
        """Documents that each pipeline of `timelines` trains, by the number of the micro-batch."""

    @property
    def tokens(self) -> int:
        """Tokens trained, equal for all methods of a comparison."""
        return int(self.run.length.sum())

    @property
    def total_seconds(self) -> float:
        """Seconds of all steps, with those that empty the queues at the end of the stream."""
        return float(self.seconds.sum())

    @property
    def steady_seconds(self) -> float:
        """Seconds of all steps if those that empty the queues were as efficient as the others, as in a longer stream.

        These are the seconds before the flush, times all work, divided by the work before the flush.
        """
        streamed = self.run.streamed
        return float(self.seconds[:streamed].sum() * self.work.sum() / self.work[:streamed].sum())

    @property
    def tokens_per_second(self) -> float:
        """Tokens that the whole cluster trains in a second, over all steps."""
        return self.tokens / self.total_seconds

    @property
    def imbalance(self) -> Floats:
        """float64[streamed]: predicted time of the heaviest micro-batch over the mean of its step."""
        return self.balance.imbalance

    @property
    def balance(self) -> Balance:
        """Balance of the steps, without those that empty the queues at the end of the stream."""
        return self.all_balance.first(self.run.streamed)

    @property
    def idle(self) -> Floats:
        """float64[steps]: share of the time in which GPUs wait for other stages or replicas."""
        return np.asarray(sum(self.attribution[name] for name in IDLE) / self.seconds)

    @property
    def model_flops_utilization(self) -> float:
        """FLOPs of the documents as they are trained, divided by what the GPUs could compute in the time."""
        peak = self.scenario.hardware.peak_flops * self.scenario.layout.world_size
        return self.flops / (peak * self.total_seconds)

    @cached_property
    def flops(self) -> float:
        """FLOPs of the documents as they are trained, fewer if they are cut."""
        return float(self.scenario.model_flops(self.run.length).sum())

    @property
    def flush_share(self) -> float:
        """Share of the time in the last steps, which empty queues or are not full."""
        return float(self.seconds[self.run.streamed :].sum()) / self.total_seconds

    def summary(self) -> dict[str, Any]:
        """A few numbers, as plain JSON values."""
        return dict(self._summary)

    def _columns(self) -> dict[str, Any]:
        """A row for each step; imbalance is unknown (NaN) in the steps that empty the queues."""
        imbalance = np.full(len(self.seconds), np.nan)
        imbalance[: self.run.streamed] = self.imbalance
        figures = {"step": np.arange(len(self.seconds)), "seconds": self.seconds, "work": self.work, "idle": self.idle}
        return figures | {"imbalance": imbalance} | self.attribution

    @cached_property
    def _summary(self) -> dict[str, Any]:
        run, total = self.run, self.total_seconds
        packing = run.summary()
        imbalance = self.imbalance
        return {
            "title": self.title,
            "steps": len(run.digests),
            "steps_of_flush": packing["steps_of_flush"],
            "flush_share": self.flush_share,
            "tokens": self.tokens,
            "micro_batches_mean": self.micro_batches,
            "seconds": total,
            "step_seconds_mean": float(self.seconds[: run.streamed].mean()),
            "step_seconds_p95": percentile(self.seconds[: run.streamed], 0.95),
            "step_seconds_worst": float(self.seconds[: run.streamed].max()),
            "tokens_per_second": self.tokens_per_second,
            "model_flops_utilization": self.model_flops_utilization,
            "attribution": {name: float(part.sum() / total) for name, part in self.attribution.items()},
            "micro_batch_imbalance_mean": float(imbalance.mean()),
            "micro_batch_imbalance_p95": imbalance_percentile(imbalance, 0.95),
            "micro_batch_imbalance_worst": float(imbalance.max()),
            "micro_batch_imbalance_band": list(self.imbalance_band),
            "lost_time_band": list(self.lost_time_band),
            **self.balance.summary(),
            "cp_imbalance": self.cp_imbalance,
            "cp_strategies": self.strategies,
            "cp_sizes": {str(size): share for size, share in self.cp_sizes.items()},
            "delay_mean": packing["delay_mean"],
            "delay_p99": packing["delay_p99"],
            "delay_max": packing["delay_max"],
            "documents_cut": packing["documents_cut"],
            "largest_micro_batch": self.largest_micro_batch,
            "peak_bytes": float(self.memory.total.max()),
            "digest": packing["digest"],
        }


def noise_factors(scenario: Scenario, shape: tuple[int, ...]) -> Floats:
    """Log-normal factors of mean 1 on the times of micro-batches, equal for all methods."""
    if not scenario.noise:
        return np.ones(shape)
    sigma = np.sqrt(np.log1p(scenario.noise**2))
    return np.random.default_rng(scenario.noise_seed).lognormal(-(sigma**2) / 2, sigma, shape)
