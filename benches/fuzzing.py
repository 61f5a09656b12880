"""Random plans of every kind, and what is wrong with them; `compare.py` counts it."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import numpy as np
from rich.progress import Progress

import wlb
from benches.common import Lengths
from tests.oracles.dynamic_cp import violations

FUZZED_AT_ONCE = 3_000


def fuzzed(plans: int, progress: Progress) -> tuple[int, list[str]]:
    """Random plans of every kind, on every core; how many, and what is wrong with them."""
    task = progress.add_task("fuzz", total=plans)
    found: list[str] = []
    done = 0
    first = time.time_ns()
    with multiprocessing.get_context("fork").Pool() as pool:
        for made, wrong in pool.imap_unordered(fuzzed_from, range(first, first + -(-plans // FUZZED_AT_ONCE))):
            done, found = done + made, found + wrong
            progress.update(task, completed=done)
    return done, found


def fuzzed_from(seed: int) -> tuple[int, list[str]]:
    """Some of them, the same ones for the same seed."""
    rng = np.random.default_rng(seed)
    found: list[str] = []
    done = 0
    while done < FUZZED_AT_ONCE:
        cost = wlb.CostModel(attention=float(rng.random()), linear=float(rng.random() * 10.0 ** rng.integers(0, 5)))
        for kind in (one_packing, one_dynamic_plan, one_stream):
            plans_made, wrong = kind(rng, cost)
            found += [f"seed {seed}, after {done} plans, {kind.__name__}: {what}" for what in wrong]
            done += plans_made
    return done, found


def random_lengths(rng: np.random.Generator, longest: int) -> Lengths:
    lengths = np.exp(rng.uniform(0, np.log(longest + 1), rng.integers(1, 60))).astype(np.int64)
    return lengths.clip(1, longest)


def one_packing(rng: np.random.Generator, cost: wlb.CostModel) -> tuple[int, list[str]]:
    lengths = random_lengths(rng, 300)
    method: Any = rng.choice(["var_length", "refined", "fixed_length", "original"])
    room = max(int(lengths.max()), int(rng.uniform(0.5, 3) * lengths.mean() * 5))
    plan = wlb.pack(
        lengths,
        num_micro_batches=int(rng.integers(1, 12)),
        max_tokens=room,
        cost_model=cost,
        method=method,
        leftover="return",
    )
    return 1, lost([plan], dict(enumerate(lengths.tolist())), plan.leftover, plan.leftover_lengths, room)


def one_stream(rng: np.random.Generator, cost: wlb.CostModel) -> tuple[int, list[str]]:
    n, longest = int(rng.integers(1, 9)), 200
    adaptive = bool(rng.integers(2))
    packer = wlb.Packer(
        num_micro_batches=n,
        max_tokens=int(rng.integers(longest, 3 * longest)),
        cost_model=cost,
        max_document_tokens=longest,
        method="refined" if rng.integers(2) else "var_length",
        max_delay=int(rng.integers(1, 9)) if rng.integers(2) else None,
        **({"release": "adaptive"} if adaptive else {"outlier_thresholds": (60, 120)[: rng.integers(0, 3)]}),
    )
    arrived: dict[int, int] = {}
    plans = []
    for _ in range(4):
        lengths = random_lengths(rng, longest)
        ids = np.arange(len(arrived), len(arrived) + len(lengths))
        arrived |= dict(zip(ids.tolist(), lengths.tolist(), strict=True))
        plans.append(packer.push(lengths, ids=ids))
    plans += packer.flush()
    none = np.zeros(0, np.int64)
    return len(plans), lost(plans, arrived, none, none, packer.max_tokens)


def lost(plans: list[wlb.Packing], arrived: dict[int, int], left: Any, left_lengths: Any, room: int) -> list[str]:
    """Every token of every document once, and no micro-batch too long."""
    tokens = dict.fromkeys(arrived, 0)
    wrong = []
    for plan in plans:
        for batch in plan.micro_batches:
            if batch.lengths.sum() > room:
                wrong.append("too many tokens in a micro-batch")
            for document, length in zip(batch.document_ids.tolist(), batch.lengths.tolist(), strict=True):
                tokens[document] += length
    for document, length in zip(left.tolist(), left_lengths.tolist(), strict=True):
        tokens[document] += length
    return wrong if tokens == arrived else [*wrong, "a document is lost or doubled"]


def one_dynamic_plan(rng: np.random.Generator, cost: wlb.CostModel) -> tuple[int, list[str]]:
    world, tokens = int(rng.integers(1, 25)), int(rng.integers(5, 200))
    lengths = random_lengths(rng, tokens * 2 ** (world.bit_length() - 1))
    plan = wlb.plan_dynamic_cp(
        lengths,
        world_size=world,
        num_stages=int(rng.integers(1, 6)),
        num_virtual_stages=int(rng.integers(1, 3)),
        min_micro_batches=int(rng.integers(1, 20)),
        max_tokens_per_rank=tokens,
        cost_model=cost,
        p2p_seconds=float(rng.random() * 1e3 * rng.integers(2)),
        exchange=wlb.Exchange(
            seconds_per_token=float(rng.random() * rng.integers(2)),
            seconds_per_exchange=float(rng.random() * 1e3 * rng.integers(2)),
        ),
        micro_batch_seconds=float(rng.random() * 1e4 * rng.integers(2)),
    )
    wrong = violations(plan, lengths.tolist())
    if plan.lower_bound > plan.seconds * (1 + 1e-9):
        wrong.append("the bound is above the plan")
    return 1, wrong
