"""What was measured in a few figures: speed-ups with intervals, the prediction beside them, and what was idle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SAMPLES = 2000
INTERVAL = (2.5, 97.5)


@dataclass(frozen=True)
class Run:
    """A method's stream on a clock, and as it was predicted.

    Args:
        seconds: [steps] median over repetitions.
        predicted: [steps] seconds of the simulation.
        work: [steps] seconds of all ranks together in the simulation, waiting aside: what a step weighs. A clock cannot
            tell, since ranks also wait for each other inside of micro-batches.
        streamed: steps before those that empty the queues, or that a rest of the stream fills.
        tokens: of the stream.
        flops: of the stream's documents as they are trained.
    """

    seconds: Floats
    predicted: Floats
    work: Floats
    streamed: int
    tokens: int
    flops: float

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Run:
        """Of a record."""
        arrays = (np.array(row[name], float) for name in ("seconds", "predicted", "predicted_work"))
        return cls(*arrays, row["streamed"], row["tokens"], row["flops"])

    @property
    def steady(self) -> float:
        """Seconds of the stream if the last steps were as efficient as the others: what a long run takes."""
        return steady(self.seconds, self.work, np.arange(self.streamed))

    @property
    def steady_predicted(self) -> float:
        """The same as it was predicted."""
        return steady(self.predicted, self.work, np.arange(self.streamed))

    @property
    def step_errors(self) -> Floats:
        """float64 [steps]: predicted over measured, less 1."""
        return self.predicted / self.seconds - 1


def steady(seconds: Floats, work: Floats, steps: NDArray[np.int64]) -> float:
    """Seconds of all work at the efficiency of these steps."""
    return float(seconds[steps].sum() * work.sum() / work[steps].sum())


@dataclass(frozen=True)
class Gain:
    """Of a method over another one."""

    ratio: float
    low: float
    high: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.ratio - 1

    @property
    def shown(self) -> bool:
        """Whether the interval is above 1."""
        return self.low > 1


def gain(run: Run, base: Run, *, flops: bool) -> Gain:
    """Tokens, or model FLOPs, a second over those of `base`, with the interval of steps drawn in pairs.

    A pair is the two steps at the same place of the stream, which hold nearly the same documents.
    """

    def ratio(of: Floats | float, of_base: Floats | float) -> Any:
        amount = run.flops / base.flops if flops else run.tokens / base.tokens
        return amount * of_base / of

    places = np.random.default_rng(0).random((SAMPLES, min(run.streamed, base.streamed)))
    drawn = [
        np.array([steady(one.seconds, one.work, row) for row in (places * one.streamed).astype(np.int64)])
        for one in (run, base)
    ]
    low, high = np.percentile(ratio(*drawn), INTERVAL)
    measured, predicted = (
        float(ratio(getattr(run, name), getattr(base, name))) for name in ("steady", "steady_predicted")
    )
    return Gain(measured, float(low), float(high), predicted)


def levels(busy: list[list[list[float]]], sizes: Mapping[str, int]) -> dict[str, float]:
    """How uneven work is at each level: the busiest over the mean, mean over steps. WLB-LLM's figures 1 and 4.

    Args:
        busy: by step, rank (in the order pp, dp, cp) and micro-batch: seconds that the rank computed.
        sizes: of pp, dp and cp.

    Returns:
        "micro-batch": of a replica's, over its stages and ranks; "dp": of replicas; "pp": of stages; "cp": of the ranks
        of a micro-batch on a stage; "gpu": of all ranks.
    """
    found: dict[str, list[float]] = {name: [] for name in ("micro-batch", "dp", "pp", "cp", "gpu")}
    for step in busy:
        table = np.array(step).reshape(sizes["pp"], sizes["dp"], sizes["cp"], -1)
        if not table.sum():
            continue
        found["gpu"].append(_uneven(table.sum(axis=3).ravel()))
        found["dp"].append(_uneven(table.sum(axis=(0, 2, 3))))
        found["pp"].append(_uneven(table.sum(axis=(1, 2, 3))))
        found["cp"].append(float(table.max(axis=2).sum() / table.mean(axis=2).sum()))
        found["micro-batch"].append(_uneven(table.sum(axis=(0, 2)).ravel()))
    return {name: float(np.mean(values)) for name, values in found.items()}


def _uneven(values: Floats) -> float:
    return float(values.max() / values.mean())
