"""`wlb profile` of two models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

import wlb
from studies.gpu.items import Budget, Row
from studies.gpu.step import Trained
from wlb_tools.profiling import Grid, Profiler, held_out_errors

MODELS = ("llama3-8b", "step")
"""The first is that of the piece *attention*, the second the one that the piece *step* trains."""

SECONDS = {"llama3-8b": 120.0, "step": 60.0}
"""What measuring each may take."""


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
            budget_seconds=min(SECONDS[name], max(1.0, budget.left)),
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
