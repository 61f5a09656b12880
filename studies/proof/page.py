"""The page of results: tables of what the clock said, what was predicted, and what idled; and a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

import wlb
import wlb_tools
from benches.common import STYLE, WLB
from studies.proof import METHODS, Bench, Layout
from studies.proof.figures import Gain, Run, gain, levels

mpl.use("Agg")
import matplotlib.pyplot as plt

Row = dict[str, Any]
Floats = NDArray[np.float64]
BASES = ("original", "original, uncut")
QUIET = 0.3
"""Processors that other programs may keep busy."""

LEVELS = ("gpu", "dp", "pp", "cp", "micro-batch")
HOW = {
    "processes": "trained, a process for each rank; the clock on the wall",
    "slices": "each rank's work run and timed alone, put together in the order of the schedule",
}


def attention_share(bench: Bench, profile: Path) -> Row:
    """How much of a document's work attention is, where it fills the context: by FLOPs and by time, ours and a 7B's."""
    ours = bench.model.cost_model(attention_efficiency=1.0)
    theirs = wlb.ModelConfig.preset("llama2-7b").cost_model(attention_efficiency=1.0)
    measured = wlb.CostModel.from_profile(profile)

    def share(costs: wlb.CostModel, tokens: int) -> float:
        return float(costs.attention_cost([tokens])[0] / costs.cost([tokens])[0])

    h100 = wlb_tools.Hardware.preset("h100").cost_model(wlb.ModelConfig.preset("llama2-7b"))
    return {
        "flops": share(ours, bench.context),
        "seconds": share(measured, bench.context),
        "flops_7b": share(theirs, 131072),
        "seconds_7b_h100": share(h100, 131072),
    }


def levels_of(busy: list[list[list[float]]], layout: Layout, *, dynamic: bool) -> dict[str, float]:
    """See `studies.proof.figures.levels`; with groups that a plan chose, dp and cp are not what they are else."""
    found = levels(busy, layout.sizes)
    return {name: found[name] for name in (("gpu", "pp") if dynamic else LEVELS)}


def runs(layout: Row) -> dict[str, Run]:
    """By method."""
    return {name: Run.of(row) for name, row in layout["methods"].items()}


def gains(layout: Row, *, flops: bool, base: str) -> dict[str, Gain]:
    """Of every method over `base`; of none where that did not run."""
    found = runs(layout)
    return {name: gain(run, found[base], flops=flops) for name, run in found.items()} if base in found else {}


def errors(layout: Row) -> dict[str, float]:
    """The prediction against the clock: of steps, and of ratios to the baseline."""
    found = runs(layout)
    steps = np.concatenate([run.step_errors for run in found.values()])
    others = [one for name, one in gains(layout, flops=False, base=BASES[0]).items() if name != BASES[0]]
    ratios = [abs(one.error) for one in others]
    return {
        "step_median": float(np.median(np.abs(steps))),
        "step_p95": float(np.percentile(np.abs(steps), 95)),
        "step_mean": float(steps.mean()),
        "ratio_median": float(np.median(ratios)) if ratios else 0.0,
        "ratio_worst": max(ratios, default=0.0),
    }


def found(layouts: list[Row]) -> list[Row]:
    """Of every layout, for whoever has only the record: gains of model FLOP/s over the baseline, and errors."""
    return [
        {
            "layout": layout["settings"]["layout"],
            "kind": layout["kind"],
            "gains": {name: asdict(one) for name, one in gains(layout, flops=True, base=BASES[0]).items()},
            "errors": errors(layout),
        }
        for layout in layouts
    ]


def text(record: Row, *, picture: str) -> str:
    """The page, in Markdown; lines but those of tables have at most 120 characters."""
    return "\n".join(map(_wrapped, _lines(record, picture))) + "\n"


def _wrapped(line: str) -> str:
    if line.startswith(("|", "!")):
        return line
    paragraphs = line.split("\n")
    return "\n".join(
        textwrap.fill(
            one, 120, subsequent_indent="  " * one.startswith("- "), break_long_words=False, break_on_hyphens=False
        )
        for one in paragraphs
    )


def _lines(record: Row, picture: str) -> Iterator[str]:
    about, layouts = record["machine"], record["layouts"]
    settings = layouts[0]["settings"]
    share = about["attention_share"]
    yield "Written by `make proof`; do not edit."
    yield ""
    yield "# Gains by the clock, beside the prediction"
    yield ""
    summary = found(layouts)
    best = [(one["layout"], max(one["gains"].items(), key=lambda gain: gain[1]["ratio"])) for one in summary]
    gains_said = ", ".join(f"{gain['ratio']:.2f} at {layout} (*{name}*)" for layout, (name, gain) in best)
    worst = max(one["errors"]["ratio_worst"] for one in summary)
    yield (
        f"The fastest method over documents in order of arrival, by FLOPs: {gains_said}. Ratios between methods are"
        f" predicted within {worst:.1%}."
    )
    yield ""
    yield (
        "A small model trains on the lengths of real documents under every method. The"
        " plans are those of `wlb_tools.simulate`, the clock grades them, and beside each gain stands what the"
        " simulation predicted from a profile of this machine (`wlb profile`), a probe of the link between its ranks,"
        " and one of what the trainer takes beside its layers, on micro-batches and steps that no method trains."
    )
    yield ""
    yield (
        f"{about['gpu'] or about['cpu']}, {about['cores']} cores. `{record['command']}`. {record['documents']},"
        f" {settings['batches']} global batches; hidden {settings['hidden']}, {settings['layers']} layers, context"
        f" {settings['context']:,}. Attention is {share['flops']:.0%} of the FLOPs of a document that fills the context"
        f" ({share['flops_7b']:.0%} in LLaMA2-7B at 128K), and {share['seconds']:.0%} of its measured time here"
        f" ({share['seconds_7b_h100']:.0%} is assumed of the 7B model on a H100)."
    )
    yield ""
    yield f"![Gains over the baseline, measured and predicted]({picture})"
    for layout in layouts:
        yield from _layout(layout)
    yield ""
    yield from _reading()


def _layout(layout: Row) -> Iterator[str]:
    found, bases = runs(layout), [base for base in BASES if base in layout["methods"]]
    sliced = layout["kind"] == "slices"
    tokens, flops = (gains(layout, flops=flops, base=BASES[0]) for flops in (False, True))
    uncut = gains(layout, flops=True, base=BASES[-1]) if BASES[-1] in bases else {}
    clock = f" ({layout['settings']['clock']} time)" if sliced else ""
    yield ""
    yield f"## {layout['title']}: {HOW[layout['kind']]}{clock}"
    yield ""
    yield _measured(layout["machine"], layout["settings"]["repeats"], sliced=sliced)
    if sliced and not layout["link"]:
        yield ""
        yield (
            "No link was probed, for want of a second device: what ranks send each other takes no time in these"
            " figures."
        )
    yield ""
    head = ["method", "tokens/s", "GFLOP/s", "x tokens/s", "predicted"]
    head += ["x FLOP/s", "over uncut", "step error", "idle"]
    head += ["even"] if sliced else []
    yield from _head([*head, "delay", "heaviest step"])
    for name, run in found.items():
        row = layout["methods"][name]
        ranks = np.prod(list(layout["sizes"].values()))
        busy = row["work"] if not sliced else None
        idle = 1 - sum(busy) / ranks / run.seconds.sum() if busy else _idle(row)
        cells = [
            name,
            f"{run.tokens / run.steady:,.0f}",
            f"{run.flops / run.steady / 1e9:,.1f}",
            _interval(tokens[name], name == BASES[0]),
            f"{tokens[name].predicted:.3f}",
            _interval(flops[name], name == BASES[0]),
            _interval(uncut[name], name == BASES[-1]) if uncut else "",
            f"{np.median(np.abs(run.step_errors)):.1%}",
            f"{idle:.0%}",
        ]
        cells += [f"{run.seconds.sum() / sum(row['even']):.3f}"] if sliced else []
        work = run.work[: run.streamed]
        yield _row([*cells, f"{row['delay']:.2f}", f"{work.max() / work.mean():.2f}"])
    error = errors(layout)
    yield ""
    yield (
        f"Prediction: a step is off by {error['step_median']:.1%} in the median, {error['step_p95']:.1%} at the 95th"
        f" percentile ({error['step_mean']:+.1%} in the mean); a ratio to {BASES[0]} by {error['ratio_median']:.1%} in"
        f" the median and {error['ratio_worst']:.1%} at most."
        f" {_pace(layout)}{_gained(flops, uncut)}"
    )
    yield ""
    yield "Busiest over mean, mean of steps:"
    yield ""
    yield from _head(["method", *LEVELS])
    for name in found:
        level = layout["methods"][name]["levels"]
        yield _row([name, *(f"{level[key]:.3f}" if key in level else "" for key in LEVELS)])


def _measured(about: Row, repeats: int, *, sliced: bool) -> str:
    """When, how often and on what, and whether other programs were in the way."""
    busy = about["busy"]
    others = (
        "" if busy is None else f", {busy:.1f} of {about['cores']} processors busy with other programs at the start"
    )
    said = (
        f"Measured {about['time'][:16].replace('T', ' ')} UTC, {repeats} times{others}, torch"
        f" {about['packages']['torch']}, wlb {about['wlb']} at {about['commit'] or 'no known commit'}."
    )
    if busy is None or busy < QUIET:
        return said
    if sliced:
        return f"{said} Other programs were running: they slow memory and caches down, and times are less exact."
    return (
        f"{said} **Other programs were running, and the clock on the wall counts their time too: these figures say"
        " little about the methods, and have to be measured again on a quiet machine.**"
    )


def _pace(layout: Row) -> str:
    """How far the machine was from its profile."""
    slower = layout["pace"]["seconds"]
    return f"Even micro-batches of no method took {slower:.2f} times what was predicted before the run. "


def _idle(row: Row) -> float:
    """Of the mean rank: whatever is not computing."""
    return 1 - float(row["attribution"]["compute"])


def _interval(one: Gain, is_base: bool) -> str:
    return "1" if is_base else f"{one.ratio:.3f} ({one.low:.3f} to {one.high:.3f})"


def _gained(flops: Mapping[str, Gain], uncut: Mapping[str, Gain]) -> str:
    """Who gains by model FLOP/s over both baselines, beyond the interval, and who does not."""
    both = {name: [of[name] for of in (flops, uncut) if of] for name in flops if name not in BASES}
    sure = [name for name, of in both.items() if all(one.shown for one in of)]
    rest = [name for name in both if name not in sure]
    said = f"Faster than both baselines, the whole interval above 1: {', '.join(sure) or 'none'}."
    return said + (f" Not shown: {', '.join(rest)}." if rest else "")


def _reading() -> Iterator[str]:
    yield "## How to read it"
    yield ""
    yield (
        "- x: throughput over that of *original*, documents as they arrive and cut every context. Tokens a second"
        " favours methods that cut documents, which attend to less; model FLOPs a second does not. *over uncut*: FLOPs"
        " a second over those of documents as they arrive, none of them cut. In brackets 95 % of 2,000 draws of steps,"
        " in pairs from the same place of the stream: another sample of documents may give anything in it.\n"
        "- *finer* and *finer, 4 times* make 2 and 4 micro-batches of each, of the same documents; no document is cut,"
        " so that one that fills the context is a micro-batch by itself. The other packers cannot: a micro-batch of"
        " theirs is a context.\n"
        "- Every method trains every document once. The last steps, which empty queues, count at the efficiency of the"
        " others, as in a long run; what they weigh is the work that the simulation sees in them, measured and"
        " predicted alike.\n"
        "- x and what is done in a second are of the median repetition of each step. *step error*: predicted over"
        " measured seconds of a step, less 1; the median without its sign. Predicted is at the pace of the run, which"
        " the even micro-batches show. *idle*: time in which the mean rank does not compute. *even*: time over"
        " that of the same work spread evenly over ranks and micro-batches. *heaviest step*: its work over the mean"
        " step's; what waits for company makes steps uneven, unless their work is bounded (*steps of 2*: by twice a"
        " mean global batch's).\n"
        "- gpu, dp, pp, cp, micro-batch: which are compared. In processes, what a rank waits for inside a micro-batch"
        " (the keys of another) counts as busy, so that unevenness of cp hides there and shows in slices.\n"
        "- Processes keep the memory that they free, as a GPU's allocator does: else pages that come anew are up to a"
        " quarter of the time of a large micro-batch, now and then.\n"
        "- The model is small, and the ranks are processors of one machine: attention's weight is a 7B model's, the"
        " links are not. What holds on GPUs is for the same command on GPUs to say."
    )


def _head(cells: list[str]) -> Iterator[str]:
    yield _row(cells)
    yield _row(["---", *["---:"] * (len(cells) - 1)])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def draw(record: Row, path: Path) -> None:
    """Gains by model FLOPs a second with their intervals, and predicted ones, layout by layout."""
    layouts = record["layouts"]
    names = [name for name in METHODS if any(name in layout["methods"] for layout in layouts)]
    columns = min(2, len(layouts))  # a page of the site has no room for more
    rows = -(-len(layouts) // columns)
    size = 3.8 * columns + 1.8, rows * (0.9 + 0.25 * len(names))
    with mpl.rc_context(STYLE):
        figure, panels = plt.subplots(rows, columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
        for axes in panels.flat[len(layouts) :]:
            axes.set_visible(False)
        for axes, layout in zip(panels.flat, layouts, strict=False):
            found = gains(layout, flops=True, base=BASES[0])
            places = [-names.index(name) for name in found]
            ratios = np.array([one.ratio for one in found.values()])
            reach = np.array([[one.ratio - one.low, one.high - one.ratio] for one in found.values()]).T
            axes.errorbar(ratios, places, xerr=reach, fmt="o", color=WLB, capsize=3, label="measured, 95 %")
            axes.plot([one.predicted for one in found.values()], places, "x", color="#c0452c", label="predicted")
            axes.axvline(1, color="#57606a", linewidth=1)
            axes.set_title(f"{layout['title']} ({layout['kind']})", fontsize=10.5)
            axes.set_xlabel("model FLOP/s over original")
        panels[0][0].set_yticks([-index for index in range(len(names))], names)
        panels[0][0].legend(fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
        plt.close(figure)
