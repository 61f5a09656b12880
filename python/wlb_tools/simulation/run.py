"""Simulation of one stream under several methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from wlb._core import Packer, batch_offsets
from wlb._errors import error
from wlb._results import TuneResult
from wlb._shown import Shown, explained
from wlb_tools.simulation.balance import ATTENTION_RATES, band
from wlb_tools.simulation.dynamic import collect_dynamic, dynamic_steps, packer_before, score_dynamic
from wlb_tools.simulation.methods import Setup, bounded, packer_options, tune_waiting
from wlb_tools.simulation.outcome import Outcome
from wlb_tools.simulation.planner import planner_options
from wlb_tools.simulation.scenario import Scenario
from wlb_tools.simulation.static import Sharded, score, shard_run
from wlb_tools.simulation.stream import GlobalBatches, Reading
from wlb_tools.simulation.trained import PackedRun, collect
from wlb_tools.simulation.variants import Variant, chosen, defaults

TUNED_SHARE = 4
"""Thresholds are tuned on the first quarter of the global batches: 1 / TUNED_SHARE."""


@explained
@dataclass(frozen=True)
class Simulation(Shown):
    """One stream under several methods."""

    scenario: Scenario
    thresholds: tuple[int, ...]  # of the outlier queues; with fitted costs, those tuned with these costs
    batches: int  # global batches of the stream
    outcomes: dict[str, Outcome]  # by variant; the first is the baseline

    @property
    def baseline(self) -> Outcome:
        """The first of the variants, with which others are compared."""
        return next(iter(self.outcomes.values()))

    def speedup(self, name: str) -> float:
        """Throughput of a variant over the baseline's, on the same documents."""
        return self.baseline.total_seconds / self.outcomes[name].total_seconds

    def speedup_band(self, name: str) -> tuple[float, float]:
        """The least and the most of the speed-up, if attention is faster or slower than assumed (`ATTENTION_RATES`).

        Plans and shards stay the same, so they are judged by other costs than those they were made with.
        """
        pairs = zip(self.baseline.swept, self.outcomes[name].swept, strict=True)
        return band([before.total_seconds / after.total_seconds for before, after in pairs])

    def summary(self) -> dict[str, Any]:
        """Model, cluster and global batches; the fastest method, its speed-up over the first, and its tokens/s."""
        best = max(self.outcomes, key=self.speedup)
        return {
            "model": self.scenario.model.name,
            "gpus": self.scenario.layout.world_size,
            "global_batches": self.batches,
            "methods": len(self.outcomes),
            "baseline": self.baseline.title,
            "fastest": self.outcomes[best].title,
            "speedup": self.speedup(best),
            "tokens_per_second": self.outcomes[best].tokens_per_second,
        }

    def _columns(self) -> dict[str, Any]:
        """A row for each method."""
        rows = []
        for name, outcome in self.outcomes.items():
            figures = outcome.summary()
            shares = {f"share_{part}": share for part, share in figures.pop("attribution").items()}
            plain = {key: value for key, value in figures.items() if not isinstance(value, list | dict)}
            rows.append({"method": name, "speedup": self.speedup(name), **plain, **shares})
        return {key: [row[key] for row in rows] for key in rows[0]}

    def as_json(self) -> dict[str, Any]:
        """All results as plain JSON values."""
        return {
            "kernel_model": self.scenario.attention.source,
            "max_tokens": self.scenario.limit,
            "outlier_thresholds": list(self.thresholds),
            "global_batches": self.batches,
            "attention_rates": list(ATTENTION_RATES),
            "variants": {
                name: {
                    "speedup": self.speedup(name),
                    "speedup_band": list(self.speedup_band(name)),
                    **outcome.summary(),
                }
                for name, outcome in self.outcomes.items()
            },
        }


