"""What each packing method makes of a stream of documents, in one form, so that all are measured alike."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._choices import Release
from wlb._core import (
    CostModel,
    MicroBatch,
    Packer,
    Packing,
    pack,
    tune_delay_price,
    tune_outlier_thresholds,
)
from wlb._results import TuneResult


@dataclass(frozen=True)
class GlobalBatches:
    """Documents in arrival order, divided into global batches: batch i is `lengths[offsets[i]:offsets[i + 1]]`."""

    lengths: NDArray[np.int64]  # [n] tokens
    offsets: NDArray[np.int64]  # [batches + 1]

    @property
    def batches(self) -> int:
        """The number of global batches."""
        return self.offsets.size - 1

    @property
    def arrival(self) -> NDArray[np.int64]:
        """int64[n]: the global batch of each document."""
        return np.repeat(np.arange(self.batches), np.diff(self.offsets))

    def head(self, batches: int) -> NDArray[np.int64]:
        """Lengths of the first `batches` global batches."""
        return self.lengths[: self.offsets[batches]]

    def full(self, tokens: int) -> PieceBatches:
        """The same tokens in global batches of exactly `tokens` each, the last one excepted.

        For methods that cut documents anyway: where global batches divide, too.
        """
        ends = np.cumsum(self.lengths)
        total = int(ends[-1])
        batch_starts = np.arange(0, total, tokens)
        starts = np.union1d(ends - self.lengths, batch_starts)
        documents = np.searchsorted(ends, starts, side="right")
        return PieceBatches(
            lengths=np.diff(starts, append=total),
            offsets=np.append(np.searchsorted(starts, batch_starts), starts.size),
            documents=documents,
            firsts=starts - (ends - self.lengths)[documents],
            remainder=total % tokens != 0,
        )


@dataclass(frozen=True)
class PieceBatches(GlobalBatches):
    """Global batches of pieces of documents."""

    documents: NDArray[np.int64]  # [n] the document of a piece
    firsts: NDArray[np.int64]  # [n] its first token inside that document
    remainder: bool  # whether the last global batch is not full


@dataclass(frozen=True)
class Setup:
    """What the methods have in common."""

    num_micro_batches: int  # of one global batch
    context: int  # tokens: the longest document, and a micro-batch of the fixed-length methods
    max_tokens: int  # the most tokens of a micro-batch of variable length
    cost_model: CostModel
    dp_size: int = 1  # data-parallel ranks that the micro-batches of a step are dealt to
    split: int = 1  # so many times the micro-batches, where whole documents are packed

    @property
    def tokens_per_batch(self) -> int:
        """The most tokens of a global batch."""
        return self.num_micro_batches * self.context

    @property
    def packed(self) -> int:
        """Micro-batches of a global batch where whole documents are packed."""
        return self.num_micro_batches * self.split


@dataclass(frozen=True)
class Step:
    """One global batch as it is trained."""

    micro_batches: Sequence[MicroBatch]
    order: NDArray[np.int64]  # [dp, micro-batches of a rank] which rank trains which, in which order
    first_document: int  # what to add to their document ids to get indices into the stream
    iteration: int  # when it can run: iteration t is when global batch t of the stream arrives
    digest: str
    seconds: float | None  # of planning; None for what a flush yields


@dataclass(frozen=True)
class Trained:
    """A whole stream as one method trains it: a row per piece of a document, in training order."""

    name: str
    step: NDArray[np.int64]  # [pieces] global batch, in training order
    document: NDArray[np.int64]  # [pieces] index into the stream
    start: NDArray[np.int64]  # [pieces] first token inside that document
    length: NDArray[np.int64]  # [pieces] tokens
    delay: NDArray[np.int64]  # [pieces] iterations from arrival to training
    digests: tuple[str, ...]  # [steps]
    seconds: NDArray[np.float64]  # [steps before the flush or remainder] planning time

    @property
    def streamed(self) -> int:
        """Steps before those at the stream's end: the flush that empties the queues, the global batch that is not full.

        All steps where there are no others.
        """
        return self.seconds.size or len(self.digests)

    @property
    def tokens_by_delay(self) -> NDArray[np.int64]:
        """int64[delays]: tokens trained k iterations after they arrived."""
        return np.bincount(self.delay, weights=self.length).astype(np.int64)

    @property
    def delay_mean(self) -> float:
        """Iterations that a token waits, on average."""
        by_delay = self.tokens_by_delay
        return float(by_delay @ np.arange(by_delay.size) / by_delay.sum())

    def summary(self) -> dict[str, Any]:
        """Delay and planning in a few numbers, as plain JSON values."""
        by_delay = self.tokens_by_delay
        return {
            "method": self.name,
            "delay_mean": self.delay_mean,
            "delay_p99": int(np.searchsorted(by_delay.cumsum(), 0.99 * by_delay.sum())),
            "delay_max": by_delay.size - 1,
            "planning_microseconds": float(np.median(self.seconds) * 1e6) if self.seconds.size else 0.0,
            "steps": len(self.digests),
            "steps_of_flush": len(self.digests) - self.streamed,
            "documents_cut": int((np.bincount(self.document) > 1).sum()),
            "digest": hashlib.sha256("".join(self.digests).encode()).hexdigest(),
        }


@dataclass(frozen=True)
class Plan(Trained):
    """Global batches of equally many micro-batches, all of them over the same context-parallel ranks."""

    thresholds: tuple[int, ...]  # of the outlier queues
    micro_batch: NDArray[np.int64]  # [pieces] inside the step
    costs: NDArray[np.float64]  # [steps, micro-batches]
    tokens: NDArray[np.int64]  # [steps, micro-batches]
    order: NDArray[np.int64]  # [steps, dp, micro-batches of a rank] which rank trains which, in which order
    release: Release = "fifo"  # which outliers wait

    @property
    def waits(self) -> bool:
        """Whether outliers wait for others."""
        return bool(self.thresholds) or self.release == "adaptive"

    @property
    def imbalance(self) -> NDArray[np.float64]:
        """float64[streamed]: the slowest micro-batch over the mean of its step."""
        costs = self.costs[: self.streamed]
        return np.asarray(costs.max(axis=1) / costs.mean(axis=1))

    def micro_batch_lengths(self) -> Iterator[NDArray[np.int64]]:
        """The lengths of every micro-batch's pieces, step by step; of none where a micro-batch is empty."""
        width = self.tokens.shape[1]
        ends = np.bincount(self.step * width + self.micro_batch, minlength=self.tokens.size).cumsum()
        return (self.length[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True))

    def summary(self) -> dict[str, Any]:
        """Balance, delay and planning in a few numbers, as plain JSON values."""
        imbalance, tokens = self.imbalance, self.tokens[: self.streamed]
        return {
            **super().summary(),
            "thresholds": list(self.thresholds),
            "release": self.release,
            "imbalance_mean": float(imbalance.mean()),
            "imbalance_p95": float(np.quantile(imbalance, 0.95)),
            "imbalance_worst": float(imbalance.max()),
            "memory_skew": float((tokens.max(axis=1) / tokens.mean(axis=1)).mean()),
        }


