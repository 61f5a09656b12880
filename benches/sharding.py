"""Ways to shard beside each other: keys to fetch, segments, pairs, predicted latency, and time of planning.

    python -m benches.sharding --lengths lengths.npy      # int array of document lengths; without: synthetic ones
    python -m benches.sharding --profile my_gpu.json      # a measured kernel instead of the analytic H100

`best hybrid` of the first table is the threshold under which the busiest rank fetches the fewest keys, all distinct
lengths tried, with pairs as even as `auto` keeps them. A full gather brings a rank the keys of all others.

Micro-batches of `--tokens` tokens are packed as a trainer would, 16 a global batch. Latency is that of attention on
the slowest rank, forward and backward, summed over micro-batches: *predicted*, by the model that also makes the choice.
Times of the choice are the least of many bursts, beside `shard(per_document)` in the same run.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

import wlb
from benches.common import (
    COST,
    Row,
    machine,
    options,
    parse,
    rounded,
    samples,
    sources,
    synthetic,
    tables,
    write_record,
)

CP_SIZES = (2, 4, 8, 16)
MICRO_BATCHES = 16
EVEN = 1.01  # pairs of the busiest rank over the mean: what `auto` keeps to


def micro_batches(lengths: NDArray[np.int64], tokens: int, limit: int) -> list[NDArray[np.int32]]:
    """The documents of each micro-batch, longest allowed `tokens`."""
    packer = wlb.Packer(
        num_micro_batches=MICRO_BATCHES,
        max_tokens=tokens * 3 // 2,
        max_document_tokens=tokens,
        oversize="split",
        cost_model=COST,
        release="fifo",
    )
    offsets = wlb.batch_offsets(lengths, tokens_per_batch=MICRO_BATCHES * tokens)
    found: list[NDArray[np.int32]] = []
    for start, end in itertools.pairwise(offsets):
        found += [batch.lengths for batch in packer.push(lengths[start:end]).micro_batches if len(batch)]
        if len(found) >= limit:
            break
    return found[:limit]


def measure(batches: list[NDArray[np.int32]], cp_sizes: Sequence[int] = CP_SIZES) -> list[Row]:
    """What the busiest rank fetches, segments, pairs over the mean, and microseconds: means over micro-batches.

    Of the best hybrid those that all thresholds take together.
    """
    rows: list[Row] = []
    for cp_size, (name, way) in itertools.product(cp_sizes, WAYS.items()):
        found = [fetched(way(lengths, cp_size)) for lengths in batches]
        busiest, mean, segments, pairs = np.mean(found, axis=0).tolist()
        us = [min(samples(functools.partial(way, lengths, cp_size), 0.02)) for lengths in batches]
        row = {"cp": cp_size, "way": name, "busiest": busiest, "mean": mean, "segments": segments, "pairs": pairs}
        rows.append(row | {"worst_pairs": max(one[3] for one in found), "us": float(np.mean(us)), "worst_us": max(us)})
    return rows


def best_hybrid(lengths: NDArray[np.int32], cp_size: int) -> wlb.Shard:
    """The threshold of fewest keys for the busiest rank, all distinct lengths tried, with pairs as even as `auto`'s."""
    thresholds = (*np.unique(lengths), lengths.max() + 1)
    shards = (wlb.shard(lengths, cp_size=cp_size, strategy="hybrid", hybrid_threshold=int(at)) for at in thresholds)

    def rank(shard: wlb.Shard) -> tuple[bool, int]:
        pairs = shard.pairs_per_rank
        return bool(pairs.max() > EVEN * pairs.mean()), int(shard.keys_moved.max())

    return min(shards, key=rank)


WAYS: dict[str, Callable[[NDArray[np.int32], int], wlb.Shard]] = {
    "auto": lambda lengths, cp_size: wlb.shard(lengths, cp_size=cp_size),
    "per_document": lambda lengths, cp_size: wlb.shard(lengths, cp_size=cp_size, strategy="per_document"),
    "best hybrid": best_hybrid,
}


def fetched(shard: wlb.Shard) -> tuple[float, float, int, float]:
    """Keys of the busiest and of a mean rank, of a full gather; segments; the most pairs over the mean."""
    full = shard.num_tokens * (1 - 1 / shard.cp_size)
    segments = sum(shard.rank(rank).num_segments for rank in range(shard.cp_size))
    moved, pairs = shard.keys_moved, shard.pairs_per_rank
    return float(moved.max() / full), float(moved.mean() / full), segments, float(pairs.max() / pairs.mean())


