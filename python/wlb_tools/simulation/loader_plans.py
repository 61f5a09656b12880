"""The plans that wlb's loaders make inside trainers: finds the tokens of a micro-batch, and whether documents wait."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from numpy.typing import ArrayLike

from wlb._core import DELAY_PRICE, MAX_DELAY, WlbError
from wlb._errors import error
from wlb._shown import explained
from wlb.reading.sizes import micro_batches
from wlb_tools.simulation.outcome import Outcome
from wlb_tools.simulation.planner import check_planner, obstacle, planner_options
from wlb_tools.simulation.run import simulate
from wlb_tools.simulation.scenario import Scenario
from wlb_tools.simulation.tuning import FACTORS, Choice, Settings, allowed, least


@explained
@dataclass(frozen=True)
class LoaderTuning:
    """The plans of a loader that were tried, and the choice."""

    scenario: Scenario  # with the costs that the loader takes
    baseline: Outcome  # the original order
    tried: tuple[Choice, ...]  # within the limits, in the order in which they were tried
    best: Choice
    max_delay: int  # most steps that a document waits in plans in which documents wait
    planner: dict[str, Any] | None  # arguments of `wlb.plan_dynamic_cp`; None if it was not tried


def tune_loader(
    lengths: ArrayLike,
    scenario: Scenario,
    *,
    dynamic: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> LoaderTuning:
    """The fastest of the plans that a loader of wlb makes inside a trainer, within a limit of the mean delay.

    Such a loader takes the tokens of a step and of a micro-batch, and computes the number of micro-batches
    (`wlb.reading.sizes.micro_batches`). Its costs are those of the model's configuration, and documents wait for at
    most 16 steps by the adaptive rule, or not at all. So only this is tried: the tokens of a micro-batch, from one
    context up to what fits; with and without waiting; and Dynamic-CP, where the trainer has it. Among choices within
    0.3 % of the fastest, the one with fewest tokens and least waiting is taken.

    Args:
        lengths: see `wlb_tools.simulation.tune`.
        scenario: see `wlb_tools.simulation.tune`.
        dynamic: whether the trainer runs Dynamic-CP, in which no document waits.
        progress: see `wlb_tools.simulate`.

    Raises:
        WlbError: see `wlb_tools.simulate`; the schedule takes none of the numbers of micro-batches.

    Complexity:
        Up to fifteen simulations of a variant.
    """
    report = progress or (lambda *_: None)
    most = MAX_DELAY if scenario.max_delay is None else min(scenario.max_delay, MAX_DELAY)
    of_loader = dataclasses.replace(
        scenario, cost_model=scenario.cost_model or scenario.model.cost_model(), max_delay=most
    )
    settings = list(_settings(of_loader, dynamic=dynamic))
    if not settings:
        message = f"= {scenario.pipeline_schedule!r}: takes none of the numbers of micro-batches that the loader makes"
        raise error("schedule", message, value=scenario.pipeline_schedule)
    baseline = simulate(lengths, of_loader, variants=("original",)).baseline
    tried = []
    for done, each in enumerate(settings):
        report(each.title, done, len(settings))
        limit = scenario.max_tokens if each.dynamic else each.max_tokens
        waits = most if each.kind == "wlb" else None
        sized = dataclasses.replace(of_loader, max_tokens=limit, max_delay=waits)
        outcome = simulate(lengths, sized, variants={each.kind: each.variant}).baseline
        tried.append(Choice(**vars(each), outcome=outcome))
    report("done", len(settings), len(settings))
    choices = allowed(tried, scenario)
    best = least(
        choices,
        lambda choice: choice.speedup(baseline),
        lambda choice: (choice.dynamic, choice.max_tokens, choice.delay),
    )
    planner = planner_options(of_loader, lengths) if any(choice.dynamic for choice in tried) else None
    return LoaderTuning(of_loader, baseline, tuple(choices), best, most, planner)


def _settings(scenario: Scenario, *, dynamic: bool) -> Iterator[Settings]:
    layout, together = scenario.layout, 1
    if layout.virtual_stages > 1:
        together = layout.pp  # interleaved schedules take their micro-batches in rounds of so many
    limits = {*(int(factor * scenario.context) for factor in FACTORS), scenario.limit}
    for limit in sorted(limit for limit in limits if limit <= scenario.limit):
        count = layout.dp * micro_batches(
            scenario.tokens_per_batch, ranks=layout.dp, max_tokens=limit, together=together
        )
        split = Fraction(count, scenario.micro_batches)
        try:
            if scenario.setup(split=split).max_tokens < limit:
                continue  # so many micro-batches under way leave less memory for each
        except WlbError:
            continue
        shared: Any = {
            "max_tokens": limit,
            "split": split,
            "strategy": "per_document",
        }
        if scenario.max_delay:
            yield Settings(kind="wlb", delay_price=DELAY_PRICE, **shared)
        yield Settings(kind="no_waiting", **shared)
    if dynamic and obstacle(scenario) is None:
        per_rank = check_planner(scenario)
        yield Settings(kind="dynamic_cp", max_tokens=per_rank * layout.cp, strategy="per_document")
