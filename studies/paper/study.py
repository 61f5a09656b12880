"""The paper's methods on its cluster, at every point of the sweep."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import starmap
from multiprocessing import get_context
from multiprocessing.pool import Pool
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from studies.paper.inputs import Inputs, Point, documents, points, scenario
from studies.paper.published import Configuration
from wlb._core import simulate_pipeline
from wlb_tools.simulation import Outcome, Simulation, Variant, simulate
from wlb_tools.simulation.static import StaticOutcome, score, static
from wlb_tools.simulation.variants import Strategy

CHOICE: tuple[Strategy, ...] = ("per_sequence", "per_document")
"""What the paper's adaptive sharding chooses between (section 5.3)."""

# As published, documents and micro-batches go to ranks as they come.
PLAIN = Variant(title="Plain-4D", dealt=False)
METHODS = {
    "plain": PLAIN,
    "fixed, per-sequence": Variant(title="Fixed-4D, per-sequence", packing="fixed_length"),
    "fixed, per-document": Variant(
        title="Fixed-4D, per-document", packing="fixed_length", strategies=("per_document",)
    ),
    "per-document": Variant(title="per-document CP", strategies=("per_document",), dealt=False),
    "adaptive": Variant(title="adaptive CP", strategies=CHOICE, dealt=False),
    "packing": Variant(title="packing and delay", packing="var_length"),
    "wlb": Variant(title="WLB-LLM", packing="var_length", strategies=CHOICE),
    "hybrid": Variant(title="WLB-LLM and hybrid CP", packing="var_length", strategies=("adaptive",)),
}

Progress = Callable[[str, int, int], None]
Source: TypeAlias = "NDArray[np.int64] | None"
Task = tuple[Configuration, Inputs, tuple[str, ...]]
Result = TypeVar("Result")


@dataclass
class Study:
    """Runs what tables and figures ask for, and remembers speed-ups.

    Args:
        steps: global batches of every run.
        source: int[n] lengths in tokens, instead of generated ones.
        sweep: whether inputs are swept.
        workers: processes.
        solver_seconds: limit of the exact solver for one window of global batches; 0: no solver.
        solver_samples: windows of each size that it solves.
        profile: a measured kernel that runs instead of the assumed one, a name or a path.
        progress: called with what is done, how much of it, and how much there is.
    """

    steps: int = 100
    source: Source = None
    sweep: bool = True
    workers: int = 1
    solver_seconds: float = 10.0
    solver_samples: int = 2
    profile: str | None = None
    progress: Progress = lambda *_: None
    _speedups: dict[Task, dict[str, float]] = field(default_factory=dict)

    @property
    def central(self) -> Inputs:
        """The central inputs."""
        return Inputs(profile=self.profile)

    def points(self, *without: str) -> list[Point]:
        """The sweep, without the inputs that make no difference."""
        if self.profile is not None:
            without += ("attention_rate", "kernel_error")
        every = points(from_file=self.source is not None, without=without, central=self.central)
        return list(every) if self.sweep else [next(every)]

    def map(self, title: str, function: Callable[..., Result], tasks: Sequence[tuple[Any, ...]]) -> list[Result]:
        """`function(steps, source, *task)` for every task, in order; a function of a module."""
        results: list[Result] = []
        with ExitStack() as stack:
            call = partial(function, self.steps, self.source)
            stream: Iterable[Result]
            if self.workers > 1 and len(tasks) > 1:
                stream = stack.enter_context(_pool(self.workers)).imap(partial(_starred, call), tasks)
            else:
                stream = starmap(call, tasks)
            for result in stream:
                results.append(result)
                self.progress(title, len(results), len(tasks))
        return results

    def speedups(self, title: str, tasks: Sequence[Task]) -> list[dict[str, float]]:
        """Throughput of `METHODS` over Plain-4D's by name, for every configuration, inputs and names."""
        missing = [task for task in tasks if task not in self._speedups]
        if missing:
            self._speedups |= zip(missing, self.map(title, speedups, missing), strict=True)
        return [self._speedups[task] for task in tasks]


def _starred(function: Callable[..., Result], arguments: tuple[Any, ...]) -> Result:
    return function(*arguments)


def _pool(workers: int) -> Pool:
    """Processes that end at once where the `with` block does. Ctrl-C is for this process alone to see."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return get_context("spawn").Pool(workers)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run(
    steps: int, source: Source, configuration: Configuration, inputs: Inputs, variants: Mapping[str, Variant]
) -> Simulation:
    """Methods on the same documents."""
    lengths = documents(configuration, inputs, steps=steps, source=source)
    return simulate(lengths, scenario(configuration, inputs, lengths), variants=variants)


def speedups(
    steps: int, source: Source, configuration: Configuration, inputs: Inputs, names: tuple[str, ...]
) -> dict[str, float]:
    """Throughput of `METHODS` over Plain-4D's, by name."""
    made = run(steps, source, configuration, inputs, {name: METHODS[name] for name in ("plain", *names)})
    return {name: made.speedup(name) for name in names}


def even(outcome: Outcome) -> StaticOutcome:
    """The same plan if the ranks of every context-parallel group took equally long."""
    made = static(outcome)
    sharded = made.sharded
    forward, backward = (
        np.broadcast_to(seconds.mean(axis=1, keepdims=True), seconds.shape)
        for seconds in (sharded.forward, sharded.backward)
    )
    mean = replace(sharded, forward=forward, backward=backward)
    return score(made.title, made.run, mean, made.scenario)


def ceiling(outcome: Outcome) -> float:
    """Speed-up over `outcome` if all its context-parallel ranks and micro-batches took equally long: perfect balance.

    Communication, the pipeline's bubble and the gradient reduction stay. Better than that is only less work.
    """
    balanced, scenario = even(outcome), outcome.scenario
    layout = scenario.layout
    per_rank = balanced.costs.shape[2]
    mean = balanced.costs.mean(axis=(0, 1, 2))  # [stages, 3]
    step = simulate_pipeline(
        np.broadcast_to(mean, (per_rank, *mean.shape)),
        schedule=scenario.pipeline_schedule,
        num_stages=layout.pp,
        num_virtual_stages=layout.virtual_stages,
        p2p_seconds=float(balanced.p2p.mean()),
    )
    reduction = float(outcome.attribution["dp_communication"].mean())
    return outcome.total_seconds / (outcome.seconds.size * (step.seconds + reduction))
