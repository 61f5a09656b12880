"""Transfers between pipeline stages: beside what stages compute, or waited for as torch's 1F1B does."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import wlb
import wlb_tools
from tests.tools.simulation.test_simulate import MODEL, documents, possible, scenario
from wlb_tools.simulation import simulate

Floats = NDArray[np.float64]
Message = tuple[str, int, int]  # "f" or "b" for forward or backward, micro-batch, stage that sends it


def one_forward_one_backward(stage: int, stages: int, count: int) -> list[tuple[str, Any]]:
    """What torch's `Schedule1F1B` does on a stage, one thing after the other, each of which it waits for.

    ("run", ("f", j)) computes; ("send", messages) goes on at once; ("wait", messages) goes on when they were received,
    whether they are its own or it has just asked for them.
    """
    first, last = stage == 0, stage == stages - 1

    def to(kind: str, j: int) -> list[Message]:
        return [] if (last if kind == "f" else first) else [(kind, j, stage)]

    def of(kind: str, j: int) -> list[Message]:
        return [] if (first if kind == "f" else last) else [(kind, j, stage + (-1 if kind == "f" else 1))]

    done: list[tuple[str, Any]] = []
    warm_up, sent = min(count, stages - stage), []
    for j in range(warm_up):
        done += [("wait", of("f", j)), ("run", ("f", j)), ("wait", sent)]
        sent = to("f", j)
        if j < warm_up - 1:
            done.append(("send", sent))
    for j in range(count):
        if j < count - warm_up + 1:  # what was computed goes out with the request for what comes in
            done += [("send", sent), ("wait", sent + of("b", j)), ("run", ("b", j))]
            sent = to("b", j)
            if warm_up + j < count:
                done += [("send", sent), ("wait", sent + of("f", warm_up + j)), ("run", ("f", warm_up + j))]
                sent = to("f", warm_up + j)
            else:
                done.append(("send", sent))
        else:
            done += [("wait", of("b", j)), ("run", ("b", j)), ("wait", sent), ("send", to("b", j))]
            sent = to("b", j)
    return [*done, ("wait", sent)]


def as_torch_does(forward: Floats, backward: Floats, transfer: Floats) -> float:
    """Seconds of a step; a message takes its time once it is sent and asked for.

    Args:
        forward: [micro-batches, stages].
        backward: the same.
        transfer: [micro-batches].
    """
    count, stages = forward.shape
    programs = [one_forward_one_backward(stage, stages, count) for stage in range(stages)]
    at, clocks = [0] * stages, [0.0] * stages
    sent: dict[Message, float] = {}
    asked: dict[Message, float] = {}
    while any(at[stage] < len(programs[stage]) for stage in range(stages)):
        before = list(at), len(asked)
        for stage, program in enumerate(programs):
            while at[stage] < len(program):
                what, of = program[at[stage]]
                if what == "run":
                    clocks[stage] += float((forward if of[0] == "f" else backward)[of[1], stage])
                elif what == "send":
                    sent |= dict.fromkeys(of, clocks[stage])
                else:
                    for message in of:
                        if message[2] != stage:
                            asked.setdefault(message, clocks[stage])
                    if not all(message in sent and message in asked for message in of):
                        break
                    arrived = [max(sent[message], asked[message]) + transfer[message[1]] for message in of]
                    clocks[stage] = max(clocks[stage], *map(float, arrived), 0.0)
                at[stage] += 1
        assert (at, len(asked)) != before, "a deadlock"
    return max(clocks)


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("count", [3, 8])
def test_without_overlap_a_step_takes_what_the_schedule_of_torch_takes(pp: int, count: int) -> None:
    slow = wlb_tools.Link(latency=1e-3, bandwidth=1e9)  # transfers that are worth seeing
    hardware = dataclasses.replace(wlb_tools.Hardware.preset("h100"), intra_node=slow, inter_node=slow)
    layout = wlb_tools.ParallelLayout(pp=pp)
    case = dataclasses.replace(scenario(layout, num_micro_batches=count), hardware=hardware)
    # Micro-batches of equally many tokens, and unequal work.
    found = {
        share: simulate(documents(), dataclasses.replace(case, p2p_overlap=share), variants=("fixed_length",)).baseline
        for share in (0.0, 1.0)
    }
    hidden = found[1.0]
    gradients = wlb_tools.data_parallel_seconds(MODEL, layout, hardware).max()
    for step, seconds in enumerate(found[0.0].seconds):
        costs = hidden.costs[step, 0]
        taken = as_torch_does(costs[..., 0], costs[..., 1:].sum(axis=-1), hidden.p2p[step, 0])
        assert seconds == pytest.approx(taken + gradients, rel=1e-9)
    assert found[0.0].total_seconds > hidden.total_seconds


@pytest.mark.parametrize(
    "layout", [wlb_tools.ParallelLayout(dp=2, pp=2, cp=2), wlb_tools.ParallelLayout(pp=2, virtual_stages=2)]
)
def test_every_method_waits_and_its_time_is_attributed(layout: wlb_tools.ParallelLayout) -> None:
    hidden, waits = (scenario(layout, num_micro_batches=8, p2p_overlap=share) for share in (1.0, 0.0))
    names = possible(waits)
    before, after = (simulate(documents(), case, variants=names).outcomes for case in (hidden, waits))
    for name in names:
        outcome = after[name]
        assert sum(outcome.attribution.values()) == pytest.approx(outcome.seconds)
        assert min(part.min() for part in outcome.attribution.values()) >= -1e-12
        if outcome.summary()["digest"] == before[name].summary()["digest"]:
            assert outcome.total_seconds > before[name].total_seconds
            compute = (of.attribution["compute"].sum() for of in (outcome, before[name]))
            assert next(compute) == pytest.approx(next(compute))


def test_schedules_that_receive_ahead_hide_their_transfers() -> None:
    layout = wlb_tools.ParallelLayout(pp=2, virtual_stages=2)
    with pytest.raises(wlb.WlbError, match="received ahead") as caught:
        scenario(layout, schedule="zbv", p2p_overlap=0.5)
    assert caught.value.argument == "p2p_overlap"
    assert scenario(layout, schedule="zbv").p2p_overlap == 1
