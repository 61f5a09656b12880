"""`wlb advise`: one page about one training run: whether wlb helps, how, and what to paste."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from cyclopts.types import PositiveInt
from numpy.typing import NDArray

import wlb_tools
from wlb_tools.command.inputs.cluster import Cluster, described
from wlb_tools.command.inputs.options import BATCHES, CLUSTER, DOCUMENTS, OUTPUT, CommandLine, settings
from wlb_tools.command.inputs.stream import Reading, Source, Stream, Trainer
from wlb_tools.command.output.configuration import configuration
from wlb_tools.command.output.console import Output, reporting
from wlb_tools.command.output.report import Code, Heading, Paragraphs, Report, Table
from wlb_tools.command.words import counted
from wlb_tools.simulation import Tuning
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

    The gain is predicted against a run that cuts documents in order of arrival (Plain-4D), with the range over other
    rates of attention. If there is nothing to gain, the page says so.

    Args:
        steps: global batches to form.
    """
    run = cluster.read()
    scenario = run.scenario(chosen=True)
    with output.progress() as bars:
        stream = reading.stream(sources, scenario.setup(), bars, steps=steps, longest=run.context)
        output.folder("advise")
        alone = _one_rank(scenario)
        tuning = None
        if alone is None:
            tuning = tune_cluster(stream.lengths, scenario, by="tokens", progress=reporting(bars, "Plans"))
    trainer = reading.trainer or "loop"
    report = _report(stream, scenario, tuning, alone, trainer, run.model_name, described(scenario) | settings(reading))
    output.write(report, command_line)


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
    tuning: Tuning | None,
    alone: str | None,
    trainer: Trainer,
    model: str,
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
    if tuning is None:
        answer = f"Nothing is to be gained: {alone}."
        more = "Pack documents to a full window and mask them from each other; wlb.pack does no better here."
        return Report(
            command="advise",
            subject="advice",
            title=answer,
            blocks=(Paragraphs([more]), Heading("The documents"), documents),
            numbers=numbers | {"gain": 1.0, "answer": answer},
            facts={"Settings": about},
        )
    best = tuning.best.summary(tuning.baseline)
    low, high = best["speedup_band"]
    gain = best["speedup"]
    name = tuning.best.title
    if tuning.best.outcome is tuning.baseline or gain < _LITTLE:
        answer = (
            f"Little or nothing is to be gained: the best plan ({name}) is predicted at {gain:.2f} times the speed."
        )
        lines = None
    else:
        answer = f"Use {name}: predicted {gain:.2f} times the speed (range {low:.2f} to {high:.2f})."
        lines = _lines(tuning, trainer, model)
    baseline = tuning.baseline.summary()
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
    rows = [(choice.title, choice.summary(tuning.baseline), choice == tuning.best) for choice in tuning.by_plan]
    blocks: list[Any] = [
        Paragraphs([cost, *([needs] if lines else [])]),
        Heading("The documents"),
        documents,
        Table.of("Plans that were tried", "plan", keys, rows),
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
        blocks.append(Code(f"Lines to paste ({trainer})", lines))
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


def _lines(tuning: Tuning, trainer: Trainer, model: str) -> str:
    """Lines to paste into a trainer. Its entry point chooses a plan itself; a loop gets the plan of this page."""
    scenario, tokens = tuning.scenario, tuning.best.outcome.summary()["largest_micro_batch"]
    longest = scenario.context
    calls = {
        "huggingface": "from wlb.integrations.huggingface import balance\n\ntrainer = balance(trainer, max_tokens={})",
        "trl": (
            "from wlb.integrations.huggingface import balance\n\n"
            "trainer = SFTTrainer(model, SFTConfig(packing=False, max_length=None), train_dataset=dataset)\n"
            "trainer = balance(trainer, max_tokens={})"
        ),
        "axolotl": "plugins:\n  - wlb.integrations.axolotl.BalancePlugin\nwlb:\n  max_tokens: {}",
        "llamafactory": (
            "from llamafactory.train.tuner import run_exp\nfrom wlb.integrations.llamafactory import balanced\n\n"
            "run_exp = balanced(run_exp, max_tokens={})\nrun_exp()"
        ),
        "lightning": (
            "from wlb.integrations.lightning import BalancedDataModule\n\n"
            "data = BalancedDataModule(documents, max_tokens={}, config=config)"
        ),
    }
    if trainer in calls:
        return f"{calls[trainer].format(tokens)}\n"
    if trainer == "megatron":
        per_rank = -(-longest // scenario.layout.cp)
        return (
            "from wlb.integrations import megatron\n\n"
            'data = megatron.data_iterator(\n    "corpus_text_document",\n    model=model,\n'
            f"    max_tokens_per_rank={per_rank},\n    tokens_per_batch={scenario.tokens_per_batch},\n)\n"
        )
    return configuration(tuning, model=model, profile=None)
