"""Settings for a user's documents on a cluster, and what each choice costs in delay and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from wlb._core import TunedPoint, TuneResult
from wlb.simulation.run import Simulation, simulate, tune_scenario
from wlb.simulation.scenario import Scenario
from wlb.simulation.outcome import Outcome
from wlb.simulation.variants import VARIANTS, Strategy, Variant

EQUAL = 0.003
"""Choices whose throughput differs by no more are equal: then the one that needs least (memory, delay) is taken."""

FACTORS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
"""Contexts that are tried for `S_max`, as far as they fit, besides what just fits."""

STRATEGIES: tuple[Strategy, ...] = ("per_sequence", "per_document", "adaptive")

_SHOWN_POINTS = 8
_OTHERS = ("plain", "as_they_come", "fixed", "per_document", "adaptive_cp", "packing")


@dataclass(frozen=True)
class Choice:
    """One choice of settings, and the stream under it."""

    max_tokens: int
    outlier_thresholds: tuple[int, ...]
    strategy: Strategy
    outcome: Outcome

    def summary(self, baseline: Outcome) -> dict[str, Any]:
        """In a few numbers, as plain JSON values."""
        return {
            "max_tokens": self.max_tokens,
            "outlier_thresholds": list(self.outlier_thresholds),
            "strategy": self.strategy,
            "speedup": baseline.steady_seconds / self.outcome.steady_seconds,
            **self.outcome.summary(),
        }


@dataclass(frozen=True)
class Tuning:
    """What was tried, one setting at a time, and what was chosen."""

    scenario: Scenario  # with the fitted costs
    attention_efficiency: float  # of the fitted costs
    baseline: Outcome  # Plain-4D
    by_memory: tuple[Choice, ...]  # S_max, ascending; thresholds tuned for each
    by_delay: tuple[Choice, ...]  # thresholds at the chosen S_max: the Pareto front, by delay
    by_strategy: tuple[Choice, ...]  # sharding at the chosen thresholds
    thresholds: TuneResult  # at the chosen S_max
    best: Choice

    def simulate(self, lengths: ArrayLike) -> Simulation:
        """What was chosen, as "wlb", beside the other methods on the same cluster with the same costs."""
        best = self.best
        scenario = dataclasses.replace(
            self.scenario, max_tokens=best.max_tokens, outlier_thresholds=best.outlier_thresholds
        )
        tuned = Variant(title="WLB, tuned", packing="var_length", strategies=(best.strategy,))
        return simulate(lengths, scenario, variants={**{name: VARIANTS[name] for name in _OTHERS}, "wlb": tuned})

    def as_json(self) -> dict[str, Any]:
        """Everything in numbers, as plain JSON values."""
        return {
            "kernel_model": self.scenario.attention.source,
            "attention_efficiency": self.attention_efficiency,
            "baseline": self.baseline.summary(),
            "best": self.best.summary(self.baseline),
            **{
                name: [choice.summary(self.baseline) for choice in getattr(self, name)]
                for name in ("by_memory", "by_delay", "by_strategy")
            },
        }


def tune(lengths: ArrayLike, scenario: Scenario, *, progress: Callable[[str, int, int], None] | None = None) -> Tuning:
    """Looks for `S_max`, thresholds and a sharding strategy: to 0.3 % the fastest tried within the delay limit.

    One after the other, each with the best of those before: the packer's costs are fitted to the cluster
    (:meth:`Scenario.fitted_efficiency`); `S_max` from one context up to what fits; the Pareto front of thresholds;
    the strategies. Of those within 0.3 % of the fastest so far the one with least memory or delay is taken. Throughput
    is that of a long stream (:attr:`Outcome.steady_seconds`): the sample's flush at its end would say more about the
    sample's length.

    Args:
        lengths: int[n] tokens of the documents in arrival order, see :func:`wlb.simulate`. All of them are tuned on,
            so give what is typical.
        scenario: model, cluster, limits. `max_tokens` is the most `S_max` that is tried, by default what fits into
            memory; `cost_model` and `outlier_thresholds` are not used.
        progress: see :func:`wlb.simulate`.

    Returns:
        Tuning.

    Raises:
        WlbError: see :func:`wlb.simulate`.

    Complexity:
        About fifteen simulations of a variant, and six searches for thresholds.
    """
    report = progress or (lambda *_: None)
    efficiency = scenario.fitted_efficiency(lengths)
    scenario = dataclasses.replace(
        scenario,
        cost_model=scenario.model.cost_model(attention_efficiency=efficiency),
        max_tokens=scenario.limit,
    )
    limits = sorted({*(int(factor * scenario.context) for factor in FACTORS), scenario.limit})
    limits = [limit for limit in limits if limit <= scenario.limit]
    jobs = len(limits) + _SHOWN_POINTS + len(STRATEGIES)

    def run(limit: int, thresholds: tuple[int, ...], strategy: Strategy) -> Choice:
        case = dataclasses.replace(scenario, max_tokens=limit, outlier_thresholds=thresholds)
        variant = Variant(title=strategy, packing="var_length", strategies=(strategy,))
        outcome = simulate(lengths, case, variants={strategy: variant}).baseline
        return Choice(limit, thresholds, strategy, outcome)

    def in_time(choice: Choice) -> bool:
        return choice.outcome.plan.delay_mean <= scenario.max_mean_delay

    report("Plain-4D", 0, jobs)
    baseline = simulate(lengths, scenario, variants={"plain": VARIANTS["plain"]}).baseline

    found: dict[int, TuneResult] = {}
    by_memory = []
    for done, limit in enumerate(limits):
        report(f"S_max {limit:,}", done, jobs)
        found[limit] = tune_scenario(lengths, dataclasses.replace(scenario, max_tokens=limit))
        by_memory.append(run(limit, found[limit].thresholds, "adaptive"))
    tried = [choice for choice in by_memory if in_time(choice)]
    limit = _least(tried or by_memory, tried or by_memory, lambda choice: choice.max_tokens).max_tokens

    by_delay = []
    for done, point in enumerate(_spread(found[limit].pareto, found[limit].best), start=len(limits)):
        report(f"thresholds {point.thresholds}", done, jobs)
        by_delay.append(run(limit, point.thresholds, "adaptive"))
    allowed = [choice for choice in by_delay if in_time(choice)] or by_delay[:1]
    tried += allowed
    waiting = _least(allowed, tried, lambda choice: choice.outcome.plan.delay_mean)

    report("sharding", jobs - len(STRATEGIES), jobs)
    by_strategy = [run(limit, waiting.outlier_thresholds, strategy) for strategy in STRATEGIES]
    tried += by_strategy
    best = _least(by_strategy, tried, lambda choice: float(STRATEGIES.index(choice.strategy)))
    report("done", jobs, jobs)
    return Tuning(
        scenario=scenario,
        attention_efficiency=efficiency,
        baseline=baseline,
        by_memory=tuple(by_memory),
        by_delay=tuple(by_delay),
        by_strategy=tuple(by_strategy),
        thresholds=found[limit],
        best=best,
    )


def _spread(points: Iterable[TunedPoint], best: TunedPoint) -> list[TunedPoint]:
    """Some of the Pareto front, evenly, both ends and the best among them."""
    front = list(points)
    picked = {int(index) for index in np.linspace(0, len(front) - 1, _SHOWN_POINTS - 1).round()}
    picked |= {index for index, point in enumerate(front) if point.thresholds == best.thresholds}
    return [front[index] for index in sorted(picked)]


def _least(choices: list[Choice], tried: list[Choice], need: Callable[[Choice], float]) -> Choice:
    """Of those as fast as the fastest of all that was tried so far, the one that needs least.

    There is one: what was chosen before is among the choices.
    """
    fastest = min(choice.outcome.steady_seconds for choice in tried)
    return min((choice for choice in choices if choice.outcome.steady_seconds <= fastest * (1 + EQUAL)), key=need)
