"""The example trainer as a user runs it: any layout learns what one process learns, and a run goes on after its end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
TRAIN = Path(__file__).parents[1] / "examples" / "train.py"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hundred files with a long tail."""
    folder, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    for number, length in enumerate(np.exp(rng.normal(3.5, 1.0, 200)).astype(int).clip(1, 255)):
        (folder / f"{number:03d}.py").write_bytes(rng.integers(97, 123, length).astype(np.uint8).tobytes())
    return folder


def train(folder: Path, corpus: Path, *options: str, processes: int = 1) -> list[dict[str, float]]:
    """Runs the example and returns what it logged of each step."""
    log = folder / "log.jsonl"
    log.unlink(missing_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    sizes = ["--context", "128", "--micro-batches", "4", "--corpus", str(corpus), "--metrics-file", str(log)]
    command = [sys.executable, *(launcher if processes > 1 else []), str(TRAIN), *sizes, *options]
    subprocess.run(command, check=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_the_example_learns_the_same_on_two_ranks_and_goes_on_on_other_ones(tmp_path: Path, corpus: Path) -> None:
    alone = train(tmp_path, corpus, "--steps", "4")
    save = ("--checkpoint-dir", str(tmp_path / "run"), "--checkpoint-every", "2")
    pipeline = train(tmp_path, corpus, "--pp", "2", "--steps", "4", *save, processes=2)
    (tmp_path / "run" / "step-00000004").rename(tmp_path / "run" / "unfinished")
    context = train(tmp_path, corpus, "--cp", "2", "--steps", "4", *save, processes=2)
    assert [row["step"] for row in context] == [3, 4]
    assert max(row["imbalance"] for row in alone) > 1
    for expected, *found in zip(alone[2:], pipeline[2:], context, strict=True):
        for row in found:
            np.testing.assert_allclose(row.pop("loss"), expected["loss"], rtol=1e-4)
            assert row == {name: value for name, value in expected.items() if name != "loss"}


@pytest.mark.long
def test_a_tied_weight_learns_the_same_on_two_stages(tmp_path: Path, corpus: Path) -> None:
    alone = train(tmp_path, corpus, "--tied", "--steps", "3")
    stages = train(tmp_path, corpus, "--tied", "--pp", "2", "--steps", "3", processes=2)
    np.testing.assert_allclose([row["loss"] for row in stages], [row["loss"] for row in alone], rtol=1e-4)


def test_grpo_learns_the_same_with_and_without_shared_prompts(tmp_path: Path) -> None:
    """On two ranks, where groups of 4 and 8 are parted otherwise when each completion has its own prompt."""
    logs = {}
    sizes = ["--groups", "4", "8", "--prompt", "64", "--completion", "32", "--steps", "2", "--max-tokens", "512"]
    for flags in ((), ("--no-sharing",)):
        log = tmp_path / "log.jsonl"
        log.unlink(missing_ok=True)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*launcher, str(TRAIN.with_name("grpo.py")), *sizes, *flags, "--metrics-file", str(log)]
        subprocess.run(command, check=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
        logs[flags] = [json.loads(line) for line in log.read_text().splitlines()]
    shared, apart = logs.values()
    assert len(shared) == 4
    for one, other in zip(shared, apart, strict=True):
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-4, atol=1e-6)
        assert one["raw_tokens"] == other["raw_tokens"] == other["unique_tokens"] > 2 * one["unique_tokens"]
