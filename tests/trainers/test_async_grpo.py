"""TRL's asynchronous GRPO with rows planned by wlb: the same samples in each micro-batch, in lighter rows."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import wlb
from wlb.integrations import trl as ours

pytest.importorskip("trl", reason="trl is not installed: pip install trl")
reason = "this trl has no asynchronous GRPO that can be imported"
grpo = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer", reason=reason, exc_type=ImportError)

COST = wlb.CostModel(attention=3.0, linear=2000.0)
BATCHERS = ("TokenBudgetBatcher", "FixedCountBatcher")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in BATCHERS:
        monkeypatch.setattr(grpo, name, getattr(grpo, name))
    ours.install(cost_model=COST)
    return grpo


def rollouts(prompts: int = 24, n: int = 6) -> list[dict[str, Any]]:
    """Samples in groups that share a prompt, with completions of very unequal lengths."""
    rng = np.random.default_rng(11)
    samples = []
    for group in range(prompts):
        prompt = rng.integers(0, 50, rng.integers(10, 60))
        for _ in range(n):
            completion = rng.integers(0, 50, int(rng.lognormal(4, 1).__ceil__()) % 400 + 1)
            mask = np.append(np.zeros(prompt.size, int), np.ones(completion.size, int))
            samples.append(
                {
                    "input_ids": torch.tensor(np.append(prompt, completion)),
                    "completion_mask": torch.tensor(mask),
                    "old_log_probs": torch.zeros(mask.size),
                    "advantage": float(rng.normal()),
                    "group_id": group,
                    "metrics": {},
                }
            )
    return samples


def heaviest(rows: list[Any]) -> tuple[float, float]:
    costs = [ours._cost(row, COST) for row in rows]
    return max(costs), sum(costs)


@pytest.mark.parametrize("name", BATCHERS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_have_the_same_samples_and_are_lighter(name: str, ranks: int, installed: Any) -> None:
    samples, budget = rollouts(), 1200
    more: tuple[Any, ...] = (budget, defaultdict(list)) if name == "TokenBudgetBatcher" else (12 * ranks,)
    batcher = getattr(installed, name)
    planned, theirs = [*batcher(samples, ranks, *more)], [*batcher._of_trl(samples, ranks, *more)]
    assert len(planned) == len(theirs) > 2
    longer, even = np.zeros(2), 0.0
    for ours_rows, their_rows in zip(planned, theirs, strict=True):
        held = [{id(sample) for row in rows for sample in row.samples} for rows in (ours_rows, their_rows)]
        assert held[0] == held[1], "another choice of samples would change the losses"
        assert all(row.samples for row in ours_rows)
        if name == "TokenBudgetBatcher":
            assert all(len(row.tokens) <= budget and row.trained <= budget for row in ours_rows)
        assert heaviest(ours_rows)[0] <= heaviest(their_rows)[0]
        longer += heaviest(ours_rows)[0], heaviest(their_rows)[0]
        even += heaviest(their_rows)[1] / ranks
    print(f"{name}, {ranks} ranks: {longer[0] / even:.3f} of even work, TRL alone {longer[1] / even:.3f}")
    assert longer[0] < longer[1]


def test_costs_of_trees_are_those_of_the_forest() -> None:
    samples = rollouts(2, 3)
    row = grpo.TreeRow()
    for sample in samples[:1]:
        row.add(sample)
    assert ours._cost(row, COST) == pytest.approx(COST.cost([len(samples[0]["input_ids"])])[0])
    row.add(samples[0])
    assert ours._cost(row, COST) == pytest.approx(COST.cost([len(samples[0]["input_ids"])])[0]), "shared as a whole"


def test_the_trainers_loader_uses_them(installed: Any) -> None:
    """`get_train_dataloader` takes the batcher by its name in the module."""
    assert installed.TokenBudgetBatcher._of_trl is not installed.TokenBudgetBatcher
    assert "TokenBudgetBatcher" in installed.AsyncGRPOTrainer.get_train_dataloader.__code__.co_names
    ours.install(cost_model=COST)
    assert not hasattr(installed.TokenBudgetBatcher._of_trl, "_of_trl"), "installed once, however often"


def test_another_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        def __init__(self, dataset: Any, budget: int) -> None:
            """Another version's."""

        def __iter__(self) -> Iterator[Any]:
            return iter(())

    monkeypatch.setattr(grpo, "TokenBudgetBatcher", Other)
    with pytest.raises(wlb.WlbError, match=r"trl .*\(self, dataset, budget\), but wlb expects .*, as in TRL 1.16"):
        ours.install(cost_model=COST)
    monkeypatch.setattr(importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    with pytest.raises(wlb.WlbError, match="trl is needed, and cannot be imported"):
        ours.install(cost_model=COST)
