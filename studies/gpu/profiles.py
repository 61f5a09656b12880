"""`wlb profile` of two models, and the profile's error on calls of mixed segments, which it was not made of."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import wlb
from studies.gpu.attention import Layer, Lengths, packed
from studies.gpu.items import Budget, Item, Row
from studies.gpu.step import Trained
from wlb_tools.profiling import Grid, Profiler, held_out_errors

MODELS = ("llama2-7b", "llama3-8b", "step")
"""The first has as many key heads as heads, the second fewer; the last is the model that the piece *step* trains."""

SECONDS = 300.0
"""That measuring one may take."""


def measured(name: str, folder: Path, device: torch.device, budget: Budget, tick: Callable[[str], None]) -> Row | None:
    """The profile in `folder`, named by GPU, kernel and heads; None where the budget ended before it did.

    Samples are in a file beside it, from which a later run goes on.
    """
    if device.type == "cpu":  # a toy: what runs is the same, and takes seconds
        grid = Grid.default(queries=(16, 64), keys=(64, 256), tokens=(64, 256), held_out=4)
    else:
        grid = Grid.default()
    profiler = Profiler(model_of(name, device), device=device)
    path = folder / f"{name}-{profiler.name}.json"
    try:
        profile = profiler.measure(
            records=path.with_suffix(".records.jsonl"),
            grid=grid,
            budget_seconds=min(SECONDS, max(1.0, budget.left)),
            progress=lambda done, total, shape: tick(f"{name}: {shape}, {done} of {total}"),
        )
    except wlb.WlbError as unfinished:
        if getattr(unfinished, "argument", None) != "budget_seconds":
            raise
        return None
    path.write_text(json.dumps(profile) + "\n")
    errors = held_out_errors(path)
    assert errors is not None
    found = {"profile": path.name, "held_out": errors.relative.size, "median": errors.median, "p95": errors.p95}
    return {**found, "ok": errors.median <= 0.05 and errors.p95 <= 0.15}


def model_of(name: str, device: torch.device) -> wlb.ModelConfig:
    """The model of that name; of a preset, on a CPU, one with as many kinds of heads that it measures in seconds."""
    if name == "step":
        return wlb.ModelConfig(**Trained(device).config.shape(), name=name)
    model = wlb.ModelConfig.preset(name)
    if device.type == "cuda":
        return model
    kv_heads = 2 if model.attention.num_kv_heads == model.attention.num_heads else 1
    shape = {"hidden_size": 128, "ffn_hidden_size": 256, "num_layers": 1, "num_heads": 2, "vocab_size": 256}
    return wlb.ModelConfig(**shape, num_kv_heads=kv_heads, name=name)  # type: ignore[arg-type]


def mixed(layer: Layer, lengths: Lengths, tokens: int, count: int) -> Iterator[Item]:
    """Calls as ranks make them of packed documents: the kernels alone, beside the profile."""
    for index, batch in enumerate(packed(lengths, tokens, count)):
        for cp_size in (1, 4, 8):
            yield f"mixed, micro-batch {index}, CP {cp_size}", functools.partial(mixed_error, layer, batch, cp_size)


def mixed_error(layer: Layer, lengths: Lengths, cp_size: int) -> Row:
    """Relative error of every rank's kernels, signed: above 0 where the model predicts too much."""
    shard = wlb.shard(lengths, cp_size=cp_size, strategy="per_document")
    took = np.array([layer.seconds(shard, rank)[1] for rank in range(cp_size)])
    errors = layer.model.rank_seconds(shard) / took - 1
    return {"errors": errors.tolist(), "ok": bool(np.abs(errors).max() <= 0.1)}
