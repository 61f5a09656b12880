"""A whole stream as one method trains it, in rows of one form for all methods, and summaries of it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb._choices import Release
from wlb._core import CostModel
from wlb._shown import explained
from wlb_tools.simulation.balance import ATTENTION_RATES, Balance, band, imbalance_percentile
from wlb_tools.simulation.methods import Step, document_ids
from wlb_tools.simulation.stream import GlobalBatches, PieceBatches


@explained
@dataclass(frozen=True)
class Trained:
    """A whole stream as one method trains it: a row per piece of a document, in training order."""

    name: str
    step: NDArray[np.int64]  # [pieces] number of the training step
    document: NDArray[np.int64]  # [pieces] index into the stream
    start: NDArray[np.int64]  # [pieces] first token inside that document
    length: NDArray[np.int64]  # [pieces] tokens
    delay: NDArray[np.int64]  # [pieces] iterations from its turn to training; negative before its turn
    digests: tuple[str, ...]  # [steps]
    # [steps before the flush or remainder] planning time by the clock, so it is not compared
    seconds: NDArray[np.float64] = field(compare=False)

    @property
    def streamed(self) -> int:
        """Number of steps before those at the end, which empty the queues or have a global batch that is not full.

        All steps, if there are no others.
        """
        return self.seconds.size or len(self.digests)

    @property
    def tokens_by_delay(self) -> NDArray[np.int64]:
        """int64[delays]: tokens trained k iterations after they arrived; tokens before their turn have delay 0."""
        return np.bincount(np.maximum(self.delay, 0), weights=self.length).astype(np.int64)

    @property
    def delay_mean(self) -> float:
        """Iterations that a token waits, on average."""
        by_delay = self.tokens_by_delay
        return float(by_delay @ np.arange(by_delay.size) / by_delay.sum())

    @property
    def early_mean(self) -> float:
        """Iterations by which a token is trained before its turn, on average."""
        return float((np.maximum(-self.delay, 0) * self.length).sum() / self.length.sum())

    def summary(self) -> dict[str, Any]:
        """Delay and planning in a few numbers, as plain JSON values."""
        by_delay = self.tokens_by_delay
        return {
            "method": self.name,
            "delay_mean": self.delay_mean,
            "delay_p99": int(np.searchsorted(by_delay.cumsum(), 0.99 * by_delay.sum())),
            "delay_max": by_delay.size - 1,
            "early_mean": self.early_mean,
            "planning_microseconds": float(np.median(self.seconds) * 1e6) if self.seconds.size else 0.0,
            "steps": len(self.digests),
            "steps_of_flush": len(self.digests) - self.streamed,
            "documents_cut": int((np.bincount(self.document) > 1).sum()),
            "digest": hashlib.sha256("".join(self.digests).encode()).hexdigest(),
        }


@explained
@dataclass(frozen=True)
class PackedRun(Trained):
    """Global batches of equally many micro-batches, all on the same context-parallel ranks."""

    thresholds: tuple[int, ...]  # of the outlier queues
    micro_batch: NDArray[np.int64]  # [pieces] number inside the step
    costs: NDArray[np.float64]  # [steps, micro-batches]
    tokens: NDArray[np.int64]  # [steps, micro-batches]
    order: NDArray[np.int64]  # [steps, dp, micro-batches of a rank] which rank trains which, in which order
    release: Release = "fifo"  # rule that chooses the documents that wait
    column_costs: NDArray[np.float64] | None = None  # [steps, micro-batches, columns] if documents have given costs
    limits: tuple[float, ...] = ()  # of these columns

    @property
    def waits(self) -> bool:
        """Whether outliers wait for others."""
        return bool(self.thresholds) or self.release == "adaptive"

    @property
    def balance(self) -> Balance:
        """Balance of the steps by the packer's own costs, without those that empty the queues at the end."""
        return self.all_balance.first(self.streamed)

    @property
    def all_balance(self) -> Balance:
        """Balance of all steps; with several cost columns, a step has the heaviest micro-batch of each."""
        return Balance.of(self.costs if self.column_costs is None else self.column_costs[..., self.timed])

    @property
    def timed(self) -> NDArray[np.bool_]:
        """bool[columns]: which columns of given costs take time; the others are memory."""
        return np.isinf(self.limits)

    @property
    def cost_per_token(self) -> float:
        """Cost of the heaviest micro-batches for each token, without the steps that empty the queues."""
        return float(self.balance.heaviest.sum()) / float(self.tokens[: self.streamed].sum())

    @property
    def imbalance(self) -> NDArray[np.float64]:
        """float64[streamed]: the slowest micro-batch over the mean of its step."""
        return self.balance.imbalance

    def graded(self, cost_model: CostModel, rates: Sequence[float] = ATTENTION_RATES) -> list[Balance]:
        """Balance by other costs than those of the packer: by `cost_model`, with attention at several rates.

        Args:
            cost_model: by which the documents were packed.
            rates: of attention, relative to `cost_model`.
        """
        slot = self.step * self.costs.shape[1] + self.micro_batch
        of_pieces = cost_model.attention_cost(self.length)
        attention = np.bincount(slot, weights=of_pieces, minlength=self.costs.size).reshape(self.costs.shape)
        graded = [np.maximum(self.costs + (1 / rate - 1) * attention, 0.0) for rate in rates]
        return [Balance.of(costs).first(self.streamed) for costs in graded]

    def bands(self, cost_model: CostModel) -> dict[str, Any]:
        """The least and the most of the balance at these rates, as plain JSON values."""
        graded = self.graded(cost_model)
        return {
            "imbalance_band": list(band([float(balance.imbalance.mean()) for balance in graded])),
            "lost_time_band": list(band([balance.lost_time for balance in graded])),
        }

    def columns(self) -> list[dict[str, Any]]:
        """Sums and limits of each cost column, as plain JSON values.

        For a column that takes time, `share` is its part of the steps' time, and `lost_time` is as in `Balance`;
        `heaviest` is the most of it in any micro-batch of all steps.
        """
        if self.column_costs is None:
            return []
        streamed = self.column_costs[: self.streamed]
        most = float(self.all_balance.first(self.streamed).heaviest.sum())
        found = []
        for column, limit in enumerate(self.limits):
            balance, timed = Balance.of(streamed[..., column]), limit == math.inf
            found.append(
                {
                    "column": column,
                    "limit": None if timed else limit,
                    "heaviest": float(self.column_costs[..., column].max()),
                    "lost_time": balance.lost_time if timed else None,
                    "share": float(balance.heaviest.sum()) / most if timed and most else None,
                }
            )
        return found

    def micro_batch_pieces(self) -> Iterator[slice]:
        """Range of pieces of every micro-batch, step by step; empty for an empty micro-batch."""
        width = self.tokens.shape[1]
        ends = np.bincount(self.step * width + self.micro_batch, minlength=self.tokens.size).cumsum().tolist()
        return (slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True))

    def micro_batch_lengths(self) -> Iterator[NDArray[np.int64]]:
        """The lengths of every micro-batch's pieces, step by step; an empty array for an empty micro-batch."""
        return (self.length[pieces] for pieces in self.micro_batch_pieces())

    def summary(self) -> dict[str, Any]:
        """Balance, delay and planning in a few numbers, as plain JSON values."""
        balance, tokens = self.balance, self.tokens[: self.streamed]
        imbalance = balance.imbalance
        return {
            **super().summary(),
            "thresholds": list(self.thresholds),
            "release": self.release,
            "imbalance_mean": float(imbalance.mean()),
            "imbalance_p95": imbalance_percentile(imbalance, 0.95),
            "imbalance_worst": float(imbalance.max()),
            **balance.summary(),
            "memory_skew": float((tokens.max(axis=1) / tokens.mean(axis=1)).mean()),
        }


