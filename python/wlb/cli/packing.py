"""The packing methods side by side on one stream, and how evenly their micro-batches shard: what demo and pack run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

import wlb
from wlb._choices import Release, StreamMethod
from wlb.cli.inputs.documents import Documents
from wlb.cli.inputs.stream import Stream
from wlb.cli.words import counted
from wlb.simulation import methods, trained
from wlb.simulation.methods import Setup, Step
from wlb.simulation.trained import Plan

CP_SIZES = (2, 4, 8, 16)
STRATEGIES: tuple[Literal["per_sequence", "per_document"], ...] = ("per_sequence", "per_document")


@dataclass(frozen=True)
class CpBalance:
    """(query, key) pairs of the busiest rank over the mean rank, for each micro-batch."""

    cp_size: int
    strategy: str
    ratios: NDArray[np.float64]  # [micro-batches]

    def summary(self) -> dict[str, float | int | str]:
        """The figures of the tables, as plain JSON values."""
        return {
            "cp_size": self.cp_size,
            "strategy": self.strategy,
            "mean": float(self.ratios.mean()),
            "worst": float(self.ratios.max()),
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Plans of one stream; the first is the original order."""

    documents: Documents
    stream: Stream
    setup: Setup
    plans: tuple[Plan, ...]
    shown: Plan  # the one to set against the original
    balances: tuple[CpBalance, ...]  # of `shown`


def collect(
    name: str,
    steps: Iterator[Step],
    stream: Stream,
    progress: Progress,
    thresholds: tuple[int, ...] = (),
    release: Release = "fifo",
) -> Plan:
    """Runs a method over the stream, as :func:`wlb.simulation.trained.collect`."""
    tracked = progress.track(steps, total=stream.batches, description=f"Packing: {name}")
    return trained.collect(name, tracked, stream, thresholds, release)


def waiting(
    setup: Setup,
    release: Release,
    delay_price: float | None = None,
    method: StreamMethod = "var_length",
) -> dict[str, Any]:
    """Options of a packer: what waits, and how the rest is placed. A global batch is what the price counts in."""
    return {
        "release": release,
        "delay_price": delay_price,
        "max_document_tokens": setup.context,
        "method": method,
    }


def tune(
    stream: Stream,
    setup: Setup,
    *,
    batches: int,
    queues: int | None,
    max_mean_delay: float,
    max_delay: int | None,
    progress: Progress,
    method: StreamMethod = "var_length",
) -> wlb.TuneResult:
    """The best thresholds, or without `queues` the best price of delay, for the first `batches` global batches."""
    what = "the price of delay" if queues is None else counted(queues, "queue")
    task = progress.add_task(f"Tuning {what}", total=None)
    result = methods.tune_waiting(
        stream.head(batches),
        {**methods.packer_options(setup, max_delay), "method": method},
        tokens_per_batch=setup.tokens_per_batch,
        queues=queues,
        max_mean_delay=max_mean_delay,
    )
    progress.update(task, total=result.evaluated, completed=result.evaluated)
    return result


def cp_balances(plan: Plan, progress: Progress) -> tuple[CpBalance, ...]:
    """Every strategy at every CP size, over the micro-batches of the plan that are not empty."""
    ends = np.flatnonzero(np.diff(plan.step * plan.costs.shape[1] + plan.micro_batch)) + 1
    packed = np.split(plan.length, ends)
    cases = [(cp_size, strategy) for cp_size in CP_SIZES for strategy in STRATEGIES]
    return tuple(
        CpBalance(cp_size, strategy, np.array([_ratio(lengths, cp_size, strategy) for lengths in packed]))
        for cp_size, strategy in progress.track(cases, description="Sharding over CP ranks")
    )


def _ratio(lengths: NDArray[np.int64], cp_size: int, strategy: Literal["per_sequence", "per_document"]) -> float:
    pairs = wlb.shard(lengths, cp_size=cp_size, strategy=strategy).pairs_per_rank
    return float(pairs.max() / pairs.mean())
