"""Plans of `wlb.rl` in the slots of RL trainers, judged by these trainers' own code.

The trainers are read from checkouts that environment variables name: WLB_SLIME, WLB_NEMO_RL, WLB_AREAL, WLB_PRIME_RL,
WLB_SKYRL, WLB_OPENRLHF, WLB_TORCHTITAN. A file is imported without what its package imports.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import wlb
from tests.trainers.page import UNREACHED, block

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
    folder = Path(os.environ.get(variable, "") or "none")
    if not folder.is_dir():
        pytest.skip(f"{variable} names no checkout: {UNREACHED}")
    return folder


def module(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def without_packages(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    """Packages of a checkout that import nothing of their own, so that a module of them can be imported alone."""
    for name in names:
        package = ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        monkeypatch.setitem(sys.modules, name, package)


def lines(marker: str, theirs: ModuleType) -> None:
    """Runs a block of the page in the module that it changes."""
    exec(block(marker), {**vars(theirs), "wlb": wlb, "cost": COST}, scope := {})
    for name, made in scope.items():
        setattr(theirs, name, made)


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


@pytest.mark.parametrize("images", [0, 9])
@pytest.mark.parametrize("workers", [4, 64])
def test_prime_rl(workers: int, images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own `prepare_batch` on ours: every token once, ranks meet in images or text alone, and wait less."""
    pytest.importorskip("msgspec", reason="msgspec is not installed: pip install msgspec")
    source = checkout("WLB_PRIME_RL") / "src"
    names = ("prime_rl", "prime_rl.trainer", "prime_rl.transports", "prime_rl.transports.rollouts")
    without_packages(monkeypatch, source, *names)
    types = importlib.import_module("prime_rl.transports.rollouts.types")
    found = {}
    for name in ("ours", "theirs"):
        theirs = module("prime_rls_batch", source / "prime_rl" / "trainer" / "batch.py")
        if name == "ours":
            lines("# prime-rl: in the place", theirs)
        samples = []
        for number, size in enumerate(LENGTHS.tolist()):
            fields: dict[str, Any] = {"token_ids": [number] * size, "mask": [True] * size, "logprobs": [0.0] * size}
            fields |= {"temperatures": [1.0] * size, "advantages": [1.0] * size, "env_name": "one"}
            if number < images:
                fields["mm_kwargs"] = {"pixels": types.EncodedTensor("float32", [1, 2], b"12345678")}
            samples.append(types.TrainingSample(**fields))
        held = theirs.prepare_batch(samples, 32768, workers, lambda sizes: int(COST.cost(np.array(sizes)).sum() / 1e9))
        assert len({len(of) for of in held}) == 1
        real = [[[size for size in mb.sequence_lengths if any(mb.loss_mask)] for mb in of] for of in held]
        assert sorted(size for of in real for part in of for size in part) == sorted(LENGTHS.tolist())
        assert max(sum(part) for of in real for part in of) <= 32768
        for together in zip(*held, strict=True):
            assert len({mb.mm_kwargs is None for mb in together}) == 1
        work = [[COST.cost(np.array(part)).sum() if part else 0.0 for part in of] for of in real]
        found[name] = np.array(work).max(axis=0).sum() * workers / np.sum(work)
    assert found["ours"] <= found["theirs"]
    if workers == 4 and not images:
        assert found["ours"] < 1.05


def test_skyrl() -> None:
    """Its own factory makes our packer, with samples over the limit alone and a multiple of micro-batches."""
    theirs = module("skyrls_packing", checkout("WLB_SKYRL") / "skyrl" / "train" / "dataset" / "bin_packing.py")
    lengths = [*LENGTHS.tolist(), 40000]
    heaviest = []
    for own in (True, False):
        if not own:
            lines("# SkyRL: in the place", theirs)
        packer = theirs.make_seq_packer("balanced", bin_capacity=32768, bin_count_multiple=4)
        bins = packer.pack(lengths)
        assert sorted(sample for held in bins for sample in held) == [*range(len(lengths))]
        assert [len(lengths) - 1] in bins
        assert max(sum(lengths[i] for i in held) for held in bins if held != [len(lengths) - 1]) <= 32768
        assert len(bins) % 4 == 0
        bins = theirs.make_seq_packer("balanced", bin_capacity=32768).pack(LENGTHS.tolist())
        work = [COST.cost(LENGTHS[held]).sum() for held in bins]
        heaviest.append(max(work) / np.mean(work))
    assert heaviest[1] < 1.07 < 1.2 < heaviest[0]  # micro-batches are 99 % full


def test_openrlhf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks' equal slices are steps of even work; theirs evens the whole round."""
    torch, ranks, steps = importlib.import_module("torch"), 4, 3
    folder = checkout("WLB_OPENRLHF")
    without_packages(monkeypatch, folder, "openrlhf", "openrlhf.utils")
    theirs = module("openrlhfs_experience", folder / "openrlhf" / "trainer" / "ppo_utils" / "experience.py")
    lengths = LENGTHS[:120] // 20 + 1
    parts = (
        SimpleNamespace(num_nodes=1, num_gpus_per_node=16),
        SimpleNamespace(ring_attn_size=2, tensor_parallel_size=2),
    )
    args = SimpleNamespace(actor=parts[0], ds=parts[1], train=SimpleNamespace(batch_size=120 // steps))
    heaviest = []
    for own in (True, False):
        given = [
            theirs.Experience(
                sequences=torch.full((1, size), number),
                attention_mask=torch.ones((1, size), dtype=torch.long),
                action_mask=torch.ones((1, size - 1), dtype=torch.bool),
                total_length=torch.tensor([size]),
                prompts=[str(number)],
            )
            for number, size in enumerate(lengths.tolist())
        ]
        if not own:
            lines("# OpenRLHF: in the place", theirs)
        held = [[int(prompt) for prompt in of.prompts] for of in theirs.balance_experiences(given, args)]
        assert sorted(number for of in held for number in of) == [*range(120)]
        assert [len(of) for of in held] == [30] * ranks
        slices = np.array(held).reshape(ranks, steps, -1)
        heaviest.append([imbalance(slices[:, [step]].tolist(), lengths) for step in range(steps)])
    assert max(heaviest[1]) < 1.01 < max(heaviest[0])


def test_torchtitan_rl() -> None:
    """Its own `Batcher` makes micro-batches of our rows, in a process of its own: an installed torchtitan has none."""
    folder = checkout("WLB_TORCHTITAN")
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(folder), str(root), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.trainers.titan_rl"]
    subprocess.run(command, check=True, timeout=300, cwd=root, env=os.environ | {"PYTHONPATH": path})
