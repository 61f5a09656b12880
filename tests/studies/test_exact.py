"""The exact packer: against every possible assignment, and as a judge of the greedy one."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import benches.exact
import wlb
from tests.plain import pieces_of
from wlb import testing

SOLVER_TOLERANCE = 1e-6  # HiGHS' feasibility tolerance, relative to the largest cost


def best_maximum(costs: Sequence[float], lengths: Sequence[int], *, num_micro_batches: int, max_tokens: int) -> float:
    """The least possible maximum cost, by trying every assignment; infinite when the documents do not fit."""
    best = float("inf")
    for assignment in product(range(num_micro_batches), repeat=len(lengths)):
        tokens = [0] * num_micro_batches
        loads = [0.0] * num_micro_batches
        for batch, length, cost in zip(assignment, lengths, costs, strict=True):
            tokens[batch] += length
            loads[batch] += cost
        if max(tokens) <= max_tokens:
            best = min(best, max(loads))
    return best


@given(
    testing.document_lengths(max_length=30, min_size=1, max_size=7),
    testing.cost_models(exact=True),
    st.integers(1, 3),
    st.integers(30, 60),
)
def test_no_assignment_is_better(lengths: list[int], cost: wlb.CostModel, n: int, max_tokens: int) -> None:
    sizes: dict[str, Any] = {"num_micro_batches": n, "max_tokens": max_tokens}
    best = best_maximum(cost.cost(lengths).tolist(), lengths, **sizes)
    if best == float("inf"):
        with pytest.raises(wlb.WlbError):
            benches.exact.solve(lengths, **sizes, cost_model=cost)
        return
    solution = benches.exact.solve(lengths, **sizes, cost_model=cost)
    slack = SOLVER_TOLERANCE * best
    assert solution.optimal
    assert abs(solution.objective - best) <= slack
    assert solution.lower_bound <= best + slack
    assert 0 <= solution.gap <= 2 * SOLVER_TOLERANCE

    packing = solution.packing
    assert solution.objective == max(packing.costs)
    assert packing.leftover.size == 0
    assert max(packing.tokens) <= max_tokens
    placed = sorted(piece for batch in packing.micro_batches for piece in pieces_of(batch))
    assert [piece.length for piece in placed] == lengths
    assert [piece.id for piece in placed] == list(range(len(lengths)))

    greedy = wlb.pack(lengths, **sizes, cost_model=cost, leftover="return")
    if greedy.leftover.size == 0:
        assert greedy.lower_bound <= best <= max(greedy.costs)
        if greedy.length_fallbacks == 0:
            assert max(greedy.costs) <= (2 - 1 / n) * best, "Graham's bound for list scheduling"


def test_a_batch_of_forty(llama_cost: wlb.CostModel) -> None:
    """Too large for brute force: the solution lies between its own bound and the greedy one."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(100), np.log(30_000), 40)).astype(np.int64)
    sizes: dict[str, Any] = {"num_micro_batches": 4, "max_tokens": 80_000}
    solution = benches.exact.solve(lengths, **sizes, cost_model=llama_cost, time_limit=0.5)
    greedy = wlb.pack(lengths, **sizes, cost_model=llama_cost)
    assert greedy.leftover.size == 0
    slack = SOLVER_TOLERANCE * solution.objective
    assert solution.lower_bound - slack <= solution.objective <= max(greedy.costs) + slack
    assert solution.lower_bound >= greedy.lower_bound - slack
    assert solution.gap == pytest.approx(solution.objective / solution.lower_bound - 1, abs=SOLVER_TOLERANCE)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_micro_batches", 0),
        ("max_tokens", 0),
        ("time_limit", -1.0),
        ("time_limit", float("nan")),
        ("time_limit", "5"),
        ("relative_gap", -1.0),
        ("relative_gap", float("nan")),
        ("relative_gap", "0"),
    ],
)
def test_bad_arguments_are_named(argument: str, value: float | str, llama_cost: wlb.CostModel) -> None:
    arguments: dict[str, Any] = {
        "num_micro_batches": 2,
        "max_tokens": 100,
        "time_limit": 1.0,
        argument: value,
    }
    with pytest.raises(wlb.WlbError) as raised:
        benches.exact.solve([10, 20], cost_model=llama_cost, **arguments)
    assert raised.value.argument == argument


def test_no_time_limit(llama_cost: wlb.CostModel) -> None:
    sizes: dict[str, Any] = {"num_micro_batches": 2, "max_tokens": 100}
    assert benches.exact.solve([10, 20, 30], **sizes, cost_model=llama_cost, time_limit=float("inf")).optimal


def test_bad_lengths_are_named(llama_cost: wlb.CostModel) -> None:
    for lengths, index in ([10, 0], 1), ([10, 101], 1), ([-1], 0):
        with pytest.raises(wlb.WlbError) as raised:
            benches.exact.solve(lengths, num_micro_batches=2, max_tokens=100, cost_model=llama_cost)
        assert (raised.value.argument, raised.value.index) == ("lengths", index)
