"""Finds settings for a user's documents on a cluster, and what each choice costs in delay and memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from wlb._core import DELAY_PRICE, WlbError, simulate_pipeline
from wlb._errors import error
from wlb._results import TunedPoint, TuneResult
from wlb._shown import explained
from wlb_tools.simulation.balance import band
from wlb_tools.simulation.dynamic import packer_before
from wlb_tools.simulation.methods import packer_options, tune_waiting
from wlb_tools.simulation.outcome import Outcome
from wlb_tools.simulation.planner import check_planner, obstacle, planner_options
from wlb_tools.simulation.run import Simulation, simulate, tune_scenario
from wlb_tools.simulation.scenario import Scenario
from wlb_tools.simulation.variants import VARIANTS, Strategy, Variant

Cutting = Literal["original", "fixed_length", "per_document", "adaptive_cp"]
Kind = Literal[Cutting, "no_waiting", "wlb_llm_fitted", "wlb", "early", "dynamic_cp", "wlb_dynamic_cp"]
Objective = Literal["tokens", "flops"]

CUTTING: tuple[Cutting, ...] = get_args(Cutting)
"""Kinds that cut documents at the end of a context: names in `wlb_tools.simulation.VARIANTS`, the baseline first."""

KINDS: tuple[Kind, ...] = (*CUTTING, *(kind for kind in get_args(Kind) if kind not in CUTTING))
"""Kinds of plans in the order of their complexity: names in `wlb_tools.simulation.VARIANTS`."""

EQUAL = 0.003
"""Choices whose throughput differs by no more count as equal; the one with least memory or delay is taken."""

FACTORS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
"""Multiples of the context that are tried for `S_max`, as far as they fit, besides the largest that fits."""

SPLITS = (1, 2, 4)
"""Multiples of the scenario's number of micro-batches that are tried."""

PRICES = (DELAY_PRICE / 10, DELAY_PRICE, DELAY_PRICE * 10)
"""Prices of delay that are tried with adaptive release (see `wlb.Packer`), besides the one that balances best within
the limit of the mean delay."""

EARLY = VARIANTS["early"].max_early
"""Iterations that long documents may come before their turn, in plans that allow it."""

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

_SHOWN_POINTS = 8


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A plan and its settings."""

    kind: Kind
    max_tokens: int  # `S_max`; with Dynamic-CP on `layout.cp` ranks together
    outlier_thresholds: tuple[int, ...] = ()
    delay_price: float | None = None  # of adaptive release
    max_early: int = 0  # iterations, of adaptive release
    split: int | Fraction = 1  # factor on the scenario's micro-batches, for the packer
    strategy: Strategy = "adaptive"

    @property
    def dynamic(self) -> bool:
        """Whether the ranks of a micro-batch are divided into groups."""
        return self.kind in ("dynamic_cp", "wlb_dynamic_cp")

    @property
    def cuts(self) -> bool:
        """Whether documents are cut."""
        return self.kind in CUTTING

    @property
    def variant(self) -> Variant:
        """The variant to simulate; `S_max`, thresholds and fitted costs are those of the scenario."""
        variant = VARIANTS[self.kind]
        if self.cuts:
            return variant
        packer = {} if self.delay_price is None else {"release": "adaptive", "delay_price": self.delay_price}
        changes: dict[str, Any] = {
            "packer": packer,
            "max_early": self.max_early,
            "split": self.split,
        }
        return dataclasses.replace(variant, strategies=(self.strategy,), fitted=False, **changes)

    @property
    def title(self) -> str:
        """The method's name in reports."""
        return VARIANTS[self.kind].title

    @property
    def machinery(self) -> tuple[float, ...]:
        """Sort key that grows with what a user has to build and run."""
        return (KINDS.index(self.kind), STRATEGIES.index(self.strategy), float(self.split))


