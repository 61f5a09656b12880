"""Costs from measured times: close to what made them, honest about what they cannot show, and refused where wrong."""

from typing import Any

import numpy as np
import pytest

import wlb

Rows = list[np.ndarray[Any, np.dtype[np.int64]]]


def micro_batches(count: int, seed: int, *, most: int = 65_536) -> Rows:
    """Documents with a long tail, up to some tens of thousands of tokens in each micro-batch."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        lengths = np.minimum(20 + rng.pareto(1.1, 400) * 300, most).astype(np.int64)
        rows.append(lengths[: int(np.searchsorted(lengths.cumsum(), rng.integers(20_000, 90_000))) + 1])
    return rows


def seconds(cost: wlb.CostModel, rows: Rows) -> Any:
    return np.array([cost.cost(row).sum() + cost.terms.get("micro_batches", 0.0) for row in rows])


DENSE = wlb.CostModel(attention=3e-10, linear=2e-6, unit="seconds")
LOCAL = wlb.CostModel(attention=1e-10, linear=2e-6, windows={1024: 2e-9}, document=2e-4, unit="seconds")
NAMES = ["pairs", "window_pairs[1024]", "chunk_pairs[8192]", "tokens", "documents", "micro_batches"]


@pytest.mark.parametrize("cost", [DENSE, LOCAL], ids=["dense", "local"])
def test_times_without_noise_give_the_model_back(cost: wlb.CostModel) -> None:
    rows = micro_batches(60, 1)
    fit = wlb.CostModel.fit(rows, seconds(cost, rows), windows=(1024,), chunks=[8192])
    assert fit.merged == ()
    assert fit.cost_model.terms == pytest.approx(cost.terms, rel=1e-6)
    assert list(fit.rates) == NAMES
    assert wlb.CostModel.from_json(fit.cost_model.to_json()) == fit.cost_model


def test_a_window_that_no_document_fills_is_pairs() -> None:
    rows = micro_batches(60, 1)
    times = seconds(LOCAL, rows)
    fit = wlb.CostModel.fit(rows, times, windows=(2**31, 1024, 2**40), chunks=[2**31 - 1])
    assert fit.cost_model == wlb.CostModel.fit(rows, times, windows=(1024,)).cost_model
    assert list(wlb.CostModel.fit(rows, times, windows=(2**31,), terms=["tokens"]).rates) == ["pairs", "tokens"]


def test_ranks_share_pairs_and_tokens() -> None:
    rows = micro_batches(60, 1)
    fit = wlb.CostModel.fit(rows, seconds(DENSE, rows), ranks=[2] * 60)
    assert fit.rates["pairs"] == pytest.approx(2 * 3e-10)
    assert fit.rates["tokens"] == pytest.approx(2 * 2e-6)


def test_outliers_are_left_out_and_named() -> None:
    rows = micro_batches(100, 2)
    times = seconds(DENSE, rows) * (1 + 0.02 * np.random.default_rng(0).standard_normal(100))
    times[7::10] *= 8  # a checkpoint, a garbage collection
    times[3] /= 50  # a clock that missed the backward pass
    fit = wlb.CostModel.fit(rows, times)
    assert set(range(7, 100, 10)) | {3} <= set(fit.outliers.tolist())
    assert len(fit.outliers) < 15
    assert fit.cost_model.terms["pairs"] == pytest.approx(3e-10, rel=0.05)


def test_what_cannot_be_told_apart_is_named_and_stands_in_one_place() -> None:
    # Every micro-batch of the same tokens, as many packers fill them: a constant and a cost of tokens are one.
    rng = np.random.default_rng(5)
    rows = [
        np.diff(np.concatenate([[0], np.sort(rng.choice(np.arange(1, 8192), 20, replace=False)), [8192]]))
        for _ in range(80)
    ]
    cost = wlb.CostModel(attention=1e-8, linear=2e-6, micro_batch=0.01, unit="seconds")
    fit = wlb.CostModel.fit(rows, seconds(cost, rows), terms=["pairs", "tokens", "micro_batches"])
    assert fit.merged == (("tokens", "micro_batches"),)
    assert fit.rates["micro_batches"] == 0
    assert fit.rates["tokens"] * 8192 == pytest.approx(2e-6 * 8192 + 0.01)
    assert "could not be told apart: tokens, micro_batches" in fit.report()
    assert "in tokens" in fit.report()


def test_times_that_do_not_grow_with_the_documents_are_no_costs() -> None:
    with pytest.raises(wlb.WlbError) as caught:
        wlb.CostModel.fit(micro_batches(20, 3), np.ones(20))
    assert caught.value.argument == "seconds"
