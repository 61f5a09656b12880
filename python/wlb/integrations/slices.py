"""Rounds whose ranks are equal slices, and whose optimizer steps are equal slices of these: verl, TransferQueue."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wlb import rl


def planned(
    lengths: NDArray[np.int64],
    costs: NDArray[np.float64],
    prompts: Sequence[Hashable],
    *,
    dp_size: int,
    samples_per_step: int,
    together: Literal["step", "rank"] = "step",
) -> tuple[list[list[NDArray[np.int64]]], int]:
    """The samples of each rank in each step: equal numbers for all ranks and steps, and even work in each step.

    Args:
        lengths: int64[n], tokens of each sample.
        costs: float64[n], cost of each sample.
        prompts: prompt of each sample.
        dp_size: data-parallel ranks, which divide the number of samples.
        samples_per_step: samples of an optimizer step. If they do not divide the round, it is one step.
        together: what the samples of a prompt share.

    Returns:
        For each rank, for each step its samples, ascending; and the number of prompts that are parted between steps,
        because no whole prompts make equal steps.

    Raises:
        WlbError: with ``together="rank"``, prompts whose sizes cannot be dealt to ranks in equal numbers of samples.

    Complexity:
        O(n log n) and a bounded number of exchanges for each step.
    """
    count = lengths.size
    steps = 1 if count % samples_per_step else max(count // samples_per_step, 1)
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    groups = np.array([numbers[prompt] for prompt in prompts], np.int64)
    tokens = np.maximum(lengths, 1)
    options: dict[str, Any] = {
        "dp_size": dp_size,
        "max_tokens": max(int(tokens.sum()), 1),  # a rank splits its steps by tokens afterwards
        "costs": np.maximum(costs, np.finfo(float).tiny),
        "num_micro_batches": dp_size,
        "equal_samples": True,
    }
    whole: dict[str, Any] = {"groups": groups, "samples_per_step": max(count // steps, 1), "together": together}
    for step_samples in ("in_order", "even"):
        plan = rl.plan(tokens, step_samples=step_samples, **whole, **options)
        if (np.bincount(plan.steps, minlength=steps) == count // steps).all():
            break
    else:
        plan = rl.plan(tokens, num_steps=steps, **options)
    parts = [[plan.micro_batches(step, rank)[0] for step in range(len(plan))] for rank in range(dp_size)]
    pieces = np.unique(groups * (steps + 1) + plan.steps) // (steps + 1)
    return parts, int((np.bincount(pieces) > 1).sum())