@explained
@dataclass(frozen=True, kw_only=True, eq=False)
class Choice(Settings):
    """A plan and its outcome. Choices are equal if their settings are."""

    outcome: Outcome

    @property
    def delay(self) -> float:
        """Iterations between a token's turn and its training, on average."""
        return self.outcome.run.delay_mean + self.outcome.run.early_mean

    def speedup(self, baseline: Outcome, by: Objective = "tokens") -> float:
        """Throughput over the baseline's, as in a long stream: of tokens, or of the FLOPs of these documents.

        By FLOPs, cut documents count as less work, because their tokens attend to less.
        """
        work = self.outcome.flops / baseline.flops if by == "flops" else 1.0
        return work * baseline.steady_seconds / self.outcome.steady_seconds

    def speedup_band(self, baseline: Outcome) -> tuple[float, float]:
        """The least and the most of the speed-up in a long stream, as `Simulation.speedup_band`."""
        pairs = zip(baseline.swept, self.outcome.swept, strict=True)
        return band([before.steady_seconds / after.steady_seconds for before, after in pairs])

    def summary(self, baseline: Outcome) -> dict[str, Any]:
        """A few numbers, as plain JSON values."""
        return {
            "kind": self.kind,
            "max_tokens": self.max_tokens,
            "outlier_thresholds": list(self.outlier_thresholds),
            "delay_price": self.delay_price,
            "max_early": self.max_early,
            "early_mean": self.outcome.run.early_mean,
            "split": float(self.split),
            "strategy": self.strategy,
            "speedup": self.speedup(baseline),
            "speedup_flops": self.speedup(baseline, "flops"),
            "speedup_band": list(self.speedup_band(baseline)),
            **self.outcome.summary(),
        }


@explained
@dataclass(frozen=True)
class Tuning:
    """All settings that were tried, one at a time, and the choice."""

    scenario: Scenario  # with the fitted costs
    by: Objective  # what the best choice trains most of in a second
    attention_efficiency: float  # of the fitted costs
    by_memory: tuple[Choice, ...]  # values of S_max, ascending, with queues whose thresholds are tuned for each
    by_delay: tuple[Choice, ...]  # thresholds at the chosen S_max: the Pareto front, by delay
    by_strategy: tuple[Choice, ...]  # sharding of the best plan without Dynamic-CP
    by_plan: tuple[Choice, ...]  # the best of each kind within the limits, then the fastest if that is another
    tried: tuple[Choice, ...]  # all plans at the chosen S_max
    thresholds: TuneResult  # at the chosen S_max
    simulation: Simulation  # `CUTTING`, then `by_plan` within the limits, by kind
    planner: dict[str, Any] | None  # arguments of `wlb.plan_dynamic_cp`; None if it cannot plan
    best: Choice

    @property
    def baseline(self) -> Outcome:
        """The original order."""
        return self.simulation.baseline

    def as_json(self) -> dict[str, Any]:
        """All results as plain JSON values."""
        return {
            "kernel_model": self.scenario.attention.source,
            "attention_efficiency": self.attention_efficiency,
            "by": self.by,
            "baseline": self.baseline.summary(),
            "best": self.best.summary(self.baseline),
            **{
                name: [choice.summary(self.baseline) for choice in getattr(self, name)]
                for name in ("by_memory", "by_delay", "by_strategy", "by_plan")
            },
        }


