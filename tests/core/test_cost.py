"""Cost models from Python: their parts, terms and units, what makes two equal, clear errors.

What they are worth is held to closed forms in `rust/wlb-core/tests/cost.rs`.
"""

import pickle
from typing import Any

import numpy as np
import pytest

import wlb

TABLES = wlb.CostModel.from_tables([10, 100], attention_seconds=[0.1, 7.3], linear_seconds=[0.3, 2.9])


def test_pairs_are_integers() -> None:
    longest = 2**31 - 1
    for causal, expected in ((True, [1, 10, longest * 2**30]), (False, [1, 16, longest**2])):
        array = wlb.pairs([1, 4, longest], causal=causal)
        assert (array.dtype, array.tolist()) == (np.int64, expected)
        scalar = wlb.pairs(longest, causal=causal)
        assert (type(scalar), scalar) == (int, expected[-1])


def test_a_cost_has_two_parts() -> None:
    model = wlb.CostModel(attention=0.5, linear=2.0, causal=False)
    assert not model.causal
    assert model.attention_cost([3, 10]).tolist() == [4.5, 50.0]
    assert model.linear_cost([3, 10]).tolist() == [6.0, 20.0]
    assert (model.cost([3, 10]).dtype, model.cost([3, 10]).tolist()) == (np.float64, [10.5, 70.0])


def test_from_flops_by_hand() -> None:
    """One layer, two heads of 4, an FFN of 16, 10 words: 4*2*4 FLOPs a pair, 2*(256+256+80) a token."""
    arguments: dict[str, Any] = {
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": 10,
    }
    model = wlb.CostModel.from_flops(**arguments, gated_ffn=False, passes="forward")
    assert model == wlb.CostModel(attention=32.0, linear=1184.0)
    assert model.cost([3]).tolist() == [32.0 * 6 + 1184.0 * 3]
    both = wlb.CostModel.from_flops(**arguments, gated_ffn=False)
    assert both == wlb.CostModel(attention=112.0, linear=3552.0)
    # Half the keys, a gate, two experts: 2 * (192 + 768 + 80) a token; once more forward and twice for gradients.
    every = wlb.CostModel.from_flops(
        **arguments,
        num_kv_heads=1,
        head_dim=4,
        experts_per_token=2,
        passes="backward",
        recompute=True,
        attention_efficiency=0.5,
        flops_per_second=2.0,
        causal=False,
    )
    assert every == wlb.CostModel(attention=112.0, linear=3120.0, causal=False)


@pytest.mark.parametrize("model", [wlb.CostModel(attention=0.1, linear=700.3, causal=False), TABLES])
def test_a_model_survives_pickling(model: wlb.CostModel) -> None:
    copy = pickle.loads(pickle.dumps(model))
    assert (copy, hash(copy), copy.causal) == (model, hash(model), model.causal)
    assert copy.cost([1, 7, 5000, 10**6]).tolist() == model.cost([1, 7, 5000, 10**6]).tolist()


TERMS: dict[str, Any] = {
    "windows": {4096: 0.25, 128: 0.5},
    "chunks": {8192: 0.125},
    "document": 7.0,
    "micro_batch": 11.0,
    "unit": "seconds",
}


