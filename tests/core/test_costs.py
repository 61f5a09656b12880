"""Documents whose costs are given: the time of a step, and what is refused. Plans are held to the core's oracle."""

import pickle
from typing import Any

import numpy as np
import pytest

import wlb


@pytest.mark.parametrize("method", ["var_length", "refined", "original"])
def test_a_step_takes_the_sum_over_columns_of_the_heaviest(method: Any) -> None:
    lengths = [40, 3, 100, 17, 60, 25, 80]
    costs = np.random.default_rng(0).uniform(1e-3, 1e3, (7, 3))
    packing = wlb.pack(lengths, num_micro_batches=3, max_tokens=200, costs=costs, method=method)
    per_micro_batch = np.zeros((3, 3))
    for j, micro_batch in enumerate(packing):
        for document, length in zip(micro_batch.document_ids, micro_batch.lengths, strict=True):
            per_micro_batch[j] += costs[document] * length / lengths[document]
    heaviest = per_micro_batch.max(axis=0).sum()
    np.testing.assert_allclose(packing.column_costs, per_micro_batch, rtol=1e-12)
    np.testing.assert_allclose(packing.costs, per_micro_batch.sum(axis=1), rtol=1e-12)
    np.testing.assert_allclose(packing.step_cost, heaviest, rtol=1e-12)
    np.testing.assert_allclose(packing.imbalance, heaviest * 3 / per_micro_batch.sum(), rtol=1e-12)
    assert pickle.loads(pickle.dumps(packing)) == packing


def test_one_column_is_the_cost_model_it_came_from() -> None:
    lengths = np.random.default_rng(0).integers(1, 100_000, 300)
    cost = wlb.CostModel(attention=1.0, linear=5000.0)
    options: dict[str, Any] = {"num_micro_batches": 8, "max_tokens": int(lengths.sum() / 7)}
    for method in ("var_length", "refined"):
        by_model = wlb.pack(lengths, cost_model=cost, method=method, **options)
        for costs in (cost.cost(lengths), cost.cost(lengths)[:, None]):
            assert wlb.pack(lengths, costs=costs, method=method, **options) == by_model


def test_memory_is_a_column_with_a_limit() -> None:
    """Four images of 3 GB each: at most two in a micro-batch of 6 GB, whatever the time says."""
    costs = np.array([[1.0, 3.0]] * 4 + [[10.0, 0.0]] * 2)
    options: dict[str, Any] = {"max_tokens": 1000, "costs": costs}
    packing = wlb.pack([10] * 6, num_micro_batches=2, limits=[np.inf, 6.0], **options)
    assert packing.column_costs.tolist() == [[12.0, 6.0]] * 2
    assert packing.step_cost == 12.0
    with pytest.raises(wlb.WlbError, match="num_micro_batches=None"):
        wlb.pack([10] * 6, num_micro_batches=2, limits=[np.inf, 5.0], **options)
    assert len(wlb.pack([10] * 6, num_micro_batches=None, limits=[np.inf, 5.0], **options)) == 4


def test_an_assignment_made_elsewhere_is_scored_alike() -> None:
    costs = np.array([[1.0, 5.0], [2.0, 0.0], [3.0, 1.0]])
    packing = wlb.Packing.from_assignment([1, 1, 1], [0, 1, 0], num_micro_batches=2, max_tokens=10, costs=costs)
    assert packing.column_costs.tolist() == [[4.0, 6.0], [2.0, 0.0]]
    assert (packing.step_cost, packing.lower_bound) == (10.0, 3.0 + 5.0)


def test_costs_that_are_all_zero_name_a_way_out() -> None:
    """There is no other column to leave this one out of."""
    for options in ({}, {"dp_size": 2}):
        with pytest.raises(wlb.WlbError, match="is 0 for every document: say what each costs, or give a cost_model"):
            wlb.pack([5, 6, 7], num_micro_batches=2, max_tokens=20, costs=np.zeros(3), **options)
    with pytest.raises(wlb.WlbError, match=r"costs\[:, 1\]: is 0 for every document: leave this column out"):
        wlb.pack([5, 6], num_micro_batches=2, max_tokens=20, costs=[[1.0, 0.0], [2.0, 0.0]])
