"""The report of `wlb tune` when it compares layouts: the fastest, the best without wlb, and those refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wlb_tools.command.inputs.stream import Stream
from wlb_tools.command.output.columns import COLUMNS, RATES
from wlb_tools.command.output.report import Code, Headline, Paragraphs, Report, Table
from wlb_tools.command.words import counted
from wlb_tools.simulation import Choice
from wlb_tools.simulation.layouts import LayoutSearch, in_short
from wlb_tools.simulation.words import assumptions, kernel_sentence, model_sentences

_NOTES = (
    "v: stages of each pipeline rank, if there are several. s: seconds of a global batch, in a long stream. gain: the"
    " speed of the best layout over this one's. delay: iterations that a token waits. GiB: memory of the fullest GPU."
    " most lost: what takes the most time besides computing.",
    f"band: least and most gain, {RATES}.",
    "Without wlb: the original order or fixed lengths on their best layout, with each document sharded as Transformer"
    " Engine does. All"
    " rows are predicted for the same documents.",
)

_SHOWN = ("plan", "step_seconds", "tokens_per_second", "gain", "gain_band", "delay_mean", "peak_bytes", "most_lost")


def layouts_report(search: LayoutSearch, stream: Stream, *, settings: Mapping[str, Any], continued: str) -> Report:
    """Makes the report.

    Args:
        search: the result of the search.
        stream: documents that were simulated.
        settings: settings of the command.
        continued: command line that tunes the settings of the best layout.
    """
    best, scenario = search.best, search.best.outcome.scenario
    layout, gain = in_short(scenario.layout), search.gain(search.without)
    others = {"without wlb": search.without, "own": search.own, "own, without wlb": search.own_without}
    compared = [_values(search, choice, name) for name, choice in others.items() if choice is not None]
    ranked = [_values(search, choice) for choice in search.ranked]
    gains = [f"{gain:.3f} times the best layout without wlb"]
    if search.own is not None:
        gains.append(f"{search.gain(search.own):.3f} times the own layout with its best plan")
    if search.own_without is not None:
        gains.append(f"{search.gain(search.own_without):.3f} times the own layout without wlb")
    slower, faster = (of["tokens_per_second"] for of in (compared[0], ranked[0]))
    gpus = scenario.layout.world_size
    return Report(
        command="tune",
        subject=f"predicted · {scenario.model.name}, {gpus} x {scenario.hardware.name}",
        title=f"{layout}, {best.title}: {gain:.2f}x the best layout without wlb (predicted)",
        sentences=(
            f"{scenario.model.name} on {gpus} x {scenario.hardware.name}, {scenario.tokens_per_batch:,} tokens in a"
            f" global batch; {counted(stream.batches, 'global batch')} of documents.",
            kernel_sentence(scenario),
            *model_sentences(scenario),
            f"The best is {', '.join(gains)}, by {'tokens' if search.by == 'tokens' else 'FLOPs'}.",
            f"{counted(search.layouts, 'layout')} possible, {counted(search.candidates, 'candidate')} with"
            f" micro-batches and methods, {search.simulated:,} of them simulated: the others are slower by a bound.",
            *search.refused.sentences(),
            *stream.in_words(),
        ),
        headlines=[Headline.of("tokens/s, best without wlb and best", slower, faster, COLUMNS["tokens_per_second"])],
        blocks=(
            _table("The fastest layouts, each with its best plan", ranked),
            _table("To compare with", compared),
            Paragraphs(_NOTES, small=True),
            Code("Its settings, tuned", continued),
        ),
        facts={"Assumptions": assumptions(scenario), "Settings": settings, "Documents": stream.described()},
        numbers=search.as_json(),
    )


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    return Table.of(title, "layout", _SHOWN, [(row["layout"], row, row["gain"] == 1) for row in rows])


def _values(search: LayoutSearch, choice: Choice, name: str = "") -> dict[str, Any]:
    outcome = choice.outcome
    of = outcome.summary()
    batches = outcome.tokens / outcome.scenario.tokens_per_batch
    parts: Mapping[str, float] = of["attribution"]
    worst = max(parts.keys() - {"compute"}, key=lambda name: (parts[name], name))
    what = COLUMNS[worst]
    lost = f"{what.group}: {what.heading} {parts[worst]:.0%}" if parts[worst] > 0 else ""
    return {
        **of,
        "layout": in_short(outcome.scenario.layout),
        "plan": choice.title + (f" ({name})" if name else ""),
        "step_seconds": outcome.steady_seconds / batches,
        "tokens_per_second": outcome.tokens / outcome.steady_seconds,
        "gain": search.gain(choice),
        "gain_band": search.gain_band(choice),
        "most_lost": lost,
    }
