"""Packing methods: each turns a stream of global batches into training steps of the form `Step`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._choices import Sync
from wlb._core import (
    CostModel,
    MicroBatch,
    Packer,
    Packing,
    pack,
    tune,
)
from wlb._results import TuneResult
from wlb_tools.simulation.stream import GlobalBatches, Reading


def meeting_ranks(sync: Sync, dp_size: int) -> dict[str, Any]:
    """Arguments of a packer for data-parallel ranks that meet in every micro-batch; empty if they do not."""
    return {"dp_size": dp_size, "sync": sync} if sync == "micro_batch" and dp_size > 1 else {}


@dataclass(frozen=True)
class Setup:
    """Settings that the methods share."""

    num_micro_batches: int  # of one global batch
    context: int  # most tokens of a document, and tokens of a micro-batch of the fixed-length methods
    max_tokens: int  # most tokens of a micro-batch of variable length
    cost_model: CostModel | None  # None: documents have given costs
    dp_size: int = 1  # data-parallel ranks to which the micro-batches of a step are dealt
    sync: Sync = "step"  # where these ranks wait for each other
    split: int | Fraction = 1  # factor on the number of micro-batches, if whole documents are packed
    max_delay: int | None = None  # most iterations that a document waits
    max_step_cost: float | None = None  # for packers with release="adaptive"

    @property
    def tokens_per_batch(self) -> int:
        """Most tokens of a global batch."""
        return self.num_micro_batches * self.context

    @property
    def packed(self) -> int:
        """Micro-batches of a global batch if whole documents are packed."""
        return int(self.num_micro_batches * self.split)


@dataclass(frozen=True)
class Step:
    """One global batch in training."""

    micro_batches: Sequence[MicroBatch]
    order: NDArray[np.int64]  # [dp, micro-batches of a rank] which rank trains which, in which order
    first_document: int  # what to add to their document ids to get indices into the stream
    delays: NDArray[np.int64]  # [pieces] iterations from the turn to training, micro-batch after micro-batch
    digest: str
    seconds: float | None  # of planning; None for what a flush yields
    column_costs: NDArray[np.float64] | None = None  # [micro-batches, columns] where documents bring their costs


def original(stream: GlobalBatches, setup: Setup, *, dealt: bool = True) -> Iterator[Step]:
    """Documents concatenated in order of arrival and cut every `context` tokens.

    `dealt`: micro-batches go to data-parallel ranks by `wlb.Packing.deal`, instead of in order.
    """
    for i in range(stream.batches):
        first, last = int(stream.offsets[i]), int(stream.offsets[i + 1])
        costs = None
        if stream.costs is not None:  # in a single batch a column may have only zeros, which `pack` refuses
            present = stream.costs[first:last].any(axis=0)
            costs = stream.costs[first:last, present] if present.any() else np.ones(last - first)
        began = time.perf_counter()
        packing = pack(
            stream.lengths[first:last],
            num_micro_batches=setup.num_micro_batches,
            max_tokens=setup.context,
            cost_model=setup.cost_model,
            costs=costs,
            method="original",
        )
        seconds = time.perf_counter() - began
        column_costs = None
        if costs is not None:
            column_costs = np.zeros((setup.num_micro_batches, present.size))
            if present.any():
                column_costs[:, present] = packing.column_costs
        order = packing.deal(setup.dp_size) if dealt else _as_they_come(setup)
        delays = np.zeros(sum(map(len, packing.micro_batches)), dtype=np.int64)
        yield Step(packing.micro_batches, order, first, delays, packing.digest(), seconds, column_costs)


def whole(stream: GlobalBatches, setup: Setup) -> Iterator[Step]:
    """Documents in order of arrival, uncut: one that no longer fits a micro-batch of `context` begins the next one.

    A step has as many micro-batches as a global batch but fewer tokens, so the stream has more steps. Micro-batches go
    to data-parallel ranks by `wlb.Packing.deal`.
    """
    n = setup.num_micro_batches
    owner = next_fit(stream.lengths, setup.context)
    firsts = np.searchsorted(owner, np.arange(0, int(owner[-1]) + 1, n))
    for first, last in itertools.pairwise([*firsts.tolist(), owner.size]):
        began = time.perf_counter()
        packing = Packing.from_assignment(
            stream.lengths[first:last],
            owner[first:last] - owner[first] // n * n,
            num_micro_batches=n,
            max_tokens=setup.context,
            cost_model=setup.cost_model,
        )
        seconds = time.perf_counter() - began if owner[last - 1] % n == n - 1 else None  # the last may not be full
        delays = np.zeros(last - first, dtype=np.int64)
        yield Step(packing.micro_batches, packing.deal(setup.dp_size), first, delays, packing.digest(), seconds)


def next_fit(lengths: NDArray[np.int64], max_tokens: int) -> NDArray[np.int64]:
    """int64[n]: the micro-batch of each document, if a document without room begins the next micro-batch."""
    ends = lengths.cumsum()
    owner = np.zeros(lengths.size, dtype=np.int64)
    first, number = 0, 0
    while first < lengths.size:
        limit = ends[first] - lengths[first] + max_tokens
        last = max(int(np.searchsorted(ends, limit, side="right")), first + 1)
        owner[first:last] = number
        first, number = last, number + 1
    return owner


def fixed_length(stream: GlobalBatches, setup: Setup, window: int) -> Iterator[Step]:
    """Greedy packing of `window` global batches at once. The first of their steps waits until the last has arrived."""
    n, arrival = setup.num_micro_batches, stream.arrival
    for i in range(0, stream.batches, window):
        end = min(i + window, stream.batches)
        first, last = int(stream.offsets[i]), int(stream.offsets[end])
        began = time.perf_counter()
        packing = pack(
            stream.lengths[first:last],
            num_micro_batches=n,
            max_tokens=setup.context,
            cost_model=setup.cost_model,
            method="fixed_length",
            global_batches=end - i,
        )
        seconds = (time.perf_counter() - began) / (end - i)
        micro_batches, digest = packing.micro_batches, packing.digest()
        orders = packing.deal(setup.dp_size).reshape(end - i, setup.dp_size, -1)
        for k, order in enumerate(orders):
            of_step = micro_batches[k * n : (k + 1) * n]
            delays = end - 1 + k - arrival[first + document_ids(of_step)]
            yield Step(of_step, order - k * n, first, delays, digest, seconds)


def var_length(
    stream: GlobalBatches,
    setup: Setup,
    thresholds: tuple[int, ...],
    options: Mapping[str, Any] | None = None,
    *,
    max_early: int = 0,
) -> Iterator[Step]:
    """Wlb and WLB-LLM: whole documents, micro-batches of equal work and unequal tokens, outliers in waiting queues.

    Documents enter as the loaders of `wlb.torch` read them, see `Reading`; only their order matters here, not the
    stream's global batches. If ranks wait for each other in every micro-batch, steps are planned for them. `options`
    are further arguments of the packer. Long documents come up to `max_early` iterations before their turn.
    """
    given: dict[str, Any] = (
        {} if stream.costs is None else {"cost_columns": len(stream.limits), "limits": stream.limits}
    )
    options = {
        **packer_options(setup),
        **given,
        "outlier_thresholds": thresholds,
        **bounded(options or {}, setup.max_step_cost),
    }
    packer = Packer(**options)
    reading = Reading(stream.lengths, packer, costs=stream.costs, max_early=max_early)
    for read in reading.steps():
        micro_batches = read.packing.micro_batches
        delays = read.iteration - reading.turns[document_ids(micro_batches)]
        order, digest = read.packing.deal(setup.dp_size), read.packing.digest()
        column_costs = None if stream.costs is None else read.packing.column_costs
        yield Step(micro_batches, order, 0, delays, digest, read.seconds, column_costs)


def document_ids(micro_batches: Sequence[MicroBatch]) -> NDArray[np.int64]:
    """int64[pieces]: the document of each, micro-batch after micro-batch."""
    return np.concatenate([micro_batch.document_ids for micro_batch in micro_batches])


def packer_options(setup: Setup) -> dict[str, Any]:
    """Arguments of `wlb.Packer` and of its tuning for a setup, except those of waiting and of the placement."""
    return {
        "num_micro_batches": setup.packed,
        "max_tokens": setup.max_tokens,
        "cost_model": setup.cost_model,
        "max_delay": setup.max_delay,
        "max_document_tokens": setup.context,
        "tokens_per_batch": setup.tokens_per_batch,
        **meeting_ranks(setup.sync, setup.dp_size),
    }


def bounded(packer: Mapping[str, Any], max_step_cost: float | None) -> dict[str, Any]:
    """Arguments of a packer with the bound on the work of a step, if its release rule supports it."""
    adaptive = packer.get("release") == "adaptive" and max_step_cost is not None
    return {**packer, "max_step_cost": max_step_cost} if adaptive else {**packer}


def tune_waiting(
    lengths: ArrayLike,
    packer: Mapping[str, Any],
    *,
    queues: int | None,
    max_mean_delay: float,
    costs: NDArray[np.float64] | None = None,
    limits: tuple[float, ...] = (),
    max_step_cost: float | None = None,
    max_early: int = 0,
) -> TuneResult:
    """The best setting of waiting, for these documents and a packer with these arguments, by `wlb.tune`.

    With `queues` it tunes their thresholds. Without, it tunes the price of delay of the adaptive release within a bound
    on the work of steps, with documents up to `max_early` iterations before their turn. `costs` and `limits` are those
    of documents with given costs.
    """
    options = {**packer, "num_queues": queues, "max_mean_delay": max_mean_delay, "costs": costs}
    if queues is None:
        options |= {"max_step_cost": max_step_cost, "max_early": max_early}
    elif costs is not None:
        options["limits"] = limits
    return tune(lengths, **options)


def _as_they_come(setup: Setup) -> NDArray[np.int64]:
    return np.arange(setup.num_micro_batches).reshape(setup.dp_size, -1)
