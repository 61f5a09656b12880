"""Meshes and context-parallel groups in real process groups."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import wlb
from tests.torch import processes
from wlb.torch.groups import ContextParallelGroups, build_mesh, data_and_context


def mesh_of_eight(rank: int) -> dict[str, Any]:
    mesh = build_mesh(pp=1, dp=2, cp=2, tp=2, device_type="cpu")
    both = data_and_context(mesh)
    assert data_and_context(mesh) is both
    return {
        "sizes": [mesh[name].size() for name in ("pp", "dp", "cp", "tp")],
        "ranks": {name: dist.get_process_group_ranks(mesh[name].get_group()) for name in ("pp", "dp", "cp", "tp")},
        "dp_cp": dist.get_process_group_ranks(both.get_group()),
    }


def test_the_mesh() -> None:
    results = processes.run(8, mesh_of_eight)
    assert all(result["sizes"] == [1, 2, 2, 2] for result in results)
    assert results[5]["ranks"] == {"pp": [5], "dp": [1, 5], "cp": [5, 7], "tp": [4, 5]}
    assert results[5]["dp_cp"] == [1, 3, 5, 7]


def groups_of_six(rank: int) -> dict[str, Any]:
    """Tp 1, dp x cp = 6: not a power of two."""
    groups = ContextParallelGroups(build_mesh(dp=3, cp=2, device_type="cpu"))
    sums = {}
    for size in groups.sizes:
        if any(rank in run for run in groups.ranks(size)):
            options = groups.group(size)._get_backend(torch.device("cpu")).options
            assert options._timeout == timedelta(seconds=processes.TIMEOUT)  # as the world was given
            total = torch.tensor([rank])
            dist.all_reduce(total, group=groups.group(size))
            sums[size] = total.item()
        else:
            with pytest.raises(wlb.WlbError, match=f"rank {rank} is in none"):
                groups.group(size)
    for wrong in (0, 3, 8):
        with pytest.raises(wlb.WlbError):
            groups.ranks(wrong)
    return {"sums": sums, "ranks": {size: groups.ranks(size) for size in groups.sizes}}


def test_groups_of_every_power_of_two() -> None:
    results = processes.run(6, groups_of_six)
    ranks = {1: ((0,), (1,), (2,), (3,), (4,), (5,)), 2: ((0, 1), (2, 3), (4, 5)), 4: ((0, 1, 2, 3),)}
    for rank, result in enumerate(results):
        assert result["ranks"] == ranks
        for size, runs in ranks.items():
            mine = [sum(run) for run in runs if rank in run]
            assert result["sums"].get(size) == (mine[0] if mine else None)


def groups_inside_positions(rank: int) -> Any:
    groups = ContextParallelGroups(build_mesh(pp=2, cp=2, tp=2, device_type="cpu"))
    return groups.ranks(2), dist.get_process_group_ranks(groups.group(2))


def test_groups_stay_inside_one_stage_and_one_tensor_rank() -> None:
    results = processes.run(8, groups_inside_positions)
    assert [ranks for _, ranks in results] == [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    assert results[5][0] == ((5, 7),)


def wrong_sizes(rank: int) -> list[str]:
    messages = []
    for sizes in ({"dp": 3}, {"dp": 0}, {"cp": -1, "dp": -2}):
        with pytest.raises(wlb.WlbError) as raised:
            build_mesh(**sizes, device_type="cpu")
        messages.append(str(raised.value))
    return messages


def test_wrong_sizes_are_named() -> None:
    first, second = processes.run(2, wrong_sizes)
    assert first == second
    assert "3 ranks, but the world has 2" in first[0]
