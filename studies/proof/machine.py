"""This machine in the words of the simulation: a profile of one processor, and the link between its ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

import wlb
import wlb_tools
from studies.proof import HEAD_DIM, Bench, unaligned
from wlb._core import pass_weights
from wlb_tools.profiling import Grid, Profiler

GIB = 2**30
SHORTEST = 16
"""Tokens from which on a profile has lengths halfway between powers of two."""


def profile(
    bench: Bench, path: Path, *, device: str, budget_seconds: float, progress: Callable[[int, int, str], None]
) -> None:
    """Measures attention and a layer of the model on one processor, as `wlb profile` does; once for each grid."""
    wanted = grid(bench)
    if path.exists() and tuple(json.loads(path.read_text())["query_lengths"]) == wanted.query_lengths:
        return
    measured = Profiler(bench.model, device=device).measure(
        records=path.with_suffix(".records.jsonl"), grid=wanted, budget_seconds=budget_seconds, progress=progress
    )
    path.write_text(json.dumps(measured) + "\n")


def grid(bench: Bench) -> Grid:
    """Lengths that a profile of the model has."""
    limit = 1 << int(np.ceil(np.log2(bench.memory * bench.context)))
    context = 1 << int(np.ceil(np.log2(bench.context)))
    # From one token on: a third of the documents have less than 16 here, which take as long as 16 do, and a profile
    # knows nothing of lengths below its own but that pairs are fewer. Halfway between powers of two, too: what a
    # CPU takes for a pair changes with what its caches hold; of the shortest, that is nothing beside what a segment
    # takes.
    round_ones = Grid.default(queries=(1, context), keys=(1, context), tokens=(min(256, limit), limit), held_out=16)
    halfway = (3 * length // 2 for length in round_ones.key_lengths[:-1] if length >= SHORTEST)
    lengths = tuple(sorted(set(map(unaligned, (*round_ones.key_lengths, *halfway)))))
    tokens = tuple(map(unaligned, round_ones.tokens))
    return replace(round_ones, query_lengths=lengths, key_lengths=lengths, tokens=tokens)


def hardware(bench: Bench, path: Path, link: wlb_tools.Link, ranks: int) -> wlb_tools.Hardware:
    """The machine: the rate of its linear part is that of the profile's layer, and all its ranks are in one node."""
    measured = json.loads(path.read_text())
    linear, attention = wlb.CostModel.from_profile(path), wlb.KernelModel.from_profile(path)
    tokens = np.array([bench.context])
    layer = bench.config.shape() | {"num_layers": 1, "vocab_size": 1}
    flops = wlb.CostModel.from_flops(**layer)
    rate = float(flops.linear_cost(tokens)[0] / linear.linear_cost(tokens)[0])
    weight, _ = pass_weights("forward_backward")
    pairs = weight * 4 * attention.num_heads * HEAD_DIM * float(wlb.pairs(tokens)[0])
    relative = pairs / float(attention.segment_seconds(tokens, tokens, passes="forward_backward")[0]) / rate
    return wlb_tools.Hardware(
        name=str(measured["gpu"]),
        peak_flops=rate,
        memory_bytes=64 * GIB,
        gpus_per_node=max(ranks, 1),
        intra_node=link,
        inter_node=link,
        launch_latency=1e-9,  # the link's latency holds it
        gemm_efficiency=1.0,
        attention_efficiency=relative,
    )
