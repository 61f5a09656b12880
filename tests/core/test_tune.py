"""Tuning: every reported point is what the packer really does, and no other is better."""

import collections
import inspect
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import wlb
from wlb import testing
from wlb._core import MAX_MEAN_DELAY
from wlb.simulation.reading import Reading

POINT_FIELDS = [
    "imbalance_mean",
    "imbalance_p95",
    "imbalance_worst",
    "delay_mean",
    "delay_max",
    "memory_skew_mean",
]


@pytest.mark.parametrize("tune", [wlb.tune_outlier_thresholds, wlb.tune_delay_price])
def test_the_default_limit_of_the_delay_is_the_cores(tune: Any) -> None:
    assert inspect.signature(tune).parameters["max_mean_delay"].default == MAX_MEAN_DELAY


def measure(
    lengths: Any,
    thresholds: tuple[int, ...],
    tokens_per_batch: int,
    packing: dict[str, Any],
    delay_price: float | None = None,
) -> list[float]:
    """What the packer does to the sample, read as in training, under these thresholds, or at this price."""
    release = "fifo" if delay_price is None else "adaptive"
    packer = wlb.Packer(outlier_thresholds=thresholds, release=release, delay_price=delay_price, **packing)
    reading = Reading(np.asarray(lengths), packer, tokens_per_batch)
    collections.deque(reading.steps(), maxlen=0)
    return [getattr(reading.packer.metrics(), name) for name in POINT_FIELDS]


def check(result: wlb.TuneResult, lengths: Any, tokens_per_batch: int, packing: dict[str, Any], limit: float) -> None:
    points = [result.best, *result.pareto]
    for point in points:
        assert measure(lengths, point.thresholds, tokens_per_batch, packing, point.delay_price) == [
            getattr(point, name) for name in POINT_FIELDS
        ]
    assert (result.thresholds, result.delay_price) == (result.best.thresholds, result.best.delay_price)
    pareto = [(point.delay_mean, point.imbalance_mean) for point in result.pareto]
    assert pareto == sorted(pareto)
    assert all(later[1] < earlier[1] for earlier, later in itertools.pairwise(pareto)), "none dominates"
    within = [point for point in result.pareto if point.delay_mean <= limit]
    if within:
        assert result.best.delay_mean <= limit
        assert result.best.imbalance_mean == min(point.imbalance_mean for point in within)
    else:
        assert result.best.delay_mean == min(point.delay_mean for point in result.pareto)
    assert result.evaluated >= len(result.pareto)


@given(
    testing.document_lengths(max_length=200, min_size=1, max_size=120),
    testing.cost_models(),
    st.none() | st.integers(0, 2),
    st.sampled_from([0.0, 0.2, 1.0]),
    st.none() | st.integers(0, 5),
    st.sampled_from(["var_length", "refined"]),
)
def test_points_are_what_the_packer_does(
    lengths: list[int], cost: wlb.CostModel, num_queues: int | None, limit: float, max_delay: int | None, method: str
) -> None:
    packing: dict[str, Any] = {
        "num_micro_batches": 3,
        "max_tokens": 220,
        "cost_model": cost,
        "max_delay": max_delay,
        "method": method,
    }
    arguments: dict[str, Any] = {"max_mean_delay": limit, "tokens_per_batch": 400}
    tune: Any = wlb.tune_delay_price
    if num_queues is not None:
        tune, arguments["num_queues"] = wlb.tune_outlier_thresholds, num_queues
    result = tune(lengths, **packing, **arguments)
    check(result, lengths, 400, packing, limit)
    assert all(len(point.thresholds) <= (num_queues or 0) for point in result.pareto)
    assert all((point.delay_price is None) == (num_queues is not None) for point in result.pareto)
    again = tune(lengths, **packing, **arguments)
    for other in (again, pickle.loads(pickle.dumps(result))):
        assert other == result
        assert other.best == result.best
        assert other.evaluated == result.evaluated
        assert [fields(point) for point in other.pareto] == [fields(point) for point in result.pareto]
        assert fields(other.best) == fields(result.best)


def fields(point: wlb.TunedPoint) -> list[Any]:
    return [getattr(point, name) for name in ("thresholds", "delay_price", *POINT_FIELDS)]


def test_a_price_for_any_limit(corpus: NDArray[Any], llama_cost: wlb.CostModel) -> None:
    """The limit is kept, and spent: better than any price of the first, coarse round."""
    packing: dict[str, Any] = {"num_micro_batches": 8, "max_tokens": 200_000, "cost_model": llama_cost}
    arguments: dict[str, Any] = {"tokens_per_batch": 1_000_000, "max_document_tokens": 131_072}
    lengths = corpus[:4000]
    never = wlb.tune_delay_price(lengths, **packing, **arguments, max_mean_delay=0)
    assert (never.best.delay_mean, never.best.delay_max) == (0, 0)
    balance = never.best.imbalance_mean
    coarse = [
        measure(lengths, (), 1_000_000, packing | {"max_document_tokens": 131_072}, 8 / 1.5**step) for step in range(23)
    ]
    gains = []
    for limit in (0.01, 0.05, 0.2, 0.5):  # the first is below the delay of any coarse price
        result = wlb.tune_delay_price(lengths, **packing, **arguments, max_mean_delay=limit)
        queued = wlb.tune_outlier_thresholds(lengths, **packing, **arguments, max_mean_delay=limit)
        assert 0.5 * limit < result.best.delay_mean <= limit
        assert result.best.imbalance_mean < min(balance, queued.best.imbalance_mean), "queues wait longer for less"
        balance = result.best.imbalance_mean
        within = [imbalance for imbalance, *_, delay, _, _ in coarse if delay <= limit]
        gains.append(min(within, default=never.best.imbalance_mean) - balance)
    assert min(gains) > -1e-5, "as good as any of the coarse prices, up to rounding of the price"
    assert max(gains) > 0.01, "and better where the delay passes the limit between two"


def test_at_no_delay_nothing_waits_that_finds_room() -> None:
    """Where a shorter step would be dearer than any wait: light documents usually make way for long ones."""
    packing: dict[str, Any] = {
        "num_micro_batches": 2,
        "max_tokens": 51,
        "max_document_tokens": 47,
        "cost_model": wlb.CostModel(attention=1.0, linear=0.0),
    }
    push = [42, 43, 8, 7]
    for price, placed in ((0.1, [1, 0, 1, -1]), (1e6, [1, 0, 1, 0])):
        packer = wlb.Packer(release="adaptive", delay_price=price, **packing)
        assert packer.push(push).assignment.tolist() == placed
    result = wlb.tune_delay_price(push * 40, **packing, tokens_per_batch=100, max_mean_delay=0.0)
    assert (result.best.delay_mean, result.best.delay_max) == (0, 0)


def test_nothing_to_tune_on(llama_cost: wlb.CostModel) -> None:
    for tune in (wlb.tune_outlier_thresholds, wlb.tune_delay_price):
        with pytest.raises(wlb.WlbError) as raised:
            tune([], num_micro_batches=2, max_tokens=10, cost_model=llama_cost)
        assert raised.value.argument == "lengths"
