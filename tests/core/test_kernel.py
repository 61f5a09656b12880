"""The kernel model and what is chosen by it: exact where measured, the best of all, and picky in what it reads."""

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wlb
import wlb.profile
from profiles import profile
from wlb import testing

PASSES: Any = st.sampled_from(["forward", "backward", "forward_backward"])
LENGTHS = testing.document_lengths(max_length=600, max_size=8)
PROFILE = profile()
ROUNDING: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}
"""Sums in another order, of segments rounded to 57 fs each."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles") / "profile.json"


def kernel_model(path: Path, content: Any, **arguments: Any) -> wlb.KernelModel:
    path.write_text(json.dumps(content))
    return wlb.KernelModel.from_profile(path, **arguments)


def test_the_model_is_exact_where_it_was_measured(path: Path) -> None:
    model = kernel_model(path, PROFILE)
    assert model.source == "measured: Test GPU test kernel"
    for name in ("forward", "backward"):
        for queries, row in zip(PROFILE["query_lengths"], PROFILE[name]["median_seconds"], strict=True):
            for keys, measured in zip(PROFILE["key_lengths"], row, strict=True):
                if measured is not None:
                    assert model.segment_seconds([queries], [keys], passes=name)[0] == pytest.approx(
                        measured, rel=1e-14
                    )


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 6), PASSES, st.sampled_from([None, "a100", "h100"]))
def test_choices_are_the_best_of_all(
    path: Path, lengths: list[int], cp_size: int, passes: Any, generation: Any
) -> None:
    """Adaptive is as fast as the best of everything there is, hybrid as fast as its best threshold."""
    if generation is None:
        model = kernel_model(path, PROFILE)
    else:
        model = wlb.KernelModel.analytic(generation, num_heads=32, head_dim=128)
    same: dict[str, Any] = {"cp_size": cp_size, "causal": model.causal}
    thresholds = [*sorted(set(lengths)), max(lengths, default=0) + 1]
    variants: list[dict[str, Any]] = [{"strategy": "per_sequence"}, {"strategy": "per_document"}, {"strategy": "auto"}]
    variants += [{"strategy": "hybrid", "hybrid_threshold": threshold} for threshold in thresholds]
    slowest = [model.rank_seconds(wlb.shard(lengths, **same, **variant)).max() for variant in variants]

    adaptive = wlb.shard(lengths, strategy="adaptive", kernel_model=model, **same)
    assert model.rank_seconds(adaptive).max() == min(slowest)
    hybrid = wlb.shard(lengths, strategy="hybrid", kernel_model=model, **same)
    assert hybrid.strategy == "hybrid"
    assert model.rank_seconds(hybrid).max() == min(slowest[3:])

    for shard in (adaptive, hybrid):
        chosen: Any = {"strategy": shard.strategy, "hybrid_threshold": shard.hybrid_threshold}
        assert (shard.hybrid_threshold is None) == (shard.strategy != "hybrid")
        assert shard == wlb.shard(lengths, **same, **chosen)
        assert np.ptp(shard.tokens_per_rank) <= 1
        assert shard.tokens_per_rank.sum() == sum(lengths)
        again = pickle.loads(pickle.dumps(shard))
        assert (again, again.hybrid_threshold) == (shard, shard.hybrid_threshold)
        assert pickle.loads(pickle.dumps(shard.rank(0))) == shard.rank(0)

    split = sum(model.rank_seconds(adaptive, passes=part) for part in ("forward", "backward"))
    np.testing.assert_allclose(model.rank_seconds(adaptive), split, **ROUNDING)
    np.testing.assert_allclose(
        model.rank_seconds(adaptive, passes=passes).sum(),
        sum(model.rank_seconds(adaptive, passes=part).sum() for part in NAMES[passes]),
        **ROUNDING,
    )


NAMES = {"forward": ["forward"], "backward": ["backward"], "forward_backward": ["forward", "backward"]}


def test_only_one_threshold_is_reported() -> None:
    assert wlb.shard([5, 9], cp_size=2).hybrid_threshold is None
    assert wlb.shard([5, 9], cp_size=2, strategy="hybrid", hybrid_threshold=7).hybrid_threshold == 7


@pytest.mark.parametrize("generation", ["a100", "h100", "h200", "b200"])
@pytest.mark.parametrize("causal", [True, False])
def test_analytic_models_say_so(generation: Any, causal: bool) -> None:
    model = wlb.KernelModel.analytic(generation, num_heads=32, num_kv_heads=8, head_dim=128, causal=causal)
    assert model.source == f"analytic: {generation}"
    assert (model.num_heads, model.num_kv_heads, model.head_dim, model.tile) == (32, 8, 128, 128)
    assert model.causal == causal
    # Fewer queries than a tile take no less time than it; two take less than twice as long where loads are shared.
    few, tile, two = model.segment_seconds([16, 128, 256], [16_384] * 3)
    assert few >= tile
    assert (two < 1.7 * tile) == (generation != "a100")
    segment: Any = ([300], [5000])
    assert model.segment_seconds(*segment, passes="backward") > 2.5 * model.segment_seconds(*segment, passes="forward")


def test_models_pickle_compare_and_hash(path: Path) -> None:
    measured = kernel_model(path, PROFILE)
    analytic = wlb.KernelModel.analytic("h100", num_heads=32, head_dim=128)
    assert measured != analytic
    assert analytic != wlb.KernelModel.analytic("h100", num_heads=16, head_dim=128)
    for model in (measured, analytic):
        again = pickle.loads(pickle.dumps(model))
        assert again == model
        assert hash(again) == hash(model)
        assert again.segment_seconds([77], [777]) == model.segment_seconds([77], [777])
        assert model.source in repr(model)


def test_other_heads_scale_a_measured_profile(path: Path) -> None:
    measured, half = kernel_model(path, PROFILE), kernel_model(path, PROFILE, num_heads=16)
    assert half.num_heads == 16
    groups = PROFILE["num_heads"] // PROFILE["num_kv_heads"]
    assert half.num_kv_heads == 16 // groups
    assert kernel_model(path, PROFILE, num_heads=1).num_kv_heads == 1
    np.testing.assert_allclose(
        half.segment_seconds([9, 900], [90, 5000]) * 2, measured.segment_seconds([9, 900], [90, 5000])
    )
    with pytest.raises(wlb.WlbError, match="num_heads"):
        kernel_model(path, PROFILE, num_heads=0)


def test_a_kernel_model_goes_with_its_mask_and_strategy() -> None:
    model = wlb.KernelModel.analytic("h100", num_heads=32, head_dim=128)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("kernel_model", {"strategy": "adaptive"}),
        ("kernel_model", {"strategy": "per_document", "kernel_model": model}),
        ("kernel_model", {"strategy": "per_sequence", "kernel_model": model}),
        ("kernel_model", {"strategy": "hybrid", "hybrid_threshold": 5, "kernel_model": model}),
        ("kernel_model", {"strategy": "adaptive", "kernel_model": model, "causal": False}),
        ("hybrid_threshold", {"strategy": "adaptive", "kernel_model": model, "hybrid_threshold": 5}),
        ("hybrid_threshold", {"strategy": "hybrid"}),
        ("remainder", {"strategy": "adaptive", "kernel_model": model, "remainder": "token"}),
    ]
    for argument, arguments in wrong:
        with pytest.raises(wlb.WlbError) as raised:
            wlb.shard([5, 6], cp_size=2, **arguments)
        assert raised.value.argument == argument, arguments
    with pytest.raises(TypeError):
        wlb.shard([5, 6], cp_size=2, strategy="adaptive", kernel_model="h100")  # type: ignore[arg-type]
    with pytest.raises(wlb.WlbError) as raised:
        model.rank_seconds(wlb.shard([5, 6], cp_size=2, causal=False))
    assert raised.value.argument == "shard"


def test_segments_have_no_fewer_keys_than_queries() -> None:
    model = wlb.KernelModel.analytic("h100", num_heads=32, head_dim=128)
    with pytest.raises(wlb.WlbError) as raised:
        model.segment_seconds([5, 9], [5, 8])
    assert (raised.value.argument, raised.value.index, raised.value.value) == ("key_lengths", 1, 8)
    for queries, keys in (([5], [5, 6]), ([0], [5]), ([5], [2**31])):
        with pytest.raises(wlb.WlbError):
            model.segment_seconds(queries, keys)


def test_a_cost_model_from_the_same_profile(path: Path) -> None:
    """Attention of whole documents as the kernel model has them at the grid's lengths; the rest as measured."""
    kernel = kernel_model(path, PROFILE)
    knots = [16, 128, 1024, 8192]
    for passes, names in NAMES.items():
        model = wlb.CostModel.from_profile(path, passes=passes)  # type: ignore[arg-type]
        assert model.causal
        seconds = kernel.segment_seconds(knots, knots, passes=passes)  # type: ignore[arg-type]
        attention = wlb.CostModel.from_tables(knots, attention_seconds=seconds, linear_seconds=[1.0] * 4)
        lengths = [1, 16, 100, 1024, 5000, 8192, 50_000]
        np.testing.assert_allclose(model.attention_cost(lengths), attention.attention_cost(lengths), rtol=1e-9)
        linear = sum(np.array(PROFILE["linear"][name]["median_seconds"]) for name in names)
        np.testing.assert_allclose(model.linear_cost(PROFILE["linear"]["tokens"]), linear, rtol=1e-12)
    kernel_model(path, profile(linear=False))
    with pytest.raises(wlb.WlbError, match="linear"):
        wlb.CostModel.from_profile(path)


