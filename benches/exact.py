"""The optimal packing, found by a solver: a baseline and a test oracle, not a run-time path.

Minimises ``max_j sum_i x_ij W(d_i)`` subject to each document once and ``sum_i x_ij d_i <= S_max`` (WLB-LLM,
section 4.2), as a mixed-integer program given to HiGHS. Needs HiGHS: ``pip install highspy``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._core import CostModel, Packing, pack
from wlb._errors import check_positive, check_share, error

__all__ = ["ExactSolution", "solve"]


@dataclass(frozen=True, kw_only=True)
class ExactSolution:
    """What the solver found within its time limit.

    Attributes:
        packing: the best packing found; every document is placed.
        objective: its maximum cost.
        lower_bound: no packing has a smaller maximum cost (proved by the solver).
        gap: ``objective / lower_bound - 1``; at most ``relative_gap`` when optimal.
        optimal: the gap was closed before the time limit.
        seconds: time the solver took.
    """

    packing: Packing
    objective: float
    lower_bound: float
    gap: float
    optimal: bool
    seconds: float


def solve(
    lengths: ArrayLike,
    *,
    num_micro_batches: int,
    max_tokens: int,
    cost_model: CostModel,
    time_limit: float = 60.0,
    relative_gap: float = 1e-6,
) -> ExactSolution:
    """Packs one global batch (or a window of them) with the least possible maximum cost.

    Args:
        lengths: int[n], tokens of each document.
        num_micro_batches: ``N``; for a window of ``g`` global batches pass ``g * N``.
        max_tokens: most tokens of a micro-batch.
        cost_model: what documents cost.
        time_limit: seconds after which the best packing so far is taken; infinity: never.
        relative_gap: the solver stops when the objective is proved to be this close to the optimum, from 0 to 1.

    Raises:
        WlbError: wrong lengths, sizes or limits; no packing fits, or none was found in time.
        ImportError: HiGHS is not installed.

    Exponential in the worst case: minutes from some hundred documents on.
    """
    try:
        import highspy
    except ImportError as missing:
        raise ImportError("benches.exact needs the HiGHS solver: pip install highspy") from missing
    if time_limit != np.inf:
        check_positive("time_limit", time_limit)
    check_share("relative_gap", relative_gap)

    # Checks the arguments, and is the solution that the solver starts from.
    greedy = pack(
        lengths, num_micro_batches=num_micro_batches, max_tokens=max_tokens, cost_model=cost_model, leftover="return"
    )
    costs = cost_model.cost(lengths)
    tokens = np.asarray(lengths, dtype=np.float64)
    documents = len(tokens)
    if documents == 0:
        return ExactSolution(packing=greedy, objective=0.0, lower_bound=0.0, gap=0.0, optimal=True, seconds=0.0)
    # The solver's tolerances are absolute: let the fair share be 1.
    unit = costs.sum() / num_micro_batches
    scaled = costs / unit

    model = highspy.Highs()  # type: ignore[no-untyped-call]
    model.setOptionValue("output_flag", False)
    model.setOptionValue("time_limit", float(time_limit))
    model.setOptionValue("mip_rel_gap", float(relative_gap))
    # One thread, one seed: the same input gives the same packing, as long as the time limit does not strike.
    model.setOptionValue("threads", 1)

    heaviest = model.addVariable(lb=max(1.0, float(scaled.max())), obj=1.0)
    # Micro-batches are interchangeable. Documents from longest to shortest, the k-th may use only the first k + 1
    # micro-batches: that removes most copies of the same packing and no packing for good.
    order = np.argsort(-tokens, kind="stable")
    placed = {
        (int(document), j): model.addBinary()
        for rank, document in enumerate(order)
        for j in range(min(rank + 1, num_micro_batches))
    }
    for document in range(documents):
        bins = [placed[document, j] for j in range(num_micro_batches) if (document, j) in placed]
        model.addConstr(sum(bins[1:], start=bins[0] * 1.0) == 1)
    for j in range(num_micro_batches):
        inside = [(document, x) for (document, micro_batch), x in placed.items() if micro_batch == j]
        if not inside:
            continue
        first, first_x = inside[0]
        cost = sum((x * float(scaled[document]) for document, x in inside[1:]), start=first_x * float(scaled[first]))
        size = sum((x * float(tokens[document]) for document, x in inside[1:]), start=first_x * float(tokens[first]))
        model.addConstr(cost <= heaviest)
        model.addConstr(size <= float(max_tokens))
    if len(greedy.leftover) == 0:
        _start_from(model, placed, heaviest, greedy, unit, order)
    model.run()

    status = model.getModelStatus()
    info = model.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        raise error("lengths", "do not fit into num_micro_batches of max_tokens each")
    if info.primal_solution_status != 2:  # kSolutionStatusFeasible
        message = f"= {time_limit}: no packing found in time ({model.modelStatusToString(status)})"
        raise error("time_limit", message, value=time_limit)
    values = np.asarray(model.getSolution().col_value)
    assignment = np.full(documents, -1, dtype=np.int64)
    for (document, j), x in placed.items():
        if values[x.index] > 0.5:
            assignment[document] = j
    packing = Packing.from_assignment(
        lengths,
        assignment,
        num_micro_batches=num_micro_batches,
        max_tokens=max_tokens,
        cost_model=cost_model,
    )
    objective = float(packing.costs.max())
    lower_bound = max(packing.lower_bound, min(objective, float(info.mip_dual_bound) * unit))
    return ExactSolution(
        packing=packing,
        objective=objective,
        lower_bound=lower_bound,
        gap=objective / lower_bound - 1.0,
        optimal=bool(status == highspy.HighsModelStatus.kOptimal),
        seconds=float(model.getRunTime()),
    )


def _start_from(
    model: Any,
    placed: dict[tuple[int, int], Any],
    heaviest: Any,
    packing: Packing,
    unit: float,
    order: NDArray[np.intp],
) -> None:
    """Gives the solver a packing to start from, its micro-batches renumbered as the model has them."""
    import highspy

    values = np.zeros(model.getNumCol())
    renumbered: dict[int, int] = {}
    assignment = packing.assignment
    for document in order:
        j = renumbered.setdefault(int(assignment[document]), len(renumbered))
        values[placed[int(document), j].index] = 1.0
    values[heaviest.index] = packing.costs.max() / unit
    solution = highspy.HighsSolution()
    solution.col_value = values.tolist()
    model.setSolution(solution)
