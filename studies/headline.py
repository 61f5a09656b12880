"""``make headline``: what wlb is worth over the best that a cluster can do without it; writes docs/headline.md.

For every corpus, size of the global batch and share of hidden communication the layouts of all GPUs are searched twice:
with every method, and with those that need nothing of wlb (Plain-4D and Fixed-4D, sharded per document where that is
faster). The gain is the best of the first over the best of the second, each on the layout that suits it. Both are then
judged in orders of the documents that the search has not seen. Beside it stands what every method is worth on one
layout, over that same best without wlb; and gains where one assumption is another: replicas that meet in every
micro-batch, ranks that gather only the keys that they need.
"""

from __future__ import annotations

import itertools
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

import numpy as np
from cyclopts import App
from cyclopts.types import PositiveInt
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).parents[1] / "benches"))

from common import CONTEXT, Lengths, machine, rounded, sources, stream, write_record

import wlb
import wlb_tools
from wlb_tools.cluster.parallel import Fsdp
from wlb_tools.simulation import KINDS, VARIANTS, LayoutSearch, Outcome, search_layouts
from wlb_tools.simulation.balance import band
from wlb_tools.simulation.layouts import in_short
from wlb_tools.simulation.scenario import Keys
from wlb_tools.simulation.tuning import Choice, Objective

Row = dict[str, Any]
MILLIONS = (0.5, 1, 4, 16)  # tokens of a global batch, of 2^20
HIDDEN = (0.0, 0.5, 1.0)  # share of all communication that computation hides
GAIN = 1.02  # below this a gain is none
ORDERS = 4  # random orders of the documents, beside the one that is searched, in which what was found is judged
LAYOUT = wlb_tools.ParallelLayout(tp=8, cp=2, pp=4, virtual_stages=2)  # of the example in docs/simulation.md
METHODS = ("plain", "adaptive_cp", "adaptive_release", "dynamic_cp", "wlb_dynamic_cp")
MEETING = 4  # millions of tokens of a global batch, where replicas also meet in every micro-batch
SHOWN = (0.0, 0.5)  # shares of hidden communication where ranks also gather only the keys that they need

app = App(name="python -m studies.headline", version_flags=[])


@dataclass(frozen=True)
class Case:
    """What is assumed of a run."""

    corpus: str
    millions: float
    hidden: float
    fsdp: Fsdp = "zero1"
    cp_keys: Keys = "all"


@app.default
def main(
    *lengths: Path,
    model: str = "llama2-7b",
    gpu: str = "h100",
    gpus: PositiveInt = 64,
    batches: tuple[float, ...] = MILLIONS,
    tokens: PositiveInt = 24,
    least: PositiveInt = 4,
    workers: PositiveInt = 2,
    page: Path = Path("headline.md"),
    record: Path = Path("headline.json"),
) -> None:
    """Searches layouts under every assumption, with wlb and without.

    Args:
        lengths: .npy files of documents' lengths in tokens; without any, synthetic ones.
        model: preset or config.
        gpu: preset.
        gpus: of the cluster.
        batches: millions (2^20) of tokens of a global batch.
        tokens: millions of tokens of each stream, in random order; again in a new one where there are not so many.
        least: global batches that a stream has, if `tokens` are fewer.
        workers: processes.
        page: where the tables go.
        record: where all numbers go.
    """
    corpora = sources(lengths, documents=60_000)
    cases = [Case(*case) for case in itertools.product(corpora, batches, HIDDEN)]
    if MEETING in batches:
        cases += [Case(*case, fsdp="zero3") for case in itertools.product(corpora, [MEETING], HIDDEN)]
    cases += [Case(*case, cp_keys="needed") for case in itertools.product(corpora, batches, SHOWN)]
    options = {"model": wlb.ModelConfig.preset(model), "hardware": wlb_tools.Hardware.preset(gpu), "gpus": gpus}
    about = {"machine": machine(), "command": command(lengths, tokens, least), "model": model, "gpu": gpu, "gpus": gpus}
    found: dict[Case, list[Row]] = {}
    with (
        Progress(console=Console(stderr=True), transient=True) as bars,
        ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool,
    ):
        task = bars.add_task("layouts", total=len(cases))
        # The largest first, so that no core waits for the last one.
        order = sorted(cases, key=lambda case: (case.fsdp, -case.millions))
        running = {pool.submit(answer, case, corpora[case.corpus], tokens, least, options): case for case in order}
        for done in as_completed(running):
            found[running[done]] = done.result()
            rows = [asdict(case) | row for case in cases for row in found.get(case, [])]
            made = rounded(about | {"rows": rows})
            write_record(record, made)  # a run that is cut off leaves what it has
            bars.advance(task)
    text = "\n".join(lines(made)) + "\n"
    page.write_text(text)
    print(text)