def original(stream: GlobalBatches, setup: Setup, *, dealt: bool = True) -> Iterator[Step]:
    """Documents concatenated as they arrive and cut every `context` tokens.

    Micro-batches go to data-parallel ranks by :meth:`wlb.Packing.deal`, or as they come.
    """
    for i in range(stream.batches):
        first, last = int(stream.offsets[i]), int(stream.offsets[i + 1])
        began = time.perf_counter()
        packing = pack(
            stream.lengths[first:last],
            num_micro_batches=setup.num_micro_batches,
            max_tokens=setup.context,
            cost_model=setup.cost_model,
            method="original",
        )
        seconds = time.perf_counter() - began
        order = packing.deal(setup.dp_size) if dealt else _as_they_come(setup)
        yield Step(packing.micro_batches, order, first, i, packing.digest(), seconds)


def fixed_length(stream: GlobalBatches, setup: Setup, window: int) -> Iterator[Step]:
    """Greedy over `window` global batches. The first of their steps waits for the last of them to arrive."""
    n = setup.num_micro_batches
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
            window=end - i,
        )
        seconds = (time.perf_counter() - began) / (end - i)
        micro_batches, digest = packing.micro_batches, packing.digest()
        orders = packing.deal(setup.dp_size).reshape(end - i, setup.dp_size, -1)
        for k, order in enumerate(orders):
            of_step = micro_batches[k * n : (k + 1) * n]
            yield Step(of_step, order - k * n, first, end - 1 + k, digest, seconds)


