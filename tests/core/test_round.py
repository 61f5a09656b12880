"""Rounds of reinforcement learning: what every plan keeps, edge cases, and weights against plain means."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import wlb
from tests.oracles import rounds
from wlb import rl

COST = wlb.CostModel(attention=1.0, linear=1000.0)


def drawn(rng: np.random.Generator, most: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Lengths of a round, and any options that go together."""
    samples = int(rng.integers(1, most))
    lengths = rng.lognormal(5, 1, samples).astype(np.int64).clip(1, 900)
    options: dict[str, Any] = {
        "dp_size": int(rng.integers(1, 6)),
        "max_tokens": int(lengths.max() + rng.integers(0, 900)),
        "sync": rng.choice(["step", "micro_batch"]),
        "order": rng.choice(["light_ends", "heaviest_first", "given"]),
        "step_samples": rng.choice(["in_order", "even"]),
    }
    prompts = samples
    if rng.random() < 0.7:
        options["groups"] = (
            np.sort(rng.integers(-3, 20, samples)) if rng.random() < 0.7 else rng.integers(0, 9, samples)
        )
        options["together"] = rng.choice(["step", "rank", "micro_batch"])
        prompts = len(set(options["groups"].tolist()))
    bundled = options.get("together") == "micro_batch"
    if bundled:
        options["max_tokens"] += int(np.bincount(options["groups"] + 3, lengths).max())
    kind = rng.integers(0, 4)
    if kind == 1:
        options["num_steps"] = int(rng.integers(1, prompts + 1))
    elif kind == 2 and "groups" in options:
        options["prompts_per_step"] = int(rng.integers(1, 9))
    elif kind == 3:
        options["samples_per_step"] = int(rng.integers(1, 40))
    if rng.random() < 0.4:
        options["classes"] = rng.integers(5, 5 + rng.integers(1, 4), samples)
        options["class_rounds"] = bool(rng.integers(0, 2))
        if bundled:
            options["classes"] = 5 + options["groups"] % 3
    if rng.random() < 0.2 and not bundled:
        options["max_samples"] = int(rng.integers(1, 6))
    if rng.random() < 0.2:
        options["multiple_of"] = int(rng.integers(1, 5))
    if rng.random() < 0.3:
        options |= {"max_tokens": int(rng.integers(50, 900)), "oversize": "alone"}
    if rng.random() < 0.2 and options.get("together", "step") == "step":
        options["equal_samples"] = True
    return lengths, options


