"""Other costs from a step on: the same plans on every rank, whatever was fetched ahead, and after every resume."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

import wlb
from tests.torch import processes
from wlb.torch.data import BalancedBatchSampler, BalancedStream, Documents, Step, StepLoader, collate
from wlb.torch.data.costs import CostSwitches

RNG = np.random.default_rng(11)
LENGTHS = np.where(RNG.random(160) < 0.85, RNG.integers(1, 20, 160), RNG.integers(30, 64, 160))
DATA = [RNG.integers(0, 40_000, length) for length in LENGTHS]
TOLD = wlb.CostModel(attention=0.0, linear=1.0)
LEARNT = wlb.CostModel(attention=1.0, linear=1.0)


def packer() -> wlb.Packer:
    return wlb.Packer(
        num_micro_batches=4,
        max_tokens=96,
        max_document_tokens=64,
        release="adaptive",
        delay_price=0.05,
        cost_model=TOLD,
    )


def steps(rank: int = 0, size: int = 1, *, workers: int = 0) -> StepLoader[Any]:
    sampler = BalancedBatchSampler(LENGTHS, packer=packer(), dp_rank=rank, dp_size=size, num_epochs=2)
    return StepLoader(DataLoader(Documents(DATA), batch_sampler=sampler, collate_fn=collate, num_workers=workers))  # type: ignore[arg-type]


def stream(rank: int = 0, size: int = 1) -> BalancedStream[Any]:
    group = dist.group.WORLD if dist.is_initialized() else None
    return BalancedStream([DATA[part::4] for part in range(4)], packer=packer(), collate_fn=collate, group=group)


SOURCES: dict[str, Callable[..., Any]] = {
    "steps": steps,
    "workers": functools.partial(steps, workers=2),
    "stream": stream,
}


def every_step(loader: Any) -> Iterator[Step[Any]]:
    """Of both epochs, or of the streams."""
    if isinstance(loader, BalancedStream):
        yield from loader
        loader.close()
        return
    sampler = loader._sampler
    while sampler.epoch < sampler.num_epochs:
        yield from loader


def trained(loader: Any, decide: int | None = None) -> list[tuple[str, Any, bool]]:
    """All steps: the digest of each plan, its state, whether it was made by what was learnt after step `decide`."""
    found = []
    for step in every_step(loader):
        if step.number == decide:
            with loader.cost_switches.held() as begun:
                pass
            loader.cost_switches.switch(begun, LEARNT)
        found.append((step.packing.digest(), step.state, step.packing.costs.tolist() == priced(step, LEARNT)))
    return found


def priced(step: Step[Any], cost_model: wlb.CostModel) -> list[float]:
    return [float(cost_model.cost(part.lengths).sum()) if part.lengths.size else 0.0 for part in step.packing]


@pytest.mark.parametrize("source", SOURCES)
def test_costs_change_at_one_step_and_a_resumed_run_changes_with_it(source: str) -> None:
    make = SOURCES[source]
    without = trained(make())
    found = trained(make(), decide=3)
    changed = [number for number, (_, _, new) in enumerate(found) if new]
    first = changed[0]
    assert 3 < first < len(found) - 3
    assert changed == list(range(first, len(found)))
    assert [row[0] for row in found[:first]] == [row[0] for row in without[:first]]
    assert [row[0] for row in found[first:]] != [row[0] for row in without[first:]]
    # Before step 3 nothing is decided: a run resumed there decides anew.
    for number in [3, first - 1, first, first + 1, len(found) // 2 + 1]:
        loader = make()
        loader.load_state_dict(json.loads(json.dumps(found[number][1])))
        again = trained(loader)
        assert [row[0] for row in again] == [row[0] for row in found[number + 1 :]], number
        tail = [row[1] for row in again if row[1]["step"] > first]
        assert tail == [row[1] for row in found[number + 1 :] if row[1]["step"] > first]
    # The decision is in the states until it has come into effect, and then in the packer's.
    assert [("cost_changes" in row[1]) for row in found] == [3 <= number < first for number in range(len(found))]
    assert found[first][1]["packer"]["first_cost_model"] is not None
    assert found[first - 1][1]["packer"]["first_cost_model"] is None


@pytest.mark.parametrize("source", ["workers", "stream"])
def test_ranks_change_at_the_same_step_and_go_on_on_any_number(source: str) -> None:
    both = processes.run(2, _two_ranks, source)
    assert both[0][0] == both[1][0]
    digests, state, number = both[0]
    loader = SOURCES[source]()
    loader.load_state_dict(state)
    assert [row[0] for row in trained(loader)] == digests[number + 1 :]


def _two_ranks(rank: int, source: str) -> tuple[list[str], dict[str, Any], int]:
    loader = SOURCES[source](rank, 2)
    digests, kept = [], {}
    for step in every_step(loader):
        if step.number == 3:
            time.sleep(0.05 * rank)  # so that one has fetched further than the other
            with loader.cost_switches.held() as begun:
                everyone: list[Any] = [None, None]
                dist.all_gather_object(everyone, begun)
                loader.cost_switches.switch(max(everyone), LEARNT)
        digests.append(step.packing.digest())
        if step.number == 4:
            kept = step.state
    return digests, kept, 4


def test_a_step_that_is_planned_cannot_change() -> None:
    switches = CostSwitches.of_packer(packer())
    switches.begin(0)
    with pytest.raises(wlb.WlbError, match="step = 0: is planned already; the first that is not is step 1") as caught:
        switches.switch(0, LEARNT)
    assert caught.value.value == 0
    switches.switch(2, LEARNT)
    switches.switch(2, LEARNT)
    with pytest.raises(wlb.WlbError, match="step = 2: its costs change to others already"):
        switches.switch(2, TOLD)
    assert switches.latest == LEARNT
    assert switches.begin(1) == TOLD
    assert switches.begin(2) == switches.of(3) == LEARNT


def test_a_sampler_that_is_sent_makes_the_same_plans() -> None:
    found = []
    for columns in (None, 1):
        given = {"cost_model": TOLD} if columns is None else {"cost_columns": columns}
        costs = None if columns is None else LENGTHS.astype(float) ** 2
        of = wlb.Packer(num_micro_batches=4, max_tokens=96, release="fifo", **given)  # type: ignore[arg-type]
        sampler = BalancedBatchSampler(LENGTHS, packer=of, dp_rank=0, dp_size=1, costs=costs)
        sent = pickle.loads(pickle.dumps(sampler))
        assert list(sent) == list(sampler)
        found.append(list(sampler))
        with sent.cost_switches.held():
            pass
    assert found[0] != found[1]


def test_planning_waits_while_ranks_agree() -> None:
    switches = CostSwitches.of_packer(packer())
    switches.begin(0)
    begun = threading.Event()

    def plan() -> None:
        switches.begin(1)
        begun.set()

    with switches.held() as first:
        thread = threading.Thread(target=plan)
        thread.start()
        assert first == 1
        assert not begun.wait(0.1)
        switches.begin(0)  # again: it was planned before
        switches.begin(5, real=False)
    assert begun.wait(10)
    thread.join()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, "which is past"),
        ({"step": "4"}, "which is past"),
        ({"cost_model": {"attention": 1}}, "no change of costs"),
        (None, "no change of costs"),
    ],
)
def test_a_change_that_is_none_is_refused(change: Any, message: str) -> None:
    from wlb._seal import seal

    loader = steps()
    state = next(row for _, row, _ in trained(steps(), decide=3) if "cost_changes" in row)
    damaged = copy.deepcopy(state)
    damaged["cost_changes"] = change if change is None else [damaged["cost_changes"][0] | change]
    if change is None:
        damaged["cost_changes"] = [None]
    before = loader.state_dict()
    with pytest.raises(wlb.WlbError, match=message):
        loader.load_state_dict(seal(damaged))
    with pytest.raises(wlb.WlbError, match="changed after it was saved"):
        loader.load_state_dict(damaged)
    assert loader.state_dict() == before


def test_a_step_that_is_sent_brings_what_was_decided() -> None:
    loader = steps()
    for step in loader:
        with loader.cost_switches.held() as begun:
            loader.cost_switches.switch(begun, LEARNT)
        sent = pickle.loads(pickle.dumps(step))
        assert sent.state == step.state
        assert sent.state["cost_changes"][0]["step"] == begun
        break
