"""What runs on a GPU, on the CPU: a kernel that is wrong is seen, and what was done is not done again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wlb
from tests.torch import processes as forked
from wlb.torch.attention import kernels

items, parity, step, transports = (
    pytest.importorskip(f"studies.gpu.{name}") for name in ("items", "parity", "step", "transports")
)
CPU = torch.device("cpu")
torch.set_num_threads(1)


@pytest.mark.parametrize("mask", parity.MASKS)
@pytest.mark.parametrize("cp_size", [1, 3, 8])
def test_the_reference_kernel_is_right_rank_by_rank(mask: str, cp_size: int) -> None:
    problem = parity.Problem("GQA", 64, mask, (90, 1, 37, 1, 130, 2), CPU)
    assert parity.one(kernels.ReferenceKernel, problem, cp_size)["ok"]


class Wrong(kernels.ReferenceKernel):
    """Its gradients of values are 5 % too long."""

    def backward(self, *arguments: Any) -> Any:
        dq, dk, dv = super().backward(*arguments)
        return dq, dk, 1.05 * dv


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
    lengths = np.random.default_rng(0).lognormal(8, 1.5, 4000).astype(np.int64).clip(1, 131072)
    trained = step.Trained(CPU)
    cost = wlb.CostModel(attention=1.0, linear=1000.0)
    made = step.plans(lengths, trained.context, cost)
    totals = {method: sum(sum(map(sum, batches)) for batches in steps) for method, steps in made.items()}
    assert totals["original"] > 0.9 * step.STEPS * step.RANKS * trained.context
    assert all(len(batches) <= step.RANKS for steps in made.values() for batches in steps)
    assert max(sum(batch) for batches in made["original"] for batch in batches) <= trained.context


def test_times_that_are_as_a_cost_says_have_no_error() -> None:
    """A constant of every micro-batch is part of it: 0.2 s of these."""
    rng = np.random.default_rng(0)
    batches = [rng.integers(1, 2000, rng.integers(1, 40)).tolist() for _ in range(60)]
    cost = wlb.CostModel(attention=1e-8, linear=1e-6)
    rows = [
        {"item": f"adaptive, step 0, {index}", "lengths": lengths, "seconds": 0.2 + float(cost.cost(lengths).sum())}
        for index, lengths in enumerate(batches)
    ]
    assert "error on the others: 0.0% in the median, 0.0% at most" in "\n".join(step.summary(rows, None))