def fetches(rows: list[Row], micro_batches: int) -> Table:
    table = Table("CP", "way", "keys of a full gather", "mean rank", "segments", "pairs", "worst pairs", "us")
    table.title = f"keys that the busiest rank fetches; {micro_batches} micro-batches"
    for row in rows:
        keys = (f"{row['busiest']:.3f}", f"{row['mean']:.3f}", f"{row['segments']:.0f}")
        told = (f"{row['pairs']:.4f}", f"{row['worst_pairs']:.4f}", f"{row['us']:.1f}")
        table.add_row(str(row["cp"]), row["way"], *keys, *told)
    return table


def gains(batches: list[NDArray[np.int32]], model: wlb.KernelModel) -> Table:
    """Shares of the strategies chosen, and the latency of all micro-batches relative to adaptive."""
    names = ("per_sequence", "per_document", "hybrid")
    table = Table("CP", *names, *(f"over {name}" for name in (*names, "auto")))
    documents = np.median([len(lengths) for lengths in batches])
    table.title = (
        f"chosen, and gain of adaptive; {len(batches)} micro-batches, {documents:.0f} documents; {model.source}"
    )
    for cp_size in CP_SIZES:
        chosen: Counter[str] = Counter()
        seconds: Counter[str] = Counter()
        for lengths in batches:
            shards = {
                "auto": wlb.shard(lengths, cp_size=cp_size),
                "per_sequence": wlb.shard(lengths, cp_size=cp_size, strategy="per_sequence"),
                "per_document": wlb.shard(lengths, cp_size=cp_size, strategy="per_document"),
                "hybrid": wlb.shard(lengths, cp_size=cp_size, strategy="hybrid", kernel_model=model),
                "adaptive": wlb.shard(lengths, cp_size=cp_size, strategy="adaptive", kernel_model=model),
            }
            chosen[shards["adaptive"].strategy] += 1
            for name, shard in shards.items():
                seconds[name] += model.rank_seconds(shard).max()
        shares = [f"{chosen[name] / len(batches):.1%}" for name in names]
        speedups = [f"{seconds[name] / seconds['adaptive']:.3f}x" for name in (*names, "auto")]
        table.add_row(str(cp_size), *shares, *speedups)
    return table


def times(lengths: NDArray[np.int64], model: wlb.KernelModel) -> list[float]:
    """Microseconds of auto, of a shard per document, of the best hybrid, of adaptive, and of sorting the lengths."""
    work = (
        lambda: wlb.shard(lengths, cp_size=8),
        lambda: wlb.shard(lengths, cp_size=8, strategy="per_document"),
        lambda: wlb.shard(lengths, cp_size=8, strategy="hybrid", kernel_model=model),
        lambda: wlb.shard(lengths, cp_size=8, strategy="adaptive", kernel_model=model),
        lambda: np.sort(lengths),
    )
    return [min(samples(call, 1.0)) for call in work]


def main() -> None:
    parser = options(__doc__, lengths=True, record="sharding.json")
    parser.add_argument("--profile", help="path or name of a measured profile")
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=320)
    arguments = parse(parser)
    if arguments.profile:
        model = wlb.KernelModel.from_profile(arguments.profile)
    else:
        model = wlb.KernelModel.analytic("h100", num_heads=32, head_dim=128)
    console = tables(120)
    record: Row = {"machine": machine(), "tokens": arguments.tokens, "keys": {}, "microseconds": {}}
    for name, lengths in sources(arguments.lengths, documents=200_000).items():
        console.print(f"\n[bold]{name}[/bold], {arguments.tokens} tokens a micro-batch")
        batches = micro_batches(lengths, arguments.tokens, arguments.micro_batches)
        record["keys"][name] = rows = measure(batches)
        console.print(fetches(rows, len(batches)))
        console.print(gains(batches, model))
    table = Table("documents", "auto", "per_document", "best hybrid", "adaptive", "numpy.sort")
    table.title = "microseconds a call from Python, the shard included; CP 8"
    for documents in (10, 30, 64, 200):
        record["microseconds"][str(documents)] = values = times(synthetic(documents), model)
        table.add_row(str(documents), *(f"{value:.1f}" for value in values))
    console.print(table)
    write_record(arguments.record, rounded(record))


if __name__ == "__main__":
    main()
