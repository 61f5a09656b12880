"""An example of a profile, as `wlb profile` writes it."""

from typing import Any

QUERY_LENGTHS, KEY_LENGTHS, TILE = (16, 128, 1024), (128, 1024, 8192), 128


def profile(*, linear: bool = True) -> dict[str, Any]:
    """Of a GPU that does not exist: an overhead for each segment, and a rate per pair of whole tiles."""

    def table(overhead: float, per_pair: float) -> dict[str, Any]:
        def median(queries: int, keys: int) -> float | None:
            pairs = sum(TILE * min(keys, keys - queries + end) for end in range(TILE, queries + TILE, TILE))
            return overhead + per_pair * pairs if queries <= keys else None

        medians = [[median(queries, keys) for keys in KEY_LENGTHS] for queries in QUERY_LENGTHS]

        def scaled(factor: float) -> list[list[float | None]]:
            return [[None if entry is None else entry * factor for entry in row] for row in medians]

        return {
            "tile": TILE,
            "launch_seconds": 5e-6,
            "median_seconds": medians,
            "p10_seconds": scaled(0.98),
            "p90_seconds": scaled(1.05),
            "segments_per_call": [[None if entry is None else 64 for entry in row] for row in medians],
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
        "causal": True,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "query_lengths": list(QUERY_LENGTHS),
        "key_lengths": list(KEY_LENGTHS),
        "forward": table(2e-6, 3e-11),
        "backward": table(4e-6, 8e-11),
        "held_out": [{"query_length": 300, "key_length": 3000, "forward_seconds": 3e-5, "backward_seconds": 7e-5}],
    } | ({"linear": layer} if linear else {})
