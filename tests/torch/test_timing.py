"""What a step timer measures: every part of a micro-batch once, in any loop, and at next to no cost."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

import wlb
import wlb.torch as wt
from tests.torch import processes


class Clock:
    """What the timer reads: it passes only where a test says so, in whole seconds, whatever else a machine does."""

    now = 0.0

    @classmethod
    def passes(cls, seconds: int) -> None:
        cls.now += seconds


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wlb.torch.timing.time", SimpleNamespace(perf_counter=lambda: Clock.now))


class Work(torch.autograd.Function):
    """Takes as long as it is told, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: int, backward: int) -> Tensor:
        Clock.passes(forward)
        ctx.backward_seconds = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        Clock.passes(ctx.backward_seconds)
        return gradients[0], None, None


class Model(nn.Module):
    """`seconds` forward, twice that backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor, seconds: int = 0) -> dict[str, Tensor]:
        return {"logits": Work.apply(tokens * self.weight, seconds, 2 * seconds)}  # type: ignore[no-untyped-call]


def test_a_loop_of_ones_own() -> None:
    timer, model = wt.StepTimer(), Model()
    for _ in range(2):
        for index, seconds in enumerate([1, 3]):
            with timer.micro_batch(index):
                loss = model(torch.ones(3), seconds)["logits"].sum()
            with timer.micro_batch(index):
                loss.backward()
        Clock.passes(10)  # an optimizer, say
        timer.end_step()
    first, second = timer.read()
    assert (first.number, second.number) == (0, 1)
    for step in (first, second):
        assert step.seconds.tolist() == [3, 9]
    assert timer.read() == []


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_loop_with_hooks_only(checkpointed: bool) -> None:
    timer, model = wt.StepTimer(), Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    remove = timer.attach(model, optimizer)
    call: Any = model
    if checkpointed:
        call = partial(torch.utils.checkpoint.checkpoint, model, use_reentrant=False)
    for _ in range(2):
        for seconds in (1, 3):
            loss = call(torch.ones(3), seconds)["logits"].sum()
            Clock.passes(10)  # neither the model's forward nor its backward
            loss.backward()
        optimizer.step()
    with torch.no_grad():
        model(torch.ones(3), 10)  # an evaluation is no micro-batch
    # What is recomputed is no forward of its own. (torch recomputes only up to what it needs: not the work.)
    assert [step.seconds.tolist() for step in timer.read()] == [[3, 9]] * 2
    remove()
    model(torch.ones(3))
    timer.end_step()
    assert timer.read()[0].seconds.size == 0


def test_a_part_that_fails_is_no_time() -> None:
    timer = wt.StepTimer("cpu")
    with pytest.raises(MemoryError), timer.micro_batch(0):  # noqa: PT012
        Clock.passes(1)
        raise MemoryError
    timer.end_step()
    with timer.micro_batch(0):
        pass
    timer.end_step()
    failed, whole = (step.seconds.tolist() for step in timer.read())
    assert np.isnan(failed).all()
    assert whole == [0]


def test_a_step_is_not_ended_twice() -> None:
    timer, model = wt.StepTimer(), Model()
    remove = timer.attach(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(wlb.WlbError, match="ended by the optimizer already"):
        timer.end_step(lengths=[[3]])
    remove()
    timer.end_step(lengths=[[3]])


def test_a_forward_that_fails_leaves_nothing_open() -> None:
    timer, model = wt.StepTimer(), Model()
    timer.attach(model)
    with pytest.raises(TypeError):
        model("no tensor")
    model(torch.ones(3), 1)["logits"].sum().backward()
    timer.end_step()
    assert timer.read()[0].seconds.tolist() == [0, 3]


def _stages(rank: int, schedule: str) -> list[list[float]]:
    torch.manual_seed(0)
    indices = wt.stages_of_rank(rank, pp_size=2, num_stages=4 if schedule != "1f1b" else 2, schedule=schedule)
    count = 4 if schedule != "1f1b" else 2

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor, seconds: int) -> Tensor:
            return Work.apply(x * self.weight, seconds, 2 * seconds)  # type: ignore[no-untyped-call]

    stages = [wt.VarlenPipelineStage(Stage(), index, count, "cpu", hidden_size=1) for index in indices]
    timer = wt.StepTimer()
    timer.attach_stages(stages)
    batches = [
        wt.PipelineMicroBatch(tokens=3, args=(torch.ones(3, 1),), kwargs={"seconds": seconds}, target=None)
        for seconds in (1, 3)
    ]

    def loss(output: Tensor, _: Any) -> Tensor:
        Clock.passes(2)
        return output.sum()

    wait = schedules._wait_batch_p2p

    def wait_long(work: Any) -> None:
        wait(work)
        Clock.passes(1000)

    schedules._wait_batch_p2p = wait_long
    for _ in range(2):
        wt.pipeline_step(stages, batches, schedule=schedule, loss_fn=loss)
        timer.end_step()
    assert Clock.now > 1000, "nobody waited"
    return [step.seconds.tolist() for step in timer.read()]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
def test_stages_of_a_pipeline_whose_passes_alternate(schedule: str) -> None:
    """Waiting for the other rank is no time of a micro-batch; the loss is, on the last stage."""
    each = 1 if schedule == "1f1b" else 2
    for rank, steps in enumerate(processes.run(2, _stages, schedule)):
        assert steps == [[each * 3 * work + 2 * rank for work in (1, 3)]] * 2


def test_a_log_holds_what_was_measured(tmp_path: Path) -> None:
    timer, log = wt.StepTimer(), tmp_path / "timings.jsonl"
    for number in range(2):
        with timer.micro_batch(1):
            Clock.passes(1)
        timer.end_step(lengths=[[5, 6], [7 + number]])
    assert timer.write(log) == 2
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(row["step"], row["micro_batch"], row["lengths"]) for row in rows] == [(0, 1, [7]), (1, 1, [8])]
    assert [row["seconds"] for row in rows] == [1, 1]
    with timer.micro_batch(0):
        pass
    timer.end_step()
    with pytest.raises(wlb.WlbError, match="ended without lengths"):
        timer.write(log)
    with timer.micro_batch(2):
        pass
    with pytest.raises(wlb.WlbError, match="has 2 micro-batches, and micro-batch 2 was timed"):
        timer.end_step(lengths=[[1], [1]])


def test_it_costs_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step of 50 ms and 8 micro-batches a thousandth is 6 us for each; the bench measures it in a real one."""
    monkeypatch.undo()
    timer = wt.StepTimer()
    best, until = np.inf, time.monotonic() + 20
    while best >= 6e-6 and time.monotonic() < until:  # any hundred that a busy machine did not interrupt
        started = time.perf_counter()
        for index in range(100):
            with timer.micro_batch(index):
                pass
        best = min(best, (time.perf_counter() - started) / 100)
        timer.end_step()
    assert best < 6e-6, best
