"""A range of cost models, `cost_model=[low, high]`: least worst over it, and saved with the rest."""

import json
import pickle
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import wlb

LOW, HIGH = (wlb.CostModel(attention=1.0, linear=linear) for linear in (100.0, 2000.0))
SIZES: dict[str, Any] = {"num_micro_batches": 4, "max_tokens": 6000}


def documents(seed: int = 0, count: int = 300) -> NDArray[np.int64]:
    lengths = np.random.default_rng(seed).lognormal(3.5, 1.3, count)
    return np.clip(lengths, 1, 4000).astype(np.int64)


def imbalances(packing: wlb.Packing, models: Any) -> list[float]:
    """From the documents alone."""
    found = []
    for model in models:
        costs = np.array([model.cost(micro_batch.lengths).sum() for micro_batch in packing.micro_batches])
        found.append(float(costs.max() / costs.mean()))
    return found


def test_every_way_to_give_a_range_is_the_same() -> None:
    lengths, range_ = documents(), wlb.CostModel.range([LOW, HIGH])
    assert range_.models == (LOW, HIGH)
    assert LOW.models == (LOW,)
    assert pickle.loads(pickle.dumps(range_)) == range_ != wlb.CostModel.range([HIGH, LOW])
    plans = [wlb.pack(lengths, cost_model=cost, **SIZES) for cost in ([LOW, HIGH], (LOW, HIGH), range_)]
    assert len({plan.digest() for plan in plans}) == 1
    np.testing.assert_allclose(plans[0].imbalances, imbalances(plans[0], [LOW, HIGH]), rtol=1e-9)
    assert plans[0].imbalance == plans[0].imbalances.max()
    assert pickle.loads(pickle.dumps(plans[0])) == plans[0]
    alone = wlb.pack(lengths, cost_model=LOW, **SIZES)
    assert alone.imbalances.tolist() == [alone.imbalance]
    elsewhere = wlb.Packing.from_assignment(lengths, plans[0].assignment, cost_model=range_, **SIZES)
    np.testing.assert_allclose(elsewhere.imbalances, plans[0].imbalances, rtol=1e-12)


@pytest.mark.parametrize("release", ["fifo", "adaptive"])
def test_a_stream_is_resumed_under_its_range(release: Any) -> None:
    waiting: dict[str, Any] = {"release": release} | ({"outlier_thresholds": (1000,)} if release == "fifo" else {})
    packer = wlb.Packer(cost_model=[LOW, HIGH], max_document_tokens=4000, **SIZES, **waiting)
    assert packer.cost_model.models == (LOW, HIGH)
    found = []
    for seed in range(12):
        lengths = documents(seed, 60)
        lengths = lengths[: packer.admits(lengths)]
        packing = packer.push(lengths)
        if packing.num_tokens:
            found.append(imbalances(packing, [LOW, HIGH]))
        if seed == 5:
            packer = wlb.Packer.from_state_dict(json.loads(json.dumps(packer.state_dict())))
            assert packer.cost_model.models == (LOW, HIGH)
    metrics = packer.metrics()
    np.testing.assert_allclose(metrics.imbalance_mean_by_model, np.mean(found, axis=0), rtol=1e-9)
    assert metrics.imbalance_mean == pytest.approx(np.max(found, axis=1).mean(), rel=1e-9)
    single = wlb.Packer(cost_model=LOW, max_document_tokens=4000, **SIZES, **waiting)
    assert single.fingerprint != packer.fingerprint
    assert "range" not in json.dumps(single.state_dict())
    assert single.metrics().imbalance_mean_by_model.size == 0
    with pytest.raises(wlb.WlbError, match="cost_model"):
        single.load_state_dict(packer.state_dict())
    packer.set_cost_model([LOW, HIGH, HIGH])
    assert packer.metrics().imbalance_mean_by_model.size == 0
    packer.push(documents(99, 60)[:5])
    assert packer.metrics().imbalance_mean_by_model.size == 3


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ([], "two cost models"),
        ([LOW], "two cost models"),
        ([LOW, wlb.CostModel(attention=1.0, linear=1.0, causal=False)], "mask"),
        ([LOW, wlb.CostModel(attention=1.0, linear=1.0, unit="seconds")], "unit"),
        ([LOW, wlb.CostModel.range([LOW, HIGH])], "single"),
    ],
)
def test_a_range_that_makes_no_sense(models: list[wlb.CostModel], said: str) -> None:
    for take in (
        lambda: wlb.pack([1], cost_model=models, **SIZES),
        lambda: wlb.Packer(cost_model=models, **SIZES),
        lambda: wlb.CostModel.range(models),
    ):
        with pytest.raises(wlb.WlbError, match=said) as raised:
            take()
        assert raised.value.argument == "cost_model"


def test_what_is_no_cost_model() -> None:
    wrong: Any
    for wrong in (1, "ab", [LOW, 1]):
        with pytest.raises(TypeError, match="cost_model"):
            wlb.pack([1], cost_model=wrong, **SIZES)
    with pytest.raises(wlb.WlbError, match="range"):
        wlb.plan_dynamic_cp(
            [1], world_size=2, num_stages=1, max_tokens_per_rank=10, cost_model=wlb.CostModel.range([LOW, HIGH])
        )


def test_a_range_is_not_mixed_with_costs_of_documents() -> None:
    with pytest.raises(wlb.WlbError, match="pass one of the two"):
        wlb.pack([1, 2], cost_model=[LOW, HIGH], costs=[1.0, 2.0], **SIZES)
