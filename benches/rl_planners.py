"""Rounds of samples for reinforcement learning, and who plans them: wlb, its adapters, the functions of trainers.

A plan is lists of samples by optimizer step, rank and micro-batch. The trainers' own functions are called; what a
trainer does around them, such as cutting a round into steps, is written here after its code.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import wlb
from benches.common import Lengths
from benches.peers import loaded_file
from wlb.integrations import slices

COST = wlb.CostModel(attention=2.0, linear=24575.0)
Plan = list[list[list[list[int]]]]  # by step, rank and micro-batch: samples


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round of samples.

    Attributes:
        lengths: tokens of each sample.
        prompts: prompt of each sample.
        steps: optimizer steps.
        cap: most tokens of a micro-batch.
        cost: what samples cost in the model that is trained.
    """

    lengths: Lengths
    prompts: Lengths
    steps: int
    cap: int
    cost: wlb.CostModel = COST


def rounds() -> dict[str, Round]:
    """The three rounds."""
    rng = np.random.default_rng(1)
    asked = rng.lognormal(np.log(1500), 0.6, 64).clip(1, 16384).astype(np.int64).repeat(8)
    answers = rng.lognormal(np.log(2000), 1.0, 512).clip(16, 16384).astype(np.int64)
    a = Round(lengths=asked + answers, prompts=np.arange(64).repeat(8), steps=1, cap=32768)
    rng = np.random.default_rng(2)
    asked = rng.integers(200, 2001, 512).repeat(16)
    answers = rng.lognormal(np.log(6000), 0.9, 8192).clip(1, 30720).astype(np.int64)
    b = Round(lengths=asked + answers, prompts=np.arange(512).repeat(16), steps=4, cap=40960)
    rng = np.random.default_rng(3)
    prompts = np.arange(256).repeat(rng.integers(1, 21, 256))
    lengths = rng.lognormal(np.log(4000), 1.3, prompts.size).clip(1, 32768).astype(np.int64)
    return {"A": a, "B": b, "C": Round(lengths=lengths, prompts=prompts, steps=4, cap=40960)}


# --- planners --------------------------------------------------------------------------------------------------------


def whole(held: Round, ranks: int, **more: Any) -> Plan:
    """`wlb.rl.plan`."""
    plan = wlb.rl.plan(
        held.lengths,
        dp_size=ranks,
        max_tokens=held.cap,
        cost_model=held.cost,
        groups=held.prompts,
        num_steps=held.steps,
        **more,
    )
    every_rank = range(ranks)
    return [
        [[part.tolist() for part in plan.micro_batches(step, rank)] for rank in every_rank] for step in range(len(plan))
    ]


