"""`RoundPlan.weights` beside the means that TRL and verl take with their own code, over micro-batches and ranks."""

from __future__ import annotations

import importlib
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import wlb
from wlb import rl

LONGEST, DP_SIZE = 40, 3


def step() -> tuple[rl.RoundPlan, torch.Tensor, torch.Tensor]:
    """A step of 48 samples on three ranks; loss of each token, and which bear loss. Some samples bear none."""
    rng = np.random.default_rng(7)
    counts = rng.integers(1, LONGEST + 1, 48) * (rng.random(48) < 0.9)
    mask = torch.arange(LONGEST) < torch.tensor(counts)[:, None]
    losses = torch.tensor(rng.normal(size=(48, LONGEST)))
    cost = wlb.CostModel(attention=1.0, linear=100.0)
    plan = rl.plan(counts + 20, dp_size=DP_SIZE, max_tokens=200, cost_model=cost, groups=np.arange(48) // 4)
    assert not counts.all()
    return plan, losses, mask.double()


def weighted(plan: rl.RoundPlan, losses: torch.Tensor, mask: torch.Tensor, weights: np.ndarray) -> float:
    """Each rank's sum over its micro-batches of weight times summed token loss; the mean over ranks, as DDP's."""
    of_rank = [
        sum(float(weights[i] * (losses[i] * mask[i]).sum()) for held in plan.micro_batches(0, rank) for i in held)
        for rank in range(DP_SIZE)
    ]
    return float(np.mean(of_rank))


def counted(mask: torch.Tensor) -> np.ndarray:
    return mask.sum(1).long().numpy()


VERL: dict[str, dict[str, Any]] = {
    "token-mean": {"mean": "token"},
    "seq-mean-token-mean": {"mean": "sample", "count_empty": True},
    "seq-mean-token-sum-norm": {"mean": "sample", "count_empty": True},
}


@pytest.mark.parametrize("mode", VERL)
def test_verls_means(mode: str) -> None:
    """`agg_loss` on each micro-batch with the counts of the whole step; verl averages over ranks as DDP does."""
    pytest.importorskip("verl", reason="verl is not installed: pip install verl")
    reason = "what verl imports is not installed"
    algorithms = pytest.importorskip("verl.trainer.ppo.core_algos", reason=reason, exc_type=ImportError)
    plan, losses, mask = step()
    totals = {"dp_size": DP_SIZE, "batch_num_tokens": mask.sum(), "global_batch_size": 48, "loss_scale_factor": 90}
    of_rank = [
        sum(
            float(algorithms.agg_loss(losses[held], mask[held], mode, **totals)) for held in plan.micro_batches(0, rank)
        )
        for rank in range(DP_SIZE)
    ]
    # A sum over a constant is a mean over samples that all have as many tokens.
    counts = np.full(48, 90) if mode.endswith("norm") else counted(mask)
    ours = weighted(plan, losses, mask, plan.weights(counts, **VERL[mode]))
    assert ours == pytest.approx(float(np.mean(of_rank)), rel=1e-6)


TRL: dict[str, dict[str, Any]] = {
    "grpo": {"mean": "sample", "count_empty": True},
    "bnpo": {"mean": "token"},
    "dapo": {"mean": "token"},
    "dr_grpo": {"mean": "sample", "count_empty": True},
    "luspo": {"mean": "sample", "count_empty": True},
}


@pytest.mark.parametrize("loss_type", TRL)
def test_trls_means(loss_type: str) -> None:
    """`GRPOTrainer._compute_loss` on the whole step, with its own code around the log-probabilities that are given."""
    pytest.importorskip("trl", reason="trl is not installed: pip install trl")
    trainer = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
    plan, losses, mask = step()
    probabilities = torch.zeros_like(losses)  # a ratio of 1, so that a token's loss is minus its advantage
    one_process = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (probabilities, probabilities, None),
        **dict.fromkeys(("aux_loss_enabled", "use_vllm", "_entropy_bonus_enabled"), False),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=0.2,
        max_completion_length=90,
        accelerator=one_process,
        current_gradient_accumulation_steps=1,
        _metrics=defaultdict(metrics),
        args=SimpleNamespace(delta=None, steps_per_generation=1),
        model=SimpleNamespace(training=True),
    )
    inputs = {
        "prompt_ids": torch.zeros(48, 1),
        "prompt_mask": torch.ones(48, 1),
        "completion_ids": torch.zeros(48, LONGEST),
        "completion_mask": mask,
        "advantages": -losses,
        "num_items_in_batch": mask.sum(),
    }
    theirs = float(trainer._compute_loss(stand_in, None, inputs))
    counts = {"dr_grpo": np.full(48, 90), "luspo": np.ones(48, np.int64)}.get(loss_type, counted(mask))
    ours = weighted(plan, losses, mask, plan.weights(counts, **TRL[loss_type]))
    assert ours == pytest.approx(theirs, rel=1e-6)


def metrics() -> defaultdict[str, list[float]]:
    return defaultdict(list)
