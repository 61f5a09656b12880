"""Every goal of wlb beside its peers, measured in one run.

    make compare [LENGTHS="x.npy ..."]             # sets everything up, then:
    python benches/compare.py [--lengths x.npy ...]

Prints one line per goal: the peer, wlb, the goal, met or missed; then every packer on the same inputs
(`peers.py`). Writes docs/comparison.md and benches/records/comparison.json. Everything is measured here, by the
functions of dynamic_cp.py, release.py, refined.py, whole_batch.py and peers.py, which tell more about each. A peer
that cannot be imported is named as missing. Goals about real lengths are only decided on real ones.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import dynamic_cp
import numpy as np
import peers
import refined
import release
import whole_batch
from common import DOCS, Lengths, Row, bars, machine, markdown, options, parse, rounded, sources, tables, write_record
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import wlb
from oracles.dynamic_cp import violations

NEEDS = "needs real lengths"
SECTIONS = {
    "dynamic": "Dynamic-CP: 64 ranks a stage, PP 8, 8,192 tokens a rank",
    "release 1.5": "Release rule, 128K context, S_max 1.5x: imbalance mean / p95 at mean delay",
    "release 2": "Release rule, 128K context, S_max 2x: imbalance mean / p95 at mean delay",
    "search": "Planning a step with release adaptive, mean CPU time",
    "wait": "Longest wait of any document",
    "refined": "Refinement where max_tokens binds, up to 500 documents",
    "ranks": "A batch of 512 samples trained in one step by 8 data-parallel ranks, over equal ranks",
    "fuzz": "Plans that break a limit, lose a document or misalign a group",
}
NOTES = {
    "dynamic": "Exchange between the ranks of a group costs nothing here, for any planner: Megatron's has no price "
    "for it. Both figures, the planning time and the critical path, hold for that case only: where exchange "
    "has a price the search is longer, the plan is another and the step takes longer ([dynamic_cp.md](dynamic_cp.md) "
    "says how much). The critical path is that of 1F1B over 8 stages, over all work spread evenly over GPUs that never "
    "wait. "
    "BalancedCPScheduler plans for no pipeline and does not limit the tokens of a rank, so this score is outside what "
    "it was made for: it shows what such a plan would cost in a pipeline, not how good the scheduler is without one.",
    "release 1.5": "Imbalance is graded by the cost model that the packer plans with: a wrong model is not seen here. "
    "Queue thresholds and prices are chosen on the very stream that they are shown for; *default* is the price that is "
    "not chosen at all. *Attention at 0.55* has attention kernels at 0.55 of the matrix multiplications' rate, so that "
    "long documents weigh more; *at 1* is plain FLOPs.",
    "ranks": "Means over the batches. *The sum of the heaviest rank* is what a step takes where ranks wait for each "
    "other once a step, *the heaviest of each round* where they do in every micro-batch. verl's times are those of one "
    "process that plans for all ranks; its ranks plan at the same time, so that one waits for a part of them. Its "
    "samples are dealt equally many to each rank, which *equal samples* does as well.",
    "wait": "So measured on these streams. Where a global batch does not fit into its micro-batches by itself, a "
    "document can wait longer ([semantics.md](semantics.md)).",
}
"""What a reader has to know of a section before its figures."""


@dataclass(frozen=True)
class Line:
    """One goal."""

    section: str
    what: str
    peer: str
    ours: str
    goal: str
    verdict: str


def verdict(met: bool) -> str:
    return "met" if met else "missed"


# --- Dynamic-CP ------------------------------------------------------------------------------------------------------


def dynamic_lines(rows: list[Row]) -> Iterator[Line]:
    planning, path = {2048: 5.0, 256: 1.0}, {2048: 1.04, 256: 1.25}
    for (count, cost), group in itertools.groupby(rows, key=lambda row: (row["documents"], row["cost"])):
        of_peer = {row["planner"]: row for row in group}
        ours = of_peer.pop("wlb")
        times, paths = [], []
        for name, row in of_peer.items():
            short = name.removeprefix("megatron ")
            if "missing" in row:
                times.append(f"{short}: {row['missing']}")
                paths.append(f"{short}: {row['missing']}")
            else:
                score = mean_score(row)
                times.append(f"{short}: {np.mean(row['ms']):,.0f} ms")
                plans_for = "plans for no pipeline; " if short == "BalancedCPScheduler" else ""
                paths.append(f"{short}: {score['path']:.3f} ({plans_for}{score['tokens']:,.0f} tokens on a rank)")
        what = f"{count:,} documents, cost {cost}"
        ms = np.array(ours["ms"])
        said = f"{ms.mean():.2f} ms, exchange free; slowest batch {ms.max():.2f}"
        limit = planning[count]
        yield Line("dynamic", f"planning, {what}", "; ".join(times), said, f"< {limit:g} ms", verdict(ms.max() < limit))
        score, bound = mean_score(ours), float(np.mean(ours["bounds"]))
        above = float(np.mean(np.divide(ours["exact"], ours["bounds"]))) - 1
        said = f"{score['path']:.3f}, exchange free; lower bound {bound:.3f}, plans {above:.2%} above it"
        goal = f"<= {path[count]}" + (", or the lower bound" if count == 256 else "")
        met = score["path"] <= path[count] or (count == 256 and above <= 1e-6)
        yield Line("dynamic", f"critical path, {what}", "; ".join(paths), said, goal, verdict(met))


def overhead_lines(rows: list[Row]) -> Iterator[Line]:
    """What a micro-batch takes whatever is in it; no peer has a price for it."""
    for row in rows:
        path, bound = float(np.mean(row["exact"])), float(np.mean(row["bounds"]))
        what = f"critical path, {row['documents']:,} documents, cost {row['cost']}"
        what += f", {row['overhead'] * 1e3:g} ms for every micro-batch on every stage"
        said = f"{path:.3f} in {np.mean(row['micro_batches']):.0f} micro-batches; lower bound {bound:.3f}"
        yield Line("dynamic", what, "no price for it", said, "", "no goal")


def mean_score(row: Row) -> Row:
    return {
        "path": float(np.mean([score["path"] for score in row["scores"]])),
        "tokens": max(score["max_tokens_per_rank"] for score in row["scores"]),
    }


# --- the release rule ------------------------------------------------------------------------------------------------


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


def release_lines(rows: list[Row], real: bool) -> Iterator[Line]:
    setting = itemgetter("room", "attention_efficiency", "lengths", "micro_batches")
    for _, group in itertools.groupby(sorted(rows, key=setting), key=setting):
        by_delay = {row["max_delay"]: row for row in group}
        row = by_delay[16]
        best, met = release.towards(row)
        at_8, _ = release.towards(by_delay[8])
        free, _ = release.towards(by_delay[None])
        delay, mean, p95 = release.GOALS[row["room"]]
        peer = "; ".join(f"{point['queues']} queues {said(point)}" for point in by_delay[None]["fifo"][1:])
        ours = (
            f"{said(best)}, price {best['delay_price']:.3g}; default {said(row['default'])}; "
            f"max_delay 8: {said(at_8)}; none: {said(free)}, longest wait {free['delay_max']}"
        )
        what = f"{row['lengths']}, attention at {row['attention_efficiency']:g}, N = {row['micro_batches']}"
        goal = f"<= {mean}" + (f" / {p95}" if p95 else "") + f" at {delay:.2f}"
        decided = verdict(met) if real else NEEDS
        yield Line(f"release {row['room']:g}", what, f"Algorithm 1, {peer}", ours, goal, decided)


def said(point: Row) -> str:
    return f"{point['imbalance_mean']:.3f} / {point['imbalance_p95']:.3f} at {point['delay_mean']:.2f}"


def search_lines(rows: list[Row], real: bool) -> Iterator[Line]:
    limits = {16: 0.1, 64: 4.0}
    for row in rows:
        if row["max_delay"] == 16 and row["room"] == 1.5 and row["micro_batches"] in limits:
            t, limit = row["time"], limits[row["micro_batches"]]
            what = f"{row['lengths']}, attention at {row['attention_efficiency']:g}, N = {row['micro_batches']}"
            peer = f"one packing of the {t['documents_per_step']:,.0f} documents {t['pack_us_mean'] / 1e3:.3f} ms"
            ms, p95, packings = t["push_us_mean"] / 1e3, t["push_us_p95"] / 1e3, t["ratio_of_means"]
            ours = f"{ms:.3f} ms, p95 {p95:.3f}; {packings:.1f} packings"
            met = ms <= limit and packings <= 10
            decided = verdict(met) if real else NEEDS
            yield Line("search", what, peer, ours, f"<= {limit:g} ms, <= 10 packings", decided)


def wait_lines(rows: list[Row], real: bool) -> Iterator[Line]:
    tuned = [point for row in rows if row["max_delay"] is None for point in row["fifo"] if point["queues"] > 1]
    waits = [point["delay_max"] for point in tuned]
    peer = f"Algorithm 1, 2 and 3 queues: {min(waits)} to {max(waits)} iterations"
    for limit in (16, 8):
        longest = max(
            point["delay_max"]
            for row in rows
            if row["max_delay"] == limit
            for point in [*row["adaptive"], row["default"]]
        )
        what = f"max_delay {limit}: all lengths, costs, N, S_max and prices above"
        decided = verdict(longest <= limit) if real else NEEDS
        yield Line("wait", what, peer, f"{longest} iterations", f"<= {limit}", decided)


# --- refinement ------------------------------------------------------------------------------------------------------


def refined_lines(rows: list[Row]) -> Iterator[Line]:
    solved = [row for row in rows if "solver" in row]
    seconds = [row["solver_seconds"] for row in solved]
    above = np.array([row["refined"] for row in rows])
    over = np.array([(1 + row["refined"]) / (1 + row["solver"]) - 1 for row in solved])
    greedy = np.array([row["var_length"] for row in rows if "var_length" in row])
    us = np.array([min(row["us"]["refined"]) for row in rows])
    instances = f"{len(rows)} instances"
    within = float(np.mean(above <= 0.005))  # of a bound, so of the optimum
    yield Line(
        "refined",
        f"longest micro-batch over the optimum, {instances}",
        f"Algorithm 1 {greedy.mean():.2%} above the best lower bound; HiGHS solves {len(solved)}, "
        f"{np.mean(seconds):.1f} s each, {np.mean([row['solver'] for row in solved]):.2%} above",
        f"{above.mean():.2%} above, worst {above.max():.2%}; {within:.0%} proved within 0.5 %; over HiGHS at worst "
        f"{over.max():+.2%}",
        "<= 0.5 %",
        "met" if within == 1 else "missed" if over.max() > 0.005 else "open",
    )
    yield Line(
        "refined",
        f"planning time, {instances}",
        f"Algorithm 1 {np.mean([min(row['us']['var_length']) for row in rows]) / 1e3:.3f} ms",
        f"{us.mean() / 1e3:.3f} ms; slowest {us.max() / 1e3:.2f}",
        "< 1 ms",
        verdict(bool(us.max() < 1000)),
    )
    worse = sum(row["refined"] > row.get("var_length", np.inf) + 1e-12 for row in rows)
    what = f"plans made worse than Algorithm 1's, {instances}"
    yield Line("refined", what, "", f"{worse}", "0", verdict(worse == 0))


# --- ranks -----------------------------------------------------------------------------------------------------------


def rank_lines(rows: list[Row]) -> Iterator[Line]:
    for max_tokens, name, of_planner in whole_batch.means(rows):
        verl = [of_planner[planner] for planner in of_planner if planner.startswith("verl")]
        for sync, what in (("step", "sum of the heaviest rank"), ("micro_batch", "heaviest of each round")):
            ours, equal = of_planner[f"wlb, {sync}"], of_planner[f"wlb, {sync}, equal samples"]
            without = of_planner["wlb, multiple_of, refined"][sync]
            most = min(*(row[sync] for row in verl), 1.003 if sync == "step" else without)
            theirs = "; ".join(f"{row[sync]:.4f}, {row['rounds']:.2f} rounds, {row['us'] / 1e3:.0f} ms" for row in verl)
            own = f"{ours[sync]:.4f}, {ours['rounds']:.2f} rounds, {ours['us'] / 1e3:.2f} ms"
            yield Line(
                "ranks",
                f"{what}, {name}, {max_tokens:,} tokens",
                f"verl, its workload; our costs: {theirs}. wlb without ranks: {without:.4f}",
                f"{own}; equal samples {equal[sync]:.4f}",
                f"<= {most:.4f}, 0.5 ms",
                verdict(ours[sync] <= most + 1e-5 and ours["us"] <= 500),
            )


# --- fuzzing ---------------------------------------------------------------------------------------------------------


FUZZED_AT_ONCE = 3_000


def fuzzed(plans: int, progress: Progress) -> tuple[int, list[str]]:
    """Random plans of every kind, on every core; how many, and what is wrong with them."""
    task = progress.add_task("fuzz", total=plans)
    found: list[str] = []
    done = 0
    first = time.time_ns()
    with multiprocessing.get_context("fork").Pool() as pool:
        for made, wrong in pool.imap_unordered(fuzzed_from, range(first, first + -(-plans // FUZZED_AT_ONCE))):
            done, found = done + made, found + wrong
            progress.update(task, completed=done)
    return done, found


def fuzzed_from(seed: int) -> tuple[int, list[str]]:
    """Some of them, the same ones for the same seed."""
    rng = np.random.default_rng(seed)
    found: list[str] = []
    done = 0
    while done < FUZZED_AT_ONCE:
        cost = wlb.CostModel(attention=float(rng.random()), linear=float(rng.random() * 10.0 ** rng.integers(0, 5)))
        for kind in (one_packing, one_dynamic_plan, one_stream):
            plans_made, wrong = kind(rng, cost)
            found += [f"seed {seed}, after {done} plans, {kind.__name__}: {what}" for what in wrong]
            done += plans_made
    return done, found


def random_lengths(rng: np.random.Generator, longest: int) -> Lengths:
    lengths = np.exp(rng.uniform(0, np.log(longest + 1), rng.integers(1, 60))).astype(np.int64)
    return lengths.clip(1, longest)


def one_packing(rng: np.random.Generator, cost: wlb.CostModel) -> tuple[int, list[str]]:
    lengths = random_lengths(rng, 300)
    method: Any = rng.choice(["var_length", "var_length_fast", "refined", "fixed_length", "original"])
    room = max(int(lengths.max()), int(rng.uniform(0.5, 3) * lengths.mean() * 5))
    plan = wlb.pack(
        lengths,
        num_micro_batches=int(rng.integers(1, 12)),
        max_tokens=room,
        cost_model=cost,
        method=method,
        leftover="return",
    )
    return 1, lost([plan], dict(enumerate(lengths.tolist())), plan.leftover, plan.leftover_lengths, room)


def one_stream(rng: np.random.Generator, cost: wlb.CostModel) -> tuple[int, list[str]]:
    n, longest = int(rng.integers(1, 9)), 200
    adaptive = bool(rng.integers(2))
    packer = wlb.Packer(
        num_micro_batches=n,
        max_tokens=int(rng.integers(longest, 3 * longest)),
        cost_model=cost,
        max_document_tokens=longest,
        method="refined" if rng.integers(2) else "var_length",
        max_delay=int(rng.integers(1, 9)) if rng.integers(2) else None,
        **({"release": "adaptive"} if adaptive else {"outlier_thresholds": (60, 120)[: rng.integers(0, 3)]}),
    )
    arrived: dict[int, int] = {}
    plans = []
    for _ in range(4):
        lengths = random_lengths(rng, longest)
        ids = np.arange(len(arrived), len(arrived) + len(lengths))
        arrived |= dict(zip(ids.tolist(), lengths.tolist(), strict=True))
        plans.append(packer.push(lengths, ids=ids))
    plans += packer.flush()
    none = np.zeros(0, np.int64)
    return len(plans), lost(plans, arrived, none, none, packer.max_tokens)


def lost(plans: list[wlb.Packing], arrived: dict[int, int], left: Any, left_lengths: Any, room: int) -> list[str]:
    """Every token of every document once, and no micro-batch too long."""
    tokens = dict.fromkeys(arrived, 0)
    wrong = []
    for plan in plans:
        for batch in plan.micro_batches:
            if batch.lengths.sum() > room:
                wrong.append("too many tokens in a micro-batch")
            for document, length in zip(batch.document_ids.tolist(), batch.lengths.tolist(), strict=True):
                tokens[document] += length
    for document, length in zip(left.tolist(), left_lengths.tolist(), strict=True):
        tokens[document] += length
    return wrong if tokens == arrived else [*wrong, "a document is lost or doubled"]


def one_dynamic_plan(rng: np.random.Generator, cost: wlb.CostModel) -> tuple[int, list[str]]:
    world, tokens = int(rng.integers(1, 25)), int(rng.integers(5, 200))
    lengths = random_lengths(rng, tokens * 2 ** (world.bit_length() - 1))
    plan = wlb.plan_dynamic_cp(
        lengths,
        world_size=world,
        num_stages=int(rng.integers(1, 6)),
        num_virtual_stages=int(rng.integers(1, 3)),
        min_micro_batches=int(rng.integers(1, 20)),
        max_tokens_per_rank=tokens,
        cost_model=cost,
        p2p_seconds=float(rng.random() * 1e3 * rng.integers(2)),
        cp_seconds_per_token=float(rng.random() * rng.integers(2)),
        cp_seconds_per_exchange=float(rng.random() * 1e3 * rng.integers(2)),
        micro_batch_seconds=float(rng.random() * 1e4 * rng.integers(2)),
    )
    wrong = violations(plan, lengths.tolist())
    if plan.lower_bound > plan.seconds * (1 + 1e-9):
        wrong.append("the bound is above the plan")
    return 1, wrong


def fuzz_lines(plans: int, found: list[str]) -> Iterator[Line]:
    what = "packings, streams (fifo and adaptive) and Dynamic-CP plans, in this run"
    enough = "met" if plans >= 10**6 else "none found"
    yield Line("fuzz", what, "", f"{len(found)} in {plans:,}", "0 in 10^6", "missed" if found else enough)
    yield Line("fuzz", "long runs", "", "benches/records/fuzz.md", "0 in 10^6", "recorded there")


# --- the page --------------------------------------------------------------------------------------------------------


def print_lines(console: Console, lines: list[Line]) -> None:
    for section, title in SECTIONS.items():
        table = Table("what", "peer", "wlb", "goal", "", title=title, show_lines=True)
        for line in lines:
            if line.section == section:
                table.add_row(line.what, line.peer, line.ours, line.goal, line.verdict)
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
    parser.add_argument("--fuzz", type=int, default=100_000, help="plans to fuzz")
    parser.add_argument("--solver-seconds", type=float, default=2.0, help="time limit of HiGHS, for one packing")
    parser.add_argument("--page", type=Path, default=DOCS / "comparison.md", help="where the page goes")
    arguments = parse(parser)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # peers miss GPUs that they do not need here

    real = bool(arguments.lengths)
    with bars() as progress:
        dynamic_rows = [row for count in (2048, 256) for row in dynamic_cp.measure(count, arguments.seeds, progress)]
        overheads = dynamic_cp.measure_overheads(arguments.seeds)
        released = release_rows(sources(arguments.lengths, documents=60_000), arguments.steps, progress)
        instances = list(refined.instances(arguments.lengths, seeds=1))
        tracked = progress.track(instances, description="refined")
        refined_rows = [refined.measure(*instance, arguments.solver_seconds) for instance in tracked]
        batches = whole_batch.measure(arguments.lengths, 8, 512, (16384, 32768), arguments.seeds, progress)
        plans, found = fuzzed(arguments.fuzz, progress)
        streams, peer_rows = peers.compare(arguments.lengths, arguments.solver_seconds, progress)
    lines = [
        *dynamic_lines(dynamic_rows),
        *overhead_lines(overheads),
        *release_lines(released, real),
        *search_lines(released, real),
        *wait_lines(released, real),
        *refined_lines(refined_rows),
        *rank_lines(batches),
        *fuzz_lines(plans, found),
    ]
    described = machine(peers.PACKAGES)
    rows_of_peers = [
        peers.table(stream, [row for row in peer_rows if row["lengths"] == stream.name]) for stream in streams
    ]
    names = " ".join(path.name for path in arguments.lengths)
    flags = " ".join(
        f"--{key.replace('_', '-')} {getattr(arguments, key)}"
        for key in ("steps", "seeds", "fuzz", "solver_seconds")
        if getattr(arguments, key) != parser.get_default(key)
    )
    given = {"LENGTHS": names, "COMPARE_FLAGS": flags}
    command = " ".join(["make compare", *(f'{key}="{value}"' for key, value in given.items() if value)])
    record = {
        "machine": described,
        "command": command,
        "lines": [asdict(line) for line in lines],
        "broken_plans": found,
        "peers": peer_rows,
    }
    write_record(arguments.record, rounded(record))
    arguments.page.write_text(page(lines, peer_rows, rows_of_peers, command, described))

    console = tables(170)
    for table in rows_of_peers:
        console.print(table)
    print_lines(console, lines)
    for line in missing(peer_rows):
        console.print(f"missing: {line}")
    console.print(f"goals: {tally(lines)}; written to {arguments.page} and {arguments.record}")


if __name__ == "__main__":
    main()
