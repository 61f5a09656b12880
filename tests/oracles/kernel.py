"""Naive latency of attention segments: the oracle of `wlb.KernelModel` and of choices made by it; example profiles."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oracles.sharding import owners, segments

Table = Sequence[Sequence[float | None]]


def profile(
    *,
    query_lengths: Sequence[int] = (16, 128, 1024),
    key_lengths: Sequence[int] = (128, 1024, 8192),
    forward: Table | None = None,
    backward: Table | None = None,
    tile: int = 128,
    causal: bool = True,
    linear: bool = True,
) -> dict[str, Any]:
    """A profile as `wlb profile` writes it, of a GPU that does not exist.

    `forward` and `backward` are seconds of a segment; by default an overhead and a rate per pair.
    """

    def seconds(overhead: float, per_pair: float) -> list[list[float | None]]:
        return [
            [
                overhead + per_pair * padded_pairs(queries, keys, tile=tile, causal=causal) if queries <= keys else None
                for keys in key_lengths
            ]
            for queries in query_lengths
        ]

    def spread(table: Table) -> dict[str, Any]:
        def scaled(factor: float) -> list[list[float | None]]:
            return [[None if entry is None else entry * factor for entry in row] for row in table]

        return {
            "launch_seconds": 5e-6,
            "median_seconds": scaled(1.0),
            "p10_seconds": scaled(0.98),
            "p90_seconds": scaled(1.05),
            "segments_per_call": [[None if entry is None else 64 for entry in row] for row in table],
        }

    tokens = [1024, 4096, 16384]
    layer = {
        "tokens": tokens,
        "layer": {
            "hidden_size": 4096,
            "ffn_hidden_size": 11008,
            "num_heads": 32,
            "num_kv_heads": 8,
            "head_dim": 128,
            "gated_ffn": True,
            "tp": 1,
        },
        "forward": {"median_seconds": [1e-5 + 8e-7 * count for count in tokens]},
        "backward": {"median_seconds": [1e-5 + 16e-7 * count for count in tokens]},
    }
    return {
        "format": "wlb.profile",
        "version": 1,
        "gpu": "Test GPU",
        "kernel": "test kernel",
        "dtype": "bfloat16",
        "versions": {"torch": "0.0"},
        "clocks": {"sm_mhz": [1000, 1000]},
        "causal": causal,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "tile": tile,
        "query_lengths": list(query_lengths),
        "key_lengths": list(key_lengths),
        "forward": spread(forward or seconds(2e-6, 3e-11)),
        "backward": spread(backward or seconds(4e-6, 8e-11)),
        "held_out": [{"query_length": 300, "key_length": 3000, "forward_seconds": 3e-5, "backward_seconds": 7e-5}],
    } | ({"linear": layer} if linear else {})


def padded_pairs(queries: int, keys: int, *, tile: int, causal: bool) -> int:
    """Pairs of a segment whose queries fill its last tile, from the same first query on."""
    padded = math.ceil(queries / tile) * tile
    return sum(keys - queries + i + 1 if causal else keys for i in range(padded))


@dataclass(frozen=True)
class NaiveKernel:
    """A profile's kernel, read off its tables one segment at a time."""

    profile: dict[str, Any]

    def segment_seconds(self, queries: int, keys: int, passes: str = "forward_backward") -> float:
        """Latency of one segment."""
        return sum(self._pass_seconds(queries, keys, self.profile[name]) for name in _parts(passes))

    def rank_seconds(
        self, lengths: Sequence[int], owner: Sequence[int], *, rank: int, passes: str = "forward_backward"
    ) -> float:
        """Latency of a rank that holds the tokens that `owner` says."""
        runs = segments(lengths, owner, rank=rank, causal=self.profile["causal"])
        launch = sum(self.profile[name]["launch_seconds"] for name in _parts(passes)) if runs else 0.0
        return launch + sum(
            self.segment_seconds(run.q_end - run.q_start, run.k_end - run.k_start, passes) for run in runs
        )

    def slowest(self, lengths: Sequence[int], *, cp_size: int, **variant: Any) -> float:
        """Latency of the slowest rank of a micro-batch cut as `wlb.shard` would with these arguments."""
        owner = owners(lengths, cp_size=cp_size, **variant)
        return max(self.rank_seconds(lengths, owner, rank=rank) for rank in range(cp_size))

    def _pass_seconds(self, queries: int, keys: int, table: dict[str, Any]) -> float:
        tile, causal = self.profile["tile"], self.profile["causal"]
        rows, columns = self.profile["query_lengths"], self.profile["key_lengths"]

        def rate(row: int, column: int) -> float:
            while table["median_seconds"][row][column] is None:
                column += 1
            measured: float = table["median_seconds"][row][column]
            return measured / padded_pairs(rows[row], columns[column], tile=tile, causal=causal)

        total = sum(
            row_weight * column_weight * rate(row, column)
            for row, row_weight in _neighbours(queries, rows)
            for column, column_weight in _neighbours(keys, columns)
        )
        return total * padded_pairs(queries, keys, tile=tile, causal=causal)


def _parts(passes: str) -> list[str]:
    return ["forward", "backward"] if passes == "forward_backward" else [passes]


def _neighbours(length: int, grid: Sequence[int]) -> list[tuple[int, float]]:
    """Grid points around a length and their weights, linear in its logarithm; the nearest one beyond the ends."""
    if length <= grid[0]:
        return [(0, 1.0)]
    for i in range(1, len(grid)):
        if length < grid[i]:
            above = math.log2(length / grid[i - 1]) / math.log2(grid[i] / grid[i - 1])
            return [(i - 1, 1.0 - above), (i, above)]
    return [(len(grid) - 1, 1.0)]
