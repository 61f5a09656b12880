"""The example trainer: any layout learns what one process learns; a run that dies goes on as if it had not."""

import itertools
import json
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from studies.trainer import checkpoints, llama
from studies.trainer import train as example
from studies.trainer.llama import LlamaConfig
from tests.torch import processes
from wlb.torch.data import collate
from wlb.torch.groups import build_mesh
from wlb.torch.loss import token_normalized_loss
from wlb.torch.pipeline import pipeline_step
from wlb_tools.audit import audit

CONFIG = LlamaConfig(hidden_size=32, ffn_hidden_size=48, num_layers=8, num_heads=4, num_kv_heads=2, vocab_size=257)
SETTINGS = example.Settings(
    pp=1,
    cp=1,
    tp=1,
    virtual_stages=1,
    schedule="1f1b",
    transport="all_gather",
    ulysses_size=None,
    corpus=None,
    pattern="*.py",
    tokenizer=None,
    method="wlb",
    plan="static",
    cp_exchange=16.0,
    window=1,
    context=96,
    micro_batches=4,
    memory_factor=1.5,
    queues=1,
    threshold=(),
    max_delay=3,
    strategy="per_document",
    hybrid_threshold=None,
    workers=0,
    model=CONFIG,
    dtype="float32",
    activation_checkpointing=False,
    steps=6,
    learning_rate=1e-2,
    warmup=2,
    clip=1.0,
    seed=0,
    checkpoint_dir=None,
    checkpoint_every=2,
    keep=3,
    metrics_file=None,
)
# Micro-batches as unequal as can be: one token, a document shorter than 2 * cp, an odd total, a long document.
MICRO_BATCHES = [[1], [37, 5, 2], [64], [3, 1, 1, 20]]
LAYOUTS: dict[str, dict[str, Any]] = {
    "2x2x2x2": {"pp": 2, "cp": 2, "tp": 2},
    "interleaved": {"pp": 2, "cp": 2, "virtual_stages": 2, "schedule": "interleaved_1f1b", "transport": "ring"},
    "zero bubble": {"pp": 2, "tp": 2, "virtual_stages": 2, "schedule": "interleaved_zero_bubble"},
    "V": {"pp": 2, "cp": 2, "virtual_stages": 2, "schedule": "zbv", "transport": "ulysses"},
    "recomputed": {"cp": 2, "tp": 2, "activation_checkpointing": True},
}
WORLD = {"2x2x2x2": 16, "interleaved": 4, "zero bubble": 4, "V": 4, "recomputed": 4}


def documents(lengths: list[int]) -> list[np.ndarray]:
    return [np.random.default_rng(length).integers(0, CONFIG.vocab_size, length) for length in lengths]


def gradients(rank: int, settings: example.Settings) -> tuple[float, float, dict[str, np.ndarray]]:
    """This rank's part of the loss, the norm of all gradients, and those of its stages, whole."""
    device, mesh = torch.device("cpu"), mesh_of(settings)
    stages, _ = example.build_model(settings, settings.model, mesh, device)
    group_of = example.context_groups(settings, mesh)
    dp_rank, dp = mesh["dp"].get_local_rank(), mesh["dp"].size()
    batches = [
        collate(documents(lengths), cp_rank=mesh["cp"].get_local_rank(), cp_size=settings.cp)
        for lengths in MICRO_BATCHES[dp_rank::dp]
    ]
    valid = sum(sum(lengths) - len(lengths) for lengths in MICRO_BATCHES)
    losses = pipeline_step(
        stages,
        [example.for_pipeline(batch, group_of(batch)) for batch in batches],
        schedule=settings.schedule,
        loss_fn=lambda logits, labels: token_normalized_loss(logits, labels, num_valid_tokens=valid),
    )
    found = whole_gradients(stages)
    norm = example.clip_gradients(stages, 1.0, mesh)
    return float(sum(loss.item() for loss in losses)) / settings.tp, norm, found


def whole_gradients(stages: Any) -> dict[str, np.ndarray]:
    """Those of all parameters of these stages, gathered where they are sharded."""
    return {
        name: np.array(getattr(parameter.grad, "full_tensor", lambda grad=parameter.grad: grad)())
        for stage in stages
        for name, parameter in stage.submod.named_parameters()
    }


def check_learnt(results: list[Any], expected: Any) -> None:
    """Loss, norm and gradients of all ranks against those of one process."""
    loss, norm, gradients = expected[:3]
    assert sum(part for part, *_ in results) == pytest.approx(loss, rel=1e-5)
    seen = set()
    for _, their_norm, found, *_ in results:
        assert their_norm == pytest.approx(norm, rel=1e-5)
        for name, gradient in found.items():
            assert np.abs(gradient - gradients[name]).max() <= 1e-5 * np.abs(gradients[name]).max(), name
        seen |= set(found)
    assert seen == set(gradients)


