"""What would have to be true for the paper's numbers: for each, the value of one input at which ours is the same.

The band asks what inputs that nobody published can do within reason. This asks the other way round, and beyond reason:
every input by itself goes as far as it can, the others stay central. Where no value gives the paper's number, no single
input explains it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from studies.paper.inputs import PUBLISHED, SWEEP, Inputs
from studies.paper.results import Facts
from studies.paper.study import Study

REACH: Mapping[str, tuple[float, ...]] = {
    "virtual_stages": (1, 2, 4),
    "max_contexts": (1.0, 1.25, 1.5, 2.0, 4.0),
    "num_queues": (1, 2, 3),
    "max_mean_delay": (0.1, 0.5, 1.0, 2.0, 4.0),
    "attention_efficiency": (0.1, 0.35, 0.55, 1.0, 2.0),
    "gemm_efficiency": (0.3, 0.5, 0.65, 0.8, 1.0),
    "attention_rate": (0.1, 0.2, 0.3, 0.45, 0.6, 1.0, 1.5),
    "kernel_error": (0.0, 0.05, 0.1, 0.2, 0.4),
    "noise": (0.0, 0.02, 0.05, 0.1),
    "tp_overlap": (0.0, 0.5, 1.0),
    "cp_overlap": (0.0, 0.5, 1.0),
    "network": (0.125, 0.25, 0.5, 1.0, 2.0),
    "outliers": (0.005, 0.01, 0.0275, 0.07, 0.12, 0.2),
}
"""How far each input goes that is a number, ascending; the central values of those that have one are among them."""

Values = Mapping[str, float]
"""Ours, by the names of published numbers."""


def needed(
    study: Study,
    wanted: Values,
    evaluate: Callable[[Sequence[Inputs]], Sequence[Values]],
    *,
    without: Sequence[str] = (),
) -> tuple[Facts, ...]:
    """A row for every published number; nothing where the study does not sweep.

    Args:
        study: says from which inputs, and which of them make no difference.
        wanted: published numbers.
        evaluate: gives ours under inputs.
        without: inputs that make no difference.
    """
    if not study.sweep:
        return ()
    swept = {point.swept for point in study.points(*without)}
    fixed = {field for field in PUBLISHED if field not in without}
    inputs = [one for one in SWEEP if one.label in swept and one.field in REACH]
    labels = {one.field: one.label for one in inputs} | {field: PUBLISHED[field] for field in fixed}
    tried = [(field, value) for field in REACH if field in labels for value in REACH[field]]
    changes: list[dict[str, Any]] = [{field: value} for field, value in tried]
    found = evaluate([replace(study.central, **change) for change in changes])
    by_field: dict[str, list[tuple[float, Values]]] = {}
    for (field, value), ours in zip(tried, found, strict=True):
        by_field.setdefault(field, []).append((value, ours))
    rows = []
    for name, paper in wanted.items():
        curves = {field: [(x, ours[name]) for x, ours in curve] for field, curve in by_field.items()}
        values = {field: where(curve, paper) for field, curve in curves.items()}
        would = [f"{labels[field]}: {value:.2g}" for field, value in values.items() if value is not None]
        reached = [ours for curve in curves.values() for _, ours in curve]
        rows.append((name, f"{paper:g}", "; ".join(would) or "none", f"{min(reached):.3f} to {max(reached):.3f}"))
    columns = ("", "paper", "one input that would make ours the paper's", "ours over all of them")
    return (Facts("What would have to be true, one input at a time", columns, tuple(rows)),)


def where(curve: Sequence[tuple[float, float]], paper: float) -> float | None:
    """Where the first of the straight lines between points crosses a number, if one does."""
    for (x, ours), (next_x, next_ours) in itertools.pairwise(curve):
        if min(ours, next_ours) <= paper <= max(ours, next_ours):
            share = 0.0 if ours == next_ours else (paper - ours) / (next_ours - ours)
            return x + share * (next_x - x)
    return None
