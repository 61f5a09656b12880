"""Meshes and context-parallel groups in real process groups."""

import functools
import itertools
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import wlb
from tests.torch import processes, test_attention
from wlb.torch.groups import ContextParallelGroups, build_mesh, data_and_context
from wlb.torch.subgroup import Subgroup

SPLITS = torch.__version__ >= "2.15"
"""Whether torch splits groups of gloo."""


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


def told(rank: int, **sizes: int) -> dict[str, Any]:
    """Ranks of every run of this rank, by its first position and size; which of them have a communicator."""
    mesh = build_mesh(**sizes, device_type="cpu")
    groups = ContextParallelGroups(mesh)
    positions = data_and_context(mesh)
    me, count = positions.get_local_rank(), positions.size()
    found: dict[str, Any] = {"ranks": {}, "sums": {}, "own": {}}
    for size, first in itertools.product(range(1, count + 1), range(count)):
        if not (first <= me < first + size and first + size <= count):
            with pytest.raises(wlb.WlbError):
                groups.run(first, size)
            continue
        group = groups.run(first, size)
        assert groups.run(first, size) is group
        assert (group is None) == (size == 1)
        if group is not None:
            total = torch.tensor([rank])
            dist.all_reduce(total, group=group)
            found["ranks"][first, size] = dist.get_process_group_ranks(group)
            found["sums"][first, size] = total.item()
            if not isinstance(group, Subgroup):
                options = group._get_backend(torch.device("cpu")).options
                assert options._timeout == timedelta(seconds=processes.TIMEOUT)  # as the world was given
                found["own"][first, size] = True
    return found