def mesh_of(settings: example.Settings) -> Any:
    world = int(os.environ["WORLD_SIZE"])
    dp = world // (settings.pp * settings.cp * settings.tp)
    return build_mesh(pp=settings.pp, dp=dp, cp=settings.cp, tp=settings.tp, device_type="cpu")


@pytest.fixture(scope="module")
def reference() -> tuple[float, float, dict[str, np.ndarray]]:
    return processes.run(1, gradients, SETTINGS)[0]


@pytest.mark.a_few(3)
@pytest.mark.parametrize("layout", [pytest.param("2x2x2x2", marks=pytest.mark.long), *list(LAYOUTS)[1:]])
def test_any_layout_learns_what_one_process_learns(layout: str, reference: Any) -> None:
    check_learnt(processes.run(WORLD[layout], gradients, replace(SETTINGS, **LAYOUTS[layout])), reference)


def half_precision(rank: int, settings: example.Settings) -> tuple[float, set[torch.dtype]]:
    """The loss in bfloat16, and the types of the rotary angles."""
    types = set()
    rotate = llama.rotate

    def watched(x: torch.Tensor, rope: Any) -> torch.Tensor:
        types.update(angle.dtype for angle in rope)
        return rotate(x, rope)

    llama.rotate = watched
    return gradients(rank, settings)[0], types


def test_half_precision_keeps_positions_exact(reference: Any) -> None:
    settings = replace(SETTINGS, dtype="bfloat16", cp=2, tp=2)
    results = processes.run(4, half_precision, settings)
    assert sum(part for part, _ in results) == pytest.approx(reference[0], rel=2e-2)
    assert set().union(*(types for _, types in results)) == {torch.float32}


def sharded_weights(rank: int, settings: example.Settings) -> list[bool]:
    """Whether the weights of layers are sharded as each micro-batch begins, and after the last."""
    built: list[Any] = []
    build, rotary = example.build_model, llama.rotary

    def watched_build(*arguments: Any) -> Any:
        built.extend(build(*arguments)[0])
        return built, []

    def sharded() -> bool:
        return isinstance(next(iter(built[0].submod.layers.values())).attention.wq.weight, DTensor)

    found = []

    def watched_rotary(*arguments: Any) -> Any:
        found.append(sharded())
        return rotary(*arguments)

    example.build_model, llama.rotary = watched_build, watched_rotary
    gradients(rank, settings)
    return [*found, sharded()]


@pytest.mark.parametrize("pp", [1, 2])
def test_weights_are_gathered_once_a_step(pp: int) -> None:
    """So that data-parallel ranks do not wait for each other in every micro-batch, and optimizers see their own."""
    for found in processes.run(2 * pp, sharded_weights, replace(SETTINGS, pp=pp)):
        assert len(found) == len(MICRO_BATCHES) // 2 + 1
        assert (found[0], found[-1]) == (True, True)
        assert not any(found[1:-1])


