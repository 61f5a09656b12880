"""Batches of verl, split by wlb in the place of its planners: inside the real package, with its TensorDicts."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import wlb
from tests.torch import processes
from tests.trainers.page import UNREACHED, block
from wlb.integrations import rl
from wlb.integrations import verl as ours


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The planner of verl with ours in its place; afterwards its own again."""
    pytest.importorskip("verl", reason="verl is not installed: pip install verl")
    balancing = importlib.import_module("verl.utils.seqlen_balancing")
    for name in ("get_seqlen_balanced_partitions", "rearrange_micro_batches"):
        monkeypatch.setattr(balancing, name, getattr(balancing, name))
    importlib.import_module("verl")
    ours.install()
    assert balancing.rearrange_micro_batches is ours.rearrange_micro_batches
    return balancing


def balance_file(folder: Path) -> dict[str, str]:
    """The page's file, and the variables with which verl imports it."""
    code, _, command = block("# balance.py").partition("\n\n")
    (folder / "balance.py").write_text(code)
    name, _, value = command.split()[0].partition("=")
    return {name: value, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}


def test_verl_imports_the_pages_file(tmp_path: Path) -> None:
    pytest.importorskip("verl", reason="verl is not installed: pip install verl")
    code = "import verl.utils.seqlen_balancing as planner; print(planner.rearrange_micro_batches.__module__)"
    environment = os.environ | balance_file(tmp_path)
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert found.stdout.split()[-1:] == ["wlb.integrations.verl"], found.stderr


OWN = Path(sys.prefix) / "verl" / "tests" / "utils" / "test_seqlen_balancing.py"


