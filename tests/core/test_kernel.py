"""The kernel model from Python: what it says of itself, what goes with it, and what it refuses to read.

That it is exact where measured, and what is chosen by it the best of all: `rust/wlb-core/tests/kernel.rs`, the goldens.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wlb
import wlb.profiles
from tests.profiles import profile

PROFILE = profile()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles") / "profile.json"


def kernel_model(path: Path, content: Any, **arguments: Any) -> wlb.KernelModel:
    path.write_text(json.dumps(content))
    return wlb.KernelModel.from_profile(path, **arguments)


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
def test_analytic_models_say_so(generation: Any) -> None:
    model = wlb.KernelModel.analytic(generation, num_heads=32, num_kv_heads=8, head_dim=128, causal=False)
    assert model.source == f"analytic: {generation}"
    assert (model.num_heads, model.num_kv_heads, model.head_dim, model.tiles) == (32, 8, 128, (128, 128))
    assert not model.causal
    # Two tiles take less than twice as long as one where loads are shared.
    tile, two = model.segment_seconds([128, 256], [16_384] * 2)
    assert (two < 1.7 * tile) == (generation != "a100")


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
    half, one = (kernel_model(path, PROFILE, num_heads=heads) for heads in (16, 1))
    assert (half.num_heads, half.num_kv_heads, one.num_kv_heads) == (16, 4, 1)
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


def test_a_price_of_keys_moves_fewer_of_them() -> None:
    """Attention and fetching together decide: the dearer keys are, the fewer the busiest rank fetches."""
    model = wlb.KernelModel.analytic("h100", num_heads=32, head_dim=128)
    lengths = [12_000, *[3_000] * 6, *[500] * 12]
    ways = [wlb.shard(lengths, cp_size=4, strategy=way) for way in ("per_sequence", "per_document", "auto")]
    thresholds = [*sorted(set(lengths)), max(lengths) + 1]
    ways += [wlb.shard(lengths, cp_size=4, strategy="hybrid", hybrid_threshold=each) for each in thresholds]

    def seconds(shard: wlb.Shard, price: float) -> float:
        return float((model.rank_seconds(shard) + price * shard.keys_moved).max())

    moved = []
    for price in (0.0, 1e-9, 1e-8, 1e-7, 1e-3):
        chosen = wlb.shard(lengths, cp_size=4, strategy="adaptive", kernel_model=model, cp_seconds_per_key=price)
        assert seconds(chosen, price) == pytest.approx(min(seconds(way, price) for way in ways), rel=1e-9, abs=0)
        moved.append(chosen.keys_moved.max())
    assert moved == sorted(moved, reverse=True)
    assert moved[0] > moved[-1] == min(way.keys_moved.max() for way in ways)


def test_segments_have_no_fewer_keys_than_queries() -> None:
    model = wlb.KernelModel.analytic("h100", num_heads=32, head_dim=128)
    with pytest.raises(wlb.WlbError) as raised:
        model.segment_seconds([5, 9], [5, 8])
    assert (raised.value.argument, raised.value.index, raised.value.value) == ("key_lengths", 1, 8)
    for queries, keys in (([5], [5, 6]), ([0], [5]), ([5], [2**31])):
        with pytest.raises(wlb.WlbError):
            model.segment_seconds(queries, keys)


def test_a_cost_model_from_the_same_profile(path: Path) -> None:
    kernel_model(path, PROFILE)
    backward = wlb.CostModel.from_profile(path, passes="backward")
    measured = PROFILE["linear"]["backward"]["median_seconds"]
    np.testing.assert_allclose(backward.linear_cost(PROFILE["linear"]["tokens"]), measured, rtol=1e-12)
    kernel_model(path, profile(linear=False))
    with pytest.raises(wlb.WlbError, match="linear"):
        wlb.CostModel.from_profile(path)


def test_what_is_missing_is_named(path: Path) -> None:
    for missing in PROFILE.keys() - {"linear", "dtype", "versions", "clocks", "held_out"}:
        with pytest.raises(wlb.WlbError, match=missing):
            kernel_model(path, {key: PROFILE[key] for key in PROFILE if key != missing})


def test_a_truncated_or_absent_profile_is_refused(path: Path, tmp_path: Path) -> None:
    path.write_text(json.dumps(PROFILE)[:-20])
    for where in (path, tmp_path / "absent.json", tmp_path, "no such profile"):
        for read in (wlb.KernelModel.from_profile, wlb.CostModel.from_profile):
            with pytest.raises(wlb.WlbError):
                read(where)


@pytest.mark.parametrize("name", wlb.profiles.names())
def test_profiles_that_came_with_wlb_are_read(name: str) -> None:
    assert wlb.KernelModel.from_profile(name).source.startswith("measured: ")
    wlb.CostModel.from_profile(name)
