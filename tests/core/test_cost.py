"""Costs against closed forms and against hand-made tables."""

import pickle
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import wlb
from oracles import strategies
from oracles.cost import AnalyticCost, TableCost, flops
from oracles.cost import pairs as naive_pairs

MAX_LENGTH = 2**31 - 1
LENGTHS = st.lists(st.integers(1, MAX_LENGTH) | st.integers(1, 100), max_size=20)
PASSES = ["forward", "backward", "forward_backward"]


@given(LENGTHS, st.booleans())
def test_pairs_are_exact(lengths: list[int], causal: bool) -> None:
    expected = [naive_pairs(length, causal=causal) for length in lengths]
    array = wlb.pairs(lengths, causal=causal)
    assert array.dtype == np.int64
    assert array.tolist() == expected
    scalars = [wlb.pairs(length, causal=causal) for length in lengths]
    assert scalars == expected
    assert all(type(value) is int for value in scalars)


@given(LENGTHS, strategies.costs())
def test_analytic_cost_is_the_formula_bit_for_bit(lengths: list[int], cost: AnalyticCost) -> None:
    model = cost.model()
    assert model.causal == cost.causal
    assert model.cost(lengths).dtype == np.float64
    assert model.cost(lengths).tolist() == [cost(length) for length in lengths]
    pairs = [float(naive_pairs(length, causal=cost.causal)) for length in lengths]
    assert model.attention_cost(lengths).tolist() == [cost.attention * count for count in pairs]
    assert model.linear_cost(lengths).tolist() == [cost.linear * length for length in lengths]


@st.composite
def tables(draw: st.DrawFn) -> TableCost:
    knots = sorted(draw(st.sets(st.integers(1, 200_000), min_size=1, max_size=6)))
    column = st.lists(st.floats(1e-9, 1e3), min_size=len(knots), max_size=len(knots)).map(sorted).map(tuple)
    return TableCost(tuple(knots), draw(column), draw(column), draw(st.booleans()))


@given(st.lists(st.integers(1, 400_000), min_size=1, max_size=20), tables())
def test_tables_are_interpolated_and_continued_in_proportion(lengths: list[int], table: TableCost) -> None:
    model = table.model()
    rounding: dict[str, Any] = {"rtol": 1e-12, "atol": 0.0}
    np.testing.assert_allclose(model.attention_cost(lengths), [table.attention(x) for x in lengths], **rounding)
    np.testing.assert_allclose(model.linear_cost(lengths), [table.linear(x) for x in lengths], **rounding)
    np.testing.assert_allclose(model.cost(lengths), [table(x) for x in lengths], **rounding)
    np.testing.assert_allclose(model.attention_cost(table.lengths), table.attention_seconds, **rounding)
    np.testing.assert_allclose(model.linear_cost(table.lengths), table.linear_seconds, **rounding)
    assert np.all(np.diff(model.cost(sorted(lengths))) >= 0), "a longer document never costs less"


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


@given(
    hidden=st.sampled_from([64, 512, 4096]),
    ffn=st.sampled_from([128, 11008]),
    layers=st.integers(1, 80),
    kv_share=st.sampled_from([1, 2, 8]),
    head_dim=st.none() | st.sampled_from([32, 128]),
    gated=st.booleans(),
    experts=st.integers(1, 8),
    passes=st.sampled_from(PASSES),
    recompute=st.booleans(),
    efficiency=st.sampled_from([1.0, 0.55]),
    speed=st.sampled_from([1.0, 4e14]),
    causal=st.booleans(),
)
def test_from_flops(
    hidden: int,
    ffn: int,
    layers: int,
    kv_share: int,
    head_dim: int | None,
    gated: bool,
    experts: int,
    passes: Any,
    recompute: bool,
    efficiency: float,
    speed: float,
    causal: bool,
) -> None:
    shape: dict[str, Any] = {
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_layers": layers,
        "num_heads": 8,
        "num_kv_heads": 8 // kv_share,
        "vocab_size": 32000,
        "gated_ffn": gated,
        "experts_per_token": experts,
        "passes": passes,
        "recompute": recompute,
    }
    model = wlb.CostModel.from_flops(
        **shape, head_dim=head_dim, attention_efficiency=efficiency, flops_per_second=speed, causal=causal
    )
    pair, token = flops(**shape, head_dim=head_dim or hidden // 8)
    lengths = [1, 2, 1000, 131_072]
    expected = AnalyticCost(pair / efficiency / speed, token / speed, causal)
    np.testing.assert_allclose(model.cost(lengths), [expected(x) for x in lengths], rtol=1e-14)


@given(strategies.costs().map(AnalyticCost.model) | tables().map(TableCost.model))
def test_a_model_survives_pickling(model: wlb.CostModel) -> None:
    copy = pickle.loads(pickle.dumps(model))
    assert copy == model
    assert hash(copy) == hash(model)
    assert copy.causal == model.causal
    lengths = [1, 7, 5000, 10**6]
    assert copy.cost(lengths).tolist() == model.cost(lengths).tolist()


def test_minus_zero_is_zero() -> None:
    """Equal models have equal hashes, and packers of equal models have equal fingerprints."""
    zero, minus_zero = (wlb.CostModel(attention=attention, linear=1.0) for attention in (0.0, -0.0))
    assert zero == minus_zero
    assert hash(zero) == hash(minus_zero)
    first, second = (wlb.Packer(num_micro_batches=1, max_tokens=1, cost_model=model) for model in (zero, minus_zero))
    assert first.fingerprint == second.fingerprint


def test_models_differ_when_their_numbers_do() -> None:
    model = wlb.CostModel(attention=1.0, linear=2.0)
    assert model == wlb.CostModel(attention=1.0, linear=2.0)
    assert model != wlb.CostModel(attention=1.0, linear=2.5)
    assert model != wlb.CostModel(attention=1.0, linear=2.0, causal=False)
    assert model != 1.0
