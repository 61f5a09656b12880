"""Every goal of wlb beside its peers, measured in one run.

    make compare [LENGTHS="x.npy ..."]             # sets everything up, then:
    python -m benches.compare [--lengths x.npy ...]
    python -m benches.compare --only early sharding [--lengths ...]    # these parts alone; writes nothing

Prints one line per goal: the peer, wlb, the goal, met or missed; then every packer on the same inputs
(`peers.py`). Writes docs/comparison.md and benches/records/comparison.json. Everything is measured here, by the
functions of the other benches, which tell more about each; `goals.py` says what has to come of it. A peer
that cannot be imported is named as missing. Goals about real lengths are only decided on real ones.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benches import dynamic_cp, few_documents, fuzzing, goals, peers, refined, release, sharding, whole_batch
from benches.common import (
    CONTEXT,
    DOCS,
    Lengths,
    Row,
    bars,
    machine,
    markdown,
    options,
    parse,
    rounded,
    sources,
    stream,
    tables,
    write_record,
)
from benches.goals import NOTES, SECTIONS, Line

# --- what is measured ------------------------------------------------------------------------------------------------


def dynamic(given: Namespace, progress: Progress) -> Iterator[Line]:
    rows = [row for count in (2048, 256) for row in dynamic_cp.measure(count, given.seeds, progress)]
    yield from goals.dynamic_lines(rows)
    yield from goals.overhead_lines(dynamic_cp.measure_overheads(given.seeds))


def exchange(given: Namespace, progress: Progress) -> Iterator[Line]:
    """The documents of the section without a price, and those of the files."""
    of_lengths = {"long tail": dynamic_cp.documents} | dynamic_cp.of_files(given.lengths)
    settings = list(itertools.product(of_lengths.items(), (0.0, 1.0)))
    rows: list[Row] = []
    for (name, source), hidden in progress.track(settings, description="Dynamic-CP, exchange at a price"):
        batches = [source(2048, seed) for seed in range(given.seeds)]
        price = dynamic_cp.SEVEN_US | {"cp_overlap": hidden}
        rows.append({"lengths": name, "documents": 2048} | dynamic_cp.priced(batches, price))
    return goals.exchange_lines(rows)


def few(given: Namespace, progress: Progress) -> Iterator[Line]:
    return goals.few_lines(few_documents.measure(given.few, progress))


def released(given: Namespace, progress: Progress) -> Iterator[Line]:
    real = bool(given.lengths)
    rows = release_rows(sources(given.lengths, documents=60_000), given.steps, progress)
    yield from goals.release_lines(rows, real)
    yield from goals.search_lines(rows, real)
    yield from goals.wait_lines(rows, real)


def release_rows(streams: dict[str, Lengths], steps: int, progress: Progress) -> list[Row]:
    """The adaptive rule with `max_delay` 16, 8 and none; queues without one, as the paper has them."""
    settings = list(itertools.product(release.COSTS, release.MICRO_BATCHES, release.ROOMS, release.MAX_DELAYS))
    rows = []
    for name, lengths in streams.items():
        for efficiency, n, room, max_delay in progress.track(settings, description=f"release, {name}"):
            options: Row = {"attention_efficiency": efficiency, "micro_batches": n, "room": room}
            options |= {"max_delay": max_delay, "queues_up_to": 3 if max_delay is None else 0}
            rows.append(release.measure(name, lengths, steps=release.steps_for(n, steps), **options))
    return rows


def early(given: Namespace, progress: Progress) -> Iterator[Line]:
    """Long streams: on short ones the prices are too few for the second decimal."""
    try:
        from benches.early import measure
    except ImportError as error:  # torch, whose sampler reads ahead
        return goals.missing_early_lines(f"{error.name} is not installed")
    rows: list[Row] = []
    of_files = sources(given.lengths, documents=200_000).items()
    for (name, lengths), most in progress.track(list(itertools.product(of_files, (0, 4))), description="early"):
        read = stream(lengths, given.early_steps * 16 * CONTEXT, seed=0)
        rows.append({"lengths": name} | measure(read, 16, most))
    return goals.early_lines(rows)


def refinement(given: Namespace, progress: Progress) -> Iterator[Line]:
    tracked = progress.track(list(refined.instances(given.lengths, seeds=1)), description="refined")
    return goals.refined_lines([refined.measure(*instance, given.solver_seconds) for instance in tracked])


def ranks(given: Namespace, progress: Progress) -> Iterator[Line]:
    return goals.rank_lines(whole_batch.measure(given.lengths, 8, 512, (16384, 32768), given.seeds, progress))


def shards(given: Namespace, progress: Progress) -> Iterator[Line]:
    of_files = sources(given.lengths, documents=200_000).items()
    rows: list[Row] = []
    for name, lengths in progress.track(of_files, description="sharding"):
        batches = sharding.micro_batches(lengths, CONTEXT, 48)
        rows += [{"lengths": name, "micro_batches": len(batches)} | row for row in sharding.measure(batches, (8, 16))]
    return goals.sharding_lines(rows, bool(given.lengths))


def fuzz(given: Namespace, progress: Progress) -> Iterator[Line]:
    return goals.fuzz_lines(*fuzzing.fuzzed(given.fuzz, progress))


PARTS: dict[str, Callable[[Namespace, Progress], Iterator[Line]]] = {
    "dynamic": dynamic,
    "exchange": exchange,
    "few": few,
    "release": released,
    "early": early,
    "refined": refinement,
    "ranks": ranks,
    "sharding": shards,
    "fuzz": fuzz,
}
"""A section of the page each, but `release`, which is four."""


# --- the page --------------------------------------------------------------------------------------------------------


def print_lines(console: Console, lines: list[Line]) -> None:
    for section, title in SECTIONS.items():
        table = Table("what", "peer", "wlb", "goal", "", title=title, show_lines=True)
        for line in lines:
            if line.section == section:
                table.add_row(line.what, line.peer, line.ours, line.goal, line.verdict)
        if table.row_count:
            console.print(table)


def tally(lines: list[Line]) -> str:
    counts = {
        name: sum(line.verdict == name for line in lines) for name in dict.fromkeys(line.verdict for line in lines)
    }
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def page(lines: list[Line], peer_rows: list[Row], tables: list[Table], command: str, described: Row) -> str:
    """docs/comparison.md."""
    text = [
        "# wlb beside its peers",
        "",
        f"Written by `{command}`; do not edit. {described['cpu']}, {described['cores']} cores, Python "
        f"{described['python']}, wlb {described['wlb']} at {described['commit']}, {described['time'][:10]}. All "
        "figures are measured in that run. Timings on shared machines are noisy: read them beside their peer's.",
        "",
        "| goals about | |",
        "| --- | --- |",
    ]
    for section, title in SECTIONS.items():
        text.append(f"| {title} | {tally([line for line in lines if line.section == section])} |")
    for section, title in SECTIONS.items():
        rows = [line for line in lines if line.section == section]
        text += ["", f"## {title}", *(["", NOTES[section]] if section in NOTES else [])]
        text += ["", "| what | peer | wlb | goal | |", "| --- | --- | --- | --- | --- |"]
        text += [f"| {row.what} | {row.peer} | {row.ours} | {row.goal} | {row.verdict} |" for row in rows]
    text += ["", "## Packers on the same inputs"]
    for table in tables:
        text += ["", f"### {table.title}", "", *markdown(table), "", str(table.caption)]
    text += ["", "Missing:", "", *(f"- {line}" for line in missing(peer_rows))]
    return "\n".join(text) + "\n"


def missing(peer_rows: list[Row]) -> list[str]:
    """Peers that did not run, and why."""
    found = {f"{row['package']}: {row['missing'].removeprefix('missing: ')}" for row in peer_rows if "missing" in row}
    return [*peers.UNRELEASED, *sorted(found)]


def main() -> None:
    parser = options(__doc__, lengths=True, record="comparison.json")
    parser.add_argument("--steps", type=int, default=120, help="global batches of a release stream; half of it for 64")
    parser.add_argument("--seeds", type=int, default=10, help="global batches for Dynamic-CP")
    parser.add_argument("--few", type=int, default=few_documents.STEPS, help="steps of few documents")
    parser.add_argument("--early-steps", type=int, default=2400, help="global batches of a stream that is read ahead")
    parser.add_argument("--fuzz", type=int, default=100_000, help="plans to fuzz")
    parser.add_argument("--solver-seconds", type=float, default=2.0, help="time limit of HiGHS, for one packing")
    parser.add_argument("--page", type=Path, default=DOCS / "comparison.md", help="where the page goes")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts to measure, without packers; writes nothing")
    arguments = parse(parser)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # peers miss GPUs that they do not need here

    console = tables(170)
    with bars() as progress:
        lines = [line for part in arguments.only or PARTS for line in PARTS[part](arguments, progress)]
        if arguments.only:
            print_lines(console, lines)
            console.print(f"goals: {tally(lines)}")
            return
        streams, peer_rows = peers.compare(arguments.lengths, arguments.solver_seconds, progress)
    described = machine(peers.PACKAGES)
    rows_of_peers = [
        peers.table(stream, [row for row in peer_rows if row["lengths"] == stream.name]) for stream in streams
    ]
    names = " ".join(path.name for path in arguments.lengths)
    flags = " ".join(
        f"--{key.replace('_', '-')} {getattr(arguments, key)}"
        for key in ("steps", "seeds", "few", "early_steps", "fuzz", "solver_seconds")
        if getattr(arguments, key) != parser.get_default(key)
    )
    given = {"LENGTHS": names, "COMPARE_FLAGS": flags}
    command = " ".join(["make compare", *(f'{key}="{value}"' for key, value in given.items() if value)])
    record = {"machine": described, "command": command, "lines": [asdict(line) for line in lines], "peers": peer_rows}
    write_record(arguments.record, rounded(record))
    arguments.page.write_text(page(lines, peer_rows, rows_of_peers, command, described))

    for table in rows_of_peers:
        console.print(table)
    print_lines(console, lines)
    for line in missing(peer_rows):
        console.print(f"missing: {line}")
    console.print(f"goals: {tally(lines)}; written to {arguments.page} and {arguments.record}")


if __name__ == "__main__":
    main()
