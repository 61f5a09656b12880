"""Rows of TRL's asynchronous GRPO, planned by the model's cost.

    import wlb, wlb.integrations.trl

    model = wlb.ModelConfig.from_hugging_face("path/of/config.json")
    wlb.integrations.trl.install(cost_model=model.cost_model())
    trainer = AsyncGRPOTrainer(...)  # as always; `token_budget` stays a hard limit

TRL's batchers place samples one at a time, as they arrive. Here they choose the samples of a micro-batch as before, so
that losses stay what they were. Then wlb divides these samples among the ranks' rows all at once. A row is a tree, in
which shared tokens are computed once, as TRL has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import wlb
from wlb.integrations.versions import check_signature, needed

__all__ = ["install", "planned_rows"]

_TRAINER = "trl.experimental.async_grpo.async_grpo_trainer"


def install(*, cost_model: wlb.CostModel) -> None:
    """Puts wlb's batchers in the place of TRL's, for all trainers whose data loaders are made afterwards.

    Args:
        cost_model: what samples cost in the model that is trained.

    Raises:
        WlbError: TRL is not installed, or its batchers take other arguments than those of TRL 1.16.
    """
    module = needed("trl", _TRAINER, cost_model)
    for name, expected in (("TokenBudgetBatcher", _token_budget), ("FixedCountBatcher", _fixed_count)):
        theirs: Any = getattr(module, name, None)
        theirs = getattr(theirs, "_of_trl", theirs)
        check_signature("trl", getattr(theirs, "__init__", None), expected, "as in TRL 1.16")
        setattr(module, name, _planning(theirs, cost_model))


def _token_budget(self: Any, dataset: Any, num_processes: int, token_budget: int, metrics: dict[str, Any]) -> None:
    """The arguments of `TokenBudgetBatcher`."""


def _fixed_count(self: Any, dataset: Any, num_processes: int, microbatch_size: int) -> None:
    """The arguments of `FixedCountBatcher`."""


def _planning(theirs: Any, cost_model: wlb.CostModel) -> Any:
    """A class of TRL whose micro-batches are divided among the ranks anew."""

    def rows(self: Any) -> Iterator[list[Any]]:
        for found in theirs.__iter__(self):
            yield planned_rows(found, getattr(self, "token_budget", None), cost_model)

    return type(theirs.__name__, (theirs,), {"__iter__": rows, "_of_trl": theirs, "__doc__": theirs.__doc__})


def planned_rows(rows: list[Any], token_budget: int | None, cost_model: wlb.CostModel) -> list[Any]:
    """The samples of these rows, divided anew so that the heaviest row becomes lighter.

    Args:
        rows: `TreeRow` of each rank.
        token_budget: most unique tokens, and most tokens with loss, of a row; None for no limit.
        cost_model: what samples cost.

    Returns:
        As many rows with the same samples, none empty; the given ones if no lighter ones were found.

    Complexity:
        O(tokens).
    """
    samples = [sample for row in rows for sample in row.samples]
    if len(rows) == 1 or len(samples) < len(rows):
        return rows
    tokens = [np.asarray(sample["input_ids"], np.int64) for sample in samples]
    offsets = np.cumsum([0, *(of.size for of in tokens)])
    forest = wlb.PrefixForest.from_tokens(np.concatenate(tokens), offsets)
    most = int(offsets[-1]) if token_budget is None else token_budget
    try:
        plan = wlb.pack(forest, num_micro_batches=len(rows), max_tokens=most, cost_model=cost_model, dp_size=len(rows))
    except wlb.WlbError:  # they fit only as TRL has placed them
        return rows
    made = []
    for micro_batch in plan:
        row = type(rows[0])()
        for index in micro_batch.document_ids.tolist():
            # TRL's trees fork one token earlier than ours, so a few tokens more count.
            if token_budget is not None and not row.fits(samples[index], token_budget):
                return rows
            row.add(samples[index])
        if not row.samples:
            return rows
        made.append(row)
    heaviest = [max(_cost(row, cost_model) for row in some) for some in (made, rows)]
    return made if heaviest[0] < heaviest[1] else rows


def _cost(row: Any, cost_model: wlb.CostModel) -> float:
    """Cost of a tree: what each unique token adds to the samples that end with it."""
    depths = np.zeros(len(row.tokens), np.int64)
    for nodes in row.sample_nodes:
        depths[nodes] = np.arange(1, len(nodes) + 1)
    upto = np.append(0.0, cost_model.cost(np.arange(1, depths.max(initial=1) + 1)))
    return float(np.diff(upto)[depths - 1].sum())