def test_a_window_needs_as_many_batches(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("to be or not to be")
    settings = replace(SETTINGS, corpus=tmp_path, pattern="*.txt", method="fixed", window=8)
    with pytest.raises(processes.RankFailed, match="fewer than a window of 8"):
        processes.run(1, run, settings)


def run(rank: int, settings: example.Settings, dies: tuple[str, int] | None = None) -> None:
    """A run of the trainer on the process group that there is; rank 1 dies at some call of one of its functions."""
    if dies is not None and rank == 1:
        name, number = dies
        module: Any = example if hasattr(example, name) else checkpoints
        work, calls = getattr(module, name), itertools.count(1)

        def work_or_die(*arguments: Any) -> Any:
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return work(*arguments)

        setattr(module, name, work_or_die)
    example.train(settings)


def rows(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def corpus(folder: Path) -> Path:
    """Files of which some exceed any context here."""
    folder.mkdir()
    for number, length in enumerate(np.random.default_rng(0).lognormal(3.5, 1.2, 80).astype(int)):
        (folder / f"{number}.txt").write_text("to be or not to be, " * (length // 20) + "!" * (length % 20))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"release": "adaptive", "max_mean_delay": 0.3, "finer": 2},
        {"release": "adaptive", "delay_price": 0.5, "method": "refined"},
        {"release": "adaptive", "plan": "dynamic_cp", "cp": 2},
        {"release": "adaptive", "max_mean_delay": 0.3, "max_early": 2, "sync": "micro_batch"},
        {"release": "adaptive", "sync": "step", "strategy": "auto"},
        {"cp": 2, "strategy": "auto"},
        {"method": "whole"},
    ],
    ids=str,
)
def test_every_way_to_pack_trains(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "corpus").mkdir()
    for number, length in enumerate(np.random.default_rng(0).lognormal(3.2, 0.8, 80).astype(int).clip(2, 90)):
        (tmp_path / "corpus" / f"{number:02}.txt").write_text(
            "to be or not to be, "[: length % 20] * (1 + length // 20)
        )
    settings = replace(
        SETTINGS,
        model=replace(CONFIG, num_layers=1),
        corpus=tmp_path / "corpus",
        pattern="*.txt",
        steps=2,
        metrics_file=tmp_path / "log.jsonl",
        **changes,
    )
    processes.run(2, run, settings)
    log = rows(tmp_path / "log.jsonl")
    assert [row["step"] for row in log] == [1, 2]
    assert all(0 < row["tokens"] <= 4 * 96 * 2 for row in log)
    assert log[0]["step_work"] == 1.0
    assert 0 < log[1]["step_work"] < 2, "over the mean of both"
    if changes.get("finer"):
        assert {row["micro_batches"] for row in log} == {4}  # of 8, on two ranks
    if changes.get("method") == "whole":
        assert {row["delay_max"] for row in log} == {0}


@pytest.mark.parametrize(
    "changes",
    [
        {"max_documents": 3, "multiple_of_tokens": 16},
        {"max_documents": 3, "token_bucket": (48, 96, 144), "cp": 2},
        {"token_bucket": (150,), "memory_factor": 1.9, "release": "adaptive", "max_mean_delay": 0.3},
    ],
    ids=str,
)
def test_micro_batches_of_fixed_shapes_learn_the_same(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Two ranks learn what one process does that runs the same documents unpadded."""
    model, texts = replace(CONFIG, num_layers=1), corpus(tmp_path / "corpus")
    settings = replace(SETTINGS, model=model, corpus=texts, pattern="*.txt", steps=3, **changes)
    processes.run(2, run, replace(settings, metrics_file=tmp_path / "shaped.jsonl"))
    most = (settings.token_bucket or (144,))[-1]
    unpadded = replace(settings, memory_factor=most / 96, multiple_of_tokens=1, token_bucket=(), cp=1)
    processes.run(1, run, replace(unpadded, metrics_file=tmp_path / "log.jsonl"))
    shaped, log = rows(tmp_path / "shaped.jsonl"), rows(tmp_path / "log.jsonl")
    sizes = {size for row in shaped for size in row["micro_batch_tokens"]}
    assert sizes <= set(settings.token_bucket or range(0, most + 1, settings.multiple_of_tokens))
    assert all(row["documents"] <= 4 * (settings.max_documents or 99) for row in shaped)
    assert [row["tokens"] for row in shaped] == [row["tokens"] for row in log]
    assert [row["loss"] for row in shaped] == pytest.approx([row["loss"] for row in log], rel=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"delay_price": 0.5},
        {"max_mean_delay": 0.5},
        {"release": "adaptive", "method": "whole"},
        {"release": "adaptive", "delay_price": 0.5, "max_mean_delay": 0.5},
        {"finer": 2, "method": "original"},
        {"plan": "dynamic_cp", "method": "whole"},
        {"max_early": 2},
        {"sync": "step", "method": "fixed"},
        {"sync": "step", "plan": "dynamic_cp"},
        {"group_sizes": "any"},
        {"ranks_per_node": 2},
        {"max_documents": 4, "method": "whole"},
        {"token_bucket": (144,), "method": "original"},
        {"multiple_of_tokens": 8, "model": replace(CONFIG, num_experts=2)},
    ],
    ids=str,
)
def test_ways_to_pack_that_exclude_each_other(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "one.txt").write_text("to be or not to be")
    with pytest.raises(processes.RankFailed, match=r"go(es)?( not go)? with|give one of them"):
        processes.run(1, run, replace(SETTINGS, corpus=tmp_path, pattern="*.txt", **changes))


def test_more_stages_than_layers_are_refused() -> None:
    mesh: Any = {"pp": SimpleNamespace(size=lambda: 3)}
    with pytest.raises(SystemExit, match="8 layers are too few for 9 pipeline stages"):
        example.build_model(replace(SETTINGS, virtual_stages=3), CONFIG, mesh, torch.device("cpu"))


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[example.Settings, list[dict[str, Any]]]:
    """A run that nobody kills: its settings and its rows."""
    return trained_whole(SETTINGS, tmp_path_factory.mktemp("whole"))


def trained_whole(settings: example.Settings, folder: Path) -> tuple[example.Settings, list[dict[str, Any]]]:
    """Six steps on two context-parallel ranks of two replicas, in which documents wait."""
    small = {"model": replace(CONFIG, num_layers=2), "corpus": corpus(folder / "corpus"), "pattern": "*.txt"}
    settings = replace(settings, **small, context=250, threshold=(150,), cp=2)
    processes.run(4, run, replace(settings, metrics_file=folder / "whole.jsonl"))
    whole = rows(folder / "whole.jsonl")
    assert [row["step"] for row in whole] == [1, 2, 3, 4, 5, 6]
    assert len({row["digest"] for row in whole}) == 6
    assert whole[-1]["loss"] < whole[0]["loss"], "it learns"
    assert whole[-1]["delay_mean"] > 0, "documents wait"
    return settings, whole


def check_going_on(
    settings: example.Settings,
    whole: list[Any],
    dies: tuple[str, int],
    saved: int,
    folder: Path,
    *same: str,
    **other: Any,
) -> list[dict[str, Any]]:
    """A run that dies goes on after step `saved` as if it had not; the rows of one that goes on on another layout."""
    killed = replace(settings, metrics_file=folder / "killed.jsonl", checkpoint_dir=folder / "checkpoints")
    with pytest.raises(processes.RankFailed):
        processes.run(4, run, killed, dies)
    shutil.copytree(folder / "checkpoints", folder / "copy")
    before = len(rows(folder / "killed.jsonl"))
    processes.run(4, run, killed)
    resumed = rows(folder / "killed.jsonl")[before:]
    assert resumed[0]["step"] == saved + 1
    same = ("step", "loss", "gradient_norm", "digest", "imbalance", "delay_mean", *same)
    assert [[row[key] for key in same] for row in resumed] == [[row[key] for key in same] for row in whole[saved:]]
    elsewhere = replace(settings, **other, metrics_file=folder / "other.jsonl", checkpoint_dir=folder / "copy")
    processes.run(4, run, elsewhere)
    moved = rows(folder / "other.jsonl")
    assert [row["loss"] for row in moved] == pytest.approx([row["loss"] for row in whole[saved:]], rel=1e-4)
    for ledger in (folder / "checkpoints" / "ledger", folder / "copy" / "ledger"):
        proof = audit(ledger)
        assert (proof.findings, proof.num_steps) == ((), 6)
    return moved


@pytest.mark.long
@pytest.mark.parametrize("killed_in", ["clip_gradients", "checksums"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path: Path, killed_in: str, whole_run: Any) -> None:
    """On the same layout bit for bit; on another one with the same documents, and the same losses up to rounding.

    It dies in the middle of a step, or while a checkpoint is written, all but its manifest: then that one does not
    count.
    """
    settings, whole = whole_run
    assert whole[-1]["delay_max"] >= 1
    assert any(row["pending_tokens"] > 0 for row in whole)
    if killed_in == "checksums":
        # The second checkpoint is that of step 4.
        call, saved = 2, 2
    else:
        call = random.choice([3, 4, 5])
        saved = (call - 1) // 2 * 2
    print(f"killed in call {call} of {killed_in}")
    moved = check_going_on(settings, whole, (killed_in, call), saved, tmp_path, cp=1)  # dp 2 x cp 2 becomes dp 4
    assert [row["digest"] for row in moved] == [row["digest"] for row in whole[saved:]]


def learning(rank: int, settings: example.Settings) -> list[tuple[int, str]]:
    """A run that looks at its timings; what each look said on this rank."""
    looks: list[tuple[int, str]] = []
    look = example.CostTracker.step

    def noted(tracker: Any, step: Any) -> Any:
        update = look(tracker, step)
        if update is not None:
            cost_model = "" if update.fit is None else update.fit.cost_model.to_json()
            looks.append((update.step, cost_model))
        return update

    forward = example.LlamaStage.forward

    def slow(stage: llama.LlamaStage, x: torch.Tensor, **inputs: Any) -> torch.Tensor:
        time.sleep(1e-3 * len(x))  # so small a model takes as long for any documents, beside what else a machine does
        return forward(stage, x, **inputs)

    example.CostTracker.step, example.LlamaStage.forward = noted, slow
    example.train(settings)
    return looks


def test_a_run_learns_what_its_documents_cost_on_all_ranks_alike(tmp_path: Path) -> None:
    """Two stages, two replicas: times of a micro-batch come from both of its ranks, and all plan by the same costs."""
    settings = replace(
        SETTINGS,
        corpus=corpus(tmp_path / "corpus"),
        pattern="*.txt",
        pp=2,
        workers=1,
        learn_costs=3,
        metrics_file=tmp_path / "log.jsonl",
        checkpoint_dir=tmp_path / "checkpoints",
    )
    looks = processes.run(4, learning, settings)
    assert all(rank == looks[0] for rank in looks), "ranks differ"
    assert [step for step, _ in looks[0]] == [3, 6]
    # Times of a machine that stood still now and then may be too noisy to fit, once.
    assert any(cost_model for _, cost_model in looks[0]), "no fit"
    assert [row["step"] for row in rows(tmp_path / "log.jsonl")] == list(range(1, 7))
    proof = audit(tmp_path / "checkpoints" / "ledger")
    assert (proof.findings, proof.num_steps) == ((), 6)
