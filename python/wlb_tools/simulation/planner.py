"""Computes arguments of `wlb.plan_dynamic_cp` for a cluster."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from wlb._choices import Schedule
from wlb._core import MAX_WORLD_SIZE, CostModel, Exchange, WlbError, pairs
from wlb._errors import error
from wlb_tools.cluster.capacity import max_tokens
from wlb_tools.cluster.parallel import V_SHAPED, ParallelLayout
from wlb_tools.simulation.scenario import Scenario

_SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved_1f1b", *V_SHAPED)


def planner_options(scenario: Scenario, lengths: ArrayLike) -> dict[str, Any]:
    """Arguments of `wlb.plan_dynamic_cp` for a cluster, except the lengths of a step.

    The planner has one rate for attention, one for the linear part and one for each kind of communication. They are
    fitted to the times of the simulation: attention's to whole documents, the exchange of keys and values to the
    largest group, the transfer between stages to a rank's share of a global batch in `2 * pp` micro-batches, the rest
    to a micro-batch of one context on `layout.cp` ranks. So the planner's costs differ from those that price its plans.

    Args:
        scenario: the cluster. A given `max_tokens` is divided by `layout.cp`; by default a rank has as many tokens as
            fit into its memory beside the gathered keys of the largest group.
        lengths: int[n] tokens of the documents to which attention's rate is fitted, by `selector` if there is one.

    Raises:
        WlbError: as `check_planner`.
    """
    per_rank = check_planner(scenario)
    if np.size(lengths) == 0:
        raise error("lengths", "must not be empty", value=lengths)
    if scenario.selector is not None:
        scenario = dataclasses.replace(scenario, kernel_model=scenario.selector)
    layout, world_size, schedule = scenario.layout, _world_size(scenario), scenario.pipeline_schedule
    alone = of_size(layout, 1)
    tokens = -(-scenario.context // layout.cp)
    linear, per_micro_batch = _line(scenario, alone, tokens, "rest")
    size = _largest_group(scenario)
    per_token, latency = _line(scenario, of_size(layout, size), tokens, "exchange")
    # The middle of the numbers of micro-batches that are tried, from `pp` to four times that.
    share = -(-scenario.tokens_per_batch // (2 * layout.pp * world_size))
    sent = scenario.stage_seconds([share], attention_forward=[0.0], attention_backward=[0.0]).p2p
    return {
        "world_size": world_size,
        "num_stages": layout.pp,
        "num_virtual_stages": layout.virtual_stages,
        **({"schedule": schedule} if schedule in V_SHAPED else {}),
        **({"sync": scenario.waiting} if scenario.waiting != "step" else {}),
        "min_micro_batches": layout.pp,  # torch's schedules take no fewer
        "max_tokens_per_rank": per_rank,
        "cost_model": _attention_rates(scenario, lengths, linear),
        "exchange": Exchange(  # of the part that attention does not hide
            seconds_per_token=per_token / (size - 1), seconds_per_exchange=latency / (size - 1), overlap=0.0
        ),
        "p2p_seconds": float(sent[0]),  # the part for which stages wait is in their micro-batches
        "micro_batch_seconds": per_micro_batch,
    }


def _attention_rates(scenario: Scenario, lengths: ArrayLike, linear: float) -> CostModel:
    """A cost model with a rate for the pairs under each of the model's masks."""
    rates: dict[str, dict[int, float]] = {"full": {}, "window": {}, "chunk": {}}
    for mask, seconds in scenario.attention_by_mask(lengths).items():
        if mask.kind == "full":
            total = np.sum(pairs(lengths), dtype=np.float64)
        else:
            alone = {f"{mask.kind}s": {mask.size: 1.0}}
            total = CostModel(attention=0.0, linear=0.0, **alone).cost(lengths).sum()  # type: ignore[arg-type]
        rates[mask.kind][mask.size] = seconds / float(total)
    return CostModel(attention=rates["full"].get(0, 0.0), linear=linear, windows=rates["window"], chunks=rates["chunk"])