def command(lengths: Iterable[Path], tokens: int, least: int) -> str:
    """What makes the page again, whatever folder the lengths are in."""
    names = " ".join(path.name for path in lengths)
    return f"make headline LENGTHS={shlex.quote(names)} HEADLINE_FLAGS='--tokens {tokens} --least {least}'"


def answer(case: Case, lengths: Lengths, millions: int, least: int, options: dict[str, Any]) -> list[Row]:
    """The best with wlb and without, and the gain: by tokens, and by FLOPs; and every method on one layout."""
    batch = int(case.millions * 2**20)
    tokens = max(millions * 2**20, least * batch)
    pieces = stream(lengths, tokens, seed=0)
    others = [stream(lengths, tokens, seed=1 + seed) for seed in range(ORDERS)]
    assumed = options | dict.fromkeys(("cp_overlap", "tp_overlap", "dp_overlap"), case.hidden)
    assumed |= {"context": CONTEXT, "cp_keys": case.cp_keys}
    template = wlb_tools.ParallelLayout(fsdp=case.fsdp)
    search = search_layouts(pieces, tokens_per_batch=batch, template=template, by="tokens", **assumed)
    rows = [gained(search, others)]
    if is_plain(asdict(case)):
        rows.append(gained(search.again("flops"), others))
    if case.fsdp == "zero1" and options["gpus"] == LAYOUT.world_size:
        rows[0]["one_layout"] = on_one_layout(pieces, batch, assumed, search.without)
    return [row | {"documents": pieces.size} for row in rows]


def gained(search: LayoutSearch, others: Iterable[Lengths]) -> Row:
    """What a search found, and what that is worth in other orders."""
    return {
        "by": search.by,
        "gain": search.gain(search.without),
        "orders": [in_order(search, pieces) for pieces in others],
        "band": list(search.gain_band(search.without)),
        "with": described(search, search.best),
        "without": described(search, search.without),
        "simulated": search.simulated,
        "candidates": search.candidates,
    }


def in_order(search: LayoutSearch, lengths: Lengths) -> float:
    """The gain of the same two plans, made for these documents in this order."""

    def again(choice: Choice) -> Choice:
        variants = {choice.kind: choice.variant}
        return replace(choice, outcome=wlb_tools.simulate(lengths, choice.outcome.scenario, variants=variants).baseline)

    return again(search.best).speedup(again(search.without).outcome, search.by)


