"""Planners that people use today, beside wlb: the same steps, judged alike.

    make compare [LENGTHS="x.npy ..."]             # installs the planners, then:
    python -m benches.compare [--lengths x.npy ...]

Writes docs/results/compare.md and benches/records/compare.json. Two inputs were published by others; files of lengths
are further inputs. `peers.py` has the planners; one that cannot be imported is named with the reason.

A step is judged by the work of a 7B Llama (attention at 0.55 of the rate of matrix products), padding included, over
the work of all documents spread evenly over the ranks: 1 is the shortest possible step. Where ranks meet once a step,
it takes the sum of its heaviest rank; where they meet in every round, the sum over rounds of the heaviest rank.
"""

from __future__ import annotations

import logging
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import wlb
from benches.common import (
    CONTEXT,
    COST,
    DOCS,
    Lengths,
    Row,
    bars,
    global_batches,
    machine,
    markdown,
    options,
    parse,
    read_lengths,
    rounded,
    samples,
    stream,
    tables,
    write_record,
)
from benches.peers import PEERS, Peer, Plan, Setting

STEPS = 6
LONG = 80
"""Steps of a stream in which documents may wait."""
PACKAGES = sorted({peer.package for peer in PEERS} - {"", "wlb"})
AHEAD = 0.002
"""By how much shorter a peer's step has to be to be named as ahead."""

Input = tuple[str, str, Setting, list[Lengths]]


