"""``make headline``: what wlb is worth over the best that a cluster can do without it; writes docs/headline.md.

For every corpus, size of the global batch and share of hidden communication the layouts of all GPUs are searched twice:
with every method, and with those that need nothing of wlb (Plain-4D and Fixed-4D, sharded per document where that is
faster). The gain is the best of the first over the best of the second, each on the layout that suits it.
"""

from __future__ import annotations

import itertools
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

import numpy as np
from cyclopts import App
from cyclopts.types import PositiveInt
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).parents[1] / "benches"))

from common import CONTEXT, machine, rounded, sources, write_record

import wlb
from wlb.simulation import KINDS, LayoutSearch, search_layouts
from wlb.simulation.layouts import in_short
from wlb.simulation.tuning import Choice, Objective

Row = dict[str, Any]
MILLIONS = (0.5, 1, 4, 16)  # tokens of a global batch, of 2^20
HIDDEN = (0.0, 0.5, 1.0)  # share of all communication that computation hides
GAIN = 1.02  # below this a gain is none: documents drawn anew move it by as much

app = App(name="python -m studies.headline", version_flags=[])


@dataclass(frozen=True)
class Case:
    """What is assumed of a run."""

    corpus: str
    millions: float
    hidden: float
    by: Objective


@app.default
def main(
    *lengths: Path,
    model: str = "llama2-7b",
    gpu: str = "h100",
    gpus: PositiveInt = 64,
    batches: tuple[float, ...] = MILLIONS,
    tokens: PositiveInt = 24,
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
        tokens: millions of tokens of each stream, in random order; at least four global batches.
        workers: processes.
        page: where the tables go.
        record: where all numbers go.
    """
    corpora = sources(lengths, documents=60_000)
    cases = [Case(*case) for case in itertools.product(corpora, batches, HIDDEN, get_args(Objective))]
    options = {"model": wlb.ModelConfig.preset(model), "hardware": wlb.Hardware.preset(gpu), "gpus": gpus}
    about = {"machine": machine(), "command": command(lengths), "model": model, "gpu": gpu, "gpus": gpus}
    found: dict[Case, Row] = {}
    with (
        Progress(console=Console(stderr=True), transient=True) as bars,
        ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool,
    ):
        task = bars.add_task("layouts", total=len(cases))
        # The largest first, so that no core waits for the last one.
        order = sorted(cases, key=lambda case: -case.millions)
        running = {pool.submit(answer, case, corpora[case.corpus], tokens, options): case for case in order}
        for done in as_completed(running):
            found[running[done]] = done.result()
            rows = [asdict(case) | found[case] for case in cases if case in found]
            made = rounded(about | {"rows": rows})
            write_record(record, made)  # a run that is cut off leaves what it has
            bars.advance(task)
    text = "\n".join(lines(made)) + "\n"
    page.write_text(text)
    print(text)


def command(lengths: Iterable[Path]) -> str:
    """What makes the page again, whatever folder the lengths are in."""
    names = " ".join(path.name for path in lengths)
    return f"make headline LENGTHS={shlex.quote(names)}" if names else "make headline"


def answer(case: Case, lengths: np.ndarray[Any, np.dtype[np.int64]], millions: int, options: dict[str, Any]) -> Row:
    """The best with wlb and without, and the gain."""
    batch = int(case.millions * 2**20)
    wanted = max(millions * 2**20, 4 * batch)
    order = np.random.default_rng(0).permutation(lengths)
    order = order[: int(np.searchsorted(order.cumsum(), wanted)) + 1]
    overlap = dict.fromkeys(("cp_overlap", "tp_overlap", "dp_overlap"), case.hidden)
    search = search_layouts(order, tokens_per_batch=batch, context=CONTEXT, by=case.by, **overlap, **options)
    return {
        "gain": search.gain(search.without),
        "band": list(band(search, case.by)),
        "with": told(search, search.best),
        "without": told(search, search.without),
        "simulated": search.simulated,
        "candidates": search.candidates,
        "documents": order.size,
    }


def band(search: LayoutSearch, by: Objective) -> tuple[float, float]:
    """The least and the most of the gain of these two plans, were attention faster or slower than assumed."""
    work = search.best.outcome.flops / search.without.outcome.flops if by == "flops" else 1.0
    least, most = search.best.speedup_band(search.without.outcome)
    return work * least, work * most


def told(search: LayoutSearch, choice: Choice) -> Row:
    """A plan and its layout."""
    return {
        "plan": KINDS[choice.kind],
        "layout": in_short(choice.outcome.scenario.layout),
        "seconds": search.seconds(choice),
        "delay": choice.delay,
    }


def lines(record: Row) -> Iterator[str]:
    """The page, in Markdown; lines but those of tables have at most 120 characters."""
    rows = record["rows"]
    yield from ["# Gains over the best that runs without wlb", ""]
    about = record["machine"]
    yield from wrapped(
        f"`{record['command']}` writes this page: {record['model']} with a context of 128K on {record['gpus']}"
        f" {record['gpu']}, *predicted* ([simulation](simulation.md)). Every layout of these GPUs that fits into"
        " memory is tried, with every method; the baseline is the fastest of Plain-4D and Fixed-4D (sharded per"
        " document where that is faster) on the layout that suits *it*. So what another layout gains is not counted"
        f" as wlb's. Written {about['time'][:10]} by wlb {about['wlb']}, commit {about['commit'] or 'unknown'}."
    )
    yield ""
    tokens = [row for row in rows if row["by"] == "tokens"]
    for by in get_args(Objective):
        gains = [row["gain"] for row in rows if row["by"] == by]
        yield from wrapped(
            f"- By {by if by == 'tokens' else 'FLOPs'}: {min(gains):.2f} to {max(gains):.2f}, in the middle"
            f" {np.median(gains):.2f}; below {GAIN}, that is nothing, in {sum(gain < GAIN for gain in gains)} of"
            f" {len(gains)} rows."
        )
    yield from wrapped(
        "- *Band*: the same two plans were attention 0.35 to 2.5 times as fast as assumed. *Hidden*: the share of all"
        " communication, of context-, tensor- and data-parallel ranks, that computation hides. By FLOPs a method pays"
        " for the documents that it cuts. With all of it hidden the best layouts have tensor-parallel ranks on several"
        " nodes, which no network gives: read those rows as a limit. Where the best with wlb is a method without it,"
        " nothing of wlb is faster."
    )
    for corpus in dict.fromkeys(row["corpus"] for row in rows):
        yield from ["", f"## {corpus}", ""]
        yield "| global batch | hidden | by tokens | band | by FLOPs | band | best without wlb | best with it | delay |"
        yield "| ---: | ---: | ---: | ---: | ---: | ---: | --- | --- | ---: |"
        for row in tokens:
            if row["corpus"] == corpus:
                yield table_row(row, other(rows, row))


def other(rows: Iterable[Row], row: Row) -> Row:
    """The same case by FLOPs."""
    names = ("corpus", "millions", "hidden")
    return next(one for one in rows if one["by"] == "flops" and all(one[name] == row[name] for name in names))


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
