"""One of several JAX processes that train a step of the program of the page: `python -m tests.trainers.jax_processes`.

Takes its rank and a port. Prints the global loss and gradient, and those of this process alone, as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import grain
import jax
import numpy as np

from tests.trainers.page import block

RANKS = 2


def main(rank: int, port: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(f"127.0.0.1:{port}", RANKS, rank)
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 200, 60)
    rows = [rng.integers(0, 8, length) + 8 * (number % 8) for number, length in enumerate(lengths)]
    names: dict[str, Any] = {"documents": grain.MapDataset.source(rows), "lengths": lengths}
    exec(block("import grain, jax"), names)
    exec(block("from jax.sharding"), names)
    table = 0.1 * jax.random.normal(jax.random.key(1), (64, 16))
    batches = [batch for batch, _ in zip(names["ds"], range(4), strict=False)]
    found: list[Any] = []
    for batch in batches:
        whole = names["shared"](batch)
        assert whole["input_ids"].shape == (RANKS, batch["input_ids"].shape[1])
        value, gradient = names["step"](table, whole)
        own_value, own = names["step"](table, batch)
        found.append([float(value), np.asarray(gradient).tolist(), float(own_value), np.asarray(own).tolist()])
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
