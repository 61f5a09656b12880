"""The configuration that `wlb tune` prints: Python code that makes the chosen plans."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np

from wlb._core import MAX_TOKENS, Exchange
from wlb_tools.command.inputs.model import preset_meant
from wlb_tools.command.output import loaders
from wlb_tools.simulation import VARIANTS, Choice, Scenario, Tuning
from wlb_tools.simulation.methods import bounded


def model_code(name: str) -> str:
    """Python code for the model of `--model`, which is a preset, sizes, a file, or a name on the Hugging Face hub."""
    preset = preset_meant(name)
    if preset is not None:
        return f"wlb.ModelConfig.preset({json.dumps(preset)})"
    if "=" in name and not Path(name).exists():
        sizes = (pair.partition("=") for pair in name.split(","))
        return f"wlb.ModelConfig({', '.join(f'{key.strip()}={value.strip().title()}' for key, _, value in sizes)})"
    return f"wlb.ModelConfig.from_hugging_face({json.dumps(name)})"


class Verbatim(str):
    """Python code that `call` writes as it is, not as a string."""

    __slots__ = ()


def configuration(tuning: Tuning, *, model: str, profile: str | None) -> str:
    """Python code to paste.

    Args:
        tuning: its best choice is written.
        model: value of `--model`.
        profile: path of the measured kernel profile; None: the kernel model is analytic.
    """
    return (_dynamic(tuning) if tuning.best.dynamic else _static(tuning, model, profile)) + "\n"


def packer_micro_batches(scenario: Scenario, choice: Choice) -> int:
    """Micro-batches of the packer in a step. Before Dynamic-CP they are not divided among data-parallel ranks."""
    return scenario.micro_batches * choice.split // (scenario.layout.dp if choice.dynamic else 1)


def _static(tuning: Tuning, model: str, profile: str | None) -> str:
    """Verbatim of a packer (or of `wlb.pack`, if the plan cuts documents) and of the sharding."""
    best, scenario = tuning.best, tuning.scenario
    arguments = scenario.cost_arguments(attention_efficiency=tuning.attention_efficiency)
    costs = f"attention_efficiency={arguments['attention_efficiency']:.3f}"
    if (again := arguments.get("recompute")) is not None:
        costs += f", recompute={again if again is True else format(again, '.3g')}"
    cost_model = Verbatim(f"model.cost_model({costs})")
    lines = [
        "import functools",
        "",
        "import wlb",
        "",
        f"model = {model_code(model)}",
    ]
    if best.cuts:
        batch = {"num_micro_batches": scenario.micro_batches, "max_tokens": best.max_tokens, "cost_model": cost_model}
        method = VARIANTS[best.kind].packing
        lines += [
            f"# For the lengths of a global batch of {scenario.tokens_per_batch} tokens; cuts the documents of it.",
            f"pack = {call('functools.partial', Verbatim('wlb.pack'), **batch, method=method)}",
        ]
    else:
        lines += [
            f"# For BalancedBatchSampler{f', with max_early={best.max_early}' if best.max_early else ''}.",
            f"packer = {_packer(tuning, max_tokens=best.max_tokens, cost_model=cost_model)}",
        ]
    sharding: dict[str, Any] = {"cp_size": scenario.layout.cp, "strategy": best.strategy}
    if best.strategy == "adaptive":
        sharding["kernel_model"] = Verbatim("kernel")
        kernel = scenario.attention
        if profile is not None:
            made = call("wlb.KernelModel.from_profile", Verbatim(_literal(profile)), num_heads=kernel.num_heads)
        else:
            shape = {name: getattr(kernel, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
            made = call("wlb.KernelModel.analytic", Verbatim(_literal(scenario.generation)), **shape)
        lines.append(f"kernel = {made}")
    return "\n".join([*lines, f"shard = {call('functools.partial', Verbatim('wlb.shard'), **sharding)}"])


def _dynamic(tuning: Tuning) -> str:
    """Verbatim of a Dynamic-CP plan: cost model, planner, packer if documents wait, and loader."""
    scenario, planner = tuning.scenario, dict(tuning.planner or {})
    cost = planner.pop("cost_model")
    seconds = {"attention": cost.attention_cost([1])[0], "linear": cost.linear_cost([1])[0]}
    planner = {"cost_model": Verbatim("cost_model"), **planner}
    lines = [
        "import functools",
        "",
        "import wlb",
        "",
        "# In seconds.",
        f"cost_model = {call('wlb.CostModel', **seconds)}",
        f"plan = {call('functools.partial', Verbatim('wlb.plan_dynamic_cp'), **planner)}",
    ]
    functions: list[Any] = [loaders.loader]
    if tuning.best.kind == "wlb_dynamic_cp":
        released = min(scenario.tokens_per_batch, MAX_TOKENS)
        lines.append("# What it releases is planned, so memory is the planner's concern: max_tokens is a global batch.")
        lines.append(f"packer = {_packer(tuning, max_tokens=released, cost_model=Verbatim('cost_model'))}")
        if packer_micro_batches(scenario, tuning.best) % scenario.layout.size("dp_cp"):
            functions.insert(0, loaders.released)
        else:
            functions.insert(0, loaders.sampled)
    return "\n".join([*lines, *(f"\n\n{inspect.getsource(function).rstrip()}" for function in functions)])


def _packer(tuning: Tuning, **arguments: object) -> str:
    best, scenario = tuning.best, tuning.scenario
    if best.delay_price is None:
        waiting: dict[str, object] = {"outlier_thresholds": best.outlier_thresholds}
    else:
        waiting = bounded({"release": "adaptive", "delay_price": best.delay_price}, scenario.max_step_cost)
    if not best.dynamic:
        waiting |= scenario.meeting_ranks
    return call(
        "wlb.Packer",
        num_micro_batches=packer_micro_batches(scenario, best),
        **arguments,
        **waiting,
        max_delay=scenario.max_delay,
        max_document_tokens=scenario.context,
        tokens_per_batch=scenario.tokens_per_batch,
    )


def call(function: str, *positional: Verbatim, **arguments: object) -> str:
    """Python code of a call, with one argument per line."""
    lines = [*positional, *(f"{name}={_literal(value)}" for name, value in arguments.items())]
    return "\n".join([f"{function}(", *(f"    {line}," for line in lines), ")"])


def _literal(value: object) -> str:
    """Python code of a value: strings in double quotes, numpy scalars as plain numbers."""
    if isinstance(value, Verbatim):
        return value
    if isinstance(value, Exchange):
        return f"wlb.{value!r}"
    if isinstance(value, str):
        return json.dumps(value)
    return repr(value.item() if isinstance(value, np.generic) else value)