DAMAGE: dict[str, tuple[str, Any]] = {
    "format": ("format", "wlb.cost_profile"),
    "version": ("version", 999),
    "num_heads": ("num_heads", 0),
    "tile": ("tile", 2.5),
    "query_lengths[1]": ("query_lengths", [16, 16, 1024]),
    "query_lengths": ("query_lengths", []),
    "query_lengths[2]": ("query_lengths", [16, 128, 10_000]),
    "key_lengths[0]": ("key_lengths", [0, 1024, 8192]),
    "forward.median_seconds": ("forward", {"median_seconds": [[1.0]]}),
    "forward": ("forward", {}),
    "backward": ("backward", None),
    "offset": ("offset", 1.0),
}


@pytest.mark.parametrize("place", DAMAGE)
def test_what_is_wrong_with_a_profile_is_named(path: Path, place: str) -> None:
    key, value = DAMAGE[place]
    with pytest.raises(wlb.WlbError, match=re.escape(f"profile: {place}: ")) as raised:
        kernel_model(path, PROFILE | {key: value})
    assert raised.value.argument == "profile"


REQUIRED = [key for key in PROFILE if key not in {"linear", "dtype", "versions", "clocks", "held_out"}]


@pytest.mark.parametrize("missing", REQUIRED)
def test_what_is_missing_is_named(path: Path, missing: str) -> None:
    with pytest.raises(wlb.WlbError, match=missing):
        kernel_model(path, {key: PROFILE[key] for key in PROFILE if key != missing})