def var_length(
    stream: GlobalBatches,
    setup: Setup,
    thresholds: tuple[int, ...],
    max_delay: int | None,
    options: Mapping[str, Any] | None = None,
) -> Iterator[Step]:
    """WLB: whole documents, micro-batches of equal work and unequal tokens, outliers in waiting queues.

    `options` are further arguments of the packer.
    """
    packer = Packer(**{**packer_options(setup, max_delay), "outlier_thresholds": thresholds, **(options or {})})

    def step(packing: Packing, iteration: int, seconds: float | None) -> Step:
        order = packing.deal(setup.dp_size)
        return Step(packing.micro_batches, order, 0, iteration, packing.digest(), seconds)

    for i in range(stream.batches):
        lengths = stream.lengths[stream.offsets[i] : stream.offsets[i + 1]]
        began = time.perf_counter()
        packing = packer.push(lengths)  # default ids: a running number, here the index into the stream
        yield step(packing, i, time.perf_counter() - began)
    for i, packing in enumerate(packer.flush(), start=stream.batches):
        yield step(packing, i, None)


def packer_options(setup: Setup, max_delay: int | None) -> dict[str, Any]:
    """Arguments of :class:`wlb.Packer` for a setup; all but what waits, and how it is placed."""
    return {
        "num_micro_batches": setup.packed,
        "max_tokens": setup.max_tokens,
        "cost_model": setup.cost_model,
        "max_delay": max_delay,
        "max_document_tokens": setup.context,
    }


def tune_waiting(
    lengths: ArrayLike,
    packer: Mapping[str, Any],
    *,
    tokens_per_batch: int,
    queues: int | None,
    max_mean_delay: float,
) -> TuneResult:
    """The best of what may wait, for these documents and a packer with these arguments.

    With `queues`, their thresholds, by :func:`wlb.tune_outlier_thresholds`; without, the price of delay of the adaptive
    release, by :func:`wlb.tune_delay_price`.
    """
    options = {**packer, "tokens_per_batch": tokens_per_batch, "max_mean_delay": max_mean_delay}
    if queues is None:
        return tune_delay_price(lengths, **options)
    return tune_outlier_thresholds(lengths, num_queues=queues, **options)


def _as_they_come(setup: Setup) -> NDArray[np.int64]:
    return np.arange(setup.num_micro_batches).reshape(setup.dp_size, -1)


def collect(
    name: str,
    steps: Iterable[Step],
    stream: GlobalBatches,
    thresholds: tuple[int, ...] = (),
    release: Release = "fifo",
) -> Plan:
    """Runs a method over the stream. A step in which every document waits trains nothing and is no step."""
    trained = [step for step in steps if any(map(len, step.micro_batches))]
    micro_batches = [m for step in trained for m in step.micro_batches]
    shape = (len(trained), len(trained[0].micro_batches))

    pieces = [len(m) for m in micro_batches]
    step, micro_batch = (np.repeat(index.ravel(), pieces) for index in np.indices(shape))
    document = np.concatenate([m.document_ids for m in micro_batches])
    document += np.array([step.first_document for step in trained])[step]
    start = np.concatenate([m.starts for m in micro_batches]).astype(np.int64)
    iteration = np.array([step.iteration for step in trained])
    delay = iteration[step] - stream.arrival[document]
    seconds = [step.seconds for step in trained if step.seconds is not None]
    if isinstance(stream, PieceBatches):
        start += stream.firsts[document]
        document = stream.documents[document]
        seconds = seconds[: len(trained) - stream.remainder]
    return Plan(
        name=name,
        thresholds=thresholds,
        step=step,
        micro_batch=micro_batch,
        document=document,
        start=start,
        length=np.concatenate([m.lengths for m in micro_batches]).astype(np.int64),
        delay=delay,
        costs=np.array([m.cost for m in micro_batches]).reshape(shape),
        tokens=np.array([m.tokens for m in micro_batches]).reshape(shape),
        order=np.stack([step.order for step in trained]),
        digests=tuple(step.digest for step in trained),
        seconds=np.array(seconds),
        release=release,
    )
