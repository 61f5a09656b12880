"""What a record says: tables, and a picture of the differences."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

from studies.loss_curves.arms import REFERENCE
from studies.loss_curves.statistics import Paired

mpl.use("Agg")
import matplotlib.pyplot as plt

from benches.common import STYLE, WLB

Row = dict[str, Any]
Losses = dict[str, NDArray[np.float64]]  # of each arm: float [seeds, buckets]

MARGIN: Final = 0.005  # relative: named before the runs
# What two arms differ by, where it is one thing.
PARTS: Final = (
    ("cuts at the ends of micro-batches", "Dynamic-CP", "original"),
    ("sizes of steps, as queues 2", "sizes of queues 2", "Dynamic-CP"),
    ("who waits, queues 2", "queues 2", "sizes of queues 2"),
    ("both, queues 2", "queues 2", "Dynamic-CP"),
    ("sizes of steps, as adaptive", "sizes of adaptive", "Dynamic-CP"),
    ("who waits, adaptive", "adaptive", "sizes of adaptive"),
    ("both, adaptive", "adaptive", "Dynamic-CP"),
    ("a higher price of delay", "adaptive, price 4", "adaptive"),
    ("no step below half a batch", "adaptive, half at least", "adaptive"),
    ("learning rate by tokens, adaptive", "adaptive, rate by tokens", "adaptive"),
    ("learning rate by tokens, queues 2", "queues 2, rate by tokens", "queues 2"),
)


class Results:
    """Losses of the seeds that every arm of a record has."""

    def __init__(self, head: Row, rows: list[Row]) -> None:
        by_arm: dict[str, dict[int, Row]] = {}
        for row in rows:
            by_arm.setdefault(row["arm"], {})[row["seed"]] = row
        self.arms = list(by_arm)
        if REFERENCE not in by_arm:
            raise SystemExit(f"the record has no {REFERENCE}, which all others are compared with")
        self._rows = by_arm
        self._weights = np.array(head["bucket_tokens"]) / sum(head["bucket_tokens"])

    def seeds(self, arm: str, other: str = REFERENCE) -> list[int]:
        """Of runs of both arms."""
        return sorted(self._rows[arm].keys() & self._rows[other].keys())

    def losses(self, arm: str, seeds: list[int], what: str = "tokens") -> NDArray[np.float64]:
        """After all tokens, half-way ("half"), or after as many steps as order of arrival has ("steps").

        Float [seeds, buckets].
        """
        rows = [self._rows[arm][seed] for seed in seeds]
        if what == "steps":
            return np.array([row["equal_steps"] for row in rows])
        return np.array([row["curve"][0 if what == "half" else -1][1] for row in rows])

    def paired(self, arm: str, other: str = REFERENCE, *, what: str = "tokens", bucket: int | None = None) -> Paired:
        """Of the mean loss over all held-out tokens, or over those of a bucket."""
        return Paired.of(*self._both(arm, other, what, bucket))

    def of_seeds(self, arm: str) -> NDArray[np.float64]:
        """Float [seeds]: differences to order of arrival, relative."""
        losses, reference = self._both(arm, REFERENCE, "tokens", None)
        return losses / reference - 1

    def _both(self, arm: str, other: str, what: str, bucket: int | None) -> tuple[NDArray[np.float64], ...]:
        seeds = self.seeds(arm, other)
        weights = self._weights if bucket is None else np.eye(len(self._weights))[bucket]
        return tuple(self.losses(name, seeds, what) @ weights for name in (arm, other))

    def mean(self, arm: str) -> float:
        """Loss over all held-out tokens, mean over seeds."""
        return float((self.losses(arm, sorted(self._rows[arm])) @ self._weights).mean())

    def levels(self, arm: str, name: str) -> float:
        """Mean over seeds of what a row has."""
        return float(np.mean([row[name] for row in self._rows[arm].values()]))


def text(head: Row, rows: list[Row]) -> str:
    """The page, in markdown."""
    results = Results(head, rows)
    others = [arm for arm in results.arms if arm != REFERENCE]
    study = head["study"]
    seeds = len(results.seeds(REFERENCE))
    lines = [
        "Written by `make loss-curves`, or from its record by `python -m studies.loss_curves --summarize RECORD`.",
        "",
        "# Does packing change what is learnt?",
        "",
        f"{seeds} seeds, global batches of {study['micro_batches']} contexts, {study['batches']} of them a run. Model: "
        f"hidden {study['hidden']}, {study['layers']} layers.",
        f"Documents: {head['documents']:,} Python functions as {study['vocab_size']:,} byte pairs, mean "
        f"{head['mean_tokens']:.0f} tokens, longest {head['longest']:,};",
        f"{100 * head['filled']:.1f} % of them fill the context of {head['context']:,} tokens.",
        f"A model that knew only how often each token comes would have a loss of {head['unigram']:.3f}.",
        "",
        "A seed has its own weights, documents and order of arrival, the same for every way of packing. Differences",
        "are relative, within seeds, with 95 % intervals (Student's t). *p* is that of the test of equivalence: below",
        f"0.05 the mean difference is shown to be less than {100 * MARGIN:g} % either way. Intervals and tests are of",
        "each row by itself; none is widened because there are many.",
        "",
        "![Differences of every seed](loss_curves.png)",
        "",
        "## Beside documents cut and packed in order of arrival",
        "",
        "*Equal tokens*: every document of the seed is trained once, the learning rate has come to 0.",
        f"*Equal steps*: after {study['batches']} steps, whatever still waits. *Half-way*: at half of the tokens.",
        "",
        "| packed | loss | equal tokens | p | shown | equal steps | half-way |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        f"| {REFERENCE} | {results.mean(REFERENCE):.3f} | | | | | |",
    ]
    for arm in others:
        found = results.paired(arm)
        more = [interval(results.paired(arm, what=what)) for what in ("steps", "half")]
        cells = [arm, f"{results.mean(arm):.3f}", *graded(found), *more]
        lines.append(f"| {' | '.join(cells)} |")
    parts = [part for part in PARTS if {part[1], part[2]} <= set(results.arms)]
    if parts:
        lines += [
            "",
            "## Which part does it",
            "",
            "*Dynamic-CP* trains the global batches as they arrive, no document cut. *Sizes of* another: whole",
            "documents in order of arrival, but in every step about as many tokens as that one has in its.",
            "",
            "| what differs | | equal tokens | p | shown | equal steps |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for what, arm, other in parts:
            steps = interval(results.paired(arm, other, what="steps"))
            lines.append(f"| {what} | {arm} - {other} | {' | '.join(graded(results.paired(arm, other)))} | {steps} |")
    lines += ["", *by_length(head, results, others), "", *steps_table(results)]
    return "\n".join(lines) + "\n"


def by_length(head: Row, results: Results, arms: list[str]) -> list[str]:
    """Differences for held-out documents of each range of lengths."""
    edges = [1, *head["bounds"]]
    names = [f"{low:,} to {high - 1:,}" for low, high in itertools.pairwise(edges)] + [f"{edges[-1]:,}"]
    shown = [bucket for bucket, tokens in enumerate(head["bucket_tokens"]) if tokens]
    lines = [
        "## By length of the held-out document",
        "",
        f"Equal tokens, against {REFERENCE}; tokens of the document, which were cut at the context.",
        "",
        f"| packed | {' | '.join(names[bucket] for bucket in shown)} |",
        f"| --- |{' --- |' * len(shown)}",
        f"| tokens evaluated | {' | '.join(format(head['bucket_tokens'][bucket], ',') for bucket in shown)} |",
    ]
    for arm in arms:
        cells = [interval(results.paired(arm, bucket=bucket)) for bucket in shown]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines


def steps_table(results: Results) -> list[str]:
    """How unequal steps are."""
    lines = [
        "## Steps",
        "",
        "Work is that of a 7B model at 128K, scaled to this context. *Variation* is the standard deviation over the",
        "mean of steps; *heaviest*, the most work of a step over the mean. *Lost time* is that of micro-batches inside",
        "steps: what waiting documents buy.",
        "",
        "| packed | steps | tokens, variation | work, variation | work, heaviest | lost time |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for arm in results.arms:
        steps, *levels = (
            results.levels(arm, name) for name in ("steps", "tokens_cv", "work_cv", "heaviest", "lost_time")
        )
        # A dynamic plan is level by its groups, not by its micro-batches; and sizes alone are packed in no way.
        lost = "" if arm == "Dynamic-CP" or arm.startswith("sizes of") else f"{levels[-1]:.3f}"
        lines.append(f"| {arm} | {steps:.1f} | {' | '.join(f'{level:.2f}' for level in levels[:-1])} | {lost} |")
    return lines


def graded(found: Paired) -> list[str]:
    """The interval, p of the test of equivalence, and what is shown in words."""
    p = found.equivalence(MARGIN)
    return [interval(found), "" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}", verdict(found)]


def interval(found: Paired) -> str:
    """Mean and half of the 95 % interval, in percent."""
    half = found.half_width()
    return f"{100 * found.mean:+.2f} %" if math.isnan(half) else f"{100 * found.mean:+.2f} ± {100 * half:.2f} %"


def verdict(found: Paired) -> str:
    """In words; a difference may be real and yet within the margin."""
    half = found.half_width()
    if math.isnan(half):
        return ""
    side = "lower" if found.mean < 0 else "higher"
    real = abs(found.mean) > half
    if found.equivalence(MARGIN) < 0.05:
        return f"equivalent, {side}" if real else "equivalent"
    return side if real else "open"


def draw(head: Row, rows: list[Row], path: Path) -> None:
    """Every arm's difference: mean and 95 % interval, and each seed as a dot; the margin in grey."""
    results = Results(head, rows)
    arms = [arm for arm in results.arms if arm != REFERENCE]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.5, 1.2 + 0.38 * len(arms)), layout="constrained")
        axes.axvspan(-100 * MARGIN, 100 * MARGIN, color="#eaeef2")
        axes.axvline(0, color="#8c959f", linewidth=1)
        for place, arm in enumerate(arms):
            found, of_seeds = results.paired(arm), 100 * results.of_seeds(arm)
            axes.plot(of_seeds, [place] * of_seeds.size, "|", color="#8c959f", markersize=7)
            half = found.half_width()
            error = None if math.isnan(half) else 100 * half
            axes.errorbar(100 * found.mean, place, xerr=error, fmt="o", color=WLB, capsize=4, linewidth=2)
        axes.set_yticks(range(len(arms)), arms)
        axes.invert_yaxis()
        axes.set_xlabel(f"held-out loss beside {REFERENCE}, %, equal tokens; grey: the margin")
        title = f"What is learnt: {len(results.seeds(REFERENCE))} seeds, their means and 95 % intervals"
        figure.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
        figure.savefig(path, dpi=130)
        plt.close(figure)