@pytest.mark.filterwarnings("ignore:groups")
@pytest.mark.parametrize("seed", range(6))
def test_plans_keep_what_they_promise(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(100):
        lengths, options = drawn(rng, 120)
        plan = rl.plan(lengths, cost_model=COST, **options)
        rounds.check(plan, lengths, COST.cost(lengths), options)
        assert rl.plan(lengths, costs=COST.cost(lengths), **options).digest() == plan.digest()


@pytest.mark.filterwarnings("ignore:groups")
def test_small_steps_are_as_short_as_possible() -> None:
    rng, ratios = np.random.default_rng(0), []
    while len(ratios) < 60:
        lengths, options = drawn(rng, 6)
        options = {name: options[name] for name in options if name not in ("num_steps", "prompts_per_step", "oversize")}
        for name in ("samples_per_step", "max_samples", "multiple_of", "equal_samples"):
            options.pop(name, None)
        options |= {"dp_size": 2, "max_tokens": max(options["max_tokens"], int(lengths.max()))}
        costs = COST.cost(lengths)
        plan = rl.plan(lengths, cost_model=COST, **options)
        number = int(plan.num_micro_batches[0])
        if (2 * number) ** lengths.size > 2000:
            continue
        best = rounds.shortest(costs, lengths, number, options)
        assert plan.lower_bounds[0] <= best * (1 + 1e-12)
        assert best <= plan.step_costs[0] * (1 + 1e-12)
        ratios.append(plan.step_costs[0] / best)
    assert np.quantile(ratios, 0.9) <= 1 + 1e-9, ratios
    assert max(ratios) <= 1.25, ratios


def test_the_number_of_steps_is_the_nearest() -> None:
    for prompts, size, number in ((128, 64, 2), (130, 64, 2), (95, 64, 1), (96, 64, 2), (3, 64, 1), (7, 1, 7)):
        groups = np.arange(prompts).repeat(2)
        options: dict[str, Any] = {"dp_size": 1, "max_tokens": 100, "cost_model": COST}
        plan = rl.plan(np.ones(groups.size, int), groups=groups, prompts_per_step=size, **options)
        assert len(plan) == number, (prompts, size)
        assert len(rl.plan(np.ones(groups.size, int), groups=groups, samples_per_step=2 * size, **options)) == number
    sizes = np.bincount(plan.steps)
    assert sizes.tolist() == [2] * 7


def test_steps_chosen_for_evenness_have_equal_work() -> None:
    lengths = np.random.default_rng(1).lognormal(6, 1, 512).astype(int).clip(1, 8000)
    work = COST.cost(lengths)
    options: dict[str, Any] = {"dp_size": 4, "max_tokens": 8000, "cost_model": COST, "groups": np.arange(512) // 8}
    spread = {}
    for step_samples in ("in_order", "even"):
        plan = rl.plan(lengths, num_steps=4, step_samples=step_samples, **options)
        sums = np.bincount(plan.steps, work)
        spread[step_samples] = sums.max() / sums.mean()
    assert spread["even"] < 1.001 < 1.02 < spread["in_order"], spread


def test_largest_first_costs_nothing_where_ranks_meet_in_every_micro_batch() -> None:
    lengths = np.random.default_rng(2).lognormal(7, 1, 600).astype(int).clip(1, 8000)
    options: dict[str, Any] = {"dp_size": 8, "max_tokens": 8192, "cost_model": COST, "sync": "micro_batch"}
    plans = {order: rl.plan(lengths, order=order, **options) for order in ("light_ends", "heaviest_first", "given")}
    times = {order: plan.step_costs[0] for order, plan in plans.items()}
    np.testing.assert_allclose([*times.values()], times["light_ends"], rtol=1e-12)
    assert len({plan.digest() for plan in plans.values()}) == 3


def test_more_ranks_than_samples() -> None:
    plan = rl.plan([5, 3], dp_size=4, max_tokens=8, cost_model=COST)
    assert plan.num_micro_batches.tolist() == [1]
    assert sorted(len(plan.micro_batches(0, rank)[0]) for rank in range(4)) == [0, 0, 1, 1]
    assert plan.lower_bounds[0] == plan.step_costs[0] == COST.cost([5])[0]


def test_a_round_without_samples_has_no_steps() -> None:
    plan = rl.plan([], dp_size=4, max_tokens=8, cost_model=COST, prompts_per_step=4)
    assert (len(plan), plan.samples.size, plan.imbalance) == (0, 0, 1.0)
    assert plan.weights([], mean="prompt").size == 0


def test_as_many_prompts_as_ranks_are_named() -> None:
    """One prompt has three quarters of the work: whole it is the step, parted it is a quarter of it on each rank."""
    groups, lengths = np.arange(32) // 8, np.where(np.arange(32) // 8 == 2, 90, 10)
    options: dict[str, Any] = {"dp_size": 4, "max_tokens": 1000, "costs": lengths * 1.0, "groups": groups + 70}
    message = r'prompt 72 costs .*together=.rank. step 0 takes 3\.00 times .*together="step" .* 1\.00 times'
    with pytest.warns(UserWarning, match=message) as warned:
        plan = rl.plan(lengths, together="rank", **options)
    assert warned[0].filename == __file__
    assert plan.lower_bounds[0] / plan.parted_bounds[0] == 3.0
    assert rl.plan(lengths, **options).imbalance == 1.0


def test_long_samples_are_refused_or_alone() -> None:
    options: dict[str, Any] = {"dp_size": 2, "max_tokens": 100, "cost_model": COST}
    with pytest.raises(wlb.WlbError, match=r"lengths\[2\] = 150 exceeds max_tokens = 100"):
        rl.plan([60, 40, 150, 30], **options)
    plan = rl.plan([60, 40, 150, 30], oversize="alone", **options)
    assert plan.alone.tolist() == [2]
    assert [2] in [held.tolist() for rank in range(2) for held in plan.micro_batches(0, rank)]
    assert "alone=1" in repr(plan)


def test_steps_have_exactly_equal_numbers_where_prompts_allow_it() -> None:
    """Largest first would leave steps of 18 and 14 samples."""
    groups = np.arange(9).repeat([6, 6, 4, 4, 4, 2, 2, 2, 2])
    options: dict[str, Any] = {"dp_size": 1, "max_tokens": 9, "cost_model": COST, "step_samples": "even"}
    plan = rl.plan(np.ones(32, int), groups=groups, samples_per_step=16, **options)
    assert np.bincount(plan.steps).tolist() == [16, 16]
    groups = np.arange(5).repeat([5, 5, 4, 3, 3])
    plan = rl.plan(np.ones(20, int), groups=groups, samples_per_step=10, **options)
    assert np.bincount(plan.steps).tolist() == [10, 10]


def test_pairs_stay_in_one_micro_batch() -> None:
    """As DPO and reward models need: what the refusals of their trainers advise."""
    lengths = np.random.default_rng(4).lognormal(4.5, 0.9, 96).astype(np.int64).clip(1, 400)
    pairs = np.arange(96) // 2
    options: dict[str, Any] = {"dp_size": 4, "cost_model": COST, "groups": pairs, "together": "micro_batch"}
    plan = rl.plan(lengths, max_tokens=1000, equal_samples=True, **options)
    rounds.check(plan, lengths, COST.cost(lengths), options | {"max_tokens": 1000, "sync": "step"})
    longest = np.bincount(pairs, lengths).astype(int)
    most = int(longest.max()) - 1
    with pytest.raises(
        wlb.WlbError, match=rf"the {most + 1} tokens of this group exceed max_tokens = {most};"
    ) as raised:
        rl.plan(lengths, max_tokens=most, num_steps=3, **options)
    assert raised.value.index == 2 * longest.argmax()
    plan = rl.plan(lengths, max_tokens=most, num_steps=3, oversize="alone", **options)
    assert plan.alone.tolist() == [2 * longest.argmax(), 2 * longest.argmax() + 1]
    with pytest.raises(wlb.WlbError, match="classes: a group that stays in one micro-batch has documents of several"):
        rl.plan(lengths, max_tokens=1000, classes=np.arange(96) % 2, **options)


def test_wrong_calls_are_refused() -> None:
    options: dict[str, Any] = {"dp_size": 2, "max_tokens": 10, "cost_model": COST}
    for more, message in (
        ({"num_steps": 3}, "num_steps = 3: must be from 1 to 2"),
        ({"num_steps": 0}, "num_steps = 0"),
        ({"prompts_per_step": 1}, "prompts_per_step: needs groups"),
        ({"num_steps": 1, "samples_per_step": 1}, "num_steps: give one of"),
        ({"groups": [1]}, "groups has 1 entries, but lengths has 2"),
        ({"classes": [1]}, "classes has 1 entries, but lengths has 2"),
        ({"class_rounds": True}, "class_rounds: needs classes"),
        ({"together": "node"}, 'together = "node"'),
        ({"order": "any"}, 'order = "any"'),
        ({"oversize": "split"}, 'oversize = "split"'),
        ({"max_samples": 0}, "max_samples = 0"),
        ({"groups": [0, 0], "together": "rank", "equal_samples": True}, "equal_samples: no division"),
        ({"num_micro_batches": 2, "multiple_of": 2}, "multiple_of: a multiple other than 1"),
        ({"num_micro_batches": 3}, "dp_size = 2: does not divide the 3"),
    ):
        with pytest.raises(wlb.WlbError) as refused:
            rl.plan([5, 5], **options | more)
        assert str(refused.value).startswith(message), refused.value
        assert refused.value.argument == message.split()[0].rstrip(":")
    plan = rl.plan([5, 5], **options)
    for step, rank in ((1, 0), (0, 2), (-1, 0)):
        with pytest.raises(wlb.WlbError):
            plan.micro_batches(step, rank)


def test_plans_are_plain_data() -> None:
    plan = rl.plan([5, 3, 8], dp_size=2, max_tokens=9, cost_model=COST)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert hash(pickle.loads(pickle.dumps(plan))) == hash(plan)
    assert plan != rl.plan(
        [5, 3, 8], dp_size=2, max_tokens=10, cost_model=COST, order="heaviest_first", num_micro_batches=4
    )
    plan.samples[:] = 0
    assert plan.samples[plan.inverse].tolist() == [0, 1, 2]


# --- weights ---------------------------------------------------------------------------------------------------------


def plain_mean(losses: list[np.ndarray], groups: np.ndarray, mean: str, count_empty: bool) -> float:
    """The mean of a step's losses, written out."""
    if mean == "token":
        return float(np.concatenate(losses).mean())
    if mean == "prompt":
        losses = [np.concatenate([losses[i] for i in np.flatnonzero(groups == group)]) for group in np.unique(groups)]
    means = [one.mean() if one.size else 0.0 for one in losses if one.size or count_empty]
    return float(np.mean(means))


@pytest.mark.parametrize("mean", ["token", "sample", "prompt"])
@pytest.mark.parametrize("count_empty", [False, True])
def test_weights_give_the_mean_that_is_meant(mean: Any, count_empty: bool) -> None:
    rng = np.random.default_rng(3)
    groups = np.sort(rng.integers(0, 12, 90))
    counts = rng.integers(0, 40, 90) * (rng.random(90) < 0.8) * (groups != groups[40])
    losses = [rng.normal(size=count) for count in counts]
    lengths = counts + rng.integers(1, 50, 90)
    for sync, dp_size in (("step", 1), ("step", 4), ("micro_batch", 3)):
        plan = rl.plan(lengths, dp_size=dp_size, max_tokens=200, cost_model=COST, groups=groups, num_steps=3, sync=sync)
        weights = plan.weights(counts, mean=mean, count_empty=count_empty)
        assert weights.dtype == np.float64
        for step in range(3):
            of_rank = [
                sum(weights[i] * losses[i].sum() for held in plan.micro_batches(step, rank) for i in held)
                for rank in range(dp_size)
            ]
            held = np.flatnonzero(plan.steps == step)
            wanted = plain_mean([losses[i] for i in held], groups[held], mean, count_empty)
            np.testing.assert_allclose(np.mean(of_rank), wanted, rtol=0, atol=1e-12)
            summed = plan.weights(counts, mean=mean, count_empty=count_empty, averaged_over=1)
            np.testing.assert_allclose(summed * dp_size, weights)


def test_a_step_without_loss_has_no_weight() -> None:
    plan = rl.plan([3, 3], dp_size=1, max_tokens=9, cost_model=COST)
    for mean in ("token", "sample", "prompt"):
        assert plan.weights([0, 0], mean=mean).tolist() == [0, 0]


def test_wrong_weights_are_refused() -> None:
    plan = rl.plan([3, 3], dp_size=1, max_tokens=9, cost_model=COST)
    wrong: tuple[tuple[Any, dict[str, Any], str], ...] = (
        ([1], {"mean": "token"}, "loss_tokens has 1 entries"),
        ([1, -1], {"mean": "token"}, r"loss_tokens\[1\] = -1"),
        ([1, 1], {"mean": "tokens"}, "mean = 'tokens'"),
        ([1, 1], {"mean": "token", "averaged_over": 0}, "averaged_over = 0"),
    )
    for counts, options, message in wrong:
        with pytest.raises(wlb.WlbError, match=message):
            plan.weights(counts, **options)