def tune(
    lengths: ArrayLike,
    scenario: Scenario,
    *,
    by: Objective = "tokens",
    progress: Callable[[str, int, int], None] | None = None,
) -> Tuning:
    """The fastest of all plans here, and its settings, within a limit of the mean delay.

    It tries: documents in order, cut at the end of a context (the same with sharding per document or adaptive, and
    fixed lengths); whole documents packed for the layout's ranks, with outlier queues, with adaptive release,
    also with long documents up to 4 iterations early, or without waiting, in as many micro-batches as the scenario says
    or 2 or 4 times as many; Dynamic-CP, and both together. With a limit of 0 every document is trained in the step in
    which it arrives.

    Settings are not tried in all combinations: `S_max` is chosen with queues and then kept, and sharding strategies are
    tried for only one plan.

    Each choice starts from the best of those before: the packer's costs are fitted to the cluster
    (`Scenario.fitted_efficiency`); then `S_max` from one context up to what fits; the Pareto front of thresholds; the
    kinds of plan, their micro-batches and prices of delay; the sharding strategies of the best plan without Dynamic-CP.
    Among choices within 0.3 % of the fastest so far, the one with least memory, delay or complexity is taken.
    Throughput is that of a long stream (`Outcome.steady_seconds`), because the flush at the end of a sample depends on
    the sample's length.

    Args:
        lengths: int[n] tokens of the documents in arrival order, see `wlb_tools.simulate`. All of them are used for
            tuning, so give typical ones.
        scenario: model, cluster, limits. The choice keeps `max_mean_delay`, in which iterations before a document's
            turn count like those after it. `max_tokens` is the largest `S_max` to try, by default what fits into
            memory; `cost_model` and `outlier_thresholds` are not used. Dynamic-CP is left out if it does not support
            the cluster.
        by: what counts as fast. "tokens": tokens a second, which favours cutting documents, because their tokens then
            attend to less. "flops": FLOPs of the documents as they are trained.
        progress: see `wlb_tools.simulate`.

    Returns:
        Tuning.

    Raises:
        WlbError: see `wlb_tools.simulate`; `by` is none of these.

    Complexity:
        About fifty simulations of a variant, and as many as fourteen searches for thresholds or prices.
    """
    if by not in get_args(Objective):
        raise error("by", f"= {by!r}: must be one of {', '.join(get_args(Objective))}", value=by)
    return _Search(lengths, scenario, by, progress or (lambda *_: None)).run()


