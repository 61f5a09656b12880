"""Figures 12, 13 and 14: end-to-end speed-ups over Plain-4D, simulated."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from studies.paper.inputs import Inputs, Point
from studies.paper.needed import needed
from studies.paper.published import CONFIGURATIONS, FIGURE_12, FIGURE_13, FIGURE_14, Configuration
from studies.paper.results import Facts, Result, Row, holds_at, influence, row
from studies.paper.study import METHODS, Study, ceiling, even, run
from wlb._core import pairs
from wlb_tools.simulation import Outcome
from wlb_tools.simulation.static import static

OVER_PLAIN = "speed-up over Plain-4D"
Table = dict[str, dict[str, float]]  # by configuration, by point


def figure_12(study: Study) -> Result:
    """All configurations of table 1: Fixed-4D, with the better of its two static shardings, and WLB-LLM."""
    points = study.points()
    tables = _all_configurations(study, "Figure 12", points)
    rows: list[Row] = []
    for method, table in tables.items():
        published = FIGURE_12[method]
        rows += [row(method, name, "simulated", published.get(name), series) for name, series in table.items()]
    wlb = tables["WLB-LLM"]
    short, long = wlb["mean of 64K"], wlb["mean of 128K"]
    grows = [short[p.label] < long[p.label] for p in points]
    shrinks = [all(wlb[f"70B-{c}"][p.label] < wlb[f"7B-{c}"][p.label] for c in ("64K", "128K")) for p in points]
    return Result(
        name="fig12",
        title="Figure 12: speed-up over Plain-4D, all configurations",
        rows=tuple(rows),
        notes=(
            f"128K gains more than 64K on average (paper: 1.30 against 1.15) {holds_at(points, grows)}.",
            f"70B gains less than 7B at either window (paper: larger models gain a little less)"
            f" {holds_at(points, shrinks)}.",
            _REASONS_NOTE,
        ),
        facts=(
            _reasons(study, "Figure 12", CONFIGURATIONS, wlb),
            *_needed_of_all(study),
        ),
        influence=influence(points, wlb["mean of WLB-LLM"]),
        influenced="mean of WLB-LLM",
    )


def _all_configurations(study: Study, title: str, points: Sequence[Point]) -> dict[str, Table]:
    """By method, then by configuration and of their means, at every point."""
    names = ("fixed, per-sequence", "fixed, per-document", "wlb")
    every = _tables(study, title, CONFIGURATIONS, points, names)
    static, wlb = every[:2], every[2]
    fixed = {c: {p.label: max(one[c][p.label] for one in static) for p in points} for c in CONFIGURATIONS}
    ratio = {c: {p.label: wlb[c][p.label] / fixed[c][p.label] for p in points} for c in CONFIGURATIONS}

    def mean(table: Table, ending: str = "") -> dict[str, float]:
        chosen = [series for name, series in table.items() if name.endswith(ending)]
        return {p.label: float(np.mean([series[p.label] for series in chosen])) for p in points}

    return {
        method: table
        | {
            "mean of 64K": mean(table, "-64K"),
            "mean of 128K": mean(table, "-128K"),
            f"mean of {method}": mean(table),
        }
        for method, table in (("Fixed-4D", fixed), ("WLB-LLM", wlb), ("WLB-LLM over Fixed-4D", ratio))
    }


def _needed_of_all(study: Study) -> tuple[Facts, ...]:
    """For the published means over all configurations."""
    wanted = {name: value for of_method in FIGURE_12.values() for name, value in of_method.items()}

    def evaluate(every: Sequence[Inputs]) -> list[dict[str, float]]:
        points = [Point(str(index), inputs) for index, inputs in enumerate(every)]
        tables = _all_configurations(study, "Figure 12: what would have to be true", points)
        series = {name: tables[method][name] for method, of_method in FIGURE_12.items() for name in of_method}
        return [{name: one[point.label] for name, one in series.items()} for point in points]

    return needed(study, wanted, evaluate)


def figure_13(study: Study) -> Result:
    """7B-128K: each optimisation alone, and all."""
    configuration = CONFIGURATIONS["7B-128K"]
    methods = ("per-document", "adaptive", "packing", "wlb", "hybrid")
    points = study.points()
    tables = _tables(study, "Figure 13", {"7B-128K": configuration}, points, methods)
    series = dict(zip(methods, (table["7B-128K"] for table in tables), strict=True))
    titles = [*FIGURE_13, "all, hybrid CP (not in the paper)"]
    rows = [
        row(OVER_PLAIN, title, "simulated", FIGURE_13.get(title), series[name])
        for title, name in zip(titles, methods, strict=True)
    ]

    def evaluate(every: Sequence[Inputs]) -> list[dict[str, float]]:
        tasks = [(configuration, inputs, methods[:4]) for inputs in every]
        found = study.speedups("Figure 13: what would have to be true", tasks)
        return [{title: one[name] for title, name in zip(FIGURE_13, methods, strict=False)} for one in found]

    order = [_grows([series[name][p.label] for name in methods[:4]]) for p in points]
    ends = [max(series[name][p.label] for name in methods[:3]) < series["wlb"][p.label] for p in points]

    alone = run(
        study.steps, study.source, configuration, study.central, {name: METHODS[name] for name in ("plain", "packing")}
    ).outcomes
    plain, packed = alone["plain"], alone["packing"]
    whole, cut = (outcome.run.length.astype(np.float64) for outcome in (packed, plain))
    more = float((whole @ whole) / (cut @ cut)) - 1
    without_wait = plain.total_seconds / even(plain).total_seconds
    shares = tuple((name.replace("_", " "), f"{_share(plain, name):.1%}") for name in plain.attribution)
    return Result(
        name="fig13",
        title="Figure 13: 7B-128K, each optimisation alone and all",
        rows=tuple(rows),
        notes=(
            f"The paper's order, per-document < adaptive < packing < all, holds {holds_at(points, order)};"
            f" all is more than each alone {holds_at(points, ends)}.",
            f"Sharding alone cannot win more than {without_wait:.2f}x: what Plain-4D would gain if the"
            f" {configuration.cp} ranks of a context-parallel group took equally long. Waiting for the slowest is"
            f" {_share(plain, 'cp_wait'):.1%} of a GPU's time, and the pipeline amplifies it.",
            f"Packing alone evens out micro-batches, {plain.imbalance.mean():.2f} to {packed.imbalance.mean():.2f}, but"
            f" not the ranks inside a group, where {_share(packed, 'cp_wait'):.1%} of the time then goes.",
            f"If all micro-batches took equally long as well: {ceiling(plain):.2f}x.",
            f"Plain-4D cuts documents where a window ends, WLB-LLM trains them whole: {more:.1%} more attention for the"
            " same tokens, which its speed-up pays for.",
        ),
        facts=(
            Facts("Where Plain-4D's time goes, central inputs", ("", "share"), shares),
            *needed(study, FIGURE_13, evaluate),
        ),
        influence=influence(points, series["wlb"]),
        influenced="all",
    )


def figure_14(study: Study) -> Result:
    """The 7B model by context window, on the layout of 7B-128K."""
    base = CONFIGURATIONS["7B-128K"]
    windows = {f"{size}K": replace(base, context=size * 1024) for size in FIGURE_14}
    points = study.points()
    (wlb,) = _tables(study, "Figure 14", windows, points, ("wlb",))
    published = dict(zip(windows, FIGURE_14.values(), strict=True))
    wanted = {name: speedup for name, speedup in published.items() if speedup is not None}

    def evaluate(every: Sequence[Inputs]) -> list[dict[str, float]]:
        tasks = [(windows[name], inputs, ("wlb",)) for inputs in every for name in wanted]
        found = iter(study.speedups("Figure 14: what would have to be true", tasks))
        return [{name: next(found)["wlb"] for name in wanted} for _ in every]

    grows = [_grows([wlb[name][p.label] for name in windows]) for p in points]
    ends = [wlb["32K"][p.label] < wlb["160K"][p.label] for p in points]
    return Result(
        name="fig14",
        title="Figure 14: 7B by context window",
        rows=tuple(row(OVER_PLAIN, name, "simulated", published[name], wlb[name]) for name in windows),
        notes=(
            f"The speed-up grows from every window to the next {holds_at(points, grows)}, from 32K to 160K"
            f" {holds_at(points, ends)}.",
            _REASONS_NOTE,
        ),
        facts=(_reasons(study, "Figure 14", windows, wlb), *needed(study, wanted, evaluate)),
        influence=influence(points, wlb["160K"]),
        influenced="160K",
    )


def _tables(
    study: Study,
    title: str,
    configurations: dict[str, Configuration],
    points: Sequence[Point],
    names: tuple[str, ...],
) -> list[Table]:
    """Speed-ups of each method by configuration and point."""
    tasks = [(configuration, point.inputs, names) for configuration in configurations.values() for point in points]
    made = iter(study.speedups(title, tasks))
    tables: list[Table] = [{} for _ in names]
    for configuration in configurations:
        for point in points:
            speedups = next(made)
            for table, name in zip(tables, names, strict=True):
                table.setdefault(configuration, {})[point.label] = speedups[name]
    return tables


def _grows(values: Sequence[float]) -> bool:
    return all(a < b for a, b in itertools.pairwise(values))


def _plain(study: Study, configuration: Configuration) -> Outcome:
    return run(study.steps, study.source, configuration, study.central, {"plain": METHODS["plain"]}).baseline


_REASONS = (
    "attention",  # its share of what GPUs compute
    "imbalance",  # time of the slowest micro-batch over the mean of its step
    "longest",  # work of the longest document over a micro-batch's fair share, mean over steps
    "CP wait",  # shares of a GPU's time
    "comm.",
    "bubble",
    "even",  # the speed-up of perfect balance
    "ours",
)


_REASONS_NOTE = (
    "attention: its share of what GPUs compute. imbalance: time of the slowest micro-batch over the mean of its step."
    " longest: work of the longest document over a micro-batch's fair share of its step. CP wait, comm., bubble: shares"
    " of a GPU's time. even: speed-up if all micro-batches and context-parallel ranks took equally long; communication"
    " and the bubble of equal micro-batches stay."
)


def _reasons(study: Study, title: str, configurations: dict[str, Configuration], ours: Table) -> Facts:
    rows: list[tuple[str, ...]] = []
    for name, configuration in configurations.items():
        study.progress(f"{title}: reasons", len(rows), len(configurations))
        plain = _plain(study, configuration)
        communication = sum(_share(plain, f"{axis}_communication") for axis in ("cp", "tp", "dp"))
        rows.append(
            (
                name,
                f"{_attention_share(plain):.0%}",
                f"{plain.imbalance.mean():.2f}",
                f"{_longest(plain):.2f}",
                f"{_share(plain, 'cp_wait'):.1%}",
                f"{communication:.0%}",
                f"{_share(plain, 'bubble'):.0%}",
                f"{ceiling(plain):.2f}",
                f"{ours[name]['central']:.2f}",
            )
        )
    return Facts("Why: Plain-4D at the central inputs", ("", *_REASONS), tuple(rows))


def _share(outcome: Outcome, part: str) -> float:
    return float(outcome.attribution[part].sum() / outcome.total_seconds)


def _attention_share(outcome: Outcome) -> float:
    """Of what GPUs compute."""
    scenario, sharded = outcome.scenario, static(outcome).sharded
    attention = float((sharded.forward + sharded.backward).mean(axis=1).sum()) * scenario.model.num_layers
    pipelines = scenario.layout.pp * scenario.layout.dp
    return attention / pipelines / float(outcome.attribution["compute"].sum())


def _longest(outcome: Outcome) -> float:
    """Pairs of the longest document over a micro-batch's fair share of its step's, mean over steps."""
    packed = static(outcome).run
    work = np.asarray(pairs(packed.length), dtype=np.float64)
    longest = np.zeros(len(packed.digests))
    np.maximum.at(longest, packed.step, work)
    share = np.bincount(packed.step, weights=work) / packed.tokens.shape[1]
    return float((longest / share).mean())
