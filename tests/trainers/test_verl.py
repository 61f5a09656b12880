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
from wlb.integrations import slices
from wlb.integrations import verl as ours

COST = wlb.CostModel(attention=3.0, linear=5000.0)


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The planner of verl with ours in its place; afterwards its own again."""
    pytest.importorskip("verl", reason="verl is not installed: pip install verl")
    balancing = importlib.import_module("verl.utils.seqlen_balancing")
    monkeypatch.setattr(ours, "_cost_model", ours._cost_model)
    for name in ("calculate_workload", "get_seqlen_balanced_partitions", "rearrange_micro_batches"):
        monkeypatch.setattr(balancing, name, getattr(balancing, name))
    importlib.import_module("verl")
    ours.install(cost_model=COST)
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
    old = SimpleNamespace(calculate_workload=lambda lengths, hidden_size: None)
    monkeypatch.setattr(importlib, "import_module", lambda name: old)
    message = r"verl .* has calculate_workload\(lengths, hidden_size\), but wlb expects .*, as in verl 0.9"
    with pytest.raises(wlb.WlbError, match=message):
        ours.install(cost_model=COST)


def test_work_is_the_models(verl: Any) -> None:
    lengths = torch.tensor([[1, 7], [0, 4096]])
    wanted = np.where(lengths > 0, COST.cost(np.maximum(lengths.numpy(), 1).ravel()).reshape(2, 2), 0)
    np.testing.assert_array_equal(verl.calculate_workload(lengths).numpy(), wanted)


def test_without_a_model_work_is_verls() -> None:
    lengths = torch.tensor([1, 128, 30_000])
    np.testing.assert_allclose(ours.calculate_workload(lengths), 24576 * lengths + lengths**2, rtol=1e-12)


# --- the trainer's rounds --------------------------------------------------------------------------------------------


class Config(dict):  # type: ignore[type-arg]
    """As OmegaConf: keys as attributes."""

    __getattr__ = dict.__getitem__


def trainer(cls: Any, dp_size: int, mini_batch: int, n: int, **actor: Any) -> Any:
    """A trainer of verl with its configuration and as many ranks; it has no model, no workers and no queue."""
    whole = type(cls.__name__, (cls,), dict.fromkeys(getattr(cls, "__abstractmethods__", ()), lambda self: None))
    made = whole.__new__(whole)
    actor_config = Config(ppo_mini_batch_size=mini_batch, shuffle=False, **actor)
    made.config = Config(
        actor_rollout_ref=Config(actor=actor_config, rollout=Config(n=n)), trainer=Config(critic_warmup=0)
    )
    made.use_critic, made.global_steps = False, 1
    made.tokenizer = SimpleNamespace(eos_token_id=0)
    made.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": list(range(dp_size))})
    return made


def trainers(name: str) -> Any:
    reason = "verl's trainer cannot be imported"
    return pytest.importorskip(f"verl.trainer.ppo.{name}", reason=reason, exc_type=ImportError)


def steps_of(order: list[int], dp_size: int, size: int) -> list[list[list[int]]]:
    """As verl's workers cut a round: equal slices are ranks, and equal slices of these are optimizer steps."""
    ranks = np.array(order).reshape(dp_size, -1, size // dp_size)
    return [[ranks[rank, step].tolist() for rank in range(dp_size)] for step in range(ranks.shape[1])]


def test_rounds_are_planned_step_by_step(verl: Any) -> None:
    """In verl's own trainer: even steps of whole prompts; its own plan of the same round is worse in both."""
    base = trainers("v1.trainer_base")
    dp_size, prompts, n, mini = 4, 32, 8, 8
    lengths = samples(prompts * n, 4000)
    keys = [f"{prompt}_{session}_0" for prompt in range(prompts) for session in range(n)]
    made = trainer(base.PPOTrainer, dp_size, mini, n)
    assert type(made)._balance_batch is ours._balance_batch
    worst, parted = {}, {}
    for planned, balance in (("wlb", made._balance_batch), ("verl", made._balance_batch_of_verl)):
        batch = base.KVBatchMeta(keys=keys, tags=[{"seq_len": int(length)} for length in lengths], partition_id="train")
        metrics: dict[str, float] = {}
        order = [keys.index(key) for key in balance(batch, metrics).keys]
        assert sorted(order) == list(range(prompts * n))
        assert metrics["global_seqlen/balanced_max"] > 0
        work = COST.cost(lengths)
        steps = steps_of(order, dp_size, mini * n)
        sums = [[work[held].sum() for held in ranks] for ranks in steps]
        worst[planned] = max(max(step) * dp_size / sum(step) for step in sums)
        of_step = [{sample // n for held in ranks for sample in held} for ranks in steps]
        parted[planned] = sum(map(len, of_step)) - prompts
    assert worst["wlb"] < 1.01 < 1.05 < worst["verl"], worst
    assert parted["wlb"] == 0 < parted["verl"], parted


def test_unequal_prompts_and_padding(verl: Any) -> None:
    """Prompts of 1 to 8 samples, and verl's padding: whole prompts if steps of equal size can be made of them."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9, 30)
    prompts = [*np.arange(30).repeat(sizes).tolist()]
    prompts += [f"pad{i}" for i in range(-len(prompts) % 48)]
    lengths = samples(len(prompts), 2000)
    parts, parted = slices.planned(lengths, COST.cost(lengths), prompts, dp_size=4, samples_per_step=48)
    assert parted == 0
    assert [[held.size for held in rank] for rank in parts] == [[12] * (lengths.size // 48)] * 4
    one = slices.planned(np.full(4, 5), np.ones(4), [0, 0, 0, 1], dp_size=2, samples_per_step=2)
    assert one[1] == 1, "three samples of a prompt do not fit into steps of two"


def test_the_older_trainer_is_planned_too(verl: Any) -> None:
    ray_trainer = trainers("ray_trainer")
    protocol = importlib.import_module("verl.protocol")
    lengths = samples(64)
    data = protocol.DataProto.from_single_dict(batch_of(lengths) | {"uid": np.array([*"abcdefgh"], object).repeat(8)})
    made = trainer(ray_trainer.RayPPOTrainer, 2, 2, 8)
    metrics: dict[str, float] = {}
    assert made._balance_batch(data, metrics) is None
    assert metrics["global_seqlen/prompts_parted"] == 0
    uids = data.non_tensor_batch["uid"].tolist()
    found = data.batch["attention_mask"].sum(1)
    assert sorted(found.tolist()) == sorted(lengths.tolist())
    for step in steps_of(list(range(64)), 2, 16):
        assert len({uids[sample] for held in step for sample in held}) == 2


def test_shuffled_steps_are_named(verl: Any) -> None:
    base = trainers("v1.trainer_base")
    made = trainer(base.PPOTrainer, 2, 2, 1)
    made.config.actor_rollout_ref.actor["shuffle"] = True
    batch = base.KVBatchMeta(keys=["a_0_0", "b_0_0"], tags=[{"seq_len": 3}, {"seq_len": 4}], partition_id="train")
    with pytest.warns(UserWarning, match=r"actor.shuffle=True mixes"):
        made._balance_batch(batch, {})
