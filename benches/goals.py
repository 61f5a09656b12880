"""The goals of wlb: what was measured, as a line for each, with its peer and whether it is met.

It measures nothing: `compare.py` does, by the benches whose rows these are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from benches import few_documents, release, whole_batch
from benches.common import Row

NEEDS = "needs real lengths"
SECTIONS = {
    "dynamic": "Dynamic-CP: 64 ranks a stage, PP 8, 8,192 tokens a rank",
    "exchange": "Dynamic-CP where exchange costs 7 us a token: 64 ranks a stage, PP 8, 2,048 documents, cost 13B",
    "few": "Dynamic-CP of 4 to 30 documents, on 2 to 24 ranks a stage",
    "release 1.5": "Release rule, 128K context, S_max 1.5x: imbalance mean / p95 at mean delay",
    "release 2": "Release rule, 128K context, S_max 2x: imbalance mean / p95 at mean delay",
    "search": "Planning a step with release adaptive, mean CPU time",
    "wait": "Longest wait of any document",
    "early": "Reading ahead: mean displacement of tokens at imbalance 1.005, N = 16, S_max 1.5x, attention at 1",
    "refined": "Refinement where max_tokens binds, up to 500 documents",
    "ranks": "A batch of 512 samples trained in one step by 8 data-parallel ranks, over equal ranks",
    "sharding": "`shard` as it comes, on micro-batches of 128K tokens",
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
    "exchange": "7 us a token, through all layers. *Nothing hidden*: the exchange is added to the step "
    "(`cp_overlap` 0); *hidden*: as much of it as attention takes is not. Paths are means of the batches, and planning "
    "is judged by the slowest, as above. The peer is wlb's own solver, made to take each number of "
    "micro-batches from what memory needs to four times that, so it says how good the choice of that number is, not "
    "how good plans are: how far they are from the lower bound stands beside it.",
    "few": "Drawn at random: groups of powers of two or of any number of ranks, exchange free or at a price, 1 to 4 "
    "stages. Longest first may try all sizes of groups, one for the whole step, and all numbers of micro-batches up to "
    "twice the least; documents go, the longest first, where they are done first. Both are judged by one simulation. "
    "`python -m benches.few_documents` prints the steps in which it is over 1 % shorter.",
    "release 1.5": "Imbalance is graded by the cost model that the packer plans with: a wrong model is not seen here. "
    "Queue thresholds and prices are chosen on the very stream that they are shown for; *default* is the price that is "
    "not chosen at all. *Steps to*: work of the heaviest step, over the mean step. *Attention at 0.55* has attention "
    "kernels at 0.55 of the matrix multiplications' rate, so that long documents weigh more; *at 1* is plain FLOPs.",
    "early": "Displacement is the mean, over tokens, of the iterations between a document's turn and the one in which "
    "it is trained, before or after. Prices of delay are interpolated at equal imbalance; the price is chosen on the "
    "stream that it is shown for. The goal is for wheels_py.",
    "ranks": "Means over the batches. *The sum of the heaviest rank* is what a step takes where ranks wait for each "
    "other once a step, *the heaviest of each round* where they do in every micro-batch. verl's times are those of one "
    "process that plans for all ranks; its ranks plan at the same time, so that one waits for a part of them. Its "
    "samples are dealt equally many to each rank, which *equal samples* does as well.",
    "sharding": "*Keys* are what the busiest rank fetches, of what a full gather brings it, in the mean of the "
    "micro-batches; *pairs* those of the busiest rank over the mean, in the worst one. The best threshold is that of "
    "the hybrid with the fewest keys, all tried, among those with pairs within 1.01 if there is one. Times are of a "
    "call from Python, the shard included, the mean of the micro-batches. Fewer keys are only saved where attention "
    'fetches them (`transport="fetch"`).',
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


def exchange_lines(rows: list[Row]) -> Iterator[Line]:
    for row in rows:
        what = f"{row['lengths']}, {'hidden behind attention' if row['cp_overlap'] else 'nothing hidden'}"
        exact, best, bounds = (np.array(row[key]) for key in ("exact", "best", "bounds"))
        regret = exact / best - 1
        peer = f"every number of micro-batches, one by one: {best.mean():.3f}"
        said = f"{exact.mean():.3f}, {regret.mean():+.2%}, at worst {regret.max():+.2%}"
        said += f"; lower bound {bounds.mean():.3f}"
        yield Line("exchange", f"critical path, {what}", peer, said, "<= +1 %", verdict(regret.mean() <= 0.01))
        ms = np.array(row["ms"])
        said = f"{ms.mean():.1f} ms; slowest batch {ms.max():.1f}"
        yield Line("exchange", f"planning, {what}", "", said, "<= 10 ms", verdict(ms.max() <= 10))


def few_lines(rows: list[Row]) -> Iterator[Line]:
    over = np.array([row["over"] for row in rows])
    longer = int((over > few_documents.MUCH).sum())
    said = f"{longer} of {len(rows):,}; over longest first {over.mean():+.1%} in the mean, {over.max():+.1%} at worst"
    what = f"steps that longest first makes over {few_documents.MUCH:.0%} shorter"
    peer = f"longest first: shorter at all in {(over > 1e-9).sum():,}"
    yield Line("few", what, peer, said, "0", verdict(longer == 0))


# --- the release rule ------------------------------------------------------------------------------------------------


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
    heaviest = f"steps to {point['step_work_heaviest']:.1f}"
    return f"{point['imbalance_mean']:.3f} / {point['imbalance_p95']:.3f} at {point['delay_mean']:.2f}, {heaviest}"


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


# --- reading ahead ---------------------------------------------------------------------------------------------------

EARLY_GOALS = {"wheels_py": 0.35}


def early_lines(rows: list[Row]) -> Iterator[Line]:
    for name, group in itertools.groupby(rows, key=itemgetter("lengths")):
        moved = {row["max_early"]: row["displacement_at"]["1.005"] for row in group}
        told = {most: "never so even" if found is None else f"{found:.3f}" for most, found in moved.items()}
        waiting = f"documents only wait: {told.pop(0)}"
        ((most, ahead),) = told.items()
        goal = EARLY_GOALS.get(name)
        met = "no goal" if goal is None else verdict(moved[most] is not None and moved[most] <= goal)
        yield Line("early", name, waiting, f"max_early {most}: {ahead}", "" if goal is None else f"<= {goal}", met)


def missing_early_lines(why: str) -> Iterator[Line]:
    for name, goal in EARLY_GOALS.items():
        yield Line("early", name, "", why, f"<= {goal}", "not measured")


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
            most = min([*(row[sync] for row in verl), 1.003 if sync == "step" else without])
            theirs = "; ".join(f"{row[sync]:.4f}, {row['rounds']:.2f} rounds, {row['us'] / 1e3:.0f} ms" for row in verl)
            theirs = theirs or "not installed"
            own = f"{ours[sync]:.4f}, {ours['rounds']:.2f} rounds, {ours['us'] / 1e3:.2f} ms"
            yield Line(
                "ranks",
                f"{what}, {name}, {max_tokens:,} tokens",
                f"verl, its workload; our costs: {theirs}. wlb without ranks: {without:.4f}",
                f"{own}; equal samples {equal[sync]:.4f}",
                f"<= {most:.4f}, 0.5 ms",
                verdict(ours[sync] <= most + 1e-5 and ours["us"] <= 500),
            )


# --- sharding --------------------------------------------------------------------------------------------------------


def sharding_lines(rows: list[Row], real: bool) -> Iterator[Line]:
    for (name, cp), group in itertools.groupby(rows, key=itemgetter("lengths", "cp")):
        of_way = {row["way"]: row for row in group}
        ours, best = of_way["auto"], of_way["best hybrid"]
        where = f"{name}, CP {cp}, {ours['micro_batches']} micro-batches"
        for what, peer, said, goal, met in (
            (
                "pairs",
                f"{best['worst_pairs']:.4f}",
                f"{ours['worst_pairs']:.4f}",
                "<= 1.01",
                ours["worst_pairs"] <= 1.01 + 1e-9,
            ),
            (
                "keys",
                f"{best['busiest']:.3f}",
                f"{ours['busiest']:.3f}, {ours['busiest'] / best['busiest'] - 1:+.0%}",
                "<= +2 %",
                ours["busiest"] <= best["busiest"] * 1.02,
            ),
            (
                "planning",
                f"{best['us']:,.0f} us to try all",
                f"{ours['us']:.1f} us; slowest {ours['worst_us']:.1f}",
                "<= 10 us",
                ours["us"] <= 10,
            ),
        ):
            decided = verdict(met) if real else NEEDS
            yield Line("sharding", f"{what}, {where}", f"best threshold: {peer}", said, goal, decided)


# --- fuzzing ---------------------------------------------------------------------------------------------------------


def fuzz_lines(plans: int, found: list[str]) -> Iterator[Line]:
    what = "packings, streams (fifo and adaptive) and Dynamic-CP plans, in this run"
    enough = "met" if plans >= 10**6 else "none found"
    yield Line(
        "fuzz",
        what,
        "",
        "; ".join([f"{len(found)} in {plans:,}", *found[:3]]),
        "0 in 10^6",
        "missed" if found else enough,
    )
    yield Line("fuzz", "long runs", "", "benches/records/fuzz.md", "0 in 10^6", "recorded there")