class _Search:
    """One tuning."""

    def __init__(
        self, lengths: ArrayLike, scenario: Scenario, by: Objective, progress: Callable[[str, int, int], None]
    ) -> None:
        self._lengths, self._progress, self._given, self._by = lengths, progress, scenario, by
        self._efficiency = scenario.fitted_efficiency(lengths)
        self._scenario = dataclasses.replace(
            scenario,
            cost_model=scenario.flops(attention_efficiency=self._efficiency),
            max_tokens=scenario.limit,
        )
        limits = {*(int(factor * scenario.context) for factor in FACTORS), scenario.limit}
        self._limits = sorted(limit for limit in limits if limit <= scenario.limit)
        self._splits = [split for split in SPLITS if _possible(scenario, split)]
        self._most = _most_tokens(scenario, self._splits)
        dynamic = obstacle(scenario) is None
        self._planner = planner_options(scenario, lengths) if dynamic else None
        packers = len(self._most) + dynamic * len(self._splits)
        plans = (packers + len(self._most)) * (len(PRICES) + 1) + 2 * (len(self._most) - 1) + dynamic
        self._found: dict[Settings, Choice] = {}
        self._jobs, self._done = 1 + len(self._limits) + _SHOWN_POINTS + plans + len(STRATEGIES), 0

    def run(self) -> Tuning:
        """The whole tuning."""
        self._report("original order")
        others = simulate(self._lengths, self._scenario, variants=CUTTING)
        self._baseline = others.baseline
        cutting = [self._cutting(kind, others.outcomes[kind]) for kind in CUTTING]

        found: dict[int, TuneResult] = {}
        by_memory = []
        for limit in self._limits:
            found[limit] = self._thresholds(limit)
            by_memory.append(self._queues(limit, found[limit].thresholds))
        limit = self._least(self._allowed(by_memory), lambda choice: choice.max_tokens).max_tokens

        by_delay = [self._queues(limit, point.thresholds) for point in _spread(found[limit].pareto, found[limit].best)]
        choices = [*by_delay, *self._static(limit)]
        chosen = self._least(self._allowed(choices), _need)
        by_strategy = [self._choose(dataclasses.replace(_settings(chosen), strategy=name)) for name in STRATEGIES]
        choices += (choice for choice in by_strategy if choice is not chosen)
        choices += self._planned()
        choices += cutting
        best = self._least(self._allowed(choices), _need)
        by_plan = self._by_kind(choices)
        self._report("done")
        within = {choice.kind: choice for choice in self._allowed(by_plan)} | {best.kind: best}
        shown = {kind: choice.outcome for kind, choice in within.items()}
        queues = within.get("wlb_llm_fitted")
        return Tuning(
            scenario=self._scenario,
            by=self._by,
            attention_efficiency=self._efficiency,
            by_memory=tuple(by_memory),
            by_delay=tuple(by_delay),
            by_strategy=tuple(by_strategy),
            by_plan=tuple(by_plan),
            tried=tuple(choices),
            thresholds=found[limit],
            simulation=dataclasses.replace(
                others,
                scenario=dataclasses.replace(self._scenario, max_tokens=limit),
                outcomes=others.outcomes | shown,
                thresholds=found[limit].thresholds if queues is None else queues.outlier_thresholds,
            ),
            planner=self._planner,
            best=best,
        )

    def _cutting(self, kind: Kind, outcome: Outcome) -> Choice:
        # One strategy for the whole run; "adaptive" is counted by the strategies that it chose.
        strategy = next((s for s in VARIANTS[kind].strategies if s in outcome.strategies), STRATEGIES[-1])
        return Choice(kind=kind, max_tokens=self._scenario.context, strategy=strategy, outcome=outcome)

    def _least(self, choices: list[Choice], need: Callable[[Choice], Any]) -> Choice:
        """The choice that needs least, among those that are as fast as the fastest."""
        return least(choices, self._speed, need)

    def _speed(self, choice: Choice) -> float:
        return choice.speedup(self._baseline, self._by)

    def _static(self, limit: int) -> Iterator[Choice]:
        """Plans for the layout's ranks, except those of the first front of thresholds."""
        for split, most in self._most.items():
            fits = min(limit, most)
            if split > 1:
                yield self._choose(Settings(kind="no_waiting", max_tokens=fits, split=split))
                yield self._queues(fits, self._thresholds(fits, split).thresholds, split)
            setup = dataclasses.replace(self._scenario, max_tokens=fits).setup(split=split)
            packer = packer_options(setup)
            for price in self._prices(packer):
                yield self._choose(Settings(kind="wlb", max_tokens=fits, delay_price=price, split=split))
            for price in self._prices(packer, EARLY):
                yield self._choose(
                    Settings(kind="early", max_tokens=fits, delay_price=price, max_early=EARLY, split=split)
                )

    def _planned(self) -> Iterator[Choice]:
        """Plans with groups of their own."""
        if self._planner is None:
            return
        limit = check_planner(self._given) * self._given.layout.cp
        yield self._choose(Settings(kind="dynamic_cp", max_tokens=limit, strategy="per_document"))
        for split in self._splits:
            for price in self._prices(packer_before(self._given, self._planner, split=split)):
                settings = Settings(kind="wlb_dynamic_cp", max_tokens=limit, delay_price=price, split=split)
                yield self._choose(dataclasses.replace(settings, strategy="per_document"))

    def _prices(self, packer: dict[str, Any], max_early: int = 0) -> tuple[float, ...]:
        """Prices of delay to try, for a packer with these arguments."""
        if not self._given.max_mean_delay:
            return PRICES
        tuned = tune_waiting(
            self._lengths,
            packer,
            queues=None,
            max_mean_delay=self._given.max_mean_delay,
            max_step_cost=self._given.max_step_cost,
            max_early=max_early,
        )
        assert tuned.delay_price is not None
        return (*PRICES, tuned.delay_price)

    def _by_kind(self, choices: list[Choice]) -> list[Choice]:
        """The best choice of each kind within the limits, and the fastest of the kind if that is beyond them."""
        made = []
        for kind in KINDS:
            of_kind = [choice for choice in choices if choice.kind == kind]
            within = [choice for choice in of_kind if self._within(choice)]
            if within:
                made.append(self._least(within, _need))
            if of_kind:
                fastest = max(of_kind, key=self._speed)
                if not within or not self._within(fastest):
                    made.append(fastest)
        return made

    def _queues(self, limit: int, thresholds: tuple[int, ...], split: int = 1) -> Choice:
        kind: Kind = "wlb_llm_fitted" if thresholds else "no_waiting"
        return self._choose(Settings(kind=kind, max_tokens=limit, outlier_thresholds=thresholds, split=split))

    def _thresholds(self, limit: int, split: int = 1) -> TuneResult:
        scenario = dataclasses.replace(self._scenario, max_tokens=limit)
        return tune_scenario(self._lengths, scenario, scenario.setup(split=split))

    def _choose(self, settings: Settings) -> Choice:
        self._report(VARIANTS[settings.kind].title)
        if settings in self._found:
            return self._found[settings]
        limit = self._given.max_tokens if settings.dynamic else settings.max_tokens
        scenario = dataclasses.replace(self._scenario, max_tokens=limit, outlier_thresholds=settings.outlier_thresholds)
        outcome = simulate(self._lengths, scenario, variants={settings.kind: settings.variant}).baseline
        return self._found.setdefault(settings, Choice(**vars(settings), outcome=outcome))

    def _within(self, choice: Choice) -> bool:
        """Whether a choice keeps the given limits."""
        return within(choice, self._given)

    def _allowed(self, choices: list[Choice]) -> list[Choice]:
        return allowed(choices, self._given)

    def _report(self, what: str) -> None:
        self._progress(what, min(self._done, self._jobs), self._jobs)
        self._done += 1