def test_the_run_of_neighbours() -> None:
    """Six ranks: no power of two, two of them in no aligned run of four."""
    results = processes.run(6, functools.partial(told, dp=3, cp=2))
    for rank, result in enumerate(results):
        assert len(result["ranks"]) == (rank + 1) * (6 - rank) - 1
        for (first, size), ranks in result["ranks"].items():
            assert ranks == [*range(first, first + size)]
            assert result["sums"][first, size] == sum(ranks)
        aligned = {(rank // size * size, size) for size in (2, 4) if rank // size * size + size <= 6}
        assert {*result["own"]} == ({(0, 6), *aligned} if SPLITS else set())


def test_runs_stay_inside_one_stage_and_one_tensor_rank() -> None:
    results = processes.run(8, functools.partial(told, pp=2, cp=2, tp=2))
    of_all = [result["ranks"][0, 2] for result in results]
    assert of_all == [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]


Runs = list[tuple[int, int]]
"""Runs that are asked for one after the other, by their own ranks: first position and size."""


def follow(rank: int, runs: Runs) -> float:
    """Forward and backward through each run of this rank; then a group of the world. The largest deviation."""
    groups = ContextParallelGroups(build_mesh(dp=dist.get_world_size(), device_type="cpu"))
    rng = np.random.default_rng(len(runs))
    worst = 0.0
    for number, (first, size) in enumerate(runs):
        lengths = tuple(rng.integers(1, 24, 3).tolist())
        if first <= rank < first + size:
            transport = ("all_gather", "fetch", "ring")[number % 3]
            case = test_attention.Case(lengths, transport=transport, heads="MQA")
            worst = max(worst, *test_attention.deviations(case, rank - first, groups.run(first, size)))
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group())  # of the user, whatever this rank was in before
    assert total.item() == dist.get_world_size()
    return worst


@pytest.mark.parametrize(
    "runs",
    [
        [(0, 3), (2, 3), (1, 3)],
        [(1, 3), (0, 2), (1, 2), (2, 3), (0, 5)],
        [(0, 3), (3, 2), (1, 3), (2, 3), (0, 3)],
    ],
)
def test_ranks_with_other_groups_before_meet(runs: Runs) -> None:
    assert max(processes.run(5, follow, runs, timeout=60)) < 1e-5


def drawn(rng: np.random.Generator, ranks: int) -> Runs:
    """Micro-batches whose ranks are divided into runs at random, some of which have nothing to attend to."""
    found = []
    for _ in range(12):
        cuts = np.flatnonzero(rng.random(ranks - 1) < 0.4) + 1
        edges = [0, *cuts.tolist(), ranks]
        found += [(first, to - first) for first, to in itertools.pairwise(edges) if rng.random() < 0.8]
    return found


@pytest.mark.parametrize("ranks", [4, 5, 7])
@pytest.mark.parametrize("seed", range(2))
def test_any_sequence_of_groups_attends_as_one_process(ranks: int, seed: int) -> None:
    runs = drawn(np.random.default_rng([ranks, seed]), ranks)
    assert max(processes.run(ranks, follow, runs, timeout=60)) < 1e-5


def made(rank: int, **sizes: int) -> tuple[int, int]:
    """Calls of torch that make a group: by `ContextParallelGroups`, and while all runs of this rank are asked for."""
    mesh = build_mesh(**sizes, device_type="cpu")
    calls: list[str] = []
    for name in ("new_group", "split_group"):
        original = getattr(dist, name)

        def counted(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            calls.append(_name)
            return _original(*args, **kwargs)

        setattr(dist, name, counted)
    groups = ContextParallelGroups(mesh)
    before = len(calls)
    count = sizes["dp"]
    for size, first in itertools.product(range(1, min(count, 9) + 1), range(count)):
        if first <= rank % count < first + size and first + size <= count:
            groups.run(first, size)
    return before, len(calls)


@pytest.mark.parametrize(
    ("sizes", "expected"), [({"dp": 4}, 2), ({"dp": 5}, 3), ({"dp": 3, "pp": 2}, 2), ({"dp": 1}, 0)]
)
def test_few_groups_are_made_and_none_by_a_plan(sizes: dict[str, int], expected: int) -> None:
    results = processes.run(sizes["dp"] * sizes.get("pp", 1), functools.partial(made, **sizes))
    assert results == [(expected, expected) if SPLITS else (0, 0)] * len(results)


def made_among(rank: int, ranks: int) -> list[tuple[int, int]]:
    """Group creations of one rank of a faked world: every call of torch is made, and nothing is connected."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=ranks // 2 + 1, world_size=ranks)
    return [made(dist.get_rank(), dp=ranks)]


@pytest.mark.skipif(not SPLITS, reason="torch splits no group of this backend, and its store of faked worlds is a stub")
@pytest.mark.parametrize(("ranks", "expected"), [(64, 6), (512, 9)])
def test_few_groups_are_made_among_many_ranks(ranks: int, expected: int) -> None:
    assert processes.run(1, made_among, ranks) == [[(expected, expected)]]


def without_rank_2(rank: int, how: str, when: str, folder: Path) -> None:
    """Writes down what each of the other ranks raises if rank 2 is late or fails, and after how many seconds."""
    mesh = build_mesh(dp=4, device_type="cpu")
    groups = ContextParallelGroups(mesh) if when == "exchange" else None
    if rank == 2:
        if how == "raises":
            dist.destroy_process_group()  # as the end of its process does
        while sum(path.is_file() for path in folder.iterdir()) < (3 if when == "groups" else 2):
            time.sleep(0.05)
        raise SystemExit
    begun = time.monotonic()
    try:
        if groups is None:
            ContextParallelGroups(mesh)
        elif rank in (1, 3):
            case = test_attention.Case((20, 9), heads="MQA")
            test_attention.deviations(case, rank - 1, groups.run(1, 3))
    except RuntimeError as failure:
        (folder / "part").mkdir(exist_ok=True)
        written = folder / "part" / str(rank)
        written.write_text(f"{time.monotonic() - begun} {failure}")
        written.rename(folder / str(rank))
    time.sleep(60)


@pytest.mark.parametrize("how", ["is late", "raises"])
@pytest.mark.parametrize("when", ["groups", "exchange"])
def test_a_rank_that_is_missing_is_named(how: str, when: str, tmp_path: Path) -> None:
    folder = tmp_path / "said"
    folder.mkdir()
    with pytest.raises(processes.RankFailed, match="SystemExit"):
        processes.run(4, without_rank_2, how, when, folder, timeout=60, patience=4)
    said = {path.name: path.read_text().split(" ", 1) for path in folder.iterdir() if path.is_file()}
    assert {*said} == ({"0", "1", "3"} if when == "groups" else {"1", "3"})
    for seconds, message in said.values():
        assert float(seconds) < 20
        assert re.search(r"ranks \[2\] did not come" if when == "groups" else "wait for rank 2,", message), message


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
