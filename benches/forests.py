"""Planners that share prefixes, beside wlb: rollouts of the same prompts, judged alike; and the clock of a step.

    pip install --no-deps --target peers trl==1.16.0 datasets pyarrow dill multiprocess xxhash fsspec
    pip download --no-deps --python-version 3.12 --only-binary=:all: openpipe-art==0.5.23   # unzip it into peers/
    PYTHONPATH=peers python -m benches.forests [--no-clock]

Writes docs/results/forests.md and benches/records/forests.json. A peer that cannot be imported has no figures.

Work is that of a 7B Llama: a token costs what it adds to its path. A step's time is that of its slowest ranks over the
work of all unique tokens spread evenly over the ranks: 1 is the shortest possible. Where ranks meet once a step, it
takes the sum of its heaviest rank; where they meet in every round, the sum over rounds of the heaviest rank.

The clock runs examples/grpo.py on two processes, with and without sharing in turn, and takes the fastest step of each.
"""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table

import wlb
from benches.common import COST, DOCS, Row, machine, markdown, options, parse, rounded, tables, wrapped, write_record
from benches.peers import one_file

Ints = NDArray[np.int64]
Plan = list[list[list[int]]]  # by rank, by round: samples
DP = 8
EXAMPLE = Path(__file__).parents[1] / "examples" / "grpo.py"
CLOCKS = {"8 completions": [8, 8, 8, 8], "16 completions": [16, 16]}