def inputs(paths: Sequence[Path]) -> Iterator[Input]:
    """Name, what it is, where it is trained, and its steps."""
    rng = np.random.default_rng(0)
    chats = rng.lognormal(5, 1, 1600).astype(np.int64).clip(16, 1024)
    yield (
        "chats",
        "1,600 lengths, lognormal(5, 1) cut to 16 to 1,024, in steps of 32 (transformers #47340); "
        "2 ranks, 2 micro-batches each, at most 4,096 tokens",
        Setting(dp=2, accumulation=2, row=2048, max_tokens=4096),
        np.split(chats, 50),
    )
    tail = rng.lognormal(7, 1.2, 512 * STEPS).astype(np.int64).clip(1, 32768)
    yield (
        "long tail",
        "512 lengths a step, lognormal(7, 1.2) to 32,768; 8 ranks, 8 micro-batches each, at most 49,152 tokens",
        Setting(dp=8, accumulation=8, row=32768, max_tokens=49152),
        np.split(tail, STEPS),
    )
    for path in paths:
        documents = np.random.default_rng(0).permutation(read_lengths(path))
        pieces = wlb.split_documents(documents, max_document_tokens=CONTEXT)[2]
        yield (
            path.stem,
            f"{documents.size:,} documents in steps of 16 x {CONTEXT:,} tokens, cut at {CONTEXT:,}; "
            f"4 ranks, 4 micro-batches each, at most {CONTEXT * 3 // 2:,} tokens",
            Setting(dp=4, accumulation=4, row=CONTEXT, max_tokens=CONTEXT * 3 // 2),
            global_batches(pieces, 16, STEPS),
        )


def judged(plan: Plan, lengths: Lengths, alone: bool = False) -> dict[str, float]:
    """Step times over the shortest, padding over computed tokens, and the tokens of the fullest micro-batch.

    Args:
        plan: by rank and round.
        lengths: of the documents.
        alone: whether a rank runs one document of a round at a time.
    """
    rounds = max(map(len, plan))
    costs = np.zeros((len(plan), rounds))
    tokens = np.zeros_like(costs)
    for rank, parts in enumerate(plan):
        for number, part in enumerate(parts):
            pairs = [each if isinstance(each, tuple) else (each, 1) for each in part]
            of, ranks = np.array(pairs, np.int64).reshape(-1, 2).T
            costs[rank, number], tokens[rank, number] = (COST.cost(of) / ranks).sum(), (of / ranks).sum()
    real = int(lengths.sum())
    assert tokens.sum() >= real - 0.5, "documents are missing"
    even = COST.cost(lengths).sum() / len(plan)
    return {
        "once": float(costs.sum(axis=1).max() / even),
        "every_round": float(costs.max(axis=0).sum() / even),
        "padding": float(1 - real / tokens.sum()),
        "fullest": float(lengths.max() if alone else tokens.max()),
        "rounds": float(rounds),
    }


def measure(peer: Peer, of: Input) -> Row:
    """Means over the steps of an input."""
    name, _, setting, steps = of
    row: Row = {"input": name, "planner": peer.name, "package": peer.package}
    try:
        row["version"] = wlb.__version__ if peer.package == "wlb" else version(peer.package) if peer.package else ""
        found = []
        for lengths in steps:
            plan = peer.plan(lengths, setting)  # imports, compiles
            alone = peer.package == "megatron-core"
            found.append(
                judged(plan, lengths, alone) | {"us": min(samples(lambda n=lengths: peer.plan(n, setting), 0.02))}
            )
            found[-1]["sort_us"] = min(samples(lambda n=lengths: np.sort(n), 0.005))
    except (ImportError, PackageNotFoundError, NotImplementedError) as error:
        return row | {"missing": str(error)}
    except Exception as error:
        return row | {"missing": f"{type(error).__name__}: {error}"}
    return row | {key: float(np.mean([step[key] for step in found])) for key in found[0]}


def waiting(of: Input) -> Row:
    """A stream in which documents may wait, planned for ranks that meet in every round."""
    name, _, setting, steps = of
    packer = wlb.Packer(
        num_micro_batches=setting.bins,
        max_tokens=setting.max_tokens,
        max_document_tokens=setting.row,
        cost_model=COST,
        dp_size=setting.dp,
        sync="micro_batch",
    )
    tokens, read = 16 * CONTEXT, 0
    documents = stream(np.concatenate(steps), 2 * LONG * tokens, seed=0)
    found, us = [], []
    for step in range(LONG):
        batch = documents[read : read + int(np.searchsorted(np.cumsum(documents[read:]), tokens, side="right"))]
        batch = batch[: packer.admits(batch)]
        us.append(min(samples(lambda n=batch: packer.copy().push(n), 0.005)))
        packing = packer.push(batch)
        read += batch.size
        if step >= packer.bounds().delay:  # the first steps fill the packer
            plan = [[packing[index].lengths.tolist() for index in rank] for rank in packing.deal(setting.dp).tolist()]
            trained = np.concatenate([part.lengths for part in packing])
            found.append(judged(plan, trained) | {"sort_us": min(samples(lambda n=trained: np.sort(n), 0.002))})
    means = {key: float(np.mean([step[key] for step in found])) for key in found[0]}
    title = f"`Packer`, documents wait {packer.metrics().delay_mean:.1f} steps in the mean"
    about = {"input": name, "planner": title, "package": "wlb", "version": wlb.__version__}
    return about | means | {"us": float(np.mean(us)), "waits": packer.metrics().delay_mean}


# --- the page --------------------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> Table:
    """One input."""
    result = Table(
        "planner",
        "step, ranks meet once",
        "step, ranks meet every round",
        "padding",
        "fullest micro-batch, tokens",
        "planning, ms",
    )
    for row in rows:
        name = " ".join(filter(None, [row["package"], row.get("version"), row["planner"]]))
        if "missing" in row:
            result.add_row(name, f"did not run: {row['missing']}", *[""] * 4)
            continue
        result.add_row(
            name,
            f"{row['once']:.3f}",
            f"{row['every_round']:.3f}",
            f"{row['padding']:.1%}" if row["padding"] > 1e-9 else "none",
            f"{row['fullest']:,.0f}",
            f"{row['us'] / 1e3:.3f}",
        )
    floor = [row["sort_us"] for row in rows if "sort_us" in row]
    result.add_row("`numpy.sort` of the lengths: the floor", "", "", "", "", f"{min(floor) / 1e3:.3f}")
    return result


def ahead(rows: list[Row]) -> list[str]:
    """Where a peer is better than the best of wlb that trains every document in its own step."""
    found = []
    for name in dict.fromkeys(row["input"] for row in rows):
        of_input = [row for row in rows if row["input"] == name and "missing" not in row and "waits" not in row]
        ours = [row for row in of_input if row["package"] == "wlb"]
        for key, what in (
            ("once", "a shorter step where ranks meet once"),
            ("every_round", "a shorter step where they meet in every round"),
            ("fullest", "a less full micro-batch"),
            ("us", "faster planning"),
        ):
            best = min(row[key] for row in ours)
            margin = AHEAD if key != "us" else 0.0
            better = [row for row in of_input if row["package"] != "wlb" and row[key] < best * (1 - margin)]
            if better:
                form = {"us": "{:,.0f} us", "fullest": "{:,.0f} tokens"}.get(key, "{:.3f}")
                names = ", ".join(f"{row['planner']} ({form.format(row[key])})" for row in better)
                line = f"- *{name}*: {what}: {names}; wlb {form.format(best)}."
                found += textwrap.wrap(line, 118, subsequent_indent="  ")
    return found


def over_wlb(rows: list[Row], key: str) -> list[float]:
    """For each input, the step of the best other planner over wlb's, no document waiting."""
    ratios = []
    for name in dict.fromkeys(row["input"] for row in rows):
        found = [row for row in rows if row["input"] == name and "missing" not in row and "waits" not in row]
        ours = min(row[key] for row in found if row["package"] == "wlb")
        ratios.append(min(row[key] for row in found if row["package"] != "wlb") / ours)
    return ratios


def span(values: list[float]) -> str:
    """The least to the most."""
    return f"{min(values):.2f} to {max(values):.2f}"


def page(record: Row) -> str:
    """docs/results/compare.md."""
    rows: list[Row] = record["rows"]
    about = record["machine"]
    gains = {key: over_wlb(rows, key) for key in ("once", "every_round")}
    text = [
        "Written by `make compare` from benches/records/compare.json; do not edit.",
        "",
        "# Packers that people use, beside wlb",
        "",
        f"With the best other planner of each input a step takes {span(gains['every_round'])} times as long as with",
        f"wlb where ranks meet in every round, and {span(gains['once'])} times where they meet once.",
        "",
        "All planners get the same documents, and train each in its step (but `Packer`, which has a stream of",
        "them). A step's time is that of its slowest ranks, padding included, over the work of all documents spread",
        "evenly: 1 is the shortest possible. Work is that of a 7B Llama. *Once*: ranks wait for each other once a step",
        "(DDP, ZeRO-1). *Every round*: in every micro-batch (FSDP, ZeRO-3). `BalancedCPScheduler` and",
        "`plan_dynamic_cp` may share a document over several ranks; exchange is not counted. Ranks of",
        "`BalancedCPScheduler` meet only between its groups, and it runs one document at a time. Packers that fill",
        "rows fill them up to the longest document. Planning is a call from Python on one core.",
        "",
        f"Measured {about['time'][:10]} on {about['cpu']}, {about['cores']} cores, Python {about['python']}, wlb at "
        f'{about["commit"]}. `make compare LENGTHS="x.npy ..."` prints it.',
    ]
    for of in record["inputs"]:
        text += ["", f"## {of['name']}", "", *textwrap.wrap(of["what"] + ".", 118), ""]
        text += markdown(table([row for row in rows if row["input"] == of["name"]]))
    text += ["", "## Where wlb is not ahead", ""]
    text += ahead(rows) or ["Nowhere on these inputs."]
    text += [
        "",
        "Not compared: planners that are on no package index (Megatron-LM's `dp_balanced` and `default_dynamic_cp`),",
        "planners that share prefixes, and throughput on GPUs.",
    ]
    return "\n".join(line.rstrip() for line in "\n".join(text).split("\n")) + "\n"


def main() -> None:
    parser = options(__doc__, lengths=True, record="compare.json")
    parser.add_argument("--page", type=Path, default=DOCS / "results" / "compare.md", help="where the page goes")
    arguments = parse(parser)
    logging.disable()
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    all_inputs = list(inputs(arguments.lengths))
    with bars() as progress:
        task = progress.add_task("planners", total=len(all_inputs) * len(PEERS))
        for of in all_inputs:
            for peer in PEERS:
                progress.update(task, description=f"{of[0]}: {peer.package} {peer.name}")
                rows.append(measure(peer, of))
                progress.advance(task)
            if of[2].row == CONTEXT:
                rows.append(waiting(of))
    console: Console = tables(160)
    for of in all_inputs:
        console.print(of[0], style="bold")
        console.print(table([row for row in rows if row["input"] == of[0]]))
    described: list[dict[str, Any]] = [{"name": of[0], "what": of[1]} for of in all_inputs]
    record = rounded({"machine": machine(PACKAGES), "inputs": described, "rows": rows})
    write_record(arguments.record, record)
    arguments.page.write_text(page(record))


if __name__ == "__main__":
    main()
