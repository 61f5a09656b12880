"""Writes the golden files: inputs and the plans that the naive oracles make of them.

    python tests/golden/generate.py

The oracles are slow and obvious; the files let the Rust tests use them too. Floats are written so that they
read back bit for bit. Run it again only when the specification changes.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from oracles import packing, sharding
from oracles.cost import AnalyticCost
from oracles.packer import NaivePacker, Waiting

HERE = Path(__file__).parent
COSTS = [
    AnalyticCost(1.0, 100.0),
    AnalyticCost(0.1, 7.3),
    AnalyticCost(0.3, 0.0, causal=False),
    AnalyticCost(0.0, 0.7),
]
SHARDS: list[dict[str, Any]] = [
    {"strategy": "per_sequence"},
    {"strategy": "per_document"},
    {"strategy": "per_document", "remainder": "token"},
    {"strategy": "hybrid", "hybrid_threshold": 24},
]
STREAMS: list[dict[str, Any]] = [
    {"num_micro_batches": 3, "max_tokens": 100},
    {"num_micro_batches": 3, "max_tokens": 100, "outlier_thresholds": [40], "max_delay": None},
    {"num_micro_batches": 4, "max_tokens": 80, "outlier_thresholds": [20, 50], "max_delay": 2},
    {
        "num_micro_batches": 2,
        "max_tokens": 64,
        "outlier_thresholds": [16, 32],
        "max_delay": 0,
        "max_document_tokens": 48,
        "oversize": "truncate",
    },
    {
        "num_micro_batches": 3,
        "max_tokens": 60,
        "outlier_thresholds": [25],
        "max_delay": 3,
        "max_document_tokens": 50,
        "oversize": "split",
    },
    {"num_micro_batches": 2, "max_tokens": 48, "outlier_thresholds": [24], "max_delay": 1, "method": "refined"},
]


def pack_cases(rng: random.Random) -> list[dict[str, Any]]:
    cases = []
    for cost in COSTS:
        for num_documents, n, max_tokens in [(0, 2, 10), (1, 3, 90), (12, 3, 90), (40, 5, 120), (40, 4, 200)]:
            lengths = long_tailed(rng, num_documents, 90)
            sizes = {"num_micro_batches": n, "max_tokens": max_tokens}
            plans = {
                "original": packing.original(lengths, **sizes, cost=cost),
                "fixed_length": packing.fixed_length(lengths, **sizes, cost=cost),
                "var_length": packing.var_length(lengths, **sizes, cost=cost),
                "refined": packing.refined(lengths, **sizes, cost=cost),
            }
            for method, plan in plans.items():
                case = {"lengths": lengths, **sizes, "method": method, "window": 1}
                cases.append(case | {"cost": vars(cost), "plan": plan.plain()})
        lengths = long_tailed(rng, 24, 150)
        sizes = {"num_micro_batches": 2, "max_tokens": 100}
        plan = packing.fixed_length(lengths, **sizes, cost=cost, window=4)
        case = {"lengths": lengths, **sizes, "method": "fixed_length", "window": 4}
        cases.append(case | {"cost": vars(cost), "plan": plan.plain()})
    return cases


def packer_cases(rng: random.Random) -> list[dict[str, Any]]:
    """Streams that stop in the middle and go on with another number of micro-batches."""
    cases = []
    for settings, cost in zip(STREAMS, [*COSTS, COSTS[1], COSTS[0]], strict=True):
        naive = NaivePacker(cost=cost, **settings)
        oversize = settings.get("oversize", "error") != "error"
        longest = 2 * naive.max_tokens if oversize else naive.limit

        def step(naive: NaivePacker = naive, longest: int = longest, own_ids: bool = False) -> dict[str, Any]:
            lengths = long_tailed(rng, rng.randint(0, 10), longest)
            ids = rng.sample(range(naive.next_id + 50), len(lengths)) if own_ids else None
            waiting = {entry.piece.id for entry in naive.waiting}
            ids = [i if i not in waiting else i + 1000 * naive.iteration for i in ids] if ids else None
            return {"lengths": lengths, "ids": ids, "plan": naive.push(lengths, ids).plain()}

        before = [step(own_ids=number % 3 == 2) for number in range(5)]
        saved = {
            "iteration": naive.iteration,
            "next_id": naive.next_id,
            "carried": columns(naive.carried),
            "queues": [columns(queue) for queue in naive.queues],
        }
        naive.num_micro_batches += 1
        after = [step() for _ in range(4)]
        cases.append(
            {
                "settings": settings,
                "cost": vars(cost),
                "before": before,
                "saved": saved,
                "num_micro_batches_after": naive.num_micro_batches,
                "after": after,
                "flush": [plan.plain() for plan in naive.flush()],
            }
        )
    return cases


def shard_cases(rng: random.Random) -> list[dict[str, Any]]:
    cases = []
    for variant in SHARDS:
        for cp_size, num_documents, causal in [
            (1, 3, True),
            (2, 0, True),
            (2, 7, True),
            (3, 7, False),
            (4, 9, True),
        ]:
            lengths = long_tailed(rng, num_documents, 60)
            owner = sharding.owners(lengths, cp_size=cp_size, **variant)
            ranks = [sharding.plain_rank(lengths, owner, rank=rank, causal=causal) for rank in range(cp_size)]
            case = {"lengths": lengths, "cp_size": cp_size, "causal": causal, **variant}
            cases.append(case | {"ranks": ranks})
    return cases


def columns(waiting: list[Waiting]) -> dict[str, list[int]]:
    return {
        "ids": [entry.piece.id for entry in waiting],
        "starts": [entry.piece.start for entry in waiting],
        "lengths": [entry.piece.length for entry in waiting],
        "arrived": [entry.arrived for entry in waiting],
    }


def long_tailed(rng: random.Random, number: int, longest: int) -> list[int]:
    """Mostly short, now and then a long one, some of them equal."""
    return [rng.choice([rng.randint(1, longest // 4), rng.randint(1, longest), longest // 3]) for _ in range(number)]


def golden() -> dict[str, list[dict[str, Any]]]:
    """The content of each golden file."""
    return {
        "pack": pack_cases(random.Random(1)),
        "packer": packer_cases(random.Random(2)),
        "shard": shard_cases(random.Random(3)),
    }


if __name__ == "__main__":
    for name, cases in golden().items():
        lines = ",\n".join(json.dumps(case) for case in cases)
        (HERE / f"{name}.json").write_text(f"[\n{lines}\n]\n")
