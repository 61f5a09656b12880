"""Plans of `wlb.rl` in the slots of trainers, as docs/trainers/rl.md prints them."""

from __future__ import annotations

from typing import Any

import numpy as np

import wlb


# slime: in the place of slime.utils.dp_schedule.build_dp_schedule, in slime/ray/rollout.py
def build_dp_schedule(args, train_parallel_config, total_lengths, *, global_batch_size, rollout_indices):  # type: ignore[no-untyped-def]
    dp_size, cp_size, vpp_size, in_turn = train_parallel_config.values()
    plan = wlb.rl.plan(
        total_lengths,
        dp_size=dp_size,
        max_tokens=args.max_tokens_per_gpu * cp_size,
        cost_model=cost,
        groups=rollout_indices,
        prompts_per_step=global_batch_size,
        oversize="alone",
        multiple_of=dp_size * (in_turn if vpp_size > 1 else 1),
    )
    held = [[part for step in range(len(plan)) for part in plan.micro_batches(step, rank)] for rank in range(dp_size)]
    places = [np.split(np.arange(sum(map(len, parts))), np.cumsum([*map(len, parts)])[:-1]) for parts in held]
    prompts = [len({*np.asarray(rollout_indices)[plan.steps == step]}) for step in range(len(plan))]
    return (
        [np.concatenate(parts).tolist() for parts in held],
        [[place.tolist() for place in parts] for parts in places],
        plan.num_micro_batches.tolist(),
        prompts,
    )


# NeMo-RL: what get_packer returns; bins[shard::shards] are the micro-batches of a shard
def bins(sequence_lengths: list[int], bin_capacity: int, shards: int) -> list[list[int]]:
    plan = wlb.rl.plan(sequence_lengths, dp_size=shards, max_tokens=bin_capacity, cost_model=cost, sync="micro_batch")
    held = [plan.micro_batches(step=0, rank=rank) for rank in range(shards)]
    return [samples.tolist() for together in zip(*held, strict=True) for samples in together]


# AReaL: in the place of areal.utils.seqpack.ffd_allocate, for the samples of one rank
def allocate(values: list[int], capacity: int, min_groups: int, n_groups_divisor: int = 1) -> list[list[int]]:
    limits: Any = {"max_tokens": capacity, "cost_model": cost}
    plan = wlb.pack(values, num_micro_batches=None, multiple_of=n_groups_divisor, **limits)
    if len(plan) < min_groups:
        plan = wlb.pack(values, num_micro_batches=-(-min_groups // n_groups_divisor) * n_groups_divisor, **limits)
    return [micro_batch.document_ids.tolist() for micro_batch in plan]


cost: Any = wlb.ModelConfig.preset("llama2-7b").cost_model()