def collect(
    name: str,
    steps: Iterable[Step],
    stream: GlobalBatches,
    thresholds: tuple[int, ...] = (),
    release: Release = "fifo",
) -> PackedRun:
    """Runs a method over the stream. A step in which every document waits trains nothing and is left out."""
    trained = [step for step in steps if any(map(len, step.micro_batches))]
    micro_batches = [m for step in trained for m in step.micro_batches]
    shape = (len(trained), len(trained[0].micro_batches))

    pieces = [len(m) for m in micro_batches]
    step, micro_batch = (np.repeat(index.ravel(), pieces) for index in np.indices(shape))
    document = document_ids(micro_batches)
    document += np.array([step.first_document for step in trained])[step]
    start = np.concatenate([m.starts for m in micro_batches]).astype(np.int64)
    seconds = [step.seconds for step in trained if step.seconds is not None]
    if isinstance(stream, PieceBatches):
        start += stream.firsts[document]
        document = stream.documents[document]
        seconds = seconds[: len(trained) - stream.remainder]
    costs = np.array([m.cost for m in micro_batches]).reshape(shape)
    column_costs = None
    if stream.costs is not None:
        column_costs = np.stack([step.column_costs for step in trained if step.column_costs is not None])
        costs = column_costs[..., np.isinf(stream.limits)].sum(axis=2)
    return PackedRun(
        name=name,
        thresholds=thresholds,
        step=step,
        micro_batch=micro_batch,
        document=document,
        start=start,
        length=np.concatenate([m.lengths for m in micro_batches]).astype(np.int64),
        delay=np.concatenate([step.delays for step in trained]),
        costs=costs,
        tokens=np.array([m.tokens for m in micro_batches]).reshape(shape),
        order=np.stack([step.order for step in trained]),
        digests=tuple(step.digest for step in trained),
        seconds=np.array(seconds),
        release=release,
        column_costs=column_costs,
        limits=stream.limits,
    )
