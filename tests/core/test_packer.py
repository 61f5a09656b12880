"""A stream of global batches through the bindings: long streams, ids, prices, metrics.

Pushes, errors and resumes in any order are held to an oracle in `rust/wlb-core/tests/packer.rs`, plans by the goldens.
"""

import copy
import itertools
import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import wlb
from wlb_tools.simulation.stream import Reading

# Pushes of anything, whatever waits: the bounds are tested in test_admission.py.
pytestmark = pytest.mark.filterwarnings("ignore::wlb.BacklogWarning")


def through_json(packer: wlb.Packer) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(packer.state_dict(), allow_nan=False))
    return state


WAYS_TO_RESUME: list[Callable[[wlb.Packer], wlb.Packer]] = [
    lambda packer: wlb.Packer.from_state_dict(through_json(packer)),
    lambda packer: pickle.loads(pickle.dumps(packer)),
    copy.deepcopy,
]


def test_metrics_have_the_names_of_what_they_are() -> None:
    """A hundred steps of two micro-batches, worked out by hand so that metrics which could be mixed up differ."""
    cost = wlb.CostModel(attention=1.0, linear=0.0)
    packer = wlb.Packer(num_micro_batches=2, max_tokens=10, cost_model=cost, outlier_thresholds=(8,))
    # The first 8 waits for the second. Pairs: 10 of 4 tokens, 3 of 2, 21 of 6.
    for lengths in ([8, 4, 2], [8, 1, 1], *[[4, 4]] * 96, [4, 2], [6, 2]):
        packer.push(lengths)
    metrics = packer.metrics()
    totals = np.array([6, 18, *[8] * 96, 6, 8])
    work = np.array([13, 74, *[20] * 96, 13, 24])
    assert metrics.as_dict() == pytest.approx(
        {
            "steps": 100,
            "documents": 2 + 4 + 192 + 2 + 2,
            "tokens": 806,
            "imbalance_mean": (97 + 2 * 20 / 13 + 42 / 24) / 100,
            "imbalance_p95": 1.0,
            "imbalance_p99": 20 / 13,
            "imbalance_worst": 42 / 24,
            "delay_mean": 8 / 806,
            "delay_p99": 0,
            "delay_max": 1,
            "early_mean": 0.0,
            "backlog_mean": 8 / 100,
            "backlog_max": 8,
            "tokens_per_step_cv": totals.std() / totals.mean(),
            "step_work_cv": work.std() / work.mean(),
            "step_work_heaviest": 74 / work.mean(),
            "steps_over_max_cost": 0,
            "memory_skew_mean": (97 + 2 * 4 / 3 + 1.5) / 100,
            "memory_skew_worst": 1.5,
            "length_fallbacks": 0,
            "carried_over": 0,
            "padding_tokens": 0,
        },
        rel=1e-3,
    )
    assert metrics.delay_histogram.tolist() == [798, 8]
    shown = repr(metrics)
    for name in ("imbalance_mean", "delay_max", "backlog_max", "step_work_cv", "step_work_heaviest"):
        assert f"{name}=" in shown, "what waits and how steps differ stand beside the balance"


RULES: list[dict[str, Any]] = [
    {"outlier_thresholds": (16_384, 32_768)},
    {"release": "adaptive", "delay_price": 0.002},
    {"release": "adaptive", "max_step_cost": 1.2},
]