def simulate(
    lengths: ArrayLike,
    scenario: Scenario,
    *,
    variants: Sequence[str] | Mapping[str, Variant] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Simulation:
    """Predicts what training takes under each method, on the same documents.

    Every method trains every document of the stream once, and throughput is all tokens divided by the time of all
    steps. Methods that hold documents back empty their queues in further steps at the end, which count in full
    (`flush_share` is their share, which is smaller for longer streams).

    The packer plans with `scenario.cost_model`, which the prediction does not use. The prediction takes the kernel
    model's attention, forward and backward, of the slowest context-parallel rank, the linear part at the hardware's
    rate, and the communication that nothing hides, and runs the simulated pipeline. docs/simulation.md lists the
    assumptions.

    Args:
        lengths: int[n] tokens of the documents in arrival order, none longer than the context
            (`wlb.split_documents`). Whole documents arrive in global batches of at most
            `num_micro_batches * context` tokens; methods that cut documents get them in batches of exactly that.
        scenario: model, cluster, packing.
        variants: names in `wlb_tools.simulation.VARIANTS`, or own variants by name; the first is the baseline of
            the speed-ups. Default: `wlb_tools.simulation.defaults`.
        progress: called with a variant's title, how many are done, and how many there are.

    Returns:
        Simulation.

    Raises:
        WlbError: a length out of range, no document, an unknown variant, one whose micro-batches the schedule does not
            support or memory cannot hold, or Dynamic-CP on a cluster that does not support it: one rank, a schedule
            other than 1F1B and those in a V, a context that no group holds.

    Complexity:
        Some tens of microseconds for each micro-batch (of Dynamic-CP: each group of ranks) and variant, and the tuning
        of thresholds unless they are given.
    """
    if not isinstance(scenario, Scenario):
        kind = type(scenario).__name__
        example = "wlb_tools.Scenario(model=model, hardware=hardware, layout=layout, context=131072)"
        raise error("scenario", f"is a {kind}, not a Scenario: {example}", value=scenario)
    if variants is None:
        variants = defaults(scenario)
    wanted = chosen(variants if isinstance(variants, Mapping) else list(variants))
    for variant in wanted.values():
        if (reason := variant.obstacle(scenario)) is not None:
            raise reason  # before the long work
    stream = _stream(lengths, scenario)
    report = progress or (lambda *_: None)
    sample = stream.head(max(1, stream.batches // TUNED_SHARE))
    given = scenario.outlier_thresholds
    thresholds: dict[Any, tuple[int, ...]] = {}  # by the settings for which they were tuned

    runs: dict[Any, PackedRun] = {}
    sharded: dict[Any, Sharded] = {}
    outcomes: dict[str, Outcome] = {}
    for done, (name, variant) in enumerate(wanted.items()):
        report(variant.title, done, len(wanted))
        if variant.dynamic:
            outcomes[name] = _dynamic(variant, stream, scenario)
            continue
        packing = variant.packing_key
        if packing not in runs:
            setup = scenario.setup(fitted_to=stream.lengths if variant.fitted else None, split=variant.split)
            if variant.sync is not None:
                setup = dataclasses.replace(setup, sync=variant.sync)
            own: tuple[int, ...] = ()
            if variant.queued:
                tuned_for = (variant.fitted, variant.split)
                if given is None and tuned_for not in thresholds:
                    report("tuning thresholds", done, len(wanted))
                    thresholds[tuned_for] = tune_scenario(sample, scenario, setup).thresholds
                own = thresholds[tuned_for] if given is None else given
            arriving = variant.arriving(stream, setup)
            steps = variant.steps(arriving, setup, own)
            runs[packing] = collect(variant.title, steps, arriving, own)
        run = runs[packing]
        ways = [(strategy,) for strategy in variant.strategies] if variant.static else [variant.strategies]
        scored = []
        for way in ways:
            if (packing, way) not in sharded:
                sharded[packing, way] = shard_run(run, scenario, way)
            scored.append(score(variant.title, run, sharded[packing, way], scenario))
        outcomes[name] = min(scored, key=lambda outcome: outcome.total_seconds)
    report("done", len(wanted), len(wanted))
    used = next(iter(thresholds.values()), ()) if given is None else given
    return Simulation(scenario=scenario, thresholds=used, batches=stream.batches, outcomes=outcomes)


def _dynamic(variant: Variant, stream: GlobalBatches, scenario: Scenario) -> Outcome:
    options = planner_options(scenario, stream.lengths)
    reading = None
    if variant.packer:
        before = packer_before(scenario, options, split=variant.split)
        packer = Packer(**before, **bounded(variant.packer, scenario.max_step_cost))
        reading = Reading(stream.lengths, packer, max_early=variant.max_early)
    steps = dynamic_steps(stream, options, reading)
    run = collect_dynamic(variant.title, steps, stream)
    return score_dynamic(variant.title, run, scenario)


def _stream(lengths: ArrayLike, scenario: Scenario) -> GlobalBatches:
    offsets = batch_offsets(lengths, tokens_per_batch=scenario.tokens_per_batch)  # also checks the lengths
    values = np.asarray(lengths).astype(np.int64)
    too_long = np.flatnonzero(values > scenario.context)
    if too_long.size:
        index = int(too_long[0])
        message = f"= {values[index]}: more than the context, {scenario.context}; wlb.split_documents cuts documents"
        raise error("lengths", message, index=index, value=int(values[index]))
    if offsets.size < 2:
        raise error("lengths", "is empty: there is no global batch", value=0)
    return GlobalBatches(values, offsets)


def tune_scenario(lengths: ArrayLike, scenario: Scenario, setup: Setup | None = None) -> TuneResult:
    """The best thresholds with the scenario's settings, and with its costs or those of a setup."""
    setup = setup or scenario.setup()
    return tune_waiting(
        lengths,
        packer_options(setup),
        queues=scenario.num_queues,
        max_mean_delay=scenario.max_mean_delay,
    )