@pytest.mark.skipif(not OWN.exists(), reason=UNREACHED)
def test_its_own_tests_pass(tmp_path: Path) -> None:
    """But for the one that needs two GPUs, instead of which there is `test_ranks_have_as_many`."""
    pytest.importorskip("verl", reason="verl is not installed: pip install verl")
    (tmp_path / "test_own.py").write_text(
        OWN.read_text() + "\n\ndef test_replaced():\n    assert 'wlb' in rearrange_micro_batches.__module__\n"
    )
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", "--rootdir", str(tmp_path)]
    program += ["--deselect", "test_own.py::test_seqlen_balancing_distributed_params", "test_own.py"]
    environment = os.environ | balance_file(tmp_path)
    found = subprocess.run(program, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert found.returncode == 0, found.stdout
    assert re.search(r"^([5-9]|\d\d+) passed", found.stdout, re.MULTILINE), found.stdout
    print(found.stdout)


def batch_of(lengths: np.ndarray) -> dict[str, torch.Tensor]:
    positions = torch.arange(int(lengths.max()))
    mask = (positions < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": torch.randint(0, 1000, mask.shape), "attention_mask": mask}


def samples(count: int = 96, longest: int = 400) -> np.ndarray:
    return np.random.default_rng(0).lognormal(4.5, 0.9, count).astype(np.int64).clip(1, longest)


@pytest.mark.parametrize("equal_size", [False, True])
def test_partitions_are_no_less_even_than_verls(equal_size: bool) -> None:
    lengths = samples(256)
    work = (lengths * (24576 + lengths)).tolist()
    parts = ours.get_seqlen_balanced_partitions(work, 8, equal_size)
    assert sorted(item for part in parts for item in part) == list(range(256))
    assert all(part == sorted(part) for part in parts)
    assert not equal_size or {len(part) for part in parts} == {32}
    sums = [sum(work[item] for item in part) for part in parts]
    assert max(sums) <= 1.001 * sum(sums) / 8
    planner = pytest.importorskip("verl.utils.seqlen_balancing", reason="verl is not installed: pip install verl")
    theirs = planner.karmarkar_karp(work, 8, equal_size)
    assert max(sums) <= 1.0001 * max(sum(work[item] for item in part) for part in theirs)


def test_a_batch_survives_its_micro_batches(verl: Any) -> None:
    protocol = importlib.import_module("verl.protocol")
    lengths = samples()
    data = protocol.DataProto.from_single_dict(batch_of(lengths))
    micro_batches, indices = verl.prepare_dynamic_batch(data, max_token_len=1000)
    assert all(indices)
    assert all(lengths[held].sum() <= 1000 for held in indices)
    assert len(indices) == -(-lengths.sum() // 1000), "as few as the tokens need"
    together = torch.cat([micro_batch.batch["input_ids"] for micro_batch in micro_batches])
    torch.testing.assert_close(verl.restore_dynamic_batch(together, indices), data.batch["input_ids"])


@pytest.mark.parametrize(
    "options", [{"num_batches_divided_by": 4}, {"min_num_micro_batch": 23}, {"force_group_size": 4}]
)
def test_counts_and_groups(verl: Any, options: dict[str, int]) -> None:
    tensordict = importlib.import_module("tensordict")
    lengths = samples()
    batch = tensordict.TensorDict(batch_of(lengths), batch_size=[lengths.size])
    micro_batches, indices = verl.rearrange_micro_batches(batch, 1600, **options)
    assert sorted(sample for held in indices for sample in held) == list(range(lengths.size))
    assert all(lengths[held].sum() <= 1600 for held in indices)
    assert len(indices) % options.get("num_batches_divided_by", 1) == 0
    assert len(indices) >= options.get("min_num_micro_batch", 1)
    size = options.get("force_group_size", 1)
    assert all(len({sample // size for sample in held}) * size == len(held) for held in indices)
    for micro_batch, held in zip(micro_batches, indices, strict=True):
        torch.testing.assert_close(micro_batch["input_ids"], batch["input_ids"][held])


def on_rank(rank: int, counts: list[int], options: dict[str, Any]) -> tuple[int, int]:
    """How many micro-batches a rank has alone, and how many with the others."""
    tensordict = importlib.import_module("tensordict")
    lengths = samples(counts[rank])
    batch = tensordict.TensorDict(batch_of(lengths), batch_size=[lengths.size])
    group = dist.group.WORLD
    alone = ours.rearrange_micro_batches(batch, 1000, dp_group=group, same_micro_num_in_dp=False, **options)
    micro_batches, indices = ours.rearrange_micro_batches(batch, 1000, dp_group=group, **options)
    assert sorted(sample for held in indices for sample in held) == list(range(lengths.size))
    assert all(0 < lengths[held].sum() <= 1000 for held in indices)
    assert all(
        torch.equal(part["input_ids"], batch["input_ids"][held])
        for part, held in zip(micro_batches, indices, strict=True)
    )
    return len(alone[1]), len(micro_batches)


@pytest.mark.parametrize("options", [{}, {"num_batches_divided_by": 4}, {"min_num_micro_batch": 23}])
def test_ranks_have_as_many(options: dict[str, int]) -> None:
    pytest.importorskip("verl.utils.tensordict_utils", reason="verl is not installed: pip install verl")
    (first, both), (second, other) = processes.run(2, on_rank, [96, 40], options)
    assert first > second or "min_num_micro_batch" in options
    assert both == other == max(first, second)


def test_all_ranks_refuse_what_one_does() -> None:
    """Rank 1 has 41 samples, which are no pairs: rank 0 raises too, rather than wait for it."""
    pytest.importorskip("verl.utils.tensordict_utils", reason="verl is not installed: pip install verl")
    refusals = processes.run(2, refused_together, [96, 41])
    assert set(refusals) == {"force_group_size = 2: does not divide the 41 samples"}


def refused_together(rank: int, counts: list[int]) -> str:
    with pytest.raises(wlb.WlbError) as refused:
        ours.rearrange_micro_batches(
            batch_of(samples(counts[rank])), 1000, force_group_size=2, dp_group=dist.group.WORLD
        )
    return str(refused.value)


def test_wrong_calls_are_refused() -> None:
    for values, parts, equal, message in (
        ([1, 2], 3, False, "seqlen_list has 2 items, fewer than k_partitions = 3"),
        ([1, 2, 3], 2, True, "seqlen_list has 3 items, which k_partitions = 2 does not divide"),
        ([1, -2, 3], 2, False, r"seqlen_list\[1\] = -2"),
        ([1, float("nan")], 2, False, r"seqlen_list\[1\] = nan"),
    ):
        with pytest.raises(wlb.WlbError, match=message):
            ours.get_seqlen_balanced_partitions(values, parts, equal)
    batch = batch_of(np.array([5, 90, 7]))
    with pytest.raises(wlb.WlbError, match="max_token_len = 80: a group of samples has 90 tokens"):
        ours.rearrange_micro_batches(batch, 80)
    with pytest.raises(wlb.WlbError, match="force_group_size = 2: does not divide the 3 samples"):
        ours.rearrange_micro_batches(batch, 200, force_group_size=2)
    with pytest.raises(wlb.WlbError, match="4 micro-batches are needed, and a rank has 3 groups"):
        ours.rearrange_micro_batches(batch, 200, min_num_micro_batch=4)


def test_another_verl_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(get_seqlen_balanced_partitions=lambda lengths, parts: None)
    monkeypatch.setattr(importlib, "import_module", lambda name: old)
    message = r"verl .* has get_seqlen_balanced_partitions\(lengths, parts\), but wlb expects .*, as in verl 0.9"
    with pytest.raises(wlb.WlbError, match=message):
        ours.install()


def test_plans_for_any_trainer() -> None:
    lengths, prompts = samples(), np.arange(96) // 4
    cost = wlb.CostModel(attention=1, linear=1000)
    plans = rl.plan(lengths, dp_size=4, max_tokens=1000, cost_model=cost, groups=prompts, equal_samples=True)
    assert {len(plan) for plan in plans} == {len(plans[0])}
    held = [[sample for micro_batch in plan for sample in micro_batch] for plan in plans]
    assert [len(samples) for samples in held] == [24] * 4
    assert sorted(sample for samples in held for sample in samples) == list(range(96))
    assert sum(len(set(prompts[rank].tolist())) for rank in held) == 24
    assert all(lengths[micro_batch].sum() <= 1000 for plan in plans for micro_batch in plan)


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_pairs_stay_in_one_micro_batch(sync: Any) -> None:
    """As DPO and reward models need: what the refusals of their trainers advise."""
    lengths, pairs = samples(), np.arange(96) // 2
    cost = wlb.CostModel(attention=1, linear=1000)
    options: dict[str, Any] = {"dp_size": 4, "cost_model": cost, "groups": pairs, "sync": sync}
    plans = rl.plan(lengths, max_tokens=1000, together="micro_batch", equal_samples=True, **options)
    held = [micro_batch for plan in plans for micro_batch in plan]
    assert sorted(sample for micro_batch in held for sample in micro_batch) == list(range(96))
    assert sum(len({int(pairs[sample]) for sample in micro_batch}) for micro_batch in held) == 48
    assert all(lengths[micro_batch].sum() <= 1000 for micro_batch in held)
    assert [sum(map(len, plan)) for plan in plans] == [24] * 4
    longest = int(np.bincount(pairs, lengths).max())
    with pytest.raises(wlb.WlbError, match=rf"the {longest} tokens of this group exceed max_tokens = {longest - 1};"):
        rl.plan(lengths, max_tokens=longest - 1, together="micro_batch", **options)


def test_errors_name_the_arguments_of_the_caller() -> None:
    cost = wlb.CostModel(attention=1.0, linear=1.0)
    with pytest.raises(wlb.WlbError, match=r"^equal_samples") as raised:
        rl.plan([1, 1, 1, 1], dp_size=2, max_tokens=10, cost_model=cost, groups=[0, 0, 0, 1], equal_samples=True)
    assert raised.value.argument == "equal_samples"
    with pytest.raises(wlb.WlbError, match=r"^max_samples = 0") as raised:
        rl.plan([1, 1], dp_size=2, max_tokens=10, cost_model=cost, max_samples=0)
    assert (raised.value.argument, raised.value.value) == ("max_samples", 0)