@pytest.mark.parametrize("rule", RULES)
def test_a_long_stream(corpus: NDArray[Any], llama_cost: wlb.CostModel, rule: dict[str, Any]) -> None:
    """Real proportions: queues fill and empty, micro-batches overflow, and a resume in the middle changes nothing."""
    settings: dict[str, Any] = {
        "num_micro_batches": 8,
        "max_tokens": 65_536,
        **rule,
        "max_delay": 6,
        "max_document_tokens": 49_152,
        "oversize": "split",
    }
    packer, resumed = (wlb.Packer(cost_model=llama_cost, **settings) for _ in range(2))
    packings: list[wlb.Packing] = []
    for step, (start, end) in enumerate(itertools.pairwise(wlb.batch_offsets(corpus[:3000], tokens_per_batch=400_000))):
        packings.append(packer.push(corpus[start:end]))
        assert resumed.push(corpus[start:end]) == packings[-1]
        if step in (5, 10, 15):
            again = WAYS_TO_RESUME[step // 5 - 1](resumed)
            assert (again.state_dict(), again.fingerprint) == (resumed.state_dict(), resumed.fingerprint)
            resumed = again
    packings += packer.flush()
    assert sum(packing.num_tokens for packing in packings) == corpus[:3000].sum()
    metrics = packer.metrics()
    assert pickle.loads(pickle.dumps(metrics)) == metrics
    assert metrics != wlb.Packer(cost_model=llama_cost, **settings).metrics()
    assert min(metrics.length_fallbacks, metrics.delay_p99) > 0
    if packer.release == "fifo":
        assert metrics.carried_over > 0
    else:
        assert metrics.delay_max == 6, "max_delay holds exactly"
        # Held to a bound, more is due at once than fits, since nobody asks what the packer admits.
        assert (metrics.carried_over == 0) == (packer.max_step_cost is None)


def eight(cost: wlb.CostModel, **options: Any) -> wlb.Packer:
    """Eight micro-batches of a context and a half, under the adaptive rule."""
    sizes: dict[str, Any] = {"max_tokens": 98_304, "max_document_tokens": 65_536, "oversize": "split"}
    return wlb.Packer(num_micro_batches=8, cost_model=cost, release="adaptive", **sizes, **options)


def test_the_work_of_a_step_is_bounded(corpus: NDArray[Any], llama_cost: wlb.CostModel) -> None:
    """No step has more than so many times the mean work but for what is due; a lower bound evens steps out further."""
    found = []
    for bound in (None, 2.0, 1.25):
        packer = eight(llama_cost, max_step_cost=bound)
        assert packer.max_step_cost == bound
        offsets = wlb.batch_offsets(corpus, tokens_per_batch=8 * 65_536)
        for start, end in itertools.pairwise(offsets[:-1]):
            packer.push(corpus[start:end])
        metrics = packer.metrics()
        assert metrics.steps_over_max_cost == 0
        assert metrics.delay_max <= 16
        found.append((metrics.step_work_heaviest, metrics.step_work_cv))
        if bound is not None:
            assert metrics.step_work_heaviest < bound * 1.1  # over the mean step; the bound is over the last batches
    assert found == sorted(found, reverse=True), found
    assert found[0][0] > 2.2, "nothing to bound"


def test_the_price_is_the_knob(corpus: NDArray[Any], llama_cost: wlb.CostModel) -> None:
    """Dearer delay: less of it, and less balance. Either way better than the same stream without waiting."""
    found = []
    for delay_price in (0.003, 0.03, 0.3, 1e6):
        packer = eight(llama_cost, delay_price=delay_price)
        for start, end in itertools.pairwise(wlb.batch_offsets(corpus, tokens_per_batch=8 * 65_536)):
            packer.push(corpus[start:end])
        metrics = packer.metrics()
        found.append((metrics.delay_mean, -metrics.imbalance_mean))
    assert found == sorted(found, reverse=True), found


def test_the_default_price_is_stated() -> None:
    sizes: dict[str, Any] = {
        "num_micro_batches": 2,
        "max_tokens": 9,
        "cost_model": wlb.CostModel(attention=1.0, linear=1.0),
    }
    assert wlb.Packer(**sizes, release="adaptive").delay_price == 0.03
    assert wlb.Packer(**sizes, release="fifo").delay_price is None
    assert wlb.Packer(**sizes, release="adaptive").queued == (0,)


def test_the_rule_follows_from_the_thresholds() -> None:
    sizes: dict[str, Any] = {
        "num_micro_batches": 2,
        "max_tokens": 9,
        "cost_model": wlb.CostModel(attention=1.0, linear=1.0),
    }
    packer = wlb.Packer(**sizes)
    assert (packer.release, packer.delay_price, packer.max_delay) == ("adaptive", 0.03, 16)
    assert wlb.Packer(**sizes, outlier_thresholds=(5,)).release == "fifo"
    assert wlb.Packer(**sizes, outlier_thresholds=()).release == "fifo", "a queue without levels holds nothing back"
    with pytest.raises(wlb.WlbError, match="outlier_thresholds: have no meaning with release"):
        wlb.Packer(**sizes, outlier_thresholds=(5,), release="adaptive")
    with pytest.raises(wlb.WlbError, match="pass outlier_thresholds for queues"):
        wlb.Packer(num_micro_batches=2, max_tokens=9, cost_columns=2)
    with pytest.raises(TypeError, match="groups"):
        wlb.Packer(**sizes, groups=[1])


def small_packer() -> wlb.Packer:
    return wlb.Packer(
        num_micro_batches=1, max_tokens=9, cost_model=wlb.CostModel(attention=0.0, linear=1.0), release="fifo"
    )


def test_other_costs_price_what_waits_anew_and_come_with_the_state() -> None:
    settings: dict[str, Any] = {"num_micro_batches": 4, "max_tokens": 400, "outlier_thresholds": (150,)}
    first, later = wlb.CostModel(attention=0.0, linear=1.0), wlb.CostModel(attention=1.0, linear=10.0)
    packer = wlb.Packer(cost_model=first, **settings)
    packer.push([300, 200, 100])
    before = packer.fingerprint
    packer.set_cost_model(first)  # no change
    assert packer.fingerprint == before == wlb.Packer(cost_model=first, **settings).fingerprint
    packer.set_cost_model(later)
    assert packer.cost_model == later
    assert packer.fingerprint == wlb.Packer(cost_model=later, **settings).fingerprint != before
    resumed, other = (wlb.Packer(cost_model=cost, **settings) for cost in (first, later))
    resumed.load_state_dict(through_json(packer))
    assert resumed.cost_model == later
    with pytest.raises(wlb.StateError, match="cost_model"):
        other.load_state_dict(packer.state_dict())
    other.load_state_dict(packer.state_dict(), allow_config_change=True)
    pickled = pickle.loads(pickle.dumps(packer))
    assert len({each.push([350, 160]).digest() for each in (packer, resumed, other, pickled)}) == 1
    assert packer.state_dict() == resumed.state_dict() != other.state_dict()


def test_costs_whose_sums_overflow_change_nothing() -> None:
    packer = small_packer()
    before = packer.state_dict()
    with pytest.raises(wlb.WlbError, match="cost_model"):
        packer.set_cost_model(wlb.CostModel(attention=1e308, linear=0.0))
    assert packer.state_dict() == before


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_long_document_that_is_due_leaves_with_its_company(seed: int) -> None:
    """A document of a whole context in each global batch, and memory for just a context, read to the end of the stream.

    Short documents are due with it, and take no micro-batch that another long one needs: alone, it would be six times
    the mean.
    """
    rng, context, n = np.random.default_rng(seed), 1024, 16
    short = iter(np.clip(rng.lognormal(3.0, 1.0, 40_000), 1, context // 4).astype(np.int64).tolist())
    lengths: list[int] = []
    for _ in range(40):
        lengths.append(context)
        left = (n - 1) * context
        while left > 0:
            lengths.append(min(next(short), left))
            left -= lengths[-1]
    packer = wlb.Packer(
        num_micro_batches=n,
        max_tokens=context,
        cost_model=wlb.CostModel(attention=1.0, linear=256.0),
        release="adaptive",
        max_delay=n - 2,
    )
    reading = Reading(np.array(lengths), packer, n * context)
    assert max(read.packing.imbalance for read in reading.steps() if read.seconds is not None) < 1.3
