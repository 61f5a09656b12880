"""What no release rule can beat: the least mean delay for a given balance, with infinitely many micro-batches.

With ever more micro-batches in a global batch, every iteration brings the same mix of lengths. Then a linear program
bounds any rule from below. Its unknowns are how often a step has which *level* (cost of the heaviest micro-batch, in
mean micro-batches), how far its mean stays below, and which tokens it trains. It knows that

- a document leaves only in a step whose level is at least its own cost;
- every iteration brings the same, so that a step that trains `x` iterations' worth of a class of lengths makes at least
  `x (x - 1) / 2` of it wait (those that just came, those of the iteration before, and so on);
- tokens and their costs are conserved, class by class of lengths;
- a step holds at most `max_tokens` for each micro-batch; one with a document that takes more than half the level has
  no more tokens than the cost left over can pay.

It does not know in what order steps come, nor how documents share a micro-batch: the true least delay is longer.
Everything is rounded in favour of waiting less: classes of lengths to their cheapest document, levels and imbalances to
the better end of an interval. So the result is a bound, up to the solver's tolerance. It is one for infinitely many
micro-batches: with few, a batch may happen to be easier, or harder, than the mix.
"""

from __future__ import annotations

import highspy
import numpy as np

import wlb
from benches.common import CONTEXT, Lengths

LENGTHS = np.unique(np.concatenate([[1, 4096], np.geomspace(8192, CONTEXT, 25).round()])).astype(np.int64)
ABOVE = (1.05, 1.15, 1.3)  # levels above the longest document, relative to its cost
EXCESSES = np.array([0, 0.0025, 0.005, 0.01, 0.02, 0.06, 0.2, 0.8])  # imbalance - 1
WORTH = (1, 2, 3, 4, 5, 6, 8, 11, 16, 24)  # iterations: corners of the curve of waiting


def least_delay(
    lengths: Lengths, cost: wlb.CostModel, room: float, *, mean: float, p95: float | None = None
) -> float | None:
    """A lower bound on the mean delay of a token, for a mean (and p95) imbalance; None if there is no such rule."""
    pieces = np.sort(wlb.split_documents(lengths, max_document_tokens=CONTEXT)[2])
    starts = np.unique(np.searchsorted(pieces, LENGTHS))
    starts = starts[starts < len(pieces)]
    costs = cost.cost(pieces)
    unit = costs.sum() / pieces.sum() * CONTEXT  # of a mean micro-batch
    tokens = np.add.reduceat(pieces, starts) / pieces.sum()
    work = np.add.reduceat(costs, starts) / costs.sum()
    shortest, longest = pieces[starts], pieces[np.append(starts[1:], len(pieces)) - 1]
    least, most = (cost.cost(ends) / ends * CONTEXT / unit for ends in (shortest, longest))  # cost of a token
    heavy = cost.cost(shortest) / unit
    cheapest = float(cost.cost([1])[0]) * CONTEXT / unit  # no token costs less

    levels = np.concatenate([heavy, heavy[-1] * np.array(ABOVE), [np.inf]])
    classes, heights, kinds = len(starts), len(levels) - 1, len(EXCESSES)
    program = _Program()
    often = np.array([[program.column(upper=1.0) for _ in range(kinds)] for _ in range(heights)])
    program.row([(column, 1.0) for column in often.flat], lower=1.0, upper=1.0)
    program.row(
        [(column, excess) for row in often for column, excess in zip(row, EXCESSES, strict=True)], upper=mean - 1
    )
    if p95 is not None:
        program.row([(column, 1.0) for column in often[:, p95 - 1 <= EXCESSES].flat], upper=0.05)

    trained: list[list[tuple[int, int, int]]] = [[] for _ in range(classes)]  # height; columns: tokens, their cost
    for height in range(heights):
        low, high = levels[height], levels[height + 1]
        for kind in range(kinds):
            step = int(often[height, kind])
            of_step = [(k, program.column(), program.column()) for k in range(min(height + 1, classes))]
            filled = []
            for k, these, their_work in of_step:
                trained[k].append((height, these, their_work))
                program.row([(their_work, 1.0), (these, -least[k])], lower=0.0)
                program.row([(their_work, 1.0), (these, -most[k])], upper=0.0)
                left = room - shortest[k] / CONTEXT - (high - heavy[k]) / cheapest
                alone = heavy[k] > high / 2 and left > 0
                filled.append((these, 1.0 + (left * CONTEXT / longest[k] if alone else 0.0)))
            program.row([*filled, (step, -room)], upper=0.0)
            total = [(their_work, 1.0) for _, _, their_work in of_step]
            worst = EXCESSES[kind + 1] if kind + 1 < kinds else np.inf
            program.row([*total, (step, -low / (1 + worst))], lower=0.0)
            if np.isfinite(high):
                program.row([*total, (step, -high / (1 + EXCESSES[kind]))], upper=0.0)
    for k in range(classes):
        program.row([(these, 1.0) for _, these, _ in trained[k]], lower=tokens[k], upper=tokens[k])
        program.row([(their_work, 1.0) for _, _, their_work in trained[k]], lower=work[k], upper=work[k])
        for height in range(heights):
            released = [these for at, these, _ in trained[k] if at == height]
            if released:
                wait = program.column(price=1.0)
                for worth in WORTH:
                    row = [(wait, 1.0), *((these, -float(worth)) for these in released)]
                    row += [(int(step), worth * (worth + 1) / 2 * tokens[k]) for step in often[height]]
                    program.row(row, lower=0.0)
    return program.least()


class _Program:
    """A linear program, column by column and row by row."""

    def __init__(self) -> None:
        self._columns: list[tuple[float, float, float]] = []
        self._rows: list[tuple[list[tuple[int, float]], float, float]] = []

    def column(self, *, lower: float = 0.0, upper: float = np.inf, price: float = 0.0) -> int:
        self._columns.append((lower, upper, price))
        return len(self._columns) - 1

    def row(self, entries: list[tuple[int, float]], *, lower: float = -np.inf, upper: float = np.inf) -> None:
        self._rows.append((entries, lower, upper))

    def least(self) -> float | None:
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = len(self._columns), len(self._rows)
        program.col_lower_, program.col_upper_, program.col_cost_ = np.array(self._columns).T
        program.row_lower_, program.row_upper_ = np.array([bounds for _, *bounds in self._rows]).T
        matrix = program.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = np.cumsum([0, *(len(entries) for entries, *_ in self._rows)])
        matrix.index_ = np.array([column for entries, *_ in self._rows for column, _ in entries])
        matrix.value_ = np.array([value for entries, *_ in self._rows for _, value in entries], dtype=np.float64)
        model = highspy.Highs()
        model.setOptionValue("output_flag", False)
        model.passModel(program)
        model.run()
        if model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        return float(model.getInfo().objective_function_value)
