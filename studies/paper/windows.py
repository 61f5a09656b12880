"""Figure 6: fixed-length packing over more global batches is more even, and what it costs in loss."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np

from studies.paper.inputs import Inputs
from studies.paper.packing import LATENCY, forward_latency
from studies.paper.published import CONFIGURATIONS, FIGURE_6
from studies.paper.results import Result, Row, holds_at, row
from studies.paper.statistics import Paired
from studies.paper.study import CHOICE, Source, Study, run
from wlb_tools.simulation import Variant
from wlb_tools.simulation.static import static

LOSS = "training loss over that of one batch"
WINDOWS = (1, 2, 4, 8, 16)
RECORD = Path(__file__).parents[2] / "benches" / "records" / "loss_curves.jsonl"


def figure_6(study: Study) -> Result:
    """Imbalance of 7B-128K, and the loss of the loss study's small model, by the global batches packed at once."""
    points = study.points("num_queues", "max_mean_delay")
    made = study.map("Figure 6", _imbalances, [(point.inputs,) for point in points])
    series = {
        window: {point.label: found[window] for point, found in zip(points, made, strict=True)} for window in WINDOWS
    }
    # Table 2 has the paper's numbers of four of them, and counts them.
    rows: list[Row] = [row(LATENCY, _named(window), "simulated", None, series[window]) for window in WINDOWS]
    falls = [all(series[a][p.label] > series[b][p.label] for a, b in itertools.pairwise(WINDOWS)) for p in points]
    losses = _losses(RECORD)
    for window, paired in losses.items():
        half = paired.half_width()
        rows.append(
            Row(
                LOSS,
                _named(window),
                "measured",
                FIGURE_6.get(window),
                1 + paired.mean,
                1 + paired.mean - half,
                1 + paired.mean + half,
            )
        )
    seeds = next(iter(losses.values())).seeds if losses else 0
    return Result(
        name="fig6",
        title="Figure 6: packing over more global batches",
        rows=tuple(rows),
        notes=(
            f"Every larger window is more even {holds_at(points, falls)}.",
            f"The loss is of another model on other documents than the paper's: the small one of the loss study"
            f" (docs/results/loss_curves.md), {seeds} seeds, read from its record; beside it stands the 95 % interval"
            " over the seeds. It packs 1, 2, 4 and 8 batches. The text gives the paper's rise for 8 alone.",
        ),
    )


def _named(window: int) -> str:
    return f"{window} batch{'es' * (window > 1)}"


def _imbalances(steps: int, source: Source, inputs: Inputs) -> dict[int, float]:
    """Of every window."""
    methods = {
        _named(window): Variant(title=_named(window), packing="fixed_length", window=window, strategies=CHOICE)
        for window in WINDOWS
    }
    made = run(steps, source, CONFIGURATIONS["7B-128K"], inputs, methods).outcomes
    return {window: float(forward_latency(static(made[_named(window)])).mean()) for window in WINDOWS}


def _losses(record: Path) -> dict[int, Paired]:
    """Relative differences to one batch, seed by seed, over all held-out tokens; none without the record."""
    if not record.exists():
        return {}
    head, *lines = (json.loads(line) for line in record.read_text().splitlines())
    weights = np.array(head["bucket_tokens"]) / sum(head["bucket_tokens"])
    by_window = {
        window: {
            line["seed"]: float(weights @ line["curve"][-1][1]) for line in lines if line["arm"] == f"fixed {window}"
        }
        for window in WINDOWS
    }
    one = by_window[1]
    found: dict[int, Paired] = {}
    for window, losses in by_window.items():
        seeds = sorted(losses.keys() & one.keys())
        if window > 1 and seeds:
            found[window] = Paired.of([losses[seed] for seed in seeds], [one[seed] for seed in seeds])
    return found
