"""The solver's row of table 2: windows of global batches packed by HiGHS, within a time limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benches.exact import ExactSolution, solve
from wlb._core import CostModel, WlbError
from wlb_tools.simulation.methods import Setup, Step, document_ids
from wlb_tools.simulation.stream import GlobalBatches
from wlb_tools.simulation.trained import PackedRun, collect

_PAIRS = CostModel(attention=1.0, linear=0.0)
"""What formula (1) of the paper balances: attention, alone."""


@dataclass(frozen=True)
class Solved:
    """What the solver made of the first windows of a stream."""

    run: PackedRun | None  # of the windows that were solved
    solutions: tuple[ExactSolution, ...]
    problems: tuple[str, ...]  # of windows for which nothing was found

    def note(self, name: str) -> str:
        """How far it came, in words."""
        tried = len(self.solutions) + len(self.problems)
        text = f"{name}: HiGHS on one thread, {tried} window{'s' * (tried != 1)}"
        if self.solutions:
            optimal = sum(solution.optimal for solution in self.solutions)
            gaps = ", ".join(f"{solution.gap:.2%}" for solution in self.solutions)
            text += f"; {optimal} solved to the end; gap to the proven bound {gaps}"
        return text + "".join(f"; {problem}" for problem in self.problems) + "."


def solved(stream: GlobalBatches, setup: Setup, *, window: int, samples: int, limit: float) -> Solved:
    """Packs `samples` windows of `window` global batches into whole context windows, within `limit` seconds each.

    Raises:
        ImportError: HiGHS is not installed.
    """
    solutions: list[ExactSolution] = []
    problems: list[str] = []

    def steps() -> Iterator[Step]:
        n, arrival = setup.num_micro_batches, stream.arrival
        for first_batch in range(0, min(samples * window, stream.batches - window + 1), window):
            first, last = int(stream.offsets[first_batch]), int(stream.offsets[first_batch + window])
            try:
                solution = solve(
                    stream.lengths[first:last],
                    num_micro_batches=window * n,
                    max_tokens=setup.context,
                    cost_model=_PAIRS,
                    time_limit=limit,
                    relative_gap=1e-4,
                )
            except WlbError as problem:
                problems.append(str(problem))
                continue
            solutions.append(solution)
            micro_batches = solution.packing.micro_batches
            order = np.arange(n).reshape(setup.dp_size, -1)
            for k in range(window):
                of_step = micro_batches[k * n : (k + 1) * n]
                digest, seconds = solution.packing.digest(), solution.seconds / window
                delays = first_batch + window - 1 + k - arrival[first + document_ids(of_step)]
                yield Step(of_step, order, first, delays, digest, seconds)

    made = list(steps())
    run = collect(f"solver, window of {window}", made, stream) if made else None
    return Solved(run, tuple(solutions), tuple(problems))
