"""A fixed set of plans, as digests: every process that computes them must get the same.

Run as a program it prints them as JSON.
"""

import json
from typing import Any

import wlb
from wlb import _core

METHODS: list[Any] = list(_core.METHODS)
SHARDS: list[dict[str, Any]] = [
    {"strategy": "per_sequence"},
    {"strategy": "contiguous"},
    {"strategy": "per_document"},
    {"strategy": "hybrid", "hybrid_threshold": 2000},
]
NUM_BATCHES = 8


def batch(number: int) -> list[int]:
    """1500 long-tailed lengths: enough for the GIL to be released, and the same in every process."""
    return [1 + (i * 7919 + number * 104_729) % 4000 * (1 + 10 * (i % 97 == number)) for i in range(1500)]


def cost_model() -> wlb.CostModel:
    return wlb.CostModel(attention=0.1, linear=700.3)


def packer() -> wlb.Packer:
    return wlb.Packer(
        num_micro_batches=16,
        max_tokens=200_000,
        cost_model=cost_model(),
        outlier_thresholds=(8_000, 25_000),
        max_delay=4,
    )


def pack_digests(lengths: list[int]) -> list[str]:
    sizes: dict[str, Any] = {"num_micro_batches": 16, "max_tokens": 200_000, "cost_model": cost_model()}
    return [wlb.pack(lengths, method=method, leftover="return", **sizes).digest() for method in METHODS]


def shard_digests(lengths: list[int]) -> list[str]:
    return [wlb.shard(lengths, cp_size=8, **variant).digest() for variant in SHARDS]


def stream_digests(resume_every_step: bool = False) -> list[str]:
    stream = packer()
    found = []
    for number in range(NUM_BATCHES):
        found.append(stream.push(batch(number)).digest())
        if resume_every_step:
            stream = wlb.Packer.from_state_dict(json.loads(json.dumps(stream.state_dict())))
    found += [packing.digest() for packing in stream.flush()]
    return [*found, stream.fingerprint, stream.state_dict()["digest"]]


def digests() -> list[str]:
    batches = [batch(number) for number in range(2)]
    return [
        *(digest for lengths in batches for digest in pack_digests(lengths) + shard_digests(lengths)),
        *stream_digests(),
        str(hash(cost_model())),
    ]


if __name__ == "__main__":
    print(json.dumps(digests()))