@pytest.mark.parametrize("value", [0.0, -1.0, None, "1", 1e-320, [1.0]])
def test_a_time_that_is_none_is_named(path: Path, value: Any) -> None:
    damaged = copy.deepcopy(PROFILE)
    damaged["backward"]["median_seconds"][1][2] = value
    with pytest.raises(wlb.WlbError, match=re.escape("backward.median_seconds[1][2]")):
        kernel_model(path, damaged)
    damaged = copy.deepcopy(PROFILE)
    damaged["forward"]["median_seconds"][2][0] = 1.0
    with pytest.raises(wlb.WlbError, match=re.escape("forward.median_seconds[2][0]: must be null")):
        kernel_model(path, damaged)


def test_a_truncated_or_absent_profile_is_refused(path: Path, tmp_path: Path) -> None:
    path.write_text(json.dumps(PROFILE)[:-20])
    for where in (path, tmp_path / "absent.json", tmp_path, "no such profile"):
        for read in (wlb.KernelModel.from_profile, wlb.CostModel.from_profile):
            with pytest.raises(wlb.WlbError):
                read(where)


@pytest.mark.parametrize("name", wlb.profile.names())
def test_profiles_that_came_with_wlb_are_read(name: str) -> None:
    assert wlb.KernelModel.from_profile(name).source.startswith("measured: ")
    wlb.CostModel.from_profile(name)
