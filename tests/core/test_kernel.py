"""The kernel model and what is chosen by it: exact where measured, the best of all, and picky in what it reads."""

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wlb
import wlb.profile
from profiles import profile

PROFILE = profile()
ROUNDING: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}
"""Sums in another order, of segments rounded to 57 fs each."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles") / "profile.json"


def kernel_model(path: Path, content: Any, **arguments: Any) -> wlb.KernelModel:
    path.write_text(json.dumps(content))
    return wlb.KernelModel.from_profile(path, **arguments)


NAMES = {"forward": ["forward"], "backward": ["backward"], "forward_backward": ["forward", "backward"]}


@pytest.mark.parametrize("strategy", ["adaptive", "hybrid"])
def test_a_choice_is_kept_by_pickles(strategy: Any) -> None:
    model = wlb.KernelModel.analytic("h100", num_heads=32, head_dim=128)
    shard = wlb.shard([5, 900, 40, 3000, 70], cp_size=4, strategy=strategy, kernel_model=model)
    assert (shard.hybrid_threshold is None) == (shard.strategy != "hybrid")
    again = pickle.loads(pickle.dumps(shard))
    assert (again, again.hybrid_threshold) == (shard, shard.hybrid_threshold)
    assert pickle.loads(pickle.dumps(shard.rank(0))) == shard.rank(0)


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


def test_what_is_missing_is_named(path: Path) -> None:
    for missing in PROFILE.keys() - {"linear", "dtype", "versions", "clocks", "held_out"}:
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
