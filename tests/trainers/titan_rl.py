"""A program that packs samples with torchtitan RL's own `Batcher`, from a checkout, whose rows wlb plans.

PYTHONPATH=CHECKOUT python -m tests.trainers.titan_rl
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import wlb
from tests.trainers.page import block

RANKS, ROW, PROMPTS = 4, 512, 16
RNG = np.random.default_rng(4)
LENGTHS = RNG.lognormal(4.5, 1.0, (PROMPTS, 4)).astype(int).clip(2, ROW + 1)
COST = wlb.CostModel(attention=1.0, linear=100.0)


def batcher() -> ModuleType:
    """Its module, without the inference engine that the package around it imports."""
    spec = importlib.util.find_spec("torchtitan")
    assert spec is not None
    assert spec.origin is not None
    for name in ("torchtitan.experiments.rl", "torchtitan.experiments.rl.components"):
        package = ModuleType(name)
        package.__path__ = [str(Path(spec.origin).parent.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    return importlib.import_module("torchtitan.experiments.rl.components.batcher")


def main() -> None:
    theirs = batcher()
    types = importlib.import_module("torchtitan.experiments.rl.types")
    names: dict[str, Any] = {**vars(theirs), "wlb": wlb, "cost": COST}
    exec(block("# torchtitan RL: a batcher"), names)
    found = {}
    for kind in ("BalancedBatcher", "Batcher"):
        config = names[kind].Config(batch=theirs.BatchConfig(local_batch_size=1, seq_len=ROW))
        held = config.build(num_prompts_per_train_step=PROMPTS, dp_degree=RANKS, pad_id=0)
        batch = None
        for prompt, sizes in enumerate(LENGTHS.tolist()):
            samples = [
                types.TrainingSample(
                    min_policy_version=0,
                    max_policy_version=0,
                    rollout_id=types.RolloutTurnID(group_id=prompt, rollout_id=number, turn_id=0),
                    token_ids=[1] * size,
                    loss_mask=[True] * size,
                    logprobs=[0.0] * size,
                    advantage=[1.0] * size,
                )
                for number, size in enumerate(sizes)
            ]
            group = types.TrainingSampleGroup(group_id=prompt, training_samples=samples, metrics=[])
            batch = held.add_training_samples(training_sample_group=group)
        assert type(held).__name__ == kind
        assert batch is not None
        assert batch.num_global_valid_tokens == (LENGTHS - 1).sum()
        assert all(len(together) == RANKS for together in batch.microbatches)
        work = np.zeros((len(batch.microbatches), RANKS))
        for at, together in enumerate(batch.microbatches):
            for rank, one in enumerate(together):
                assert one.token_ids.numel() == ROW
                real = int(one.loss_mask.sum())
                starts = np.flatnonzero(one.positions[:real].numpy() == 0)
                work[at, rank] = COST.cost(np.diff([*starts, real])).sum()
        assert np.isclose(work.sum(), COST.cost(LENGTHS.ravel() - 1).sum())
        found[kind] = work.max(axis=1).sum() * RANKS / work.sum()
    print(found)
    assert found["BalancedBatcher"] < 1.1 < found["Batcher"]


if __name__ == "__main__":
    main()
