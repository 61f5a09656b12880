"""Costs against closed forms and against hand-made tables."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import wlb
from wlb import testing

MAX_LENGTH = 2**31 - 1
LENGTHS = st.lists(st.integers(1, MAX_LENGTH) | st.integers(1, 100), max_size=20)
PASSES = ["forward", "backward", "forward_backward"]


def naive_pairs(length: int, causal: bool) -> int:
    return length * (length + 1) // 2 if causal else length * length


@given(LENGTHS, st.booleans())
def test_pairs_are_exact(lengths: list[int], causal: bool) -> None:
    expected = [naive_pairs(length, causal) for length in lengths]
    array = wlb.pairs(lengths, causal=causal)
    assert array.dtype == np.int64
    assert array.tolist() == expected
    scalars = [wlb.pairs(length, causal=causal) for length in lengths]
    assert scalars == expected
    assert all(type(value) is int for value in scalars)


@given(LENGTHS, testing.cost_settings())
def test_analytic_cost_is_the_formula_bit_for_bit(lengths: list[int], settings: dict[str, Any]) -> None:
    model = wlb.CostModel(**settings)
    assert model.causal == settings["causal"]
    assert model.cost(lengths).dtype == np.float64
    attention = [settings["attention"] * float(naive_pairs(length, settings["causal"])) for length in lengths]
    linear = [settings["linear"] * float(length) for length in lengths]
    assert model.attention_cost(lengths).tolist() == attention
    assert model.linear_cost(lengths).tolist() == linear
    assert model.cost(lengths).tolist() == [a + b for a, b in zip(attention, linear, strict=True)]


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `from_tables`."""
    lengths = sorted(draw(st.sets(st.integers(1, 200_000), min_size=1, max_size=6)))
    seconds = st.lists(st.floats(1e-9, 1e3), min_size=len(lengths), max_size=len(lengths)).map(sorted)
    names = ("attention_seconds", "linear_seconds")
    return {"lengths": lengths, "causal": draw(st.booleans())} | {name: draw(seconds) for name in names}


@given(st.lists(st.integers(1, 400_000), min_size=1, max_size=20), tables())
def test_tables_are_interpolated_and_continued_in_proportion(lengths: list[int], table: dict[str, Any]) -> None:
    """Lines between the knots, in pairs (attention) and in tokens (the rest), from 0 at 0."""
    model = wlb.CostModel.from_tables(**table)

    def line(work: list[int], knots: list[int], seconds: list[float]) -> NDArray[np.float64]:
        inside: NDArray[np.float64] = np.interp(work, [0, *knots], [0.0, *seconds])
        return inside * np.maximum(np.array(work) / knots[-1], 1.0)

    work, knots = ([naive_pairs(length, table["causal"]) for length in each] for each in (lengths, table["lengths"]))
    attention = line(work, knots, table["attention_seconds"])
    linear = line(lengths, table["lengths"], table["linear_seconds"])
    rounding: dict[str, Any] = {"rtol": 1e-12, "atol": 0.0}
    np.testing.assert_allclose(model.attention_cost(lengths), attention, **rounding)
    np.testing.assert_allclose(model.linear_cost(lengths), linear, **rounding)
    np.testing.assert_allclose(model.cost(lengths), attention + linear, **rounding)
    np.testing.assert_allclose(model.attention_cost(table["lengths"]), table["attention_seconds"], **rounding)
    np.testing.assert_allclose(model.linear_cost(table["lengths"]), table["linear_seconds"], **rounding)
    assert np.all(np.diff(model.cost(sorted(lengths))) >= 0), "a longer document never costs less"


def flops(
    *,
    hidden_size: int,
    ffn_hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    gated_ffn: bool,
    experts_per_token: int,
    passes: str,
    recompute: bool,
) -> tuple[float, float]:
    """(FLOPs of one attended pair, FLOPs of one token) of a transformer."""
    attention_projections = 2 * hidden_size * num_heads * head_dim + 2 * hidden_size * num_kv_heads * head_dim
    ffn = (3 if gated_ffn else 2) * hidden_size * ffn_hidden_size * experts_per_token
    parameters = num_layers * (attention_projections + ffn) + hidden_size * vocab_size
    forward_pair, forward_token = 4.0 * num_heads * head_dim * num_layers, 2.0 * parameters
    backward_pair, backward_token = 2.5 * forward_pair, 2.0 * forward_token
    if recompute:
        backward_pair, backward_token = backward_pair + forward_pair, backward_token + forward_token
    return {
        "forward": (forward_pair, forward_token),
        "backward": (backward_pair, backward_token),
        "forward_backward": (forward_pair + backward_pair, forward_token + backward_token),
    }[passes]


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
    attention, linear = pair / efficiency / speed, token / speed
    expected = [attention * naive_pairs(length, causal) + linear * length for length in lengths]
    np.testing.assert_allclose(model.cost(lengths), expected, rtol=1e-14)


@given(testing.cost_models() | tables().map(lambda table: wlb.CostModel.from_tables(**table)))
def test_a_model_survives_pickling(model: wlb.CostModel) -> None:
    copy = pickle.loads(pickle.dumps(model))
    assert copy == model
    assert hash(copy) == hash(model)
    assert copy.causal == model.causal
    lengths = [1, 7, 5000, 10**6]
    assert copy.cost(lengths).tolist() == model.cost(lengths).tolist()


TERMS: dict[str, Any] = {
    "windows": {4096: 0.25, 128: 0.5},
    "chunks": {8192: 0.125},
    "document": 7.0,
    "micro_batch": 11.0,
    "unit": "seconds",
}


@given(st.lists(st.integers(1, 20_000), max_size=20))
def test_windows_and_chunks_are_counted_query_by_query(lengths: list[int]) -> None:
    model = wlb.CostModel(attention=0.0, linear=2.0, **TERMS)
    for length, cost in zip(lengths, model.cost(lengths), strict=True):
        position = np.arange(length)
        windows = sum(rate * np.minimum(position + 1, size).sum() for size, rate in TERMS["windows"].items())
        chunks = sum(rate * (position % size + 1).sum() for size, rate in TERMS["chunks"].items())
        assert cost == windows + chunks + 2.0 * length + 7.0


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
    tables = wlb.CostModel.from_tables([1, 2], attention_seconds=[1.0, 2.0], linear_seconds=[1.0, 2.0])
    assert tables.unit == "seconds"
    with pytest.raises(wlb.WlbError, match="measured tables"):
        _ = tables.terms


@pytest.mark.parametrize(
    ("terms", "argument"),
    [
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


def test_what_needs_seconds_refuses_flops() -> None:
    machine: dict[str, Any] = {"world_size": 4, "num_stages": 2, "max_tokens_per_rank": 100, "p2p_seconds": 1.0}
    flops = wlb.CostModel(attention=1.0, linear=1.0, unit="flops")
    with pytest.raises(wlb.WlbError, match="flops_per_second") as caught:
        wlb.plan_dynamic_cp([10, 30], cost_model=flops, **machine)
    assert caught.value.argument == "p2p_seconds"
    for unit in ("seconds", None):
        wlb.plan_dynamic_cp([10, 30], cost_model=wlb.CostModel(attention=1.0, linear=1.0, unit=unit), **machine)
    wlb.plan_dynamic_cp([10, 30], cost_model=flops, **{**machine, "p2p_seconds": 0.0})


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
