"""The packing methods on one stream, and how evenly their micro-batches shard: what demo and pack run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.progress import Progress

import wlb
from wlb._choices import Release, Strategy, StreamMethod
from wlb_tools.command.inputs.packing import Held
from wlb_tools.command.inputs.stream import Stream
from wlb_tools.command.words import counted
from wlb_tools.simulation import methods, trained
from wlb_tools.simulation.methods import Setup, Step
from wlb_tools.simulation.trained import PackedRun

CP_SIZES = (2, 4, 8, 16)
STRATEGIES: tuple[Strategy, ...] = ("per_sequence", "per_document")


def collect(
    name: str,
    steps: Iterator[Step],
    stream: Stream,
    bars: Progress,
    thresholds: tuple[int, ...] = (),
    release: Release = "fifo",
) -> PackedRun:
    """Runs a method over the stream, as `wlb_tools.simulation.trained.collect`."""
    tracked = bars.track(steps, total=stream.batches, description=f"Packing: {name}")
    return trained.collect(name, tracked, stream, thresholds, release)


def tune(
    stream: Stream,
    setup: Setup,
    max_mean_delay: float,
    bars: Progress,
    *,
    queues: int | None,
    batches: int | None = None,
    method: StreamMethod = "var_length",
) -> wlb.TuneResult:
    """The best thresholds, or without `queues` the best price of delay, for the first `batches` global batches."""
    batches = batches or stream.batches
    task = bars.add_task(f"Tuning {'the price of delay' if queues is None else counted(queues, 'queue')}", total=None)
    costs, limits = stream.costs_of_head(batches)
    result = methods.tune_waiting(
        stream.head(batches),
        {**methods.packer_options(setup), "method": method},
        queues=queues,
        max_mean_delay=max_mean_delay,
        costs=costs,
        limits=limits,
        max_step_cost=setup.max_step_cost,
    )
    bars.update(task, total=result.evaluated, completed=result.evaluated)
    return result


def wlb_plan(
    stream: Stream,
    setup: Setup,
    held: Held,
    bars: Progress,
    *,
    tuned_batches: int,
    method: StreamMethod = "var_length",
    queues: int | None = None,
) -> tuple[PackedRun, float | None]:
    """A plan as `held` says, what it leaves open tuned on the first global batches; and the price of delay, if any.

    The name of the plan has `queues`, by default as many as there are: tuning may do with fewer than it was given.
    """
    levels, price = held.outlier_thresholds, held.delay_price
    adaptive = held.release == "adaptive"
    open_ = price is None if adaptive else levels is None and held.num_queues > 0
    # Documents that cost nothing are level however they are placed.
    if open_ and stream.work(setup.cost_model)[: stream.offsets[tuned_batches]].any():
        most = None if adaptive else held.num_queues
        tuned = tune(stream, setup, held.max_mean_delay, bars, queues=most, batches=tuned_batches, method=method)
        levels, price = tuned.thresholds, tuned.delay_price
    levels = levels or ()
    waiting = {"release": held.release, "delay_price": price, "method": method}
    steps = methods.var_length(stream, setup, levels, waiting)
    name = "wlb" if adaptive else f"WLB-LLM, {counted(len(levels) if queues is None else queues, 'queue')}"
    name += ", refined" if method == "refined" else ""
    return collect(name, steps, stream, bars, levels, held.release), price


def cp_balance(plan: PackedRun, bars: Progress) -> list[dict[str, Any]]:
    """(query, key) pairs of the busiest rank over the mean rank, in the mean and in the worst micro-batch.

    Every strategy at every CP size, over the micro-batches of the plan that are not empty, as plain JSON values.
    """
    packed = [lengths for lengths in plan.micro_batch_lengths() if lengths.size]
    found = []
    cases = [(size, strategy) for size in CP_SIZES for strategy in STRATEGIES]
    for size, strategy in bars.track(cases, description="Sharding over CP ranks"):
        pairs = [wlb.shard(lengths, cp_size=size, strategy=strategy).pairs_per_rank for lengths in packed]
        ratios = np.array([of_ranks.max() / of_ranks.mean() for of_ranks in pairs])
        balance = {"mean": float(ratios.mean()), "worst": float(ratios.max())}
        found.append({"cp_size": size, "strategy": strategy, **balance})
    return found
