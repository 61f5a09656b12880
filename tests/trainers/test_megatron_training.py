"""Training inside Megatron-Core on wlb's plans: losses as of one document at a time, on every layout of ranks."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.torch.processes import RankFailed
from tests.torch.processes import run as run_processes

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core import utils as megatron_utils

from tests.trainers.megatron_run import Result, Run, alone, documents, hybrid, hybrid_pieces, reference, train
from tests.trainers.reads import reads

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
    "cp, rows of 48": (2, Run(cp=2, options={"multiple_of_tokens": 48, "max_tokens_per_rank": 96})),
    "pp": (2, Run(pp=2)),
    "interleaved": (2, Run(pp=2, chunks=2, config={"overlap_p2p_comm": True})),
    "dp, pp": (4, Run(pp=2)),
    "tp, pp": (4, Run(tp=2, pp=2)),
    "dynamic, 2": (2, Run(dynamic_cp=True)),
    "dynamic, 4": (4, Run(dynamic_cp=True, options={"max_tokens_per_rank": 32})),
    "dynamic, pp": (4, Run(dynamic_cp=True, pp=2, options={"max_tokens_per_rank": 32})),
    "five steps": (4, Run(dynamic_cp=True, pp=2, options={"max_tokens_per_rank": 32}, steps=5)),
}
QUICK = {"five steps"}
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
    assert expected[-1] < expected[0] - 0.01  # something is learnt, so that wrong gradients would show
    assert sum(result.losses[0] is not None for result in results) == len(results) // LAYOUTS[name][1].pp


def waits(rank: int, run: Run) -> dict[str, int]:
    with reads() as found:
        train(rank, run)
    return dict(found)


def test_no_step_waits_for_a_device() -> None:
    assert run_processes(2, waits, Run(pp=2, steps=3)) == [{}, {}]


def test_ranks_are_given_what_their_stage_takes() -> None:
    results = trained("five steps")  # ranks 0 and 1 are of the first stage
    assert [result.given for result in results] == [{"tokens"}, {"tokens"}, {"labels"}, {"labels"}]
    assert len(set(results[0].sizes)) > 1  # micro-batches differ from step to step,
    assert all(result.sizes == results[0].sizes for result in results)  # and ranks agree on how many


def test_padding_is_counted_and_no_token_is_lost() -> None:
    results = trained("five steps")
    lengths = np.array([len(row["input_ids"] if isinstance(row, dict) else row) for row in documents()])
    for step, rows in enumerate(pieces_of(results)):
        assert not (rows[:, 2] % 4).any()  # twice the largest group
        inside = rows[:, 2].sum() - np.minimum(lengths[rows[:, 0]] - rows[:, 1], rows[:, 2]).sum()
        counted = sum(result.padding[step] for result in results)
        assert counted >= inside  # and rows without documents
        assert counted - inside <= 2 * results[0].sizes[step] * 4
    assert not any(sum(result.padding) for result in results[2:])  # that do not read
    assert len({(number, start) for rows in pieces_of(results) for number, start, _ in rows.tolist()}) == sum(
        len(rows) for rows in pieces_of(results)
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["dp", "dp, pp", "dynamic, 2"])
def test_a_killed_run_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    ranks, run = LAYOUTS[name]
    whole = run_processes(ranks, train, dataclasses.replace(run, steps=8))
    with pytest.raises(RankFailed, match="died"):
        run_processes(ranks, train, dataclasses.replace(run, steps=8, dies=tmp_path))
    ends = [(tmp_path / str(rank)).read_bytes() for rank in range(ranks)]
    rest = run_processes(ranks, train, dataclasses.replace(run, steps=3, begin=ends))
    for expected, found in zip(whole, rest, strict=True):
        assert expected.losses[5:] == found.losses
        assert all(np.array_equal(found.weights[key], value) for key, value in expected.weights.items())


@pytest.mark.long
@pytest.mark.skipif(
    not hasattr(megatron_utils, "get_batch_on_this_hybrid_cp_rank"), reason="this megatron-core has no rows of its own"
)
def test_its_own_dynamic_cp_trains_by_our_scheduler() -> None:
    steps = 6
    results = run_processes(4, hybrid, steps)
    pieces = hybrid_pieces(steps)
    expected = plain(np.concatenate(pieces).tobytes(), tuple(map(len, pieces)))
    for losses, _ in results:
        np.testing.assert_allclose(losses, expected, atol=1e-5, rtol=0)
    assert len({size for _, ranks in results for step in ranks for size, _ in step}) > 1
    assert all(length <= 16 * size for _, ranks in results for step in ranks for size, length in step)
