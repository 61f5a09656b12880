"""Advice of `wlb advise` for a trainer, what the simulation behind it plans, and what its pasted lines plan."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import wlb
import wlb_tools
from wlb_tools.command.output.trainers import ENTRIES
from wlb_tools.simulation import LoaderTuning, dynamic, methods, simulate, tune_loader

CONTEXT = 48
LENGTHS = np.random.default_rng(5).lognormal(2.8, 1.0, size=400).astype(int).clip(1, CONTEXT)
RANKS = 2


class Made:
    """Notes the packers and the Dynamic-CP plans that are made, and makes them."""

    def __init__(self) -> None:
        self.packers: list[dict[str, Any]] = []
        self.planned: list[dict[str, Any]] = []

    def noting(self, owner: Any, patch: pytest.MonkeyPatch, *names: str) -> None:
        """From now on `owner.Packer` or `owner.plan_dynamic_cp` note what they make."""
        packer, plan = wlb.Packer, wlb.plan_dynamic_cp

        @functools.wraps(packer)
        def noted(**options: Any) -> wlb.Packer:
            made = packer(**options)
            config = made.state_dict()["config"] | {"oversize": None}  # a loader splits, the simulation gets pieces
            self.packers.append(config)
            return made

        noted.__signature__ = inspect.signature(packer)  # type: ignore[attr-defined]

        @functools.wraps(plan)
        def noted_plan(*args: Any, **options: Any) -> Any:
            self.planned.append({name: value for name, value in options.items() if name != "ids" and value is not None})
            return plan(*args, **options)

        for name in names:
            patch.setattr(owner, name, {"Packer": noted, "plan_dynamic_cp": noted_plan}[name])


def advised(name: Any, model: Any, best: str, **given: Any) -> LoaderTuning:
    """Tuning of a trainer's loader for these documents, with the best plan of one kind as its choice."""
    layout = {"dp": RANKS} | given.pop("layout", {})
    scenario = wlb_tools.Scenario(
        model=model,
        hardware=wlb_tools.Hardware.preset("h100"),
        layout=wlb_tools.ParallelLayout(**layout),
        context=CONTEXT,
        num_micro_batches=8,
        max_tokens=160,
        **given,
    )
    entry = ENTRIES[name]
    tuned = tune_loader(LENGTHS, scenario, dynamic=entry.dynamic)
    return dataclasses.replace(tuned, best=next(choice for choice in tuned.tried if choice.kind == best))


def predicted(tuned: LoaderTuning) -> Made:
    """What the simulation of the best plan makes."""
    made, best = Made(), tuned.best
    limit = 160 if best.dynamic else best.max_tokens
    delay = tuned.max_delay if best.kind == "wlb" else None
    scenario = dataclasses.replace(tuned.scenario, max_tokens=limit, max_delay=delay)
    with pytest.MonkeyPatch.context() as patch:
        made.noting(methods, patch, "Packer")
        made.noting(dynamic, patch, "plan_dynamic_cp")
        simulate(LENGTHS, scenario, variants={best.kind: best.variant})
    return made


def rows() -> list[dict[str, list[int]]]:
    return [{"input_ids": [1] * length, "labels": [1] * length} for length in LENGTHS.tolist()]


def of(config: Any) -> wlb.ModelConfig:
    return wlb.ModelConfig.from_hugging_face(config.to_dict())


def calling(function: Callable[[], Any], made_by: str = "Packer") -> Made:
    made = Made()
    with pytest.MonkeyPatch.context() as patch:
        made.noting(wlb, patch, made_by)
        function()
    return made


def running(lines: str, names: dict[str, Any], made_by: str = "Packer") -> Made:
    return calling(lambda: exec(lines, names), made_by)
