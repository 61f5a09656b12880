"""The page of a run: one conclusion, then a table for each piece, from its records alone."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import wlb
from studies.gpu import parity, step
from studies.gpu.items import Row
from wlb.torch.attention.plan import keys_plan
from wlb_tools.profiling import held_out_errors

COMMAND = "python -m studies.gpu --report benches/records/gpu --page docs/results/gpu.md"


def read(folder: Path, piece: str) -> tuple[Row, list[Row]]:
    """The identity of a piece's records and its rows; both empty where it was not run."""
    path = folder / f"{piece}.jsonl"
    if not path.exists():
        return {}, []
    first, *rows = (json.loads(line) for line in path.read_text().splitlines())
    return first, rows


def text(folder: Path, profile: str | Path | None, step_profile: Path | None) -> str:
    """The page.

    Args:
        folder: records, a file for each piece.
        profile: path or name of the profile that predicts kernels of the piece *attention*, if there is one.
        step_profile: what predicts micro-batches of the piece *step*, if there is one.
    """
    steps = read(folder, "step")[1]
    sections = [
        _conclusion(steps),
        _correct(folder),
        _step(steps, step_profile),
        _layer(read(folder, "attention")[1], profile),
    ]
    found = (read(folder, piece)[0] for piece in ("parity", "step", "attention"))
    about = next((identity for identity in found if identity), {})
    versions = f"torch {about.get('torch')}, CUDA {about.get('cuda')}"
    lengths = ", ".join(f"`{name}`" for name in read(folder, "step")[0].get("lengths", ()))
    lines = [
        "Written from the records of `make gpu` by",
        f"`{COMMAND}`.",
        "",
        f"# wlb on one {about.get('device', 'device')} ({versions})",
        "",
        *(line for section in sections for line in section),
        *([f"Document lengths: {lengths}."] if lengths else []),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _conclusion(rows: list[Row]) -> Iterator[str]:
    rates = step.rates(rows)
    if {"original", "adaptive", "dynamic_cp"} <= rates.keys():
        gains = [rates[method] / rates["original"] for method in ("adaptive", "dynamic_cp")]
        yield f"A step of {step.RANKS} emulated ranks is {gains[0]:.2f} times as fast with wlb's adaptive packing, and"
        yield f"{gains[1]:.2f} times with Dynamic-CP, as with documents packed in the order they come."
        yield ""


def _correct(folder: Path) -> Iterator[str]:
    """Checks that pass or fail, a row each."""
    rows = {piece: read(folder, piece)[1] for piece in ("parity", "transports", "training", "sanitizer")}
    if not any(rows.values()):
        return
    yield "## Results are right (measured)"
    yield ""
    yield "| check | cases | failed | largest deviation |"
    yield "| --- | ---: | ---: | --- |"
    kernels: dict[str, list[Row]] = {}
    for row in rows["parity"]:
        kernels.setdefault(row["item"].split(", ")[0], []).append(row)
    for name, found in kernels.items():
        yield _check(f"kernel `{name}` in bfloat16 against float64, rank by rank", found, parity.NAMES)
    for row in rows["transports"]:
        what = f"all transports, {row['item']} on the GPU, exchanged through the host"
        yield _check(what, [row], parity.NAMES, cases=row.get("cases", 1))
    for row in rows["training"]:
        yield _check(f"{row['item']}: losses beside the CPU's", [row], ("losses_off",))
    for row in rows["sanitizer"]:
        yield _check("a small part of the kernel cases under `compute-sanitizer`", [row], ())
    yield ""
    yield "A deviation is the largest difference over the largest value of output or gradient."
    yield ""


def _check(what: str, rows: list[Row], names: tuple[str, ...], cases: int | None = None) -> str:
    failed = sum("error" in row or row.get("ok") is False for row in rows)
    worst = max((row[name] for row in rows for name in names if name in row), default=None)
    return f"| {what} | {cases or len(rows)} | {failed} | {'' if worst is None else f'{worst:.2g}'} |"


def _step(rows: list[Row], profile: Path | None) -> Iterator[str]:
    if not rows:
        return
    yield f"## A step of a 1B Llama on {step.RANKS} ranks (each rank measured alone: emulated)"
    yield ""
    yield "The model has 16 layers and a context of 64K tokens; its backward pass computes each layer again. A step has"
    yield f"{step.RANKS} contexts of tokens. Each rank's micro-batches ran alone on the GPU. A step takes as long as"
    yield "its slowest rank; the ranks of a Dynamic-CP group wait for each other. Communication is not counted."
    yield ""
    yield f"These are {step.STEPS} steps of one corpus, after {step.PUSHED} others. *original* and *fixed_length* have"
    yield f"micro-batches of at most 1 context; *adaptive* and *dynamic_cp* may use {step.ROOM} contexts of memory."
    yield "*adaptive* delays documents, so its steps train other documents than those of the other methods."
    yield ""
    yield "![Tokens per second by packing](gpu.png)"
    yield ""
    yield from step.summary(rows, profile)
    yield ""


def _layer(rows: list[Row], profile: str | Path | None) -> Iterator[str]:
    """By size, ranks and strategy over all micro-batches: the slowest rank, and the time outside of kernels."""
    if not rows:
        return
    yield "## One attention layer of Llama 3 8B, forward and backward (each rank measured alone: emulated)"
    yield ""
    yield "| tokens | CP ranks | strategy | slowest rank, ms | over the best strategy | outside of kernels |"
    yield "| ---: | ---: | --- | ---: | ---: | ---: |"
    groups: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        _, tokens, batch, cp, strategy = row["item"].split(", ")
        groups.setdefault((tokens, cp), {}).setdefault(strategy, []).append(row | {"batch": batch})
    for (tokens, cp), strategies in groups.items():
        best: dict[str, float] = {}
        for row in (row for found in strategies.values() for row in found):
            best[row["batch"]] = min(best.get(row["batch"], np.inf), max(row["seconds"]))
        for strategy, found in strategies.items():
            slowest = [max(row["seconds"]) for row in found]
            over = sum(slowest) / sum(best[row["batch"]] for row in found)
            whole, alone = (sum(sum(row[key]) for row in found) for key in ("seconds", "kernels"))
            ms = 1e3 * statistics.mean(slowest)
            yield f"| {int(tokens):,} | {cp[3:]} | {strategy} | {ms:.1f} | {over:.3f} | {1 - alone / whole:.1%} |"
    yield ""
    yield "Keys of other ranks are there already: what fetching them takes is not counted. *adaptive* and *hybrid*"
    yield "choose by the profile that was measured in the same run."
    yield ""
    if profile is not None:
        yield from _predicted(rows, profile)


def _predicted(rows: list[Row], profile: str | Path) -> Iterator[str]:
    """Kernel times beside a kernel model's, for the strategies that no kernel model chooses."""
    model = wlb.KernelModel.from_profile(profile)
    yield "### How well the profile predicts kernels"
    yield ""
    yield "| what | how many | median error | 95 % are within | largest error |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    held_out = held_out_errors(profile)
    if held_out is not None:
        yield _errors("segments that the profile was not made of", held_out.relative)
    measured: dict[str, list[float]] = {}
    predicted: dict[str, list[float]] = {}
    empty: dict[str, list[float]] = {}
    for row in rows:
        *_, cp, strategy = row["item"].split(", ")
        if strategy not in ("hybrid", "adaptive"):
            word: Any = strategy
            shard = wlb.shard(row["lengths"], cp_size=int(cp[3:]), strategy=word)
            measured.setdefault(strategy, []).extend(row["kernels"])
            predicted.setdefault(strategy, []).extend(model.rank_seconds(shard).tolist())
            empty.setdefault(strategy, []).extend(empty_blocks(shard, rank, model) for rank in range(len(shard)))
    for strategy, seconds in measured.items():
        yield _errors(f"ranks, {strategy}", np.array(predicted[strategy]) / seconds - 1)
    took, expected, blocks = (np.concatenate(list(found.values())) for found in (measured, predicted, empty))
    share = blocks / took
    each = float(share @ (1 - expected / took) / (share @ share))
    corrected = (expected + each * blocks) / took - 1
    yield _errors(f"all of these ranks, with {each * 1e9:.1f} ns for each empty block", corrected)
    yield ""
    yield "A call's backward starts a thread block for every 128 keys of its *longest* segment, for each head and"
    yield "segment. Where segments are shorter, blocks have no work: many short documents beside a long one cost that."
    yield ""
    yield "Two of these figures are not independent tests. The form of the kernel model (tiles of each pass, where a"
    yield "segment is read) was chosen with the errors of these same segments in view, and the price of an empty block"
    yield "is fitted to the same ranks that it is judged on. New lengths on a GPU would tell."
    yield ""
    yield from _in_buckets(rows, each, model.num_heads)


def _in_buckets(rows: list[Row], each: float, heads: int) -> Iterator[str]:
    """What blocks without work took of these kernels' time, and what they would take of calls that are divided."""
    yield "### Calls in buckets"
    yield ""
    yield "Attention divides a call between neighbouring segments where the blocks without work that this saves take"
    yield "longer than another call. Counted for these micro-batches in shares of their kernels' time, not measured; a"
    yield "call takes 0.1 to 0.3 % of it:"
    yield ""
    yield "| tokens | CP ranks | strategy | calls of a rank | their blocks without work | in buckets: calls | blocks |"
    yield "| ---: | ---: | --- | ---: | ---: | ---: | ---: |"
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        _, tokens, _, cp, strategy = row["item"].split(", ")
        if strategy in ("per_document", "auto"):
            groups.setdefault((tokens, cp[3:], strategy), []).append(row)
    for (tokens, cp, strategy), found in groups.items():
        took, counted = 0.0, np.zeros((2, 2))
        for row in found:
            word: Any = strategy
            shard = wlb.shard(row["lengths"], cp_size=int(cp), strategy=word)
            took += sum(row["kernels"])
            for index, buckets in enumerate((False, True)):
                counted[index] += np.sum([calls_of(shard, rank, buckets) for rank in range(len(shard))], axis=0)
        ranks = int(cp) * len(found)
        cells = (f"{calls / ranks:.1f} | {blocks * heads * each / took:.1%}" for calls, blocks in counted)
        yield f"| {int(tokens):,} | {cp} | {strategy} | {' | '.join(cells)} |"
    yield ""


def calls_of(shard: wlb.Shard, rank: int, buckets: bool) -> tuple[int, int]:
    """Calls of a rank in `all_gather`, and the thread blocks without work in their backward, of each head."""
    made = keys_plan(shard, rank, fetch=False, window=None, biased=False, device=torch.device("cpu"), buckets=buckets)
    calls = [*made.local, *made.remote]
    blocks = [-(-np.diff(call.spans[:, 2:], axis=1) // 128) for call in calls]
    return len(calls), sum(int(len(of_call) * of_call.max() - of_call.sum()) for of_call in blocks)


def empty_blocks(shard: wlb.Shard, rank: int, model: wlb.KernelModel) -> int:
    """Thread blocks without work in the backward of a rank's calls, of 128 keys and a head each.

    The records are of calls as they were made then: segments that find all of their keys on the rank had one of their
    own, however few they were.
    """
    held = shard.rank(rank)
    queries, keys = np.diff(held.cu_seqlens_q), np.diff(held.cu_seqlens_k)
    first = np.searchsorted(held.documents, held.documents)
    before = held.cu_seqlens_q[first] if len(first) else queries
    here = held.cu_seqlens_q[1:] - before == keys
    total = 0
    for call in (keys[here], keys[~here]):
        blocks = -(-call // 128)
        total += model.num_heads * int(len(blocks) * blocks.max(initial=0) - blocks.sum())
    return total


def _errors(what: str, relative: NDArray[np.float64]) -> str:
    error = np.abs(relative)
    return f"| {what} | {error.size} | {np.median(error):.1%} | {np.percentile(error, 95):.1%} | {error.max():.1%} |"


def picture(folder: Path, path: Path) -> None:
    """Tokens per second of each method, as a bar chart."""
    from matplotlib.figure import Figure

    rates = step.rates(read(folder, "step")[1])
    figure = Figure(figsize=(6.4, 2.6), layout="constrained")
    axes = figure.subplots()
    names = {
        "original": "original packing", "fixed_length": "fixed-length packing", "adaptive": "wlb, adaptive",
        "dynamic_cp": "wlb, Dynamic-CP",
    }  # fmt: skip
    labels = [names.get(method, method) for method in rates]
    colors = ["#4c78a8" if label.startswith("wlb") else "#b0b7c3" for label in labels]
    bars = axes.barh(labels, [rate / 1e3 for rate in rates.values()], color=colors)
    axes.bar_label(bars, [f"{rate / rates['original']:.2f}x" for rate in rates.values()], padding=4)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    axes.set_xlabel("thousand tokens per second of four emulated ranks (1B Llama, 64K)")
    figure.savefig(path, dpi=150)