def padded(held: Round, ranks: int) -> tuple[Round, int]:
    """The round with verl's padding, short samples of their own, and its samples in a step."""
    size = -(-held.lengths.size // (held.steps * ranks)) * ranks
    pads = size * held.steps - held.lengths.size
    lengths = np.append(held.lengths, np.full(pads, 128))
    prompts = np.append(held.prompts, held.prompts.max() + 1 + np.arange(pads))
    return Round(lengths=lengths, prompts=prompts, steps=held.steps, cap=held.cap), size


def through_adapter(held: Round, ranks: int, *, together: Any) -> Plan:
    """As wlb's adapters for verl ("step") and TransferQueue ("rank"), each rank splitting its steps by our function."""
    verl = importlib.import_module("wlb.integrations.verl")
    parts, _ = slices.planned(
        held.lengths,
        COST.cost(held.lengths),
        held.prompts.tolist(),
        dp_size=ranks,
        samples_per_step=held.lengths.size // held.steps,
        together=together,
    )
    plan: Plan = []
    for step in range(held.steps):
        held_by = [parts[rank][step] for rank in range(ranks)]
        work = [(held.lengths[of], COST.cost(held.lengths[of])) for of in held_by]
        count = max(len(verl._packed(tokens, costs, held.cap, None, 1)) for tokens, costs in work)
        while True:
            packed = [verl._packed(tokens, costs, held.cap, count, 1) for tokens, costs in work]
            if all(one is not None for one in packed):
                break
            count += 1
        plan.append(
            [
                [of[one[int(at)].document_ids].tolist() for at in one.deal(1)[0]]
                for of, one in zip(held_by, packed, strict=True)
            ]
        )
    return plan


def of_verl(held: Round, ranks: int, *, stepwise: bool) -> Plan:
    """As verl 0.9.1: the round balanced and then cut, as its trainer does, or each step balanced (`keep_minibatch`)."""
    verl = importlib.import_module("verl.utils.seqlen_balancing")
    work = (24576 * held.lengths + held.lengths**2).tolist()
    size = held.lengths.size // held.steps
    if stepwise:
        starts = range(0, held.lengths.size, size)
        cut = [verl.get_seqlen_balanced_partitions(work[at : at + size], ranks, equal_size=True) for at in starts]
        steps = [[[at + sample for sample in part] for part in parts] for at, parts in zip(starts, cut, strict=True)]
    else:
        slots = [_ends(part, work) for part in verl.get_seqlen_balanced_partitions(work, ranks, equal_size=True)]
        each = size // ranks
        steps = [[slot[step * each : (step + 1) * each] for slot in slots] for step in range(held.steps)]
    return [_split(step, held, work, verl) for step in steps]


def _ends(part: list[int], work: list[int]) -> list[int]:
    rising = sorted(part, key=lambda sample: (work[sample], sample))
    return rising[::2] + rising[1::2][::-1]


def _split(ranks: list[list[int]], held: Round, work: list[int], verl: Any) -> list[list[list[int]]]:
    """Micro-batches as `rearrange_micro_batches` makes them: one more until every rank keeps to the cap."""
    count = max(-(-int(held.lengths[of].sum()) // held.cap) for of in ranks)
    while True:
        plan = []
        for of in ranks:
            parts = verl.get_seqlen_balanced_partitions([work[sample] for sample in of], count, equal_size=False)
            parts.sort(key=lambda part: (sum(work[of[at]] for at in part), part[0]), reverse=True)
            plan.append([[of[at] for at in part] for part in parts[::2][::-1] + parts[1::2]])
        if all(held.lengths[part].sum() <= held.cap for rank in plan for part in rank):
            return plan
        count += 1


def of_transferqueue(held: Round, ranks: int) -> Plan:
    """TransferQueue 0.1.11: whole prompts on ranks by tokens, step by step, then verl's micro-batches."""
    sampler = importlib.import_module("transfer_queue.sampler.seqlen_balanced_sampler")
    verl = importlib.import_module("verl.utils.seqlen_balancing")
    work, plan = (24576 * held.lengths + held.lengths**2).tolist(), []
    if len(np.unique(np.bincount(held.prompts))) > 1:
        raise ValueError("takes prompts of one size")
    n = held.lengths.size // len(np.unique(held.prompts))
    for groups in np.array_split(np.arange(held.lengths.size).reshape(-1, n), held.steps):
        tokens = held.lengths[groups].sum(axis=1).tolist()
        parts = sampler.get_seqlen_balanced_partitions(tokens, ranks, equal_size=True)
        plan.append(_split([groups[part].ravel().tolist() for part in parts], held, work, verl))
    return plan


# --- of trainers that no package has ---------------------------------------------------------------------------------

CHECKOUTS = {"slime": "WLB_SLIME", "NeMo-RL": "WLB_NEMO_RL", "AReaL": "WLB_AREAL"}
"""By trainer: the environment variable that names a checkout of it."""


def checkout(trainer: str) -> Path:
    """Where a trainer is; an ImportError if nobody says so."""
    folder = os.environ.get(CHECKOUTS[trainer], "")
    if not folder:
        raise ImportError(f"{CHECKOUTS[trainer]} names no checkout")
    return Path(folder)


def of_slime(held: Round, ranks: int) -> Plan:
    """slime, as its scripts set it: `--use-dynamic-batch-size --balance-data`, a rollout being a prompt's samples."""
    folder = str(checkout("slime"))
    if folder not in sys.path:
        sys.path.append(folder)
    schedule = importlib.import_module("slime.utils.dp_schedule").build_dp_schedule
    shape = {"hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 32, "kv_channels": 128}
    shape |= {"vocab_size": 32000, "ffn_hidden_size": 11008, "num_layers": 32}
    dynamic = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": held.cap, "balance_data": True}
    args = SimpleNamespace(**shape, **dynamic, balance_by_flops=False, num_experts=None)
    prompts = len(np.unique(held.prompts))
    partitions, places, counts, _ = schedule(
        args,
        {"dp_size": ranks, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1},
        held.lengths.tolist(),
        global_batch_size=prompts // held.steps,
        rollout_indices=held.prompts.tolist(),
    )
    ends = np.cumsum([0, *counts])
    return [
        [
            [[of[at] for at in part] for part in parts[ends[step] : ends[step + 1]]]
            for of, parts in zip(partitions, places, strict=True)
        ]
        for step in range(len(counts))
    ]


def of_nemo_rl(held: Round, ranks: int) -> Plan:
    """NeMo-RL: `shard_by_batch_size` with the packer of its GRPO configurations; bins are dealt to shards in turn."""
    file = checkout("NeMo-RL") / "nemo_rl" / "data" / "packing" / "algorithms.py"
    theirs = loaded_file(file, f"{file} is missing")
    algorithm = theirs.PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING
    packer = theirs.get_packer(algorithm, held.cap, min_bin_count=ranks, bin_count_multiple=ranks)
    size = held.lengths.size // held.steps
    plan: Plan = []
    for first in range(0, held.lengths.size, size):
        bins = packer.pack(held.lengths[first : first + size].tolist())
        plan.append([[[first + at for at in part] for part in bins[rank::ranks]] for rank in range(ranks)])
    return plan


def of_areal(held: Round, ranks: int, *, algorithm: str) -> Plan:
    """AReaL: `redistribute_trajectories` gives prompts to ranks, `ppo_update` cuts each rank's samples into steps.

    `allocate_balanced_mbs_synced` then makes each step's micro-batches, again until all ranks have equally many.
    """
    stand_ins = ["areal", "areal.utils", *(["numba"] if importlib.util.find_spec("numba") is None else [])]
    file = checkout("AReaL") / "areal" / "utils" / "seqpack.py"
    allocate = loaded_file(file, f"{file} is missing", stand_ins).get_allocate_fn(algorithm)
    unlimited = int(1e12)
    tokens = np.bincount(held.prompts, weights=held.lengths).astype(np.int64)
    of_rank = [
        np.flatnonzero(np.isin(held.prompts, of)) for of in allocate(tokens.tolist(), unlimited, min_groups=ranks)
    ]

    def split(samples: np.ndarray, capacity: int, least: int) -> list[np.ndarray]:
        groups = allocate(held.lengths[samples].tolist(), capacity, min_groups=least)
        return [samples[group] for group in sorted(sorted(group) for group in groups)]

    steps = [split(samples, unlimited, held.steps) for samples in of_rank]
    plan: Plan = []
    for step in range(held.steps):
        parts = [split(of[step], held.cap, 1) for of in steps]
        while len({len(each) for each in parts}) > 1:
            most = max(map(len, parts))
            parts = [split(of[step], held.cap, most) for of in steps]
        plan.append([[part.tolist() for part in each] for each in parts])
    return plan
