"""Training inside Megatron-Core on wlb's plans: losses as of one document at a time, on every layout of ranks."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from processes import run as run_processes

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron_run import Result, Run, alone, reference, train

Layout = tuple[int, Run]


@functools.cache
def trained(name: str) -> list[Result]:
    ranks, run = LAYOUTS[name]
    return run_processes(ranks, train, run)


@functools.cache
def plain(pieces: bytes, sizes: tuple[int, ...]) -> list[float]:
    """Losses of a plain loop; many layouts train the same documents."""
    rows = np.frombuffer(pieces, np.int64).reshape(-1, 3)
    steps = [alone(part) for part in np.split(rows, np.cumsum(sizes)[:-1])]
    return run_processes(1, reference, steps)[0]


def pieces_of(results: list[Result]) -> list[Any]:
    """Of each step, what all ranks that read have, in a fixed order."""
    reading = [result.pieces for result in results if result.pieces]
    steps = [np.concatenate(parts) for parts in zip(*reading, strict=True)]
    return [rows[np.lexsort(rows.T[::-1])] for rows in steps]


LAYOUTS: dict[str, Layout] = {
    "one": (1, Run()),
    "dp": (2, Run()),
    "tp": (2, Run(tp=2)),
    "sequence parallel": (2, Run(tp=2, sequence_parallel=True)),
    "cp": (2, Run(cp=2)),
    "pp": (2, Run(pp=2)),
    "interleaved": (2, Run(pp=2, chunks=2, config={"overlap_p2p_comm": True})),
    "dp, pp": (4, Run(pp=2)),
    "tp, pp": (4, Run(tp=2, pp=2)),
    "dynamic, 2": (2, Run(dynamic_cp=True)),
    "dynamic, 4": (4, Run(dynamic_cp=True, options={"max_tokens_per_rank": 32})),
    "dynamic, pp": (4, Run(dynamic_cp=True, pp=2, options={"max_tokens_per_rank": 32})),
}
QUICK = {"dp, pp"}
PARAMETERS = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]


@pytest.mark.parametrize("name", PARAMETERS)
def test_losses_are_those_of_one_document_at_a_time(name: str) -> None:
    results = trained(name)
    pieces = pieces_of(results)
    rows = np.concatenate(pieces)
    expected = plain(rows.tobytes(), tuple(map(len, pieces)))
    for result in results:
        if result.losses[0] is not None:
            np.testing.assert_allclose(result.losses, expected, atol=1e-5, rtol=0)
    assert expected[-1] < expected[0] - 0.05  # something is learnt, so that wrong gradients would show
    assert sum(result.losses[0] is not None for result in results) == len(results) // LAYOUTS[name][1].pp