@dataclass(frozen=True)
class Rollouts:
    """Samples of one step, in the order in which they arrive.

    Attributes:
        name: of the input.
        what: in a sentence.
        prompts: int64 [prompts] tokens of each.
        group: int64 [samples]: the prompt of each.
        completions: int64 [samples] tokens.
        max_tokens: unique tokens of a micro-batch.
    """

    name: str
    what: str
    prompts: Ints
    group: Ints
    completions: Ints
    max_tokens: int

    @property
    def lengths(self) -> Ints:
        """Tokens of each sample."""
        return self.prompts[self.group] + self.completions

    def tokens(self) -> tuple[Ints, Ints]:
        """Tokens of all samples, and where each begins. Completions differ from their first token on."""
        rng = np.random.default_rng(7)
        prompts = [rng.integers(0, 1 << 30, size) for size in self.prompts]
        rows = [
            np.append(prompts[g], rng.integers(0, 1 << 30, n))
            for g, n in zip(self.group, self.completions, strict=True)
        ]
        return np.concatenate(rows), np.append(0, np.cumsum(self.lengths))

    def forest(self) -> wlb.PrefixForest:
        """The forest of the samples: a root for each prompt, and a leaf for each completion."""
        parents = np.append(np.full(self.prompts.size, -1), self.group)
        lengths = np.append(self.prompts, self.completions)
        return wlb.PrefixForest.from_parents(parents, lengths, self.prompts.size + np.arange(self.group.size))

    def work(self, samples: Sequence[int]) -> float:
        """Cost of a micro-batch: each prompt counted once, plus what each completion adds."""
        if not len(samples):
            return 0.0
        held = self.prompts[np.unique(self.group[samples])]
        of_prompts = COST.cost(self.prompts[self.group[samples]])
        return float(COST.cost(held).sum() + (COST.cost(self.lengths[samples]) - of_prompts).sum())

    def least(self) -> int:
        """Unique tokens of any plan, at least. A tree that needs several micro-batches has its prompt in each."""
        completions = np.bincount(self.group, self.completions, self.prompts.size).astype(np.int64)
        parts = np.maximum(1, -(-completions // (self.max_tokens - self.prompts)))
        return int((parts * self.prompts + completions).sum())

    def unique(self, samples: Sequence[int]) -> int:
        """Unique tokens of a micro-batch: shared prompts count once."""
        if not len(samples):
            return 0
        return int(self.prompts[np.unique(self.group[samples])].sum() + self.completions[samples].sum())


def inputs() -> Iterator[Rollouts]:
    """The three inputs of the page: two shapes of groups, and one in the order in which rollouts end."""
    rng = np.random.default_rng(0)

    def drawn(median: float, spread: float, count: int) -> Ints:
        return rng.lognormal(np.log(median), spread, count).astype(np.int64).clip(1, 16384)

    yield Rollouts(
        "64 x 8",
        "64 prompts, lognormal(1,500, 0.6), of 8 completions, lognormal(2,000, 1) to 16,384; at most 32,768 tokens",
        drawn(1500, 0.6, 64),
        np.arange(64).repeat(8),
        drawn(2000, 1.0, 512),
        32768,
    )
    prompts, completions = drawn(5000, 0.3, 64), drawn(1500, 1.0, 1024)
    group = np.arange(64).repeat(16)
    shape = "64 prompts, lognormal(5,000, 0.3), of 16 completions, lognormal(1,500, 1) to 16,384; at most 65,536 tokens"
    yield Rollouts("64 x 16", shape, prompts, group, completions, 65536)
    order = np.argsort(completions, kind="stable")
    what = "the same, in the order in which rollouts end: the shortest first"
    yield Rollouts("64 x 16, by end", what, prompts, group[order], completions[order], 65536)


# --- planners --------------------------------------------------------------------------------------------------------


def ours(sync: Any) -> Callable[[Rollouts], tuple[Plan, float]]:
    """`wlb.pack` of the forest."""

    def plan(of: Rollouts) -> tuple[Plan, float]:
        forest = of.forest()
        seconds, planned = timed(
            lambda: wlb.pack(
                forest, num_micro_batches=None, max_tokens=of.max_tokens, cost_model=COST, dp_size=DP, sync=sync
            )
        )
        deal = planned.deal(DP).tolist()
        return [[planned[index].document_ids.tolist() for index in rank] for rank in deal], seconds

    return plan


def without_sharing(sync: Any) -> Callable[[Rollouts], tuple[Plan, float]]:
    """`wlb.pack` of the samples."""

    def plan(of: Rollouts) -> tuple[Plan, float]:
        seconds, planned = timed(
            lambda: wlb.pack(
                of.lengths, num_micro_batches=None, max_tokens=of.max_tokens, cost_model=COST, dp_size=DP, sync=sync
            )
        )
        deal = planned.deal(DP).tolist()
        return [[planned[index].document_ids.tolist() for index in rank] for rank in deal], seconds

    return plan


def trl(of: Rollouts) -> tuple[Plan, float]:
    """TRL's `TokenBudgetBatcher`, which sees a sample at a time."""
    batcher = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer").TokenBudgetBatcher
    tokens, offsets = of.tokens()
    samples: list[Row] = []
    for number, (begin, end) in enumerate(itertools.pairwise(offsets)):
        mask = torch.zeros(end - begin, dtype=torch.int64)
        mask[of.prompts[of.group[number]] :] = 1
        ids = torch.from_numpy(tokens[begin:end])
        samples.append({"input_ids": ids, "completion_mask": mask, "group_id": int(of.group[number]), "id": number})
    # A micro-batch is given when the next sample has no room: these have none, and are not judged.
    ones = torch.ones(of.max_tokens, dtype=torch.int64)
    last = [{"input_ids": -n * ones, "completion_mask": 0 * ones, "group_id": -n, "id": -1} for n in range(1, DP + 2)]
    began = time.process_time()
    rounds = list(batcher([*samples, *last], DP, of.max_tokens, {}))
    seconds = time.process_time() - began
    found = [[[each["id"] for each in row.samples if each["id"] >= 0] for row in rows] for rows in rounds]
    assert sorted(sample for rows in found for row in rows for sample in row) == list(range(of.group.size))
    return [[rows[rank] for rows in found] for rank in range(DP)], seconds


PLANNERS: dict[str, tuple[str, Callable[[Rollouts], tuple[Plan, float]]]] = {
    "wlb `pack(forest, sync='step')`": ("wlb", ours("step")),
    "wlb `pack(forest, sync='micro_batch')`": ("wlb", ours("micro_batch")),
    "wlb `pack(sync='step')`, nothing shared": ("", without_sharing("step")),
    "TRL `TokenBudgetBatcher`": ("trl", trl),
}


def timed(call: Callable[[], Any], repeats: int = 7) -> tuple[float, Any]:
    """Seconds of the processor that the fastest of some calls takes, and what it gives."""
    best, result = np.inf, None
    for _ in range(repeats):
        began = time.process_time()
        result = call()
        best = min(best, time.process_time() - began)
    return best, result


def judged(of: Rollouts, name: str) -> Row:
    """Unique tokens over the least, step times over the shortest, and milliseconds of planning."""
    package, planner = PLANNERS[name]
    row: Row = {"input": of.name, "planner": name, "package": package}
    try:
        plan, seconds = planner(of)
    except ImportError as missing:
        return row | {"missing": str(missing)}
    shares = bool(package)
    rounds = max(map(len, plan))
    work, unique = np.zeros((DP, rounds)), 0
    for rank, parts in enumerate(plan):
        for number, part in enumerate(parts):
            work[rank, number] = of.work(part) if shares else COST.cost(of.lengths[part]).sum()
            unique += of.unique(part) if shares else int(of.lengths[part].sum())
    everything = np.arange(of.group.size)
    even = of.work(everything) / DP
    return row | {
        "unique": unique / of.least(),
        "once": float(work.sum(axis=1).max() / even),
        "every_round": float(work.max(axis=0).sum() / even),
        "ms": 1e3 * seconds,
    }


def bounds(of: Rollouts) -> Row:
    """Step costs of wlb's plans over the lower bound that wlb proves."""
    found: Row = {"input": of.name}
    for sync in ("step", "micro_batch"):
        plan = wlb.pack(
            of.forest(), num_micro_batches=None, max_tokens=of.max_tokens, cost_model=COST, dp_size=DP, sync=sync
        )
        found[sync] = plan.step_cost / plan.lower_bound
    return found


def building(of: Rollouts) -> Row:
    """Tokens a second of finding what is shared, and how level context-parallel ranks are."""
    tokens, offsets = of.tokens()
    with_groups, forest = timed(lambda: wlb.PrefixForest.from_tokens(tokens, offsets, groups=of.group), 3)
    without, same = timed(lambda: wlb.PrefixForest.from_tokens(tokens, offsets), 3)
    assert forest.unique_tokens == same.unique_tokens
    row: Row = {
        "input": of.name,
        "groups": tokens.size / with_groups,
        "no_groups": tokens.size / without,
    }
    plan = wlb.pack(forest, num_micro_batches=None, max_tokens=131072, cost_model=COST)
    shards = [wlb.shard(part, cp_size=8) for part in plan if part.tokens >= 100_000]
    if shards:
        row["level"] = max(float(shard.pairs_per_rank.max() / shard.pairs_per_rank.mean()) for shard in shards)
    try:
        art = one_file("openpipe-art", "art.trainer_rank._prefix_tree_planner")
    except ImportError as missing:
        return row | {"art_missing": str(missing)}
    rows = [torch.from_numpy(tokens[begin:end]) for begin, end in itertools.pairwise(offsets)]
    build, tree = timed(lambda: art.build_canonical_prefix_tree(rows), 2)
    plan_seconds, layout = timed(lambda: art.plan_prefix_tree_layout(tree, tree.decision_indices), 2)
    unique = layout.packed_tokens / forest.unique_tokens
    return row | {"art_tokens": tokens.size / build, "art_layout_ms": 1e3 * plan_seconds, "art_unique": unique}


# --- the clock -------------------------------------------------------------------------------------------------------


def clock(groups: Sequence[int], log: Path) -> Row:
    """Seconds of a training step of the example on two processes, with and without sharing, and their losses."""
    sizes = ["--prompt", "2048", "--completion", "512", "--equal", "--max-tokens", "8192", "--steps", "1"]
    chosen = ["--groups", *map(str, groups), "--updates", "2"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    seconds: dict[str, float] = {"shared": np.inf, "apart": np.inf}
    losses: dict[str, list[float]] = {}
    for _ in range(2):  # in turn, so that both meet the same disturbances
        for name, flag in (("shared", []), ("apart", ["--no-sharing"])):
            log.unlink(missing_ok=True)
            subprocess.run([*launcher, *sizes, *chosen, *flag, "--metrics-file", str(log)], check=True)
            lines = [json.loads(line) for line in log.read_text().splitlines()]
            seconds[name] = min(seconds[name], *(line["seconds"] for line in lines))
            losses[name] = [line["loss"] for line in lines]
    apart = max(abs(a - b) for a, b in zip(losses["shared"], losses["apart"], strict=True))
    return {"seconds": seconds, "gain": seconds["apart"] / seconds["shared"], "losses_apart": apart, "losses": losses}


# --- the page --------------------------------------------------------------------------------------------------------


def page(record: Row) -> str:
    """docs/results/forests.md."""
    about, rows = record["machine"], [row for row in record["rows"] if "missing" not in row]
    best = {row["input"]: row["once"] for row in rows if row["package"] == "wlb" and "'step'" in row["planner"]}
    ratios = {
        package: [row["once"] / best[row["input"]] for row in rows if row["package"] == package]
        for package in ("", "trl")
    }
    spans = {package: f"{min(of):.2f} to {max(of):.2f}" for package, of in ratios.items() if of}
    first = f"Where ranks meet once a step, it takes {spans['']} times as long if nothing is shared"
    first += f", and {spans['trl']} times with TRL's planner." if "trl" in spans else "."
    if record.get("clock"):
        gain = min(each["gain"] for each in record["clock"].values())
        first += f" By the clock, two processes of a small model are faster by a factor of {gain:.1f} or more."
    versions = ", ".join(f"{name} {number}" for name, number in about["packages"].items())
    text = ["Written by `python -m benches.forests` from benches/records/forests.json; do not edit.", ""]
    text += ["# Planners that share prefixes, beside wlb", "", *wrapped(first), ""]
    text += wrapped(
        "A token costs what it adds to its path in a 7B Llama. A step's time is that of its slowest ranks over the "
        "work of all unique tokens spread evenly over 8 ranks: 1 is the shortest possible. *Once*: ranks wait for each "
        "other once a step. *Every round*: in every micro-batch. Unique tokens are over the least that the limit of "
        "tokens allows: a tree that needs several micro-batches has its prompt in each. Planning is time of the "
        "processor. TRL's planner sees a sample at a time, wlb's the whole step."
    )
    text += [
        "",
        *wrapped(
            f"Measured {about['time'][:10]} on {about['cpu']}, {about['cores']} cores under a load of "
            f"{about['load'][0]:.0f}, Python {about['python']}, wlb at {about['commit']}; {versions}."
        ),
    ]
    for of in record["inputs"]:
        text += ["", f"## {of['name']}", "", *wrapped(of["what"] + "."), ""]
        table = Table("planner", "unique tokens", "step, once", "step, every round", "planning, ms")
        for row in record["rows"]:
            if row["input"] == of["name"]:
                ratio = [f"{row[key]:.3f}" if key in row else "-" for key in ("unique", "once", "every_round")]
                table.add_row(row["planner"], *ratio, f"{row['ms']:,.1f}" if "ms" in row else "-")
        text += markdown(table)
    text += ["", "## Bounds, building and context parallelism", ""]
    text += wrapped(
        "`step` and `micro_batch`: the step of wlb over the bound that it proves, by `sync`. Building: tokens a second "
        "of `PrefixForest.from_tokens`, with groups and without, and of ART's `build_canonical_prefix_tree`. Level: "
        "pairs of the busiest of 8 context-parallel ranks over the mean, in micro-batches of at least 100,000 unique "
        "tokens. ART plans the rows of one rank, and balances no ranks, so that it has no step here."
    )
    table = Table("input", "step", "micro_batch", "tokens/s, groups", "tokens/s", "ART, tokens/s", "level")
    for bound, built in zip(record["bounds"], record["building"], strict=True):
        speeds = [f"{built[key]:.0e}" if key in built else "-" for key in ("groups", "no_groups", "art_tokens")]
        level = f"{built['level']:.4f}" if "level" in built else "-"
        table.add_row(bound["input"], f"{bound['step']:.3f}", f"{bound['micro_batch']:.3f}", *speeds, level)
    text += ["", *markdown(table)]
    if record.get("clock"):
        text += ["", "## The clock", ""]
        text += wrapped(
            "`examples/grpo.py` on two processes of one thread each: prompts of 2,048 tokens, completions of 512, the "
            "fastest of four training steps. Sharing leaves 1/3.3 of the tokens and of the groups of 8 1/2.3 of the "
            "pairs: a gain above 3.3 is the load of the machine, which both runs did not meet alike. Losses are those "
            "of two updates, the largest difference."
        )
        table = Table("groups", "shared, s", "nothing shared, s", "gain", "losses apart")
        for name, each in record["clock"].items():
            seconds = [f"{each['seconds'][key]:.2f}" for key in ("shared", "apart")]
            table.add_row(f"of {name}", *seconds, f"{each['gain']:.2f}", f"{each['losses_apart']:.0e}")
        text += ["", *markdown(table)]
    return "\n".join(line.rstrip() for line in text) + "\n"


def main() -> None:
    """Measures, prints and writes."""
    parser = options(__doc__, record="forests.json")
    parser.add_argument("--page", type=Path, default=DOCS / "results" / "forests.md", help="where the page goes")
    parser.add_argument("--no-clock", action="store_true", help="keep the clock of the record that is there")
    arguments = parse(parser)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    all_inputs = list(inputs())
    record: Row = {
        "machine": machine(["trl", "openpipe-art"]),
        "inputs": [{"name": of.name, "what": of.what} for of in all_inputs],
        "rows": [judged(of, name) for of in all_inputs for name in PLANNERS],
        "bounds": [bounds(of) for of in all_inputs],
        "building": [building(of) for of in all_inputs],
    }
    if not arguments.no_clock:
        log = arguments.record.with_suffix(".log")
        record["clock"] = {name: clock(groups, log) for name, groups in CLOCKS.items()}
        log.unlink(missing_ok=True)
    elif arguments.record.exists():
        record["clock"] = json.loads(arguments.record.read_text()).get("clock", {})
    record = rounded(record)
    write_record(arguments.record, record)
    arguments.page.write_text(page(record))
    tables(120).print(arguments.page.read_text())


if __name__ == "__main__":
    main()
