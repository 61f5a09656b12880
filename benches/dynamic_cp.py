"""Dynamic-CP planning beside Megatron-Core's planners: time, critical path, memory; same documents, same run.

    python -m benches.dynamic_cp                         # prints the table, writes benches/records/dynamic_cp.json
    python -m benches.dynamic_cp --lengths wheels.npy    # also of documents with these lengths

Documents: log-normal lengths (median 3K, sigma 1.6, at most 128K), plus 0.8 % of 128K ("long tail"); and, in the rows
of wlb alone, others, each source by itself: log-normal ones (mean 8 and sigma 1.3 of the logarithm, "log-normal") and
draws from files. All are padded to 128, and at most 128K; 64 ranks a stage (DP times CP), PP 8, at most 8,192 tokens a
rank. Every plan is scored by one simulation of 1F1B, each micro-batch as
slow as its slowest rank, under the same costs: a 13B Llama's FLOPs, and pairs alone, which is what Megatron plans for.
Exchange inside groups is free, as it is to Megatron: a real step, which pays for it, takes longer than any of these
figures, and a plan that prices it is another plan. *Path* is the time of a step over all work spread evenly over all
GPUs that never wait, not even for the pipeline to fill; *over filled* is the same over `(m + 7) / m` of it, what `m`
equal micro-batches would take. *Bound* is proved by wlb for every plan; *over bound* is how far above it wlb's own step
is, on average and in the worst of the global batches. The second table is for other numbers of ranks, most no power of
two; the third for exchange at 7 us a token, and at the price that `wlb simulate` gives it on H100s (TP 8 fills a node,
so that groups reach over the network), none of it hidden, or as much as attention takes. *Over the best count* is how
far each step is above the best of all numbers of micro-batches that the same solver is made to take, one by one. The
fourth is for what every micro-batch takes on every stage whatever is in it: launches, hooks, FSDP's gathers.
Times are CPU times, the least of five calls, the mean of all batches.

The released scheduler of Megatron (BalancedCPScheduler) plans for no pipeline and does not limit the tokens that a rank
gets in all (see tokens/rank). This score, a pipeline's critical path, is outside what it was made for: its planning
time compares, its path only shows what such plans would cost in a pipeline. A planner that is not installed is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import wlb
import wlb_tools
from benches.common import Lengths, bars, machine, options, package_version, parse, read_lengths, tables, write_record
from wlb_tools.simulation import planner_options

WORLD, STAGES, TOKENS = 64, 8, 8192
LONGEST = 131072
WORLDS = (24, 32, 48, 64, 96, 128, 768)
OVERHEADS = (0.0, 1e-3, 5e-3, 20e-3)  # seconds of every micro-batch on every stage
SEVEN_US = wlb.Exchange(seconds_per_token=7e-6)
LAYOUT = wlb_tools.ParallelLayout(tp=8, cp=8, dp=WORLD // 8, pp=STAGES)
COSTS = {
    "13B": wlb.CostModel.from_flops(
        hidden_size=5120,
        ffn_hidden_size=13824,
        num_layers=40,
        num_heads=40,
        vocab_size=32000,
        attention_efficiency=0.55,
        flops_per_second=8 * 400e12,  # TP 8
    ),
    "pairs": wlb.CostModel(attention=1.0, linear=0.0),
}
Source = Callable[[int, int], Lengths]  # of a number of documents and a seed
Plan = list[list[tuple[range | list[int], list[int]]]]  # micro-batch -> groups: ranks, documents


def documents(count: int, seed: int) -> Lengths:
    """The documents of one global batch."""
    generator = np.random.default_rng(seed)
    lengths = np.minimum(3000 * np.exp(1.6 * generator.standard_normal(count)), LONGEST)
    lengths[generator.permutation(count)[: round(0.008 * count)]] = LONGEST
    return padded(lengths)


def log_normal(count: int, seed: int) -> Lengths:
    """The same without a tail of long ones."""
    return padded(np.random.default_rng(seed).lognormal(8.0, 1.3, count))


def drawn(lengths: Lengths, count: int, seed: int) -> Lengths:
    """The same, of lengths that were found somewhere."""
    return padded(np.random.default_rng(seed).choice(lengths, count))


def of_files(paths: Sequence[Path]) -> dict[str, Source]:
    """Draws from each, by its name."""
    return {path.stem: partial(drawn, read_lengths(path)) for path in paths}


def padded(lengths: Lengths) -> Lengths:
    return (lengths.clip(1, LONGEST).astype(np.int64) + 127) // 128 * 128


def planned(lengths: Lengths, cost: wlb.CostModel, world_size: int = WORLD, **options: Any) -> wlb.DynamicCpPlan:
    return wlb.plan_dynamic_cp(
        lengths,
        world_size=world_size,
        num_stages=STAGES,
        max_tokens_per_rank=TOKENS,
        cost_model=cost,
        **options,
    )


def wlb_planner(lengths: Lengths, cost: wlb.CostModel) -> Plan:
    plan = planned(lengths, cost)
    return [[(group.ranks, group.document_ids.tolist()) for group in batch] for batch in plan]


def megatron_main(lengths: Lengths, cost: wlb.CostModel) -> Plan:
    """The scheduler of the released megatron-core."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    class World:
        def size(self) -> int:
            return WORLD

    scheduler = BalancedCPScheduler(TOKENS, World())
    _, ranks_of_batches = scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)
    plan: Plan = []
    for documents_of_ranks in ranks_of_batches:
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, ids in enumerate(documents_of_ranks):
            groups.setdefault(tuple(ids), []).append(rank)
        plan.append([(ranks, list(ids)) for ids, ranks in groups.items()])
    return plan