def test_terms_have_names_and_a_unit() -> None:
    model = wlb.CostModel(attention=0.5, linear=2.0, **TERMS)
    assert list(model.terms.items()) == [
        ("pairs", 0.5),
        ("window_pairs[128]", 0.5),
        ("window_pairs[4096]", 0.25),
        ("chunk_pairs[8192]", 0.125),
        ("tokens", 2.0),
        ("documents", 7.0),
        ("micro_batches", 11.0),
    ]
    assert model.unit == "seconds"
    assert pickle.loads(pickle.dumps(model)) == model
    plain = wlb.CostModel(attention=0.5, linear=2.0, windows={3: 0.0}, document=0.0)
    assert (plain.terms, plain.unit) == ({"pairs": 0.5, "tokens": 2.0}, None)
    assert plain == wlb.CostModel(attention=0.5, linear=2.0)
    assert plain != wlb.CostModel(attention=0.5, linear=2.0, unit="flops")
    assert TABLES.unit == "seconds"
    with pytest.raises(wlb.WlbError, match="measured tables"):
        _ = TABLES.terms


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, np.int64(2**40), 2**70])
def test_a_window_that_no_document_fills_is_none(size: int) -> None:
    plain = wlb.CostModel(attention=1.5, linear=2.0, windows={8: 3.0})
    assert wlb.CostModel(attention=0.5, linear=2.0, windows={8: 3.0, size: 0.5}, chunks={size: 0.5}) == plain
    assert wlb.CostModel(attention=0.5, linear=2.0, windows={8: 3.0, size: 0.5, 2**80: 0.5}) == plain
    longest = wlb.CostModel(attention=0.0, linear=2.0, windows={2**31 - 2: 1.0})
    assert longest.terms == {f"window_pairs[{2**31 - 2}]": 1.0, "tokens": 2.0}


@pytest.mark.parametrize(
    ("terms", "argument"),
    [
        ({"windows": {True: 1.0}}, "windows"),
        ({"windows": {2.0**31: 1.0}}, "windows"),
        ({"windows": {2**31: -1.0, 2**32: 2.0}}, "windows"),
        ({"attention": -1.0, "windows": {2**31: 2.0}}, "attention"),
        ({"windows": {2**31: 1.0}, "causal": False}, "windows"),
        ({"windows": {0: 1.0}}, "windows"),
        ({"windows": {8: -1.0}}, "windows"),
        ({"windows": [8]}, "windows"),
        ({"chunks": {8: float("nan")}}, "chunks"),
        ({"chunks": {8: 1.0}, "causal": False}, "chunks"),
        ({"document": -1.0}, "document"),
        ({"micro_batch": float("inf")}, "micro_batch"),
        ({"unit": "hours"}, "unit"),
        ({"linear": 0.0, "micro_batch": 1.0}, "linear"),
    ],
)
def test_terms_that_make_no_sense_are_named(terms: dict[str, Any], argument: str) -> None:
    with pytest.raises(wlb.WlbError) as caught:
        wlb.CostModel(**{"attention": 0.0, "linear": 1.0, **terms})
    assert caught.value.argument == argument


def test_a_micro_batch_costs_something_by_itself() -> None:
    """Two documents in four micro-batches: the empty ones are run too."""
    cost = wlb.CostModel(attention=0.0, linear=1.0, document=5.0, micro_batch=100.0)
    packing = wlb.pack([10, 30], num_micro_batches=4, max_tokens=100, cost_model=cost)
    assert sorted(packing.costs) == [100.0, 100.0, 115.0, 135.0]
    assert packing.imbalance == 135.0 / 112.5
    assert packing.lower_bound == 135.0


def test_minus_zero_is_zero() -> None:
    """Equal models have equal hashes, and packers of equal models have equal fingerprints."""
    zero, minus_zero = (wlb.CostModel(attention=attention, linear=1.0) for attention in (0.0, -0.0))
    assert zero == minus_zero
    assert hash(zero) == hash(minus_zero)
    first, second = (
        wlb.Packer(num_micro_batches=1, max_tokens=1, cost_model=model, release="fifo") for model in (zero, minus_zero)
    )
    assert first.fingerprint == second.fingerprint


def test_models_differ_when_their_numbers_do() -> None:
    model = wlb.CostModel(attention=1.0, linear=2.0)
    assert model == wlb.CostModel(attention=1.0, linear=2.0)
    assert model != wlb.CostModel(attention=1.0, linear=2.5)
    assert model != wlb.CostModel(attention=1.0, linear=2.0, causal=False)
    assert model != 1.0
