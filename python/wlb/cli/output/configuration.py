"""The configuration that `wlb tune` prints: Python that makes the plans that were chosen."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from wlb._core import MAX_TOKENS
from wlb.cli.output.loaders import behind_packer, behind_sampler, dynamic_cp
from wlb.cluster.models import presets
from wlb.simulation import Choice, Scenario, Tuning


def configuration(tuning: Tuning, *, model: str, profile: str | None) -> str:
    """Python to paste; `model` is a preset's name or a path, `profile` that of the kernel, if it was measured."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["repr"] = repr
    best, scenario = tuning.best, tuning.scenario
    micro_batches = packer_micro_batches(scenario, best)
    sampled = micro_batches % scenario.layout.size("dp_cp") == 0
    loader: list[Callable[..., object]] = [dynamic_cp.loader]
    if best.kind != "dynamic_cp":
        loader = [behind_sampler.loader] if sampled else [behind_packer.released, behind_packer.loader]
    return environment.get_template("configuration.py.jinja").render(
        best=best,
        scenario=scenario,
        efficiency=tuning.attention_efficiency,
        model=model,
        preset=model in presets(),
        profile=profile,
        kernel=scenario.attention,
        micro_batches=micro_batches,
        released_tokens=min(scenario.tokens_per_batch, MAX_TOKENS),
        sampled=sampled,
        loader=map(inspect.getsource, loader),
        **_planner(tuning),
    )


def packer_micro_batches(scenario: Scenario, choice: Choice) -> int:
    """Micro-batches of the packer: in front of Dynamic-CP each is as wide as the pipeline stage."""
    return scenario.micro_batches * choice.split // (scenario.layout.dp if choice.dynamic else 1)


def _planner(tuning: Tuning) -> dict[str, Any]:
    """Arguments of the planner as Python writes them: numbers without numpy's types."""
    options = dict(tuning.planner or {})
    if not options:
        return {"planner": {}, "attention": None, "linear": None}
    cost = options.pop("cost_model")
    return {
        "planner": {name: value.item() if isinstance(value, np.generic) else value for name, value in options.items()},
        "attention": float(cost.attention_cost([1])[0]),
        "linear": float(cost.linear_cost([1])[0]),
    }