def megatron_dev(scheduler: str) -> Callable[[Lengths, wlb.CostModel], Plan]:
    def planner(lengths: Lengths, cost: wlb.CostModel) -> Plan:
        from megatron.core.datasets import data_schedule

        options = {"max_seqlen_per_dp_cp_rank": TOKENS, "cp_size": 16, "dp_size": WORLD // 16}
        made = getattr(data_schedule, scheduler)(microbatch_group_size_per_vp_stage=None, **options)
        plan: Plan = []
        for documents_of_ranks in made.get_groups_and_subsamples(list(enumerate(lengths.tolist()))):
            groups: dict[tuple[int, ...], list[int]] = {}
            for rank, ids in enumerate(documents_of_ranks):
                groups.setdefault(tuple(ids), []).append(rank)
            plan.append([(ranks, list(ids)) for ids, ranks in groups.items()])
        return plan

    return planner


PLANNERS: dict[str, Callable[[Lengths, wlb.CostModel], Plan]] = {
    "wlb": wlb_planner,
    "megatron BalancedCPScheduler": megatron_main,
    "megatron default_dynamic_cp (dev)": megatron_dev("DefaultDynamicCPScheduler"),
    "megatron dp_balanced (dev)": megatron_dev("DpBalancedScheduler"),
}


def scored(plan: Plan, lengths: Lengths, cost: wlb.CostModel) -> dict[str, float]:
    """Any planner's plan under one simulator; a document that is on several ranks costs each of them a part."""
    costs = cost.cost(lengths)
    seconds = np.asarray([max(sum(costs[ids]) / len(ranks) for ranks, ids in groups) for groups in plan])
    tokens = max(-(-int(lengths[ids].sum()) // len(ranks)) for groups in plan for ranks, ids in groups)
    placed = sorted(i for groups in plan for _, ids in groups for i in ids)
    if placed != list(range(len(lengths))):
        raise SystemExit("a document is lost or doubled")
    path = wlb.simulate_pipeline(seconds, schedule="1f1b", num_stages=STAGES).seconds
    ratio = float(path / (costs.sum() / (WORLD * STAGES)))
    return {
        "path": ratio,
        "over_filled": ratio / (1 + (STAGES - 1) / len(plan)),
        "micro_batches": len(plan),
        "max_tokens_per_rank": tokens,
        "mean_cp_of_a_token": sum(len(ranks) * int(lengths[ids].sum()) for groups in plan for ranks, ids in groups)
        / int(lengths.sum()),
    }


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """CPU time of this thread: the least of some calls."""
    found: list[float] = []
    for _ in range(repeats):
        started = time.thread_time_ns()
        work()
        found.append((time.thread_time_ns() - started) / 1e6)
    return min(found)


def measure(count: int, seeds: int, progress: Progress) -> list[dict[str, Any]]:
    """A row for each cost and planner; times are of each batch, the least of several calls."""
    rows: list[dict[str, Any]] = []
    batches = [documents(count, seed) for seed in range(seeds)]
    for cost_name, cost in COSTS.items():
        for name, planner in progress.track(PLANNERS.items(), description=f"Dynamic-CP, {count:,}, {cost_name}"):
            row: dict[str, Any] = {"documents": count, "cost": cost_name, "planner": name}
            rows.append(row)
            try:
                plans = [planner(lengths, cost) for lengths in batches]
            except (ImportError, AttributeError):
                installed = package_version("megatron-core")
                row["missing"] = f"not in megatron-core {installed}" if installed != "missing" else "not installed"
                continue
            except AssertionError as error:
                row["missing"] = f"failed, AssertionError {error}"
                continue
            row["scores"] = [scored(plan, lengths, cost) for plan, lengths in zip(plans, batches, strict=True)]
            timed = planned if name == "wlb" else planner
            row["ms"] = [milliseconds(partial(timed, lengths, cost), 5) for lengths in batches]
            if name == "wlb":
                row["sort_ms"] = [milliseconds(partial(np.sort, lengths), 100) for lengths in batches]
                ours = [planned(lengths, cost) for lengths in batches]
                row["bounds"] = [plan.lower_bound / plan.balanced_seconds for plan in ours]
                # Ranks of a group wait for one another, others do not: at most the path above.
                row["exact"] = [plan.seconds / plan.balanced_seconds for plan in ours]
    return rows


def measure_worlds(seeds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    batches = [documents(2048, seed) for seed in range(seeds)]
    for world_size in WORLDS:
        plans = [planned(lengths, COSTS["13B"], world_size) for lengths in batches]
        row: dict[str, Any] = {"documents": 2048, "cost": "13B", "world_size": world_size}
        row["ms"] = [milliseconds(partial(planned, lengths, COSTS["13B"], world_size), 5) for lengths in batches]
        row["exact"] = [plan.seconds / plan.balanced_seconds for plan in plans]
        row["bounds"] = [plan.lower_bound / plan.balanced_seconds for plan in plans]
        rows.append(row)
    return rows


def measure_free(source: str, documents: Source, seeds: int) -> list[dict[str, Any]]:
    """The rows of wlb alone, exchange free."""
    rows: list[dict[str, Any]] = []
    for count in (2048, 256):
        batches = [documents(count, seed) for seed in range(seeds)]
        rows.append({"lengths": source, "documents": count, "cost": "13B"} | measured(batches))
    return rows


def measure_priced(source: str, documents: Source, seeds: int) -> list[dict[str, Any]]:
    """The 13B rows again, with exchange inside groups at a price."""
    rows: list[dict[str, Any]] = []
    cluster = wlb_tools.Scenario(
        model=wlb.ModelConfig.preset("llama2-13b"), layout=LAYOUT, hardware=wlb_tools.Hardware.preset("h100")
    )
    for count in (2048, 256):
        batches = [documents(count, seed) for seed in range(seeds)]
        of_cluster = planner_options(cluster, batches[0])
        for price in (SEVEN_US, of_cluster["exchange"]):
            of_link = {name: getattr(price, name) for name in ("seconds_per_token", "seconds_per_exchange")}
            for hidden in (1.0, 0.0):
                told = {"lengths": source, "documents": count, "cost": "13B"}
                rows.append(told | priced(batches, of_link | {"overlap": hidden}))
    return rows


def priced(batches: list[Lengths], prices: dict[str, float]) -> dict[str, Any]:
    """A row of plans for exchange at a price, each beside the best of all numbers of micro-batches."""
    exchange = wlb.Exchange(**prices)
    row = prices | measured(batches, exchange=exchange)
    return row | {"best": [best(each, exchange) for each in batches]}


def measure_overheads(seeds: int) -> list[dict[str, Any]]:
    """The 13B rows again, where every micro-batch takes something on every stage."""
    batches = [documents(2048, seed) for seed in range(seeds)]
    return [
        {"documents": 2048, "cost": "13B", "overhead": seconds}
        | measured(batches, micro_batch_seconds=seconds * STAGES)
        for seconds in OVERHEADS
    ]


def under_way(plan: wlb.DynamicCpPlan) -> float:
    """Most tokens on a rank of the first stage, each micro-batch as its fullest."""
    fullest = plan.padded_tokens_per_rank.max(axis=1).astype(float)
    pipeline = wlb.simulate_pipeline(np.ones(len(plan)), schedule="1f1b", num_stages=STAGES, activation=fullest)
    return float(pipeline.peak_activation.max())


def measured(batches: list[Lengths], **options: Any) -> dict[str, Any]:
    plans = [planned(lengths, COSTS["13B"], **options) for lengths in batches]
    return {
        "ms": [milliseconds(partial(planned, lengths, COSTS["13B"], **options), 5) for lengths in batches],
        "exact": [plan.seconds / plan.balanced_seconds for plan in plans],
        "bounds": [plan.lower_bound / plan.balanced_seconds for plan in plans],
        "micro_batches": [plan.num_micro_batches for plan in plans],
        "tokens": [int(plan.tokens_per_rank.max()) for plan in plans],
        "over_mean": [float(plan.tokens_per_rank.max() / plan.tokens_per_rank.mean()) for plan in plans],
        "under_way": [under_way(plan) for plan in plans],
    }


def best(lengths: Lengths, exchange: wlb.Exchange) -> float:
    """The shortest step of all numbers of micro-batches from what memory needs to four times that, over even work."""
    least = max(STAGES, -(-int(lengths.sum()) // (WORLD * TOKENS)))
    found = []
    for count in range(least, 4 * least + 1):
        try:
            plan = planned(lengths, COSTS["13B"], exchange=exchange, num_micro_batches=count)
        except wlb.WlbError:
            continue  # too few for the memory
        found.append(plan.seconds / plan.balanced_seconds)
    return min(found)


def over(row: dict[str, Any]) -> str:
    """How far the steps are above their bounds."""
    found = np.asarray(row["exact"]) / np.asarray(row["bounds"]) - 1
    return f"{found.mean():.2%} ({found.max():.2%})"


def main() -> None:
    parser = options(__doc__, lengths=True, record="dynamic_cp.json")
    parser.add_argument("--seeds", type=int, default=10, help="global batches to average over")
    arguments = parse(parser)
    with bars() as progress:
        rows = [row for count in (2048, 256) for row in measure(count, arguments.seeds, progress)]
        worlds = measure_worlds(arguments.seeds)
        sources = {"long tail": documents, "log-normal": log_normal} | of_files(arguments.lengths)
        each = progress.track(sources.items(), description="Dynamic-CP, exchange at a price")
        others, priced = [], []
        for name, source in each:
            others += measure_free(name, source, arguments.seeds)
            priced += measure_priced(name, source, arguments.seeds)
        overheads = measure_overheads(arguments.seeds)
    record = {"machine": machine(["megatron-core"]), "rows": rows, "worlds": worlds, "free": others, "priced": priced}
    record |= {"overheads": overheads}
    write_record(arguments.record, record)
    console = tables(150)
    report(console, rows)
    report_worlds(console, worlds)
    report_free(console, others)
    report_priced(console, priced)
    report_overheads(console, overheads)


def report(console: Console, rows: list[dict[str, Any]]) -> None:
    scores = ("ms", "m", "path", "bound", "over bound", "over filled", "tokens/rank", "mean CP")
    table = Table(
        "documents",
        "cost",
        "planner",
        *scores,
        title=f"1F1B, PP {STAGES}, {WORLD} ranks a stage; megatron-core {package_version('megatron-core')}",
    )
    for row in rows:
        head = (f"{row['documents']:,}", row["cost"], row["planner"])
        if "missing" in row:
            table.add_row(*head, "missing", *[""] * 7)
            continue
        mean = {key: float(np.mean([score[key] for score in row["scores"]])) for key in row["scores"][0]}
        table.add_row(
            *head,
            f"{np.mean(row['ms']):,.2f}",
            f"{mean['micro_batches']:.0f}",
            f"{mean['path']:.4f}",
            f"{np.mean(row['bounds']):.4f}" if "bounds" in row else "",
            over(row) if "bounds" in row else "",
            f"{mean['over_filled']:.3f}",
            f"{max(score['max_tokens_per_rank'] for score in row['scores']):,.0f}",
            f"{mean['mean_cp_of_a_token']:.1f}",
        )
    console.print(table)


def report_worlds(console: Console, worlds: list[dict[str, Any]]) -> None:
    table = Table("ranks", "ms", "path", "bound", "over bound", title="wlb, 2,048 documents, 13B")
    for row in worlds:
        path, bound = np.mean(row["exact"]), np.mean(row["bounds"])
        table.add_row(f"{row['world_size']}", f"{np.mean(row['ms']):,.2f}", f"{path:.4f}", f"{bound:.4f}", over(row))
    console.print(table)


def report_free(console: Console, rows: list[dict[str, Any]]) -> None:
    columns = ("lengths", "documents", "ms", "m", "path", "bound", "over bound")
    table = Table(*columns, title=f"wlb, {WORLD} ranks, 13B, exchange free")
    for row in rows:
        means = {key: np.mean(row[key]) for key in ("ms", "micro_batches", "exact", "bounds")}
        table.add_row(
            row["lengths"],
            f"{row['documents']:,}",
            f"{means['ms']:,.2f}",
            f"{means['micro_batches']:.0f}",
            f"{means['exact']:.4f}",
            f"{means['bounds']:.4f}",
            over(row),
        )
    console.print(table)


def report_priced(console: Console, priced: list[dict[str, Any]]) -> None:
    columns = (
        "lengths",
        "documents",
        "us a token",
        "ms a rank",
        "hidden",
        "ms",
        "m",
        "path",
        "bound",
        "over the best count",
    )
    table = Table(*columns, title=f"wlb, {WORLD} ranks, 13B, exchange at a price")
    for row in priced:
        regret = np.asarray(row["exact"]) / np.asarray(row["best"]) - 1
        table.add_row(
            row["lengths"],
            f"{row['documents']:,}",
            f"{row['seconds_per_token'] * 1e6:.2f}",
            f"{row['seconds_per_exchange'] * 1e3:.2f}",
            "all that fits" if row["overlap"] else "nothing",
            f"{np.mean(row['ms']):,.2f}",
            f"{np.mean(row['micro_batches']):.0f}",
            f"{np.mean(row['exact']):.4f}",
            f"{np.mean(row['bounds']):.4f}",
            f"{regret.mean():.2%} ({regret.max():.2%})",
        )
    console.print(table)


def report_overheads(console: Console, overheads: list[dict[str, Any]]) -> None:
    columns = ("ms a micro-batch and stage", "ms", "m", "path", "bound")
    table = Table(*columns, title=f"wlb, {WORLD} ranks, 2,048 documents, 13B, overheads")
    for row in overheads:
        means = {key: np.mean(row[key]) for key in ("ms", "micro_batches", "exact", "bounds")}
        table.add_row(
            f"{row['overhead'] * 1e3:.0f}",
            f"{means['ms']:,.2f}",
            f"{means['micro_batches']:.0f}",
            f"{means['exact']:.4f}",
            f"{means['bounds']:.4f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
