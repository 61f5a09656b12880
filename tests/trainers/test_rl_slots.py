"""Plans of `wlb.rl` in the slots of RL trainers, judged by these trainers' own code.

The trainers are read from checkouts that environment variables name: WLB_SLIME, WLB_NEMO_RL, WLB_AREAL. A file is
imported without what its package imports.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import wlb
from tests.trainers.page import block

COST: Any = wlb.ModelConfig.preset("llama2-7b").cost_model()
NAMES: dict[str, Any] = {"np": np, "wlb": wlb, "Any": Any, "cost": COST}
exec(block("# slime: in the place"), NAMES)
exec(block("# NeMo-RL: what get_packer"), NAMES)
exec(block("# AReaL: in the place"), NAMES)
OURS = SimpleNamespace(**NAMES)
RNG = np.random.default_rng(3)
PROMPTS = np.arange(32).repeat(RNG.integers(1, 9, 32))
LENGTHS = RNG.lognormal(np.log(3000), 1.1, PROMPTS.size).clip(16, 20000).astype(int)


def checkout(variable: str) -> Path:
    folder = os.environ.get(variable, "")
    if not folder:
        pytest.skip(f"{variable} names no checkout, so that its trainer could not be reached")
    return Path(folder)


def module(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def imbalance(parts: list[list[list[int]]], lengths: Any = LENGTHS) -> float:
    """Heaviest rank over the mean, for micro-batches of all ranks."""
    work = [sum(COST.cost(lengths[part]).sum() for part in rank) for rank in parts]
    return float(max(work) / np.mean(work))


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("cap", [32768, 16384])
def test_slime(cap: int, vpp: int, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """The trainer's own `assert_invariants`, with a sample over the cap; its own schedule beside ours."""
    folder = checkout("WLB_SLIME")
    monkeypatch.syspath_prepend(str(folder))
    theirs = importlib.import_module("slime.utils.dp_schedule").build_dp_schedule
    pytestconfig.addinivalue_line("markers", "unit: a mark of slime's tests")
    tests = module("slimes_tests", folder / "tests" / "test_dp_schedule.py")
    args = tests.make_args(use_dynamic_batch_size=True, max_tokens_per_gpu=cap // 2, balance_data=True)
    config = tests.make_tp(dp_size=4, cp_size=2, vpp_size=vpp, microbatch_group_size_per_vp_stage=2)
    given = {"global_batch_size": 8, "rollout_indices": PROMPTS.tolist()}
    assert inspect.signature(theirs).parameters.keys() == inspect.signature(OURS.build_dp_schedule).parameters.keys()
    ours = OURS.build_dp_schedule(args, config, LENGTHS.tolist(), **given)
    other = theirs(args, config, LENGTHS.tolist(), **given)
    found = []
    for partitions, places, counts, sizes in (ours, other):
        every = set(range(LENGTHS.size))
        options = {"expected_global_sample_indices": every, "total_lengths": LENGTHS.tolist(), "max_per_bin": cap}
        tests.assert_invariants(partitions, places, counts, dp_size=4, **options)
        assert sizes == [8] * 4
        assert all(count % vpp == 0 for count in counts)
        found.append(
            imbalance([[[p[i] for i in part] for part in mbs] for p, mbs in zip(partitions, places, strict=True)])
        )
    assert found[0] < 1.01
    assert found[0] <= found[1]


def test_nemo_rl() -> None:
    """A `SequencePacker` of NeMo-RL whose bins are ours passes its checks, and has its number of bins."""
    folder = checkout("WLB_NEMO_RL")
    theirs = module("nemo_rls_packing", folder / "nemo_rl" / "data" / "packing" / "algorithms.py")
    shards, cap = 4, 32768
    lengths = np.concatenate([LENGTHS, [32000] * shards])  # the longest stand in one round

    class Balanced(theirs.SequencePacker):  # type: ignore[misc, name-defined]
        def _pack_implementation(self, sequence_lengths: list[int]) -> list[list[int]]:
            return OURS.bins(sequence_lengths, self.bin_capacity, shards)

    packed = {}
    name = theirs.PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING
    own = theirs.get_packer(name, cap, min_bin_count=shards, bin_count_multiple=shards)
    for key, packer in (("ours", Balanced(cap, bin_count_multiple=shards)), ("own", own)):
        bins = packer.pack(lengths.tolist())
        packed[key] = bins
        assert sorted(sample for held in bins for sample in held) == [*range(lengths.size)]
        assert max(int(lengths[held].sum()) for held in bins) <= cap
        assert len(bins) % shards == 0
    found = {key: imbalance([bins[rank::shards] for rank in range(shards)], lengths) for key, bins in packed.items()}
    assert found["ours"] < 1.01
    assert found["ours"] <= found["own"]
    # Shards wait for each other in every micro-batch: the k-th ones of all shards are a round.
    rounds = {
        key: [bins[first : first + shards] for first in range(0, len(bins), shards)] for key, bins in packed.items()
    }
    every = {key: np.mean([imbalance([[part] for part in of], lengths) for of in held]) for key, held in rounds.items()}
    assert every["ours"] < 1.05
    assert every["ours"] <= every["own"]


@pytest.mark.parametrize("divisor", [1, 4])
@pytest.mark.parametrize("least", [1, 41])
def test_areal(least: int, divisor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What AReaL's own `ffd_allocate` promises; numba, which it imports, is not called by it."""
    folder = checkout("WLB_AREAL")
    logger = SimpleNamespace(getLogger=lambda name: None)
    monkeypatch.setitem(sys.modules, "areal.utils", SimpleNamespace(logging=logger))
    monkeypatch.setitem(sys.modules, "areal", SimpleNamespace(utils=sys.modules["areal.utils"]))
    try:
        importlib.import_module("numba")
    except ImportError:
        plain = SimpleNamespace(njit=lambda *given, **named: given[0] if given else lambda of: of)
        monkeypatch.setitem(sys.modules, "numba", plain)
    theirs = module("areals_packing", folder / "areal" / "utils" / "seqpack.py").get_allocate_fn("ffd")
    heaviest = []
    for allocate in (OURS.allocate, theirs):
        groups = allocate(LENGTHS.tolist(), 32768, least, divisor)
        assert sorted(sample for held in groups for sample in held) == [*range(LENGTHS.size)]
        assert max(int(LENGTHS[held].sum()) for held in groups) <= 32768
        assert len(groups) >= least
        assert len(groups) % divisor == 0
        work = [COST.cost(LENGTHS[held]).sum() for held in groups]
        heaviest.append(max(work) / np.mean(work))
    assert heaviest[0] <= heaviest[1]