def within(choice: Choice, scenario: Scenario) -> bool:
    """Whether a choice keeps the limits. If the user gave `max_tokens`, memory is up to them."""
    memory = choice.outcome.memory.total.max()
    fits = scenario.max_tokens is not None or memory <= scenario.hardware.memory_bytes
    return bool(fits) and choice.delay <= scenario.max_mean_delay


def allowed(choices: Sequence[Choice], scenario: Scenario) -> list[Choice]:
    """The choices within the limits, or if there are none, the one that waits least."""
    return [c for c in choices if within(c, scenario)] or [min(choices, key=lambda choice: choice.delay)]


def least(choices: Sequence[Choice], speed: Callable[[Choice], float], need: Callable[[Choice], Any]) -> Choice:
    """The choice that needs least, among those that are as fast as the fastest."""
    most = max(map(speed, choices))
    return min((choice for choice in choices if speed(choice) * (1 + EQUAL) >= most), key=need)


def _need(choice: Choice) -> tuple[Any, ...]:
    """Sort key for equally fast choices: less complexity, then less delay, then less time."""
    return (choice.machinery, choice.delay, choice.outcome.steady_seconds)


def _settings(choice: Choice) -> Settings:
    return Settings(**{field.name: getattr(choice, field.name) for field in dataclasses.fields(Settings)})


def _possible(scenario: Scenario, split: int) -> bool:
    """Whether the schedule supports this multiple of the number of micro-batches."""
    layout = scenario.layout
    count = scenario.micro_batches // layout.dp * split
    try:
        simulate_pipeline(
            np.ones(count),
            schedule=scenario.pipeline_schedule,
            num_stages=layout.pp,
            num_virtual_stages=layout.virtual_stages,
        )
    except WlbError:
        return False
    return True


def _most_tokens(scenario: Scenario, splits: Iterable[int]) -> dict[int, int]:
    """Largest `S_max` with each multiple of the number of micro-batches, if one context of each fits."""
    found = {}
    for split in splits:
        with contextlib.suppress(WlbError):
            found[split] = scenario.setup(split=split).max_tokens
    return found


def _spread(points: Iterable[TunedPoint], best: TunedPoint) -> list[TunedPoint]:
    """Some points of the Pareto front, evenly, with both ends and the best."""
    front = list(points)
    picked = {int(index) for index in np.linspace(0, len(front) - 1, _SHOWN_POINTS - 1).round()}
    picked |= {index for index, point in enumerate(front) if point.thresholds == best.thresholds}
    return [front[index] for index in sorted(picked)]