def check_planner(scenario: Scenario) -> int:
    """The most tokens of a rank in a micro-batch, after a check that the planner supports the cluster.

    Raises:
        WlbError: there is only one rank to form groups of; the planner does not know the schedule, or it interleaves a
            single stage a rank; the context does not fit into the largest group.
    """
    if _world_size(scenario) == 1:
        raise error("layout", "has dp x cp = 1: Dynamic-CP needs ranks to form groups of", value=scenario.layout)
    if _world_size(scenario) > MAX_WORLD_SIZE:
        message = (
            f"has dp x cp = {_world_size(scenario)}: Dynamic-CP plans for at most {MAX_WORLD_SIZE} ranks of a stage"
        )
        raise error("layout", message, value=scenario.layout)
    schedule = scenario.pipeline_schedule
    if schedule not in _SCHEDULES:
        raise error("schedule", f"= {schedule!r}: Dynamic-CP plans for {', '.join(_SCHEDULES)}", value=schedule)
    if schedule == "interleaved_1f1b" and scenario.layout.virtual_stages == 1:
        message = (
            f"= {schedule!r} with one stage a rank: Dynamic-CP plans that as 1F1B, in numbers of micro-batches that its"
            " rounds do not divide; give the layout virtual stages, or leave the schedule out"
        )
        raise error("schedule", message, value=schedule)
    size = _largest_group(scenario)
    if scenario.max_tokens is not None:
        per_rank = -(-scenario.max_tokens // scenario.layout.cp)
        if per_rank * size < scenario.context:
            message = (
                f"= {scenario.max_tokens}: Dynamic-CP has {per_rank} for each of cp = {scenario.layout.cp} ranks, and"
                f" its largest group, {size} ranks, does not hold the context, {scenario.context}"
            )
            raise error("max_tokens", message, value=scenario.max_tokens)
        return per_rank
    # If the number of ranks is no power of two, `dp` is rounded down. Then fewer ranks share the optimizer's state than
    # in reality, so that memory is never underestimated.
    fits = max_tokens(
        scenario.model,
        dataclasses.replace(scenario.layout, cp=size, dp=max(1, _world_size(scenario) // size)),
        scenario.hardware,
        schedule=scenario.pipeline_schedule,
        reserved_bytes=scenario.reserved_bytes,
        at_least=scenario.context,
    )
    return fits // size


def obstacle(scenario: Scenario) -> WlbError | None:
    """Why a cluster cannot be planned for; None if it can."""
    try:
        check_planner(scenario)
    except WlbError as reason:
        return reason
    return None


def of_size(layout: ParallelLayout, cp_size: int) -> ParallelLayout:
    """The layout if all groups of its dp x cp ranks had that size; with a few more ranks if it does not divide them."""
    whole = math.lcm(layout.ranks_of_experts * layout.dp_replicate, cp_size)
    dp = -(-layout.size("dp_cp") // whole) * whole // cp_size
    return dataclasses.replace(layout, cp=cp_size, dp=dp)


def _world_size(scenario: Scenario) -> int:
    return scenario.layout.size("dp_cp")


def _largest_group(scenario: Scenario) -> int:
    return 1 << (_world_size(scenario).bit_length() - 1)


def _line(scenario: Scenario, layout: ParallelLayout, tokens: int, part: str) -> tuple[float, float]:
    """Seconds of each token of a rank, and seconds that do not depend on tokens, over all stages and passes."""
    made = scenario.stage_seconds(
        [tokens, 2 * tokens], attention_forward=[0.0, 0.0], attention_backward=[0.0, 0.0], layout=layout
    )
    if part == "exchange":
        seconds = made.exposed_cp
    else:
        seconds = made.seconds - made.exposed_cp + scenario.exposed_dp(made.computing)
    once, twice = seconds.sum(axis=(1, 2))
    return float(twice - once) / tokens, max(0.0, float(2 * once - twice))