def on_one_layout(lengths: Lengths, batch: int, assumed: dict[str, Any], without: Choice) -> Row:
    """Every method on :data:`LAYOUT`: tokens a second over those of the best layout and plan without wlb."""
    cluster = {name: value for name, value in assumed.items() if name != "gpus"}
    scenario = wlb_tools.Scenario(layout=LAYOUT, num_micro_batches=batch // CONTEXT, outlier_thresholds=(), **cluster)
    outcomes = wlb_tools.simulate(lengths, scenario, variants=METHODS).outcomes
    before = without.outcome

    def row(outcome: Outcome) -> Row:
        pairs = zip(before.swept, outcome.swept, strict=True)
        ends = band([one.steady_seconds / other.steady_seconds for one, other in pairs])
        return {"gain": before.steady_seconds / outcome.steady_seconds, "band": list(ends)}

    return {name: row(outcome) for name, outcome in outcomes.items()}


def described(search: LayoutSearch, choice: Choice) -> Row:
    """A plan and its layout."""
    return {
        "plan": KINDS[choice.kind],
        "layout": in_short(choice.outcome.scenario.layout),
        "seconds": search.seconds(choice),
        "delay": choice.delay,
    }


def lines(record: Row) -> Iterator[str]:
    """The page, in Markdown; lines but those of tables have at most 120 characters."""
    rows = [row for row in record["rows"] if is_plain(row)]
    yield from ["# Gains over the best that runs without wlb", ""]
    about = record["machine"]
    yield from wrapped(
        f"`{record['command']}` writes this page: {record['model']} with a context of 128K on {record['gpus']}"
        f" {record['gpu']}, *predicted* ([simulation](simulation.md)). Every layout of these GPUs that fits into"
        " memory is tried, with every method. The baseline is the fastest of what needs nothing of wlb, on the layout"
        " that suits *it*: Plain-4D, Fixed-4D, and either of them with each document sharded over the context-parallel"
        " ranks, as Transformer Engine does with packed sequences. So what another layout gains is not counted as"
        f" wlb's. Written {about['time'][:10]} by wlb {about['wlb']}, commit {about['commit'] or 'unknown'}."
    )
    yield ""
    for by in get_args(Objective):
        gains = [row["gain"] for row in rows if row["by"] == by]
        yield from spread(by, gains)
    yield from wrapped(
        "- *Band*: the same two plans were attention 0.35 to 2.5 times as fast as assumed. *Hidden*: the share of all"
        " communication, of context-, tensor- and data-parallel ranks, that computation hides. By FLOPs a method pays"
        " for the documents that it cuts. With all of it hidden the best layouts have tensor-parallel ranks on several"
        " nodes, which no network gives: read those rows as a limit. Where the best with wlb is a method without it,"
        " nothing of wlb is faster."
    )
    if any("orders" in row for row in rows):
        yield from wrapped(
            "- Layouts and plans are searched for one random order of the documents, and of that order these rows are:"
            " in [orders that were not searched](#in-orders-that-were-not-searched) they differ."
        )
    for corpus in dict.fromkeys(row["corpus"] for row in rows):
        yield from ["", f"## {corpus}", ""]
        yield "| global batch | hidden | by tokens | band | by FLOPs | band | best without wlb | best with it | delay |"
        yield "| ---: | ---: | ---: | ---: | ---: | ---: | --- | --- | ---: |"
        for row in rows:
            if row["corpus"] == corpus and row["by"] == "tokens":
                yield table_row(row, same_case(rows, row, "flops"))
    yield from in_other_orders(rows)
    yield from one_layout(rows)
    yield from meeting(record["rows"])
    yield from needed_keys(record["rows"])


def spread(by: Objective, gains: list[float]) -> list[str]:
    """What the rows gain by tokens or by FLOPs, all together."""
    return wrapped(
        f"- By {by if by == 'tokens' else 'FLOPs'}: {min(gains):.2f} to {max(gains):.2f}, in the middle"
        f" {np.median(gains):.2f}; below {GAIN}, that is nothing, in {sum(gain < GAIN for gain in gains)} of"
        f" {len(gains)} rows."
    )


def in_other_orders(rows: list[Row]) -> Iterator[str]:
    """What the same two plans gain for the same documents in orders that the search has not seen."""
    shown = [row for row in rows if "orders" in row]
    if not shown:
        return
    yield from ["", "## In orders that were not searched", ""]
    yield from wrapped(
        "Layouts and plans are searched for one random order of the documents, so some of a gain is chance. The same"
        f" two plans, made for {ORDERS} other orders: the median, and the least and the most."
    )
    yield ""
    for by in get_args(Objective):
        gains = [float(np.median(row["orders"])) for row in shown if row["by"] == by]
        yield from spread(by, gains)
    yield from ["", "| lengths | global batch | hidden | by tokens | other orders | by FLOPs | other orders |"]
    yield f"| --- |{' ---: |' * 6}"
    for row in shown:
        if row["by"] == "tokens":
            cells = [
                cell for one in (row, same_case(rows, row, "flops")) for cell in (f"{one['gain']:.2f}", in_orders(one))
            ]
            yield f"| {row['corpus']} | {row['millions']:g} M | {row['hidden']:.0%} | {' | '.join(cells)} |"


def in_orders(row: Row) -> str:
    """The median gain of orders that were not searched, and its ends."""
    orders = row["orders"]
    return f"{np.median(orders):.2f} ({min(orders):.2f} to {max(orders):.2f})"


def one_layout(rows: Iterable[Row]) -> Iterator[str]:
    """Every method on one layout, over the best without wlb on any."""
    shown = [row for row in rows if "one_layout" in row]
    if not shown:
        return
    yield from ["", "## On one layout", ""]
    yield from wrapped(
        f"What each method is worth on {in_short(LAYOUT)}, by tokens, over the same baselines as above, each on the"
        " layout that suits it, with the band. Below 1 another layout is worth more than the method; what Plain-4D"
        " lacks there is what the layout costs."
    )
    yield from by_method(shown)


def by_method(rows: Iterable[Row]) -> Iterator[str]:
    """What every method is worth on one layout, with its band."""
    titles = [VARIANTS[name].title for name in METHODS]
    yield from ["", f"| lengths | global batch | hidden | {' | '.join(titles)} |"]
    yield f"| --- |{' ---: |' * (2 + len(titles))}"
    for row in rows:
        cells = [with_band(row["one_layout"][name]) for name in METHODS]
        yield f"| {row['corpus']} | {row['millions']:g} M | {row['hidden']:.0%} | {' | '.join(cells)} |"


def meeting(rows: Iterable[Row]) -> Iterator[str]:
    """Gains where replicas meet once a step, and where they meet in every micro-batch."""
    shown = [row for row in rows if row["fsdp"] == "zero3"]
    if not shown:
        return
    yield from ["", "## Ranks that meet in every micro-batch", ""]
    yield from wrapped(
        f"Gains by tokens at a global batch of {MEETING} M, where gradients alone are reduced, once a step (ZeRO-1: the"
        " rows above), and where parameters are gathered in every micro-batch (`--fsdp zero3`); each over the best"
        " layout and plan without wlb of its own."
    )
    yield from beside(shown, rows, "ZeRO-1", "ZeRO-3")


def needed_keys(rows: Iterable[Row]) -> Iterator[str]:
    """Gains where ranks gather the keys of all, and where they gather those that they need."""
    shown = [row for row in rows if row["cp_keys"] == "needed"]
    if not shown:
        return
    yield from ["", "## Where only needed keys are gathered", ""]
    yield from wrapped(
        "The rows above assume that context-parallel ranks gather the keys of the whole sequence, as Transformer"
        " Engine's attention does. wlb's own, and some others, gather those that another rank needs (`--cp-keys"
        " needed`): fewer where documents are short and a sequence is cut as a whole, all where every document is cut."
        " Gains by tokens, with and without wlb on such attention, so that what it saves is nobody's gain."
    )
    gains = [row["gain"] for row in shown]
    yield from ["", *spread("tokens", gains)]
    yield from beside(shown, rows, "all keys", "needed keys")
    on_one = [row for row in shown if "one_layout" in row]
    if on_one:
        yield ""
        yield from wrapped(f"On {in_short(LAYOUT)} alone, as [above](#on-one-layout), with needed keys:")
        yield from by_method(on_one)


def beside(shown: Iterable[Row], rows: Iterable[Row], before: str, after: str) -> Iterator[str]:
    """Gains by tokens of some rows beside those of the same cases as most rows have them."""
    yield ""
    yield f"| lengths | global batch | hidden | {before} | {after} | best without wlb, {after} | best with it | delay |"
    yield "| --- | ---: | ---: | ---: | ---: | --- | --- | ---: |"
    for row in shown:
        once = same_case(filter(is_plain, rows), row, "tokens")
        without, best = (f"{row[side]['plan']}, {row[side]['layout']}" for side in ("without", "with"))
        of_case = [row["corpus"], f"{row['millions']:g} M", f"{row['hidden']:.0%}"]
        cells = [*of_case, with_band(once), with_band(row), without, best, f"{row['with']['delay']:.2f}"]
        yield f"| {' | '.join(cells)} |"


def is_plain(row: Row) -> bool:
    """Whether a case assumes what most of the page does."""
    return row["fsdp"] == "zero1" and row["cp_keys"] == "all"


def with_band(row: Row) -> str:
    """A gain and its band."""
    return f"{row['gain']:.2f} ({' to '.join(f'{end:.2f}' for end in row['band'])})"


def same_case(rows: Iterable[Row], row: Row, by: Objective) -> Row:
    """The row of the same corpus, batch and share of hidden communication, by tokens or by FLOPs."""
    names = ("corpus", "millions", "hidden")
    return next(one for one in rows if one["by"] == by and all(one[name] == row[name] for name in names))


def table_row(row: Row, flops: Row) -> str:
    """One case by both objectives; the plans are those by tokens."""
    bands = [" to ".join(f"{end:.2f}" for end in one["band"]) for one in (row, flops)]
    plans = [f"{row[side]['plan']}, {row[side]['layout']}" for side in ("without", "with")]
    cells = [
        f"{row['millions']:g} M",
        f"{row['hidden']:.0%}",
        f"**{row['gain']:.2f}**",
        bands[0],
        f"**{flops['gain']:.2f}**",
        bands[1],
        *plans,
        f"{row['with']['delay']:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def wrapped(text: str) -> list[str]:
    """Lines of at most 120 characters."""
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    app()
