"""Checkpoints of the example trainer: damage of any kind is seen by all ranks, and costs at most one checkpoint."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import wlb
from tests.torch import processes
from tests.trainers.test_train import CONFIG, SETTINGS, checkpoints, example, rows, run
from wlb.torch.data import Step, collate
from wlb.torch.groups import build_mesh
from wlb_tools.audit import audit

STATE: dict[str, Any] = {"weights": torch.arange(500.0), "data": "where the next step begins", "done": 3}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextlib.contextmanager
def changed(path: Path, content: bytes | None) -> Iterator[None]:
    """A file with other content, or without the file, until the end of the context; the same for all ranks."""
    before = path.read_bytes()
    dist.barrier()
    if dist.get_rank() == 0:
        path.unlink() if content is None else path.write_bytes(content)
    dist.barrier()
    yield
    dist.barrier()
    if dist.get_rank() == 0:
        path.write_bytes(before)
    dist.barrier()


def flipped(content: bytes, bit: int) -> bytes:
    result = bytearray(content)
    result[bit // 8] ^= 1 << bit % 8
    return bytes(result)


def damage_everywhere(rank: int, folder: Path) -> tuple[list[str], list[str]]:
    """Damages one file after the other, in many ways; gives which were not seen, and the sentences of some."""
    checkpoints.save(folder, 3, STATE, keep=3)
    checkpoint = checkpoints.newest(folder)
    assert checkpoint is not None
    unseen, sentences = [], []
    for name in names(checkpoint):
        content = (checkpoint / name).read_bytes()
        bits = np.random.default_rng(len(content)).integers(0, 8 * len(content), 20).tolist()
        for bit in range(0, 8 * len(content), 13) if name == checkpoints.MANIFEST else bits:
            with changed(checkpoint / name, flipped(content, bit)):
                if not checkpoints.verify(checkpoint):
                    unseen.append(f"bit {bit} of {name}")
        for what, other in {"missing": None, "empty": b"", "short": content[:-1], "long": content + b"\0"}.items():
            with changed(checkpoint / name, other):
                problems = checkpoints.verify(checkpoint)
                if (name not in problems and name != checkpoints.MANIFEST) or not problems:
                    unseen.append(f"{name} {what}")
                sentences.append(checkpoints.sentence(problems))
    assert checkpoints.verify(checkpoint) == {}, "it is whole again"
    return unseen, sentences


def test_any_damage_is_seen_by_all_ranks(tmp_path: Path) -> None:
    """Also in the manifest: every thirteenth of its bits, so that all eight of a byte have their turn."""
    results = processes.run(2, damage_everywhere, tmp_path)
    assert results[0] == results[1]
    unseen, sentences = results[0]
    assert unseen == []
    assert "MANIFEST is missing" in sentences
    assert ".metadata is missing" in sentences
    assert "__1_0.distcp does not have its checksum" in sentences


def save_five(rank: int, folder: Path) -> None:
    (folder / "step-00000009.partial").mkdir(exist_ok=True)
    (folder / "notes").mkdir(exist_ok=True)
    for done in range(1, 6):
        checkpoints.save(folder, done, STATE, keep=2)


def damage(checkpoint: Path) -> None:
    """Flips the last bit of the file of the first rank."""
    path = checkpoint / "__0_0.distcp"
    path.write_bytes(flipped(path.read_bytes(), 8 * path.stat().st_size - 1))


def newest(rank: int, folder: Path) -> Path | None:
    return checkpoints.newest(folder)


def test_the_newest_that_is_whole_is_taken(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    processes.run(2, save_five, tmp_path)
    assert names(tmp_path) == ["notes", "step-00000004", "step-00000005"]
    (tmp_path / "step-00000006.partial").mkdir()
    damage(tmp_path / "step-00000005")
    assert processes.run(2, newest, tmp_path) == [tmp_path / "step-00000004"] * 2
    said = capfd.readouterr().err
    assert said.count("step-00000005 is damaged and not loaded: __0_0.distcp does not have its checksum") == 1
    assert "step-00000005.damaged" in names(tmp_path)

    damage(tmp_path / "step-00000004")
    for _ in range(2):
        with pytest.raises(
            processes.RankFailed, match=r"every checkpoint in .* \(step-00000004: __0_0.distcp does not"
        ):
            processes.run(2, newest, tmp_path)
    empty = tmp_path / "empty"
    assert processes.run(2, newest, empty) == [None, None]


def save_in_vain(rank: int, folder: Path, breaks: Callable[[int, Path], None]) -> tuple[str, list[str]]:
    """One checkpoint, and one that something breaks; what was raised, and the folder afterwards."""
    checkpoints.save(folder, 1, STATE, keep=1)
    breaks(rank, folder)
    try:
        checkpoints.save(folder, 2, STATE, keep=1)
    except (OSError, CheckpointException) as problem:
        raised = str(problem)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    left = [path.name for path in checkpoints.checkpoints(folder)]
    dist.barrier()
    assert checkpoints.newest(folder) == folder / "step-00000001"
    return raised, left


def no_space(rank: int, folder: Path) -> None:
    """On one rank, no file gets longer than a kilobyte."""
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


def no_name(rank: int, folder: Path) -> None:
    """Something lies where the checkpoint wants its name."""
    (folder / "step-00000002").touch()


@pytest.mark.parametrize("breaks", [no_space, no_name])
def test_a_save_that_fails_leaves_the_ones_before(tmp_path: Path, breaks: Callable[[int, Path], None]) -> None:
    for raised, left in processes.run(2, save_in_vain, tmp_path, breaks):
        if breaks is no_space:
            assert "File too large" in raised
            assert left == ["step-00000001"]
        else:
            assert "step-00000002" in raised


def test_a_damaged_checkpoint_costs_no_more_than_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The trainer says which one it is, goes on from the one before, and learns the same."""
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text("to be or not to be" * (1 + number % 5))
    small = {"model": replace(CONFIG, num_layers=2), "corpus": tmp_path, "pattern": "*.txt", "queues": 0}
    settings = replace(SETTINGS, **small, steps=5, checkpoint_every=2, checkpoint_dir=tmp_path / "run")
    processes.run(2, run, replace(settings, metrics_file=tmp_path / "log.jsonl"))
    whole = rows(tmp_path / "log.jsonl")
    assert names(tmp_path / "run") == ["ledger", "step-00000002", "step-00000004", "step-00000005"]
    damage(tmp_path / "run" / "step-00000005")
    damage(tmp_path / "run" / "step-00000004")
    capfd.readouterr()
    processes.run(2, run, replace(settings, metrics_file=tmp_path / "again.jsonl"))
    said = capfd.readouterr()
    assert "step-00000005 is damaged" in said.err
    assert "step-00000004 is damaged" in said.err
    assert f"resumed after step 2 from {tmp_path / 'run' / 'step-00000002'}" in said.out
    same = ("step", "loss", "gradient_norm", "digest")
    again = rows(tmp_path / "again.jsonl")
    assert [[row[key] for key in same] for row in again] == [[row[key] for key in same] for row in whole[2:]]
    proof = audit(tmp_path / "run" / "ledger")
    assert (proof.findings, proof.num_steps, proof.superseded) == ((), 5, 3)


def step_without_labels(rank: int) -> tuple[bool, bool]:
    """Documents of one token predict nothing; whether the step says so, and whether anything was updated."""
    mesh = build_mesh(pp=1, dp=2, cp=1, tp=1, device_type="cpu")
    settings = replace(SETTINGS, model=replace(CONFIG, num_layers=2))
    stages, optimizers = example.build_model(settings, settings.model, mesh, torch.device("cpu"))
    before = [np.array(parameter.full_tensor().detach()) for parameter in stages[0].submod.parameters()]  # type: ignore[operator]
    packing = wlb.pack([2, 2], num_micro_batches=2, max_tokens=2, cost_model=wlb.CostModel(attention=1.0, linear=1.0))
    step = Step(0, 0, packing, np.array([rank]), [collate([[7], [8]])])
    learnt = example.train_step(settings, step, stages, optimizers, lambda batch: None, mesh, torch.device("cpu"))
    after = [np.array(parameter.full_tensor().detach()) for parameter in stages[0].submod.parameters()]  # type: ignore[operator]
    same = all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    return learnt is None, same and not optimizers[0].state


def test_a_step_without_labels_updates_nothing() -> None:
    assert processes.run(2, step_without_labels) == [(True, True)] * 2
