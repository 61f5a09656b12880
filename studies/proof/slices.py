"""Each rank's work, run and timed alone: layouts of more ranks than the machine has processors.

Every part of a micro-batch that a rank computes (its stage's forward, then its backward) runs by itself on one
processor, methods taking turns step by step so that all see the same machine. How the ranks' times make a step is then
for the schedule to say (`wlb_tools.simulation.Outcome.at_measured`); what they would send each other takes what
the link's probe says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from studies.gpu import echo
from studies.proof import Bench
from studies.proof.batches import Part, Text
from studies.trainer.llama import LlamaStage
from wlb.torch.data import PackedBatch
from wlb.torch.loss import token_normalized_loss
from wlb_tools.simulation import Outcome

Floats = NDArray[np.float64]
WARM_UPS = 4


def clock_of(device: torch.device, *, thread: bool) -> Callable[[], float]:
    """Seconds now: of this thread's processor (other programs then count less), or on the wall.

    On a GPU, on the wall once the device is done.
    """
    if device.type == "cuda":

        def synchronized() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter()

        return synchronized
    return time.thread_time if thread else time.perf_counter


class Stages:
    """The stages of a pipeline in one process."""

    def __init__(self, bench: Bench, count: int, device: torch.device, clock: Callable[[], float]) -> None:
        self.stages = [LlamaStage(bench.config, stage=index, num_stages=count) for index in range(count)]
        dtype = torch.float32 if bench.bytes_per_number == 4 else torch.bfloat16
        for stage in self.stages:
            stage.initialize(bench.seed)
            stage.to(device, dtype)
        self._clock = clock

    def run(self, batch: PackedBatch, cp_size: int) -> Floats:
        """float64 [stages, 2]: seconds of forward and backward of one part on every stage; the loss is the last's."""
        seconds = np.zeros((len(self.stages), 2))
        inputs, outputs = [], []
        x = batch.tokens
        options = {
            "position_ids": batch.position_ids,
            "shard": batch.shard,
            "group": echo.group(batch.cp_rank, cp_size),
        }
        for index, stage in enumerate(self.stages):
            x = x.detach()
            if index:
                x.requires_grad_()
            inputs.append(x)
            began = self._clock()
            x = stage(x, **options)
            if index == len(self.stages) - 1:
                x = token_normalized_loss(x, batch.labels, num_valid_tokens=max(1, batch.num_valid_tokens))
            seconds[index, 0] = self._clock() - began
            outputs.append(x)
        gradient = None
        for index in reversed(range(len(self.stages))):
            began = self._clock()
            torch.autograd.backward(outputs[index], gradient)
            seconds[index, 1] = self._clock() - began
            gradient = inputs[index].grad if index else None
        return seconds

    def forget(self) -> None:
        """The gradients, as after a step."""
        for stage in self.stages:
            stage.zero_grad()


@dataclass(frozen=True)
class Measured:
    """Parts of all methods, and others that were run among them in turns."""

    seconds: dict[str, Floats]  # [repeats, parts, stages, 2] of every method: forward and backward
    others: Floats  # [others, repeats, turns] of both passes and all stages together


def measure(
    bench: Bench,
    outcomes: Mapping[str, Outcome],
    extra: Sequence[Part] = (),
    *,
    repeats: int,
    device: torch.device,
    thread_clock: bool,
    tick: Callable[[], None],
) -> Measured:
    """What all parts of all methods take.

    Args:
        bench: the model.
        outcomes: plans, by method, of one layout.
        extra: parts of no method that are run among them, one of them before each method's step.
        repeats: how often everything is run, one time after another.
        device: where.
        thread_clock: whether the processor time of this thread counts, not the wall's.
        tick: called after each part.
    """
    layout = next(iter(outcomes.values())).scenario.layout
    text = Text()
    clock = clock_of(device, thread=thread_clock)
    stages = Stages(bench, layout.num_stages, device, clock)
    parts = {name: list(outcome.parts()) for name, outcome in outcomes.items()}
    seconds = {name: np.zeros((repeats, len(found), layout.num_stages, 2)) for name, found in parts.items()}
    by_step: dict[tuple[int, str], list[int]] = {}
    for name, found in parts.items():
        for index, part in enumerate(found):
            by_step.setdefault((part.step, name), []).append(index)
    steps = sorted(by_step, key=lambda key: key[0])
    # A method's step takes a second or two, one of all methods half a minute: the machine may be another then.
    every = max(1, len(extra))
    count = -(-len(steps) // every)
    others = np.zeros((len(extra), repeats, count))
    with echo.ranks(layout.size("dp_cp")):
        first = outcomes[next(iter(outcomes))]
        for part in parts[next(iter(outcomes))][:WARM_UPS]:
            stages.run(text.batch(Part.of(first, part), device), part.cp_size)
        for repeat in range(repeats):
            for place in range(count * every):
                turn, sort = divmod(place, every)
                for other in extra[sort : sort + 1]:
                    others[sort, repeat, turn] = stages.run(text.batch(other, device), other.cp_size).sum()
                for step, name in steps[place : place + 1]:
                    for index in by_step[step, name]:
                        part = parts[name][index]
                        batch = text.batch(Part.of(outcomes[name], part), device)
                        seconds[name][repeat, index] = stages.run(batch, part.cp_size)
                        tick()
                stages.forget()
    return Measured(seconds, others)


def as_measured(outcome: Outcome, seconds: Floats) -> Outcome:
    """The run with these times of its parts.

    Args:
        outcome: of the simulation.
        seconds: float64[parts, stages, 2], of repetitions that `measure` gives.
    """
    forward, backward = np.moveaxis(seconds, -1, 0)
    # No schedule here splits the backward: where its time stands is all the same.
    return outcome.at_measured(np.stack([forward, backward, np.zeros_like(backward)], axis=-1))


def even(outcome: Outcome, seconds: Floats) -> Outcome:
    """The same work of each step, as if every rank had as much of it in every micro-batch. See `as_measured`."""
    steps = np.array([part.step for part in outcome.parts()])
    totals = np.zeros((steps[-1] + 1, *seconds.shape[1:]))
    np.add.at(totals, steps, seconds)
    means = totals / np.bincount(steps)[:, None, None]
    return as_measured(outcome, means[steps])


def busy(outcome: Outcome, seconds: Floats) -> list[list[list[float]]]:
    """By step, rank (in the order pp, dp, cp) and micro-batch: seconds that a rank computes.

    Args:
        outcome: of the simulation.
        seconds: see `as_measured`.
    """
    both = seconds.sum(axis=-1)
    steps = range(len(outcome.run.digests))
    # [stages, dp * cp, micro-batches] of a step.
    return [np.concatenate(np.moveaxis(both[outcome.placement(step)], -1, 0)).tolist() for step in steps]
