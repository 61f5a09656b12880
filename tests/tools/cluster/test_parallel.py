"""Layouts: their product, what they divide, and where their groups lie."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wlb
import wlb_tools

LLAMA = wlb.ModelConfig.preset("llama2-7b")
LLAMA3 = wlb.ModelConfig.preset("llama3-8b")


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"tp": 0}, "tp = 0: must be at least 1"),
        ({"tp": 2.0}, r"tp = 2\.0: must be an integer"),
        ({"fsdp": "zero4"}, "fsdp = 'zero4': must be one of none, zero1, zero2, zero3"),
        ({"recompute": "some"}, "recompute = 'some'"),
        ({"virtual_stages": 2}, "virtual_stages = 2: needs pp above 1"),
        ({"pp": 2, "stage_layers": (32,)}, "stage_layers has 1 numbers: pp x virtual_stages = 2 stages"),
        ({"pp": 2, "stage_layers": (33, -1)}, r"stage_layers\[1\] = -1"),
        ({"pp": 2, "stage_layers": (16, 16.0)}, r"stage_layers\[1\] = 16\.0: must be an integer"),
        ({"pp": 2, "stage_layers": 32}, "stage_layers = 32: must be a tuple"),
        ({"fsdp": ["zero1"]}, "fsdp = "),
        ({"sequence_parallel": "no"}, "sequence_parallel = 'no': must be true or false"),
    ],
)
def test_nonsense_is_refused(layout: dict[str, Any], said: str) -> None:
    with pytest.raises(wlb.WlbError, match=said) as caught:
        wlb_tools.ParallelLayout(**layout)
    assert caught.value.argument == said.split(" ")[0].partition("\\")[0]


def test_the_product_must_be_the_world_size() -> None:
    layout = wlb_tools.ParallelLayout(dp=2, pp=4, cp=2, tp=8)
    layout.check(world_size=128)
    with pytest.raises(wlb.WlbError, match="world_size = 64: dp 2 x pp 4 x cp 2 x tp 8 = 128 GPUs") as caught:
        layout.check(world_size=64)
    assert (caught.value.argument, caught.value.value) == ("world_size", 64)


@pytest.mark.parametrize(
    ("model", "layout", "said"),
    [
        (LLAMA, {"tp": 3}, "tp = 3: does not divide num_heads = 32"),
        (dataclasses.replace(LLAMA, ffn_hidden_size=11009), {"tp": 2}, "does not divide ffn_hidden_size = 11009"),
        (dataclasses.replace(LLAMA, num_heads=24, num_kv_heads=6, head_dim=128), {"tp": 4}, "num_kv_heads = 6"),
        (LLAMA, {"pp": 35}, "pp = 35: pp x virtual_stages = 35 stages, too many for num_layers = 32"),
        (LLAMA, {"pp": 2, "stage_layers": (16, 15)}, "stage_layers add up to 31: the model has num_layers = 32"),
    ],
)
def test_the_model_must_divide(model: wlb.ModelConfig, layout: dict[str, Any], said: str) -> None:
    with pytest.raises(wlb.WlbError, match=said):
        wlb_tools.ParallelLayout(**layout).check(model=model)


def test_layers_that_the_stages_do_not_divide() -> None:
    """Llama 3 405B as its authors cut it: one layer less at both ends, also of 16 ranks with 8 stages each."""
    model = wlb.ModelConfig.preset("llama3-405b")
    expected = {(4, 1): (31, 32), (8, 1): (15, 16), (16, 1): (7, 8), (16, 8): (0, 1)}
    for (pp, virtual_stages), (ends, between) in expected.items():
        layout = wlb_tools.ParallelLayout(pp=pp, virtual_stages=virtual_stages, tp=8)
        layout.check(model=model)
        layers = layout.layers_of_stages(model).tolist()
        assert layers == [ends, *[between] * (layout.num_stages - 2), ends]
        given = dataclasses.replace(layout, stage_layers=tuple(layers))
        assert given.layers_of_stages(model).tolist() == layers
    wlb_tools.ParallelLayout(tp=16).check(model=LLAMA3)  # 8 key heads, each on two ranks


@given(pp=st.integers(2, 34))
def test_stages_differ_by_a_layer_and_the_last_has_least(pp: int) -> None:
    layout = wlb_tools.ParallelLayout(pp=pp)
    layout.check(model=LLAMA)
    layers = layout.layers_of_stages(LLAMA)
    assert layers.sum() == LLAMA.num_layers
    assert layers[-1] == layers.min() >= layers.max() - 1
    assert (layers[1:-1] >= 1).all()
    assert layers[0] == layers.min() or (layers[:-1] == layers.max()).all()


@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 4),
    gpus_per_node=st.integers(1, 9),
    axis=st.sampled_from(["tp", "cp", "dp", "pp", "dp_cp"]),
)
def test_nodes_of_a_group(sizes: tuple[int, int, int, int], gpus_per_node: int, axis: Any) -> None:
    """Against the mesh itself: the same that wlb.torch.build_mesh makes, pp outermost and tp innermost."""
    pp, dp, cp, tp = sizes
    mesh = np.arange(pp * dp * cp * tp).reshape(sizes)
    position = {"pp": 0, "dp": 1, "cp": 2, "tp": 3}
    if axis == "dp_cp":
        groups = mesh.transpose(0, 3, 1, 2).reshape(-1, dp * cp)
    else:
        groups = np.moveaxis(mesh, position[axis], -1).reshape(-1, mesh.shape[position[axis]])
    expected = max(np.unique(group // gpus_per_node).size for group in groups)
    layout = wlb_tools.ParallelLayout(pp=pp, dp=dp, cp=cp, tp=tp)
    assert layout.size(axis) == groups.shape[1]
    assert layout.nodes(axis, gpus_per_node=gpus_per_node) == expected


def test_nodes_of_more_gpus_than_there_are() -> None:
    layout = wlb_tools.ParallelLayout(dp=10**15, cp=3, tp=8)
    assert layout.nodes("cp", gpus_per_node=8) == 3
    assert layout.nodes("dp", gpus_per_node=8) == 10**15
    assert layout.nodes("tp", gpus_per_node=72) == 1
