"""Costs fitted while training: steps of a packer on gloo ranks, from costs that are wrong by a factor of four."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import DataLoader

import wlb
import wlb.torch as wt
from tests.torch import processes
from wlb.torch.timing import PlannedWork

RNG = np.random.default_rng(3)
LENGTHS = np.minimum(60 + RNG.pareto(1.1, 4000) * 60, 2048).astype(int)
TRUTH = wlb.CostModel(attention=4e-9, linear=1.3e-6, micro_batch=4e-4)  # seconds: some ten milliseconds a micro-batch
WRONG = wlb.CostModel(attention=1e-9, linear=1.3e-6)
STEPS = 45


def true_costs(packing: wlb.Packing) -> NDArray[np.float64]:
    return np.array([TRUTH.cost(part.lengths).sum() + TRUTH.terms["micro_batches"] for part in packing])


def imbalance(packing: wlb.Packing) -> float:
    costs = true_costs(packing)
    return float(costs.max() / costs.mean())


class KnownTimes(wt.StepTimer):
    """A timer whose clock is a function of the plan: for tests of what comes after the clock."""

    def __init__(self, cost: wlb.CostModel, *, slow: float = 1.0, noise: float = 0.0, seed: int = 0) -> None:
        super().__init__("cpu")
        self.cost, self.slow, self.noise = cost, slow, noise
        self.rng = np.random.default_rng(seed)

    def end_step(self, step: Any = None, **options: Any) -> None:
        self.timed = wt.TimedStep(step.number, self.seconds(step))

    def seconds(self, step: Any) -> NDArray[np.float64]:
        parts = [step.packing[index].lengths for index in step.indices.tolist()]
        costs = np.array([self.cost.cost(part).sum() + self.cost.terms.get("micro_batches", 0.0) for part in parts])
        return costs * self.slow * (1 + self.noise * self.rng.standard_normal(len(parts)))

    def read(self) -> list[wt.TimedStep]:
        return [self.timed]


@dataclasses.dataclass(frozen=True)
class Pushed:
    """A step of a loop that pushes into its packer by itself."""

    number: int
    packing: wlb.Packing
    indices: NDArray[np.int64]


def pushed(packer: wlb.Packer, number: int) -> Pushed:
    lengths = np.random.default_rng(number).permutation(LENGTHS)[:60]
    return Pushed(number, packer.push(lengths), np.arange(packer.num_micro_batches))


def a_packer(cost_model: wlb.CostModel = WRONG) -> wlb.Packer:
    return wlb.Packer(
        num_micro_batches=4, max_tokens=16_384, max_document_tokens=2048, cost_model=cost_model, release="fifo"
    )


def learn(rank: int, size: int) -> tuple[list[str], list[float], list[dict[str, Any]]]:
    """A loop that takes each good fit at the end of its step."""
    packer = a_packer()
    tracker = wt.CostTracker(WRONG, every=10, timer=KnownTimes(TRUTH, noise=0.03, seed=rank))
    digests, found = [], []
    for number in range(30):
        step = pushed(packer, number)
        digests.append(step.packing.digest())
        found.append(imbalance(step.packing))
        update = tracker.step(dataclasses.replace(step, indices=step.indices[rank::size]))
        assert (update is None) == (number % 10 != 9)
        if update is not None and update.cost_model is not None and update.imbalance - update.believed > 0.01:
            packer.set_cost_model(update.cost_model)
            tracker.cost_model = update.cost_model
    assert packer.cost_model != WRONG
    updates = [dataclasses.asdict(update) | {"text": update.report()} for update in tracker.updates]
    for update in updates:
        update.pop("fit")
    return digests, found, updates


def test_a_wrong_start_is_learnt_away_on_all_ranks_alike() -> None:
    (digests, found, updates), (others, _, same_updates) = processes.run(2, learn, 2)
    assert digests == others
    assert updates == same_updates  # every figure, on both ranks
    told = a_packer(TRUTH)
    best = [imbalance(pushed(told, number).packing) for number in range(30)]
    assert np.mean(found[:10]) > np.mean(best[:10]) + 0.01, "the wrong start must cost something"
    assert np.mean(found[10:]) < np.mean(best[10:]) + 0.01
    assert updates[0]["imbalance"] - updates[0]["believed"] > 0.01
    assert updates[-1]["imbalance"] - updates[-1]["believed"] < 0.01
    assert "tokens" in updates[0]["text"]


def loader(cost_model: wlb.CostModel) -> wt.StepLoader[Any]:
    packer = wlb.Packer(
        num_micro_batches=4, max_tokens=8192, max_document_tokens=2048, release="adaptive", cost_model=cost_model
    )
    sampler = wt.BalancedBatchSampler(LENGTHS, packer=packer, dp_rank=0, dp_size=1, tokens_per_batch=12_000)
    return wt.StepLoader(DataLoader(list(range(LENGTHS.size)), batch_sampler=sampler, collate_fn=len))  # type: ignore[arg-type]


def test_a_loader_goes_on_by_other_costs_from_a_step_s_state() -> None:
    trained: list[Any] = []
    for step in loader(WRONG):
        trained.append(step)
        if step.number == 9:
            break
    again = loader(TRUTH)
    with pytest.raises(wlb.WlbError, match="cost_model"):
        again.load_state_dict(trained[-1].state)
    again.load_state_dict(trained[-1].state, allow_config_change=True)
    trained += again
    assert [step.number for step in trained] == list(range(len(trained)))
    tokens = sum(int(step.packing.tokens.sum()) for step in trained)
    assert tokens == LENGTHS.sum()
    packing = trained[10].packing
    assert packing.costs == pytest.approx(true_costs(packing))


def test_a_fit_by_right_costs_sees_nothing_to_gain() -> None:
    for cost_model in (TRUTH, wlb.CostModel(attention=4.0, linear=1300.0)):  # another unit
        packer = a_packer(cost_model)
        tracker = wt.CostTracker(cost_model, every=10, timer=KnownTimes(TRUTH, noise=0.05))
        for number in range(20):
            tracker.step(pushed(packer, number))
        assert all(update.imbalance - update.believed < 0.01 for update in tracker.updates)


def test_too_little_to_learn_from_gives_no_costs_and_says_so() -> None:
    packer = a_packer()
    tracker = wt.CostTracker(WRONG, every=1, timer=KnownTimes(TRUTH))
    update = tracker.step(pushed(packer, 0))
    assert update is not None
    assert update.fit is None
    assert update.cost_model is None
    assert "rows are too few" in update.report()


def test_times_that_say_nothing_give_no_costs() -> None:
    class Noise(KnownTimes):
        def seconds(self, step: Any) -> NDArray[np.float64]:
            return np.exp(self.rng.normal(0, 2, len(step.indices)))

    packer = a_packer()
    tracker = wt.CostTracker(WRONG, every=10, timer=Noise(TRUTH))
    for number in range(20):
        tracker.step(pushed(packer, number))
    assert len(tracker.updates) == 2
    assert all(update.problem and update.cost_model is None for update in tracker.updates)


def _shared(rank: int) -> list[float]:
    """Two replicas of two context-parallel ranks, of which the first is a tenth slower."""
    mesh = wt.build_mesh(dp=2, cp=2, device_type="cpu")
    packer = a_packer(TRUTH)
    slow = 1.1 if mesh["cp"].get_local_rank() == 0 else 1.0
    tracker = wt.CostTracker(TRUTH, every=10, mesh=mesh, timer=KnownTimes(TRUTH, slow=slow))
    for number in range(20):
        step = pushed(packer, number)
        tracker.step(dataclasses.replace(step, indices=np.arange(4)[mesh["dp"].get_local_rank() :: 2]))
    fit = tracker.updates[-1].fit
    assert fit is not None
    return (fit.cost_model.cost([256, 1024, 2048]) / TRUTH.cost([256, 1024, 2048])).tolist()


def test_the_slowest_of_the_ranks_that_share_a_micro_batch_counts() -> None:
    for ratios in processes.run(4, _shared):
        assert ratios == pytest.approx([1.1] * 3, rel=1e-6)


def _differ(rank: int, what: str) -> str:
    packer = a_packer()
    costs = TRUTH if what == "costs" and rank == 2 else WRONG
    if what == "settings" and rank == 2:
        costs = wlb.CostModel(attention=1e-9, linear=1e-6, windows={64: 1e-9}, unit="seconds")
    tracker = wt.CostTracker(costs, every=10, timer=KnownTimes(TRUTH))
    try:
        for number in range(10):
            step = pushed(packer, number)
            if what == "plans" and rank == 2:
                step = pushed(a_packer(), 77 + number)
            indices = np.arange(4)[rank::4]
            tracker.step(Pushed(number, step.packing, indices))
    except wlb.WlbError as refused:
        return str(refused)
    return "agreed"


@pytest.mark.parametrize("what", ["settings", "costs", "plans"])
def test_ranks_that_differ_are_named(what: str) -> None:
    found = processes.run(3, _differ, what)
    assert len(set(found)) == 1
    assert "[2]" in found[0], found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cost_model": a_packer()}, "cost_model is a Packer: give the CostModel"),
        ({"every": 0}, "every = 0"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(wlb.WlbError, match=message):
        wt.CostTracker(**{"cost_model": WRONG, **arguments})


def test_a_step_without_a_packing_is_refused() -> None:
    with pytest.raises(wlb.WlbError, match="step is a object without a Packing"):
        wt.CostTracker(WRONG).step(object())


# --- dynamic plans ---

EXCHANGE = wlb.Exchange(seconds_per_token=1e-6, seconds_per_exchange=1e-5, overlap=0.0)


def dynamic(
    rank: int, size: int, cost_model: wlb.CostModel = WRONG, *, group: Any = None, **pipeline: Any
) -> wt.DynamicCpLoader[Any]:
    """A loader of steps of 24 documents, of which each rank reads its share."""
    rng = np.random.default_rng(8)
    batches = [
        [wt.Document(np.zeros(LENGTHS[number], np.int64), id=number) for number in batch[rank::size].tolist()]
        for batch in (rng.choice(LENGTHS.size, 24, replace=False) for _ in range(STEPS))
    ]
    options = {"num_stages": 1, "max_tokens_per_rank": 2048, "micro_batch_seconds": 2e-4, **pipeline}
    plan = functools.partial(wlb.plan_dynamic_cp, world_size=2, cost_model=cost_model, exchange=EXCHANGE, **options)
    return wt.DynamicCpLoader(batches, plan=plan, group=group or dist.group.WORLD)


class KnownGroupTimes(KnownTimes):
    """What the planner would say of a group by true costs: its formula, written out."""

    def seconds(self, step: wt.DynamicCpStep[Any]) -> NDArray[np.float64]:
        found = []
        for group in step.groups:
            cp, shared = len(group), self.cost.cost(group.lengths).sum() if group.lengths.size else 0.0
            exchange = (cp - 1) * 1e-5 + group.tokens * (cp - 1) / cp * 1e-6 if group.lengths.size else 0.0
            found.append(2e-4 + self.cost.terms["micro_batches"] + shared / cp + exchange)
        noise = 1 + self.noise * self.rng.standard_normal(len(found))
        return np.array(found) * noise * self.slow


def _dynamic(rank: int) -> tuple[Any, ...]:
    steps = dynamic(rank, 2)
    timer = KnownGroupTimes(TRUTH, noise=0.03, seed=rank, slow=1.1 if rank else 1.0)
    tracker = wt.CostTracker(WRONG, every=15, timer=timer)
    for step in steps:
        tracker.step(step)
    steps.close()
    updates = [dataclasses.asdict(update) | {"text": update.report()} for update in tracker.updates]
    for update in updates:
        update.pop("fit")
    learnt = tracker.updates[-1].cost_model
    return updates, "" if learnt is None else learnt.to_json()


def test_dynamic_plans_are_learnt_too() -> None:
    (updates, latest), (same, _) = processes.run(2, _dynamic)
    assert updates == same
    first = updates[0]
    assert first["imbalance"] - first["believed"] > 0.01
    # What ranks exchange is no cost, and pairs and tokens are shared: these are costs of a document on one rank. One of
    # the two ranks is a tenth slower, and groups of both wait for it.
    learnt = wlb.CostModel.from_json(latest)
    ratios = learnt.cost([256, 1024, 2048]) / TRUTH.cost([256, 1024, 2048])
    assert ((ratios > 0.98) & (ratios < 1.12)).all(), ratios


def _piped(rank: int) -> tuple[float, float]:
    """Two stages of two ranks: what the costs in use show, and what the planner predicted."""
    mesh = wt.build_mesh(pp=2, dp=2, device_type="cpu")
    data = mesh["dp"].get_local_rank()
    steps = dynamic(data, 2, num_stages=2, p2p_seconds=3e-4, group=mesh["dp"].get_group())
    # Each stage has half of the model.
    tracker = wt.CostTracker(WRONG, every=15, mesh=mesh, timer=KnownGroupTimes(TRUTH, slow=0.5))
    predicted = []
    for step in steps:
        predicted.append(step.plan.seconds * 4 / float(WRONG.cost(lengths_of(step.plan)).sum()))
        if (update := tracker.step(step)) is not None:
            break
    steps.close()
    assert update is not None
    assert update.fit is not None
    ratios = update.fit.cost_model.cost([256, 1024, 2048]) / TRUTH.cost([256, 1024, 2048])
    assert ((ratios > 0.99) & (ratios < 1.01)).all(), ratios
    return update.believed, float(np.mean(predicted))


def lengths_of(plan: wlb.DynamicCpPlan) -> NDArray[np.int32]:
    return np.concatenate([group.lengths for batch in plan for group in batch])


def test_a_pipeline_counts_where_dynamic_plans_are_judged() -> None:
    for believed, predicted in processes.run(4, _piped):
        assert predicted > 1.1  # it fills and drains
        assert believed == pytest.approx(predicted, rel=1e-9)


def test_groups_of_dynamic_plans_are_logged_with_their_ranks(tmp_path: Path) -> None:
    """A log that `wlb fit` reads."""
    timer = wt.StepTimer("cpu")
    plan = functools.partial(
        wlb.plan_dynamic_cp, world_size=2, num_stages=1, max_tokens_per_rank=64, cost_model=TRUTH, max_cp_size=2
    )
    made = plan([100, 20, 30])
    step = wt.DynamicCpStep(7, made, list(made), 1, rank=1)
    for index in range(len(made)):
        with timer.micro_batch(index):
            pass
    timer.end_step(step)
    timer.write(tmp_path / "log.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    groups = [micro_batch.group_of(1) for micro_batch in made]
    assert [(row["lengths"], row["ranks"]) for row in rows] == [
        (group.lengths.tolist(), len(group)) for group in groups
    ]
    assert 2 in [row["ranks"] for row in rows]


@pytest.mark.parametrize("more", [{"dp_size": 2}, {"dp_size": 2, "sync": "micro_batch"}, {"max_documents": 8}])
def test_plans_for_ranks_and_in_shapes_are_judged_as_what_they_are(more: dict[str, Any]) -> None:
    packer = wlb.Packer(num_micro_batches=8, max_tokens=8192, cost_model=WRONG, release="fifo", **more)
    packing = packer.push([4096, 4096, *[300] * 12])
    work = PlannedWork.of(packing, WRONG)
    assert work.imbalance(WRONG) == pytest.approx(packing.rank_imbalance)
