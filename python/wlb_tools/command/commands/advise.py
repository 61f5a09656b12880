"""`wlb advise`: one page about one training run: whether wlb helps, how, and what to paste."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from cyclopts.types import PositiveInt
from numpy.typing import NDArray

import wlb_tools
from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.cluster import Cluster, described
from wlb_tools.command.inputs.options import BATCHES, CLUSTER, DOCUMENTS, OUTPUT, CommandLine, settings
from wlb_tools.command.inputs.stream import Reading, Source, Stream, Trainer
from wlb_tools.command.output.configuration import configuration
from wlb_tools.command.output.console import Output, reporting
from wlb_tools.command.output.report import Code, Heading, Paragraphs, Report, Table
from wlb_tools.command.output.trainers import ENTRIES
from wlb_tools.command.words import counted
from wlb_tools.simulation import Choice, Outcome, tune_loader
from wlb_tools.simulation import tune as tune_cluster
from wlb_tools.simulation.words import describe, model_sentences

_LITTLE = 1.01
"""A predicted speed-up below this is too small to notice."""


def advise(
    sources: Source,
    /,
    *,
    reading: Annotated[Reading, DOCUMENTS] = Reading(),
    steps: Annotated[PositiveInt, BATCHES] = 20,
    cluster: Annotated[Cluster, CLUSTER] = Cluster(),
    output: Annotated[Output, OUTPUT] = Output(),
    command_line: CommandLine,
) -> None:
    """One answer for one run: how unequal the documents are, what that costs, which plan, its gain, the lines to paste.

    Only plans that the trainer runs are tried, and the lines make the one that is recommended. The gain is predicted
    against the original order, cut at the context, with the range over other rates of attention. If there is nothing to
    gain, the page says so.

    Args:
        steps: global batches to form.
    """
    trainer = reading.trainer or "loop"
    if trainer == "verl":
        raise CliError(
            "--trainer verl: there is nothing to choose, because wlb plans every batch of it within verl's own limits;"
            " docs/trainers/rl.md has the lines"
        )
    if cluster.cost_file is not None:
        raise CliError("--cost-model: costs are fitted to the cluster, or are the trainer's own; leave this out")
    entry = ENTRIES.get(trainer)
    run = cluster.read(data_parallel=entry is not None and entry.data_parallel)
    scenario = run.scenario(chosen=True)
    if entry is not None:
        entry.check(trainer, scenario)
    with output.progress() as bars:
        stream = reading.stream(sources, scenario.setup(), bars, steps=steps, longest=run.context)
        output.folder("advise")
        alone = _one_rank(scenario)
        advice = None
        if alone is None and entry is not None:
            tuned = tune_loader(stream.lengths, scenario, dynamic=entry.dynamic, progress=reporting(bars, "Plans"))
            advice = Advice(tuned.scenario, tuned.baseline, tuned.tried, tuned.best, trainer, entry.written(tuned))
        elif alone is None:
            tuning = tune_cluster(stream.lengths, scenario, by="tokens", progress=reporting(bars, "Plans"))
            written = configuration(tuning, model=run.model_name, profile=None)
            advice = Advice(tuning.scenario, tuning.baseline, tuning.by_plan, tuning.best, trainer, written)
    report = _report(stream, scenario, advice, alone, run.assumed(), described(scenario) | settings(reading))
    output.write(report, command_line)


@dataclass(frozen=True)
class Advice:
    """Plans that a trainer runs, the best of them, and the lines that make it."""

    scenario: wlb_tools.Scenario
    baseline: Outcome
    choices: tuple[Choice, ...]
    best: Choice
    trainer: Trainer
    lines: str

    def label(self, choice: Choice) -> str:
        """The name of a plan among the others, with what differs from those of the same name, and limits it breaks."""
        alike = [other for other in self.choices if other.title == choice.title]
        name = choice.title if len(alike) < 2 else f"{choice.title}, {choice.max_tokens:,} tokens"
        scenario, need = self.scenario, choice.outcome.memory.total.max()
        if choice.delay > scenario.max_mean_delay:
            return f"{name} (waits longer than --max-mean-delay {scenario.max_mean_delay:g})"
        if need > scenario.hardware.memory_bytes:
            return f"{name} (does not fit into {scenario.hardware.name})"
        return name


def _one_rank(scenario: wlb_tools.Scenario) -> str | None:
    """The reason why no rank ever waits for another; None: some do."""
    layout = scenario.layout
    if layout.dp == layout.pp == layout.cp == 1:
        if layout.tp == 1:
            return "there is one GPU, so nothing waits for it"
        return f"the {layout.tp} GPUs split every matrix and work on the same tokens, so none waits for another"
    return None


def _report(
    stream: Stream,
    scenario: wlb_tools.Scenario,
    advice: Advice | None,
    alone: str | None,
    assumed: list[str],
    about: dict[str, Any],
) -> Report:
    numbers: dict[str, Any] = {"documents": stream.described(), "unequal": _unequal(stream.documents.lengths)}
    documents = Paragraphs(
        [
            stream.documents.in_words(),
            _unequal_in_words(numbers["unequal"]),
            *model_sentences(scenario),
        ]
    )
    if advice is None:
        answer = f"Nothing is to be gained: {alone}."
        more = "Pack documents to a full window and mask them from each other; wlb.pack does no better here."
        return Report(
            command="advise",
            subject="advice",
            title=answer,
            blocks=(Paragraphs([*assumed, more]), Heading("The documents"), documents),
            numbers=numbers | {"gain": 1.0, "answer": answer},
            facts={"Settings": about},
        )
    best = advice.best.summary(advice.baseline)
    low, high = best["speedup_band"]
    gain = best["speedup"]
    name = advice.label(advice.best)
    lines = None
    if advice.best.outcome is advice.baseline or gain < _LITTLE:
        answer = (
            f"Little or nothing is to be gained: the best plan ({name}) is predicted at {gain:.2f} times the speed."
        )
    else:
        answer = f"Use {name}: predicted {gain:.2f} times the speed (range {low:.2f} to {high:.2f})."
        lines = advice.lines
    baseline = advice.baseline.summary()
    cost = (
        f"Without wlb the heaviest micro-batch of a step takes {baseline['micro_batch_imbalance_mean']:.2f} times the"
        f" mean, in the mean over steps."
    )
    gib = best["peak_bytes"] / 2**30
    needs = (
        f"It needs micro-batches of up to {best['largest_micro_batch']:,} tokens ({gib:.0f} GiB of the fullest GPU)."
        f" A token waits {best['delay_mean']:.2f} steps in the mean, {best['delay_max']} at most."
    )
    keys = ("speedup", "speedup_band", "micro_batch_imbalance_mean", "delay_mean", "delay_max", "peak_bytes")
    rows = [(advice.label(each), each.summary(advice.baseline), each == advice.best) for each in advice.choices]
    tried = "Plans that were tried" if advice.trainer == "loop" else f"Plans that wlb makes in {advice.trainer}"
    blocks: list[Any] = [
        Paragraphs([*assumed, cost, *([needs] if lines else [])]),
        Heading("The documents"),
        documents,
        Table.of(tried, "plan", keys, rows),
        Heading("What this rests on"),
        Paragraphs(
            [
                f"{describe(scenario)}; {counted(stream.batches, 'global batch')}.",
                f"Every time is predicted; attention's from {scenario.attention.source}. The range is over attention at"
                " 0.35 to 2.5 times the assumed rate. No GPU has run this.",
            ]
        ),
    ]
    if lines:
        blocks.append(Code(f"Lines to paste ({advice.trainer})", lines))
    return Report(
        command="advise",
        subject="advice",
        title=answer,
        blocks=blocks,
        numbers=numbers | {"gain": gain, "range": [low, high], "answer": answer, "best": best, "lines": lines},
        facts={"Settings": about},
    )


def _unequal(lengths: NDArray[np.int64]) -> dict[str, float]:
    """Inequality of documents: the shares of the longest hundredth, and the longest relative to the median."""
    real = np.sort(lengths.astype(np.float64))[::-1]
    longest = real[: max(1, real.size // 100)]
    pairs = real * (real + 1) / 2
    return {
        "of_tokens": float(longest.sum() / real.sum()),
        "of_attention": float(pairs[: longest.size].sum() / pairs.sum()),
        "longest_over_median": float(real[0] / np.median(real)),
    }


def _unequal_in_words(unequal: dict[str, float]) -> str:
    return (
        f"The longest hundredth of them holds {unequal['of_tokens']:.0%} of the tokens and"
        f" {unequal['of_attention']:.0%} of the attention; the longest is {unequal['longest_over_median']:,.0f} times"
        " the median."
    )
