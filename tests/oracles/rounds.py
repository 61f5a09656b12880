"""Rounds of reinforcement learning: what a plan has to keep, and the shortest step by trying all."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.rl import RoundPlan

Table = list[list[list[list[int]]]]  # by step, rank and micro-batch: samples


def table(plan: RoundPlan) -> Table:
    """The samples of each micro-batch."""
    ranks = range(plan.dp_size)
    return [[[held.tolist() for held in plan.micro_batches(step, rank)] for rank in ranks] for step in range(len(plan))]


def step_cost(costs: NDArray[Any], ranks: list[list[list[int]]], sync: str) -> float:
    """Time of a step: the heaviest rank, or the sum over rounds of the heaviest micro-batch."""
    of_rank = np.array([[costs[held].sum() if held else 0.0 for held in rank] for rank in ranks])
    return float(of_rank.sum(axis=1).max() if sync == "step" else of_rank.max(axis=0).sum())


def check(plan: RoundPlan, lengths: NDArray[Any], costs: NDArray[Any], options: dict[str, Any]) -> None:
    """Asserts everything that `wlb.rl.plan` promises of these options."""
    found, samples = table(plan), lengths.size
    groups = np.asarray(options.get("groups", np.arange(samples)))
    flat = [sample for ranks in found for rank in ranks for held in rank for sample in held]
    assert sorted(flat) == list(range(samples))
    assert flat == plan.samples.tolist()
    assert plan.samples[plan.inverse].tolist() == list(range(samples))
    for step, ranks in enumerate(found):
        held = [sample for rank in ranks for micro_batch in rank for sample in micro_batch]
        assert set(plan.steps[held]) == {step}, "a step without samples, or a sample in another step"
        assert all(plan.ranks[sample] == r for r, rank in enumerate(ranks) for held in rank for sample in held)
    _check_steps(plan, groups, options)
    _check_micro_batches(plan, found, lengths, options)
    for step, ranks in enumerate(found):
        _check_ranks(ranks, groups, costs, options)
        time = step_cost(costs, ranks, options["sync"])
        np.testing.assert_allclose(plan.step_costs[step], time)
        even = sum(costs[held].sum() for rank in ranks for held in rank) / plan.dp_size
        assert even <= plan.parted_bounds[step] * (1 + 1e-12)
        assert plan.parted_bounds[step] <= plan.lower_bounds[step] <= time * (1 + 1e-12)
    if samples:
        np.testing.assert_allclose(plan.imbalance, plan.step_costs.sum() / (costs.sum() / plan.dp_size))


def _check_steps(plan: RoundPlan, groups: NDArray[Any], options: dict[str, Any]) -> None:
    prompts = list(dict.fromkeys(groups.tolist()))
    step_of = {prompt: set(plan.steps[groups == prompt].tolist()) for prompt in prompts}
    assert all(len(steps) == 1 for steps in step_of.values()), "a prompt in two steps"
    steps = np.array([min(step_of[prompt]) for prompt in prompts], np.int64)
    counts = np.bincount(steps, minlength=len(plan))
    if "samples_per_step" in options:
        wanted, number = options["samples_per_step"], groups.size
    else:
        wanted, number = options.get("prompts_per_step"), len(prompts)
        assert not len(plan) or counts.max() - counts.min() <= 1, "prompts of a step"
    if wanted is None:
        assert len(plan) == (options.get("num_steps", 1) if prompts else 0)
    elif len(plan) < len(prompts):
        off = abs(number / len(plan) - wanted)
        assert len(plan) == 1 or number / len(plan) >= wanted * 2 / 3 or off <= abs(number / (len(plan) - 1) - wanted)
        assert number / len(plan) <= wanted * 3 / 2
    if options.get("step_samples") != "even":
        assert (np.diff(steps) >= 0).all(), "the order of prompts"


def _check_micro_batches(plan: RoundPlan, found: Table, lengths: NDArray[Any], options: dict[str, Any]) -> None:
    flat = [held for ranks in found for rank in ranks for held in rank]
    assert [int(lengths[held].sum()) for held in flat] == plan.tokens.tolist()
    bundled = options.get("together") == "micro_batch"
    groups = np.asarray(options["groups"]) if bundled else np.arange(lengths.size)
    of_group = np.array([lengths[groups == group].sum() for group in groups])
    assert np.flatnonzero(of_group > options["max_tokens"]).tolist() == plan.alone.tolist()
    classes = np.asarray(options.get("classes", np.zeros(lengths.size)))
    for held in flat:
        assert held == sorted(held)
        assert lengths[held].sum() <= options["max_tokens"] or len(set(groups[held].tolist())) == 1
        assert len(held) <= options.get("max_samples", lengths.size)
        assert len(set(classes[held].tolist())) <= 1, "two classes in a micro-batch"
    for number in plan.num_micro_batches.tolist():
        assert number * plan.dp_size % options.get("multiple_of", 1) == 0
        assert number * plan.dp_size == options.get("num_micro_batches", number * plan.dp_size)
    if options.get("class_rounds"):
        for ranks in found:
            for of_round in zip(*ranks, strict=True):
                assert len({classes[sample] for held in of_round for sample in held}) <= 1, "two classes in a round"


def _check_ranks(
    ranks: list[list[list[int]]], groups: NDArray[Any], costs: NDArray[Any], options: dict[str, Any]
) -> None:
    together = options.get("together", "step")
    if together != "step":
        homes: dict[int, set[Any]] = {}
        for r, rank in enumerate(ranks):
            for m, held in enumerate(rank):
                for sample in held:
                    homes.setdefault(groups[sample], set()).add(r if together == "rank" else (r, m))
        assert all(len(home) == 1 for home in homes.values()), f"a prompt in two {together}"
    if options.get("equal_samples"):
        held = [sum(map(len, rank)) for rank in ranks]
        assert max(held) - min(held) <= 1
    rounds = [max(costs[held].sum() if held else 0.0 for held in of_round) for of_round in zip(*ranks, strict=True)]
    order = options.get("order", "light_ends")
    if order == "heaviest_first":
        assert rounds == sorted(rounds, reverse=True)
    elif order == "given":
        first = [
            min((s for held in of_round for s in held), default=groups.size) for of_round in zip(*ranks, strict=True)
        ]
        assert first == sorted(first)
    else:
        heaviest = int(np.argmax(rounds))
        assert rounds[: heaviest + 1] == sorted(rounds[: heaviest + 1])
        assert rounds[heaviest:] == sorted(rounds[heaviest:], reverse=True)


def shortest(costs: NDArray[Any], lengths: NDArray[Any], rounds: int, options: dict[str, Any]) -> float:
    """The shortest step with this number of micro-batches on each rank, by trying every assignment of the samples."""
    ranks = options["dp_size"]
    groups = np.asarray(options.get("groups", np.arange(costs.size)))
    classes = np.asarray(options.get("classes", np.zeros(costs.size)))
    together, best = options.get("together", "step"), np.inf
    for places in product(range(ranks * rounds), repeat=costs.size):
        place = np.array(places)
        cells = [np.flatnonzero(place == cell).tolist() for cell in range(ranks * rounds)]
        plan = [cells[rank * rounds : (rank + 1) * rounds] for rank in range(ranks)]
        home = place // rounds if together == "rank" else place
        legal = (
            all(lengths[held].sum() <= options["max_tokens"] for held in cells)
            and all(len(set(classes[held])) <= 1 for held in cells)
            and (together == "step" or all(len(set(home[groups == group])) == 1 for group in set(groups)))
        )
        if legal and options.get("class_rounds"):
            of_rounds = [[s for rank in plan for s in rank[m]] for m in range(rounds)]
            legal = all(len(set(classes[held])) <= 1 for held in of_rounds)
        if legal:
            best = min(best, step_cost(costs, plan, options["sync"]))
    return best
