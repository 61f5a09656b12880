"""What runs on a GPU, on the CPU: a kernel that is wrong is seen, and what was done is not done again."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wlb
from studies.gpu import __main__ as main
from studies.gpu import items, page, parity, step, training, transports
from tests.torch import processes as forked
from wlb.torch.attention import kernels

CPU = torch.device("cpu")
torch.set_num_threads(1)


@pytest.mark.parametrize("mask", parity.MASKS)
@pytest.mark.parametrize("cp_size", [1, 3, 8])
def test_the_reference_kernel_is_right_rank_by_rank(mask: str, cp_size: int) -> None:
    problem = parity.Problem("GQA", 64, mask, (90, 1, 37, 1, 130, 2), CPU)
    assert parity.one(kernels.ReferenceKernel, problem, cp_size)["ok"]


@pytest.mark.parametrize("scores", parity.SCORES)
def test_caps_sinks_and_narrow_values_are_right_rank_by_rank(scores: str) -> None:
    problem = parity.Problem("GQA", parity.SCORES[scores][0], "window 37", (90, 1, 37, 1, 130, 2), CPU, scores)
    for kernel in (kernels.ReferenceKernel, kernels.CpuFlashKernel):
        if parity.runs(kernel, problem):
            assert parity.one(kernel, problem, 3)["ok"]


class Wrong(kernels.ReferenceKernel):
    """Its gradients of values are 5 % too long."""

    def backward(self, *arguments: Any) -> Any:
        dq, d_keys = super().backward(*arguments)
        d_keys[:, 1] *= 1.05
        return dq, d_keys


def test_a_wrong_gradient_is_seen() -> None:
    problem = parity.Problem("MHA", 64, "causal", (90, 1, 37), CPU)
    found = parity.one(Wrong, problem, 2)
    assert not found["ok"]
    assert found["dv"] > parity.TOLERANCES["dv"] >= found["dk"]


def test_what_is_not_a_number_is_not_ok() -> None:
    right = [torch.ones(2) for _ in parity.NAMES]
    got = [torch.tensor([1.0, torch.nan]), *right[1:]]
    assert not parity.compared(got, right)["ok"]


def of_ranks(rank: int) -> list[bool]:
    transports.collectives_through_host()
    problem = parity.Problem("GQA", 64, "window 37", (90, 1, 37, 1), CPU)
    return [transports.of_rank(problem, transport)["ok"] for transport in transports.TRANSPORTS]


def test_transports_through_the_host() -> None:
    assert forked.run(2, of_ranks) == [[True] * len(transports.TRANSPORTS)] * 2


def test_items_are_done_once_and_errors_do_not_stop_the_others(tmp_path: Path) -> None:
    path, identity = tmp_path / "piece.jsonl", {"device": "CPU"}
    ran: list[str] = []

    def item(name: str, *, fails: bool = False) -> Any:
        def work() -> dict[str, Any]:
            ran.append(name)
            if fails:
                raise RuntimeError("no kernel")
            return {"ok": True}

        return name, work

    todo = [item("a"), item("b", fails=True), item("c")]
    with items.Done(path, identity) as done:
        assert done.all(todo[:2], items.Budget(60), lambda name: None)
    path.write_text(path.read_text() + '{"item": "c", "ok"')  # a run that was killed while it wrote
    with items.Done(path, identity) as done:
        assert not done.all(todo, items.Budget(0), lambda name: None)
        assert done.all(todo, items.Budget(60), lambda name: None)
        assert done.rows["b"]["error"] == "RuntimeError: no kernel"
    assert ran == ["a", "b", "c"]
    assert [json.loads(line).get("item") for line in path.read_text().splitlines()] == [None, "a", "b", "c"]
    with pytest.raises(SystemExit, match="name another folder"):
        items.Done(path, {"device": "another"})


def test_a_device_that_failed_ends_the_run(tmp_path: Path) -> None:
    def failing() -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with items.Done(tmp_path / "piece.jsonl", {}) as done, pytest.raises(SystemExit, match="goes on after it"):
        done.all([("a", failing)], items.Budget(60), lambda name: None)
    with items.Done(tmp_path / "piece.jsonl", {}) as done:
        assert "illegal" in done.rows["a"]["error"]


def test_plans_train_every_document_of_their_steps() -> None:
    lengths = np.random.default_rng(0).lognormal(8, 1.5, 40_000).astype(np.int64).clip(1, 131072)
    trained = step.Trained(CPU)
    made = step.plans(lengths, trained.context, step.assumed_cost(trained))
    totals = {
        method: sum(sum(part.lengths) / part.cp_size for batches in steps for parts in batches for part in parts)
        for method, steps in made.items()
    }
    assert totals["original"] > 0.9 * step.STEPS * step.RANKS * trained.context
    assert totals["original"] == totals["fixed_length"] == totals["dynamic_cp"]
    for steps in made.values():
        for parts in (parts for batches in steps for parts in batches):
            assert len(parts) <= step.RANKS
            assert all(part.first_rank + part.cp_size <= step.RANKS for part in parts)
    longest = max(sum(part.lengths) for batches in made["original"] for parts in batches for part in parts)
    assert longest <= trained.context


def test_ranks_of_a_group_wait_for_each_other() -> None:
    def row(batch: int, first_rank: int, cp_size: int, rank: int, seconds: float) -> dict[str, Any]:
        name = f"dynamic_cp, step 0, {batch}, rank {first_rank + rank}"
        return {"item": name, "first_rank": first_rank, "cp_size": cp_size, "seconds": seconds}

    first = [row(0, 0, 2, 0, 3.0), row(0, 0, 2, 1, 1.0), row(0, 2, 1, 0, 5.0), row(0, 3, 1, 0, 1.0)]
    assert step.step_seconds(first) == 5.0
    # Rank 1 waits for rank 0 in the first micro-batch; all ranks wait for rank 2 in the second.
    assert step.step_seconds([*first, row(1, 0, 1, 0, 4.0), row(1, 1, 1, 0, 1.0)]) == 7.0
    assert step.step_seconds([*first, *(row(1, 0, 4, rank, 1.0 + rank) for rank in range(4))]) == 9.0


def test_times_that_are_as_a_cost_says_have_no_error() -> None:
    """A constant of every micro-batch is part of it: 0.2 s of these."""
    rng = np.random.default_rng(0)
    batches = [rng.integers(1, 2000, rng.integers(1, 40)).tolist() for _ in range(60)]
    cost = wlb.CostModel(attention=1e-8, linear=1e-6)
    rows = []
    for index, lengths in enumerate(batches):
        seconds = 0.2 + float(cost.cost(lengths).sum())
        name = f"adaptive, step 0, {index}, rank 0"
        row = {"item": name, "lengths": lengths, "cp_size": 1, "first_rank": 0, "rank": 0, "seconds": seconds}
        rows.append({**row, "all_seconds": [seconds]})
    assert "| `CostModel.fit` on the other half | 30 | 0.0% | 0.0% |" in step.summary(rows, None)


def test_training_is_run_and_written_down(tmp_path: Path) -> None:
    """By the command, in a process of its own: a trainer leaves its state in the process that it runs in."""
    command = [sys.executable, "-m", "studies.gpu", "--cpu", "--out", str(tmp_path), "training"]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], capture_output=True, timeout=500)
    _, *rows = map(json.loads, (tmp_path / "training.jsonl").read_text().splitlines())
    assert len(rows) == len(list(training.items(CPU)))
    assert all(row["ok"] for row in rows)


def test_an_empty_block_is_one_of_a_segment_shorter_than_the_longest() -> None:
    model = wlb.KernelModel.analytic("h100", num_heads=2, head_dim=128)
    shard = wlb.shard([1024, 128], cp_size=1)
    assert page.empty_blocks(shard, 0, model) == 2 * (1024 // 128 - 1)
    assert page.empty_blocks(wlb.shard([512, 512], cp_size=1), 0, model) == 0


def test_the_page_is_what_its_records_say(tmp_path: Path) -> None:
    records = Path(__file__).parents[2] / "benches" / "records" / "gpu"
    written = Path(__file__).parents[2] / "docs" / "results" / "gpu.md"
    assert page.text(records, main.SHIPPED, records / "step-profile.json") == written.read_text()
    (tmp_path / "step.jsonl").write_text((records / "step.jsonl").read_text().replace('"seconds": 1', '"seconds": 3'))
    assert page.text(tmp_path, None, None) != page.text(records, None, None)
