"""Collectives by their limits: one rank, one node, one rank a node, large and small messages."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wlb
import wlb_tools
from wlb_tools.cluster.collectives import Communicator
from wlb_tools.cluster.hardware import presets

H100 = wlb_tools.Hardware.preset("h100")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "neighbour")
groups = st.tuples(st.integers(1, 8), st.integers(1, 16)).map(
    lambda pair: Communicator(size=pair[0] * pair[1], nodes=pair[1], hardware=H100)
)
collectives = st.sampled_from(COLLECTIVES)


def test_presets() -> None:
    assert presets()[:5] == ["a100", "h100", "h200", "b200", "gb200"]
    assert presets()[5:] == ["a100-40gb", "h800", "h20", "l40s", "b300", "gb300", "mi300x"]
    for name in presets():
        hardware = wlb_tools.Hardware.preset(name)
        assert hardware.name == name
        assert wlb_tools.Hardware.preset(name.upper()) == hardware
        # NCCL counts on less than the data sheet's NVLink, and NVLink outruns the network.
        sheet = {"a100": 300e9, "h100": 450e9, "h200": 450e9, "b200": 900e9, "gb200": 900e9}
        sheet |= {"a100-40gb": 300e9, "h800": 200e9, "h20": 450e9, "l40s": 32e9, "b300": 900e9, "gb300": 900e9}
        sheet |= {"mi300x": 448e9}
        rate = sheet[name]
        assert 0.75 * rate <= hardware.intra_node.bandwidth < rate
        assert hardware.inter_node.bandwidth < hardware.intra_node.bandwidth
    with pytest.raises(wlb.WlbError, match="'v100': must be one of a100"):
        wlb_tools.Hardware.preset("v100")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peak_flops": 0}, "peak_flops = 0: must be a finite number above 0"),
        ({"memory_bytes": float("nan")}, "memory_bytes = nan"),
        ({"gemm_efficiency": -0.1}, "gemm_efficiency = -0.1"),
        ({"peak_flops": "1"}, "peak_flops = '1'"),
        ({"peak_flops": True}, "peak_flops = True"),
        ({"gpus_per_node": 0.5}, "gpus_per_node = 0.5: must be an integer"),
        ({"memory_bytes": 1e9}, "memory_bytes = 1000000000.0: must be an integer"),
        ({"intra_node": None}, "intra_node = None: must be a Link"),
    ],
)
def test_bad_hardware(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(wlb.WlbError, match=said):
        dataclasses.replace(H100, **changes)
    with pytest.raises(wlb.WlbError, match="bandwidth = 0"):
        wlb_tools.Link(latency=1e-6, bandwidth=0)
    with pytest.raises(wlb.WlbError, match="latency = '1'"):
        wlb_tools.Link(latency="1", bandwidth=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "nodes"), [(0, 1), (4, 5), (17, 2), (4, 0)])
def test_bad_groups(size: int, nodes: int) -> None:
    with pytest.raises(wlb.WlbError):
        Communicator(size=size, nodes=nodes, hardware=H100)


@given(collectives, st.integers(0, 2**34))
def test_one_rank_waits_for_nobody(name: str, num_bytes: int) -> None:
    assert getattr(Communicator(size=1, nodes=1, hardware=H100), name)(num_bytes) == 0


@given(groups, collectives, st.lists(st.integers(1, 2**34), min_size=2, max_size=5))
def test_linear_monotone_and_vectorised(group: Communicator, name: str, num_bytes: list[int]) -> None:
    """Equal steps in bytes are equal steps in time; no bytes take no time."""
    collective = getattr(group, name)
    ascending = np.array(sorted(num_bytes))
    seconds = collective(ascending)
    assert seconds.dtype == np.float64
    assert (np.diff(seconds) >= 0).all()
    assert seconds.tolist() == [float(collective(n)) for n in ascending]
    assert collective([0, 0]).tolist() == [0, 0]
    if group.size > 1:
        a, b = ascending[0], ascending[-1]
        assert collective(a + b) + collective(1) == pytest.approx(float(collective(a) + collective(b + 1)), rel=1e-9)


@given(groups, collectives, st.integers(1, 2**34))
def test_more_ranks_or_more_nodes_take_no_less(group: Communicator, name: str, num_bytes: int) -> None:
    seconds = getattr(group, name)(num_bytes)
    another_node = Communicator(size=group.size + group.size // group.nodes, nodes=group.nodes + 1, hardware=H100)
    assert getattr(another_node, name)(num_bytes) >= seconds
    if group.size > group.nodes and group.size <= 8:
        assert getattr(Communicator(size=group.size, nodes=1, hardware=H100), name)(num_bytes) <= seconds


@given(st.integers(2, 8), collectives, st.integers(1, 2**34))
def test_where_both_links_are_alike_nodes_do_not_matter(size: int, name: str, num_bytes: int) -> None:
    flat = dataclasses.replace(H100, inter_node=H100.intra_node)
    times = [
        float(getattr(Communicator(size=size, nodes=nodes, hardware=flat), name)(num_bytes))
        for nodes in range(1, size + 1)
        if size % nodes == 0
    ]
    assert times == pytest.approx([times[0]] * len(times), rel=1e-12)


def test_bandwidths_that_users_measure() -> None:
    """The bus bandwidth of nccl-tests, `(n - 1) / n * bytes / seconds`, approaches that of the slower level."""
    many = 2**36
    for size, nodes, expected in (
        (8, 1, H100.intra_node.bandwidth),
        (2, 2, H100.inter_node.bandwidth),
        (8, 4, 2 * H100.inter_node.bandwidth),
        (64, 8, H100.intra_node.bandwidth),  # eight network cards of 48 GB/s outrun NVLink's 370.8
    ):
        group = Communicator(size=size, nodes=nodes, hardware=H100)
        assert (size - 1) / size * many / group.all_gather(many) == pytest.approx(expected, rel=1e-2)
        assert group.all_reduce(many) == pytest.approx(2 * group.reduce_scatter(many), rel=1e-3)


def test_groups_of_a_layout() -> None:
    """The paper's 7B-128K on nodes of eight: tensor parallelism inside a node, context parallelism across two."""
    layout = wlb_tools.ParallelLayout(tp=8, cp=2, pp=4)
    sizes = {axis: Communicator.along(axis, layout, H100) for axis in ("tp", "cp", "dp", "pp", "dp_cp")}  # type: ignore[arg-type]
    assert {axis: (group.size, group.nodes) for axis, group in sizes.items()} == {
        "tp": (8, 1),
        "cp": (2, 2),
        "dp": (1, 1),
        "pp": (4, 4),
        "dp_cp": (2, 2),
    }
