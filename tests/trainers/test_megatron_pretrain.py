"""`megatron.training.pretrain` on wlb's plans: its own loop, checkpoints and writers, against a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.torch.processes import RankFailed
from tests.torch.processes import run as run_processes

pytest.importorskip("megatron.core", reason="needs megatron-core")

from tests.trainers.megatron_pretrain import train
from tests.trainers.megatron_run import Run
from tests.trainers.test_megatron_training import plain

pytest.importorskip("tensorboard")


def scalars(folder: Path) -> dict[str, list[float]]:
    """What was written, in the order of iterations."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def together(results: list[Any]) -> list[Any]:
    """Pieces of every step, of all ranks that read, in a fixed order."""
    steps = [np.concatenate(parts) for parts in zip(*filter(None, results), strict=True)]
    return [rows[np.lexsort(rows.T[::-1])] for rows in steps]


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "run"), [(1, Run()), (2, Run()), (2, Run(pp=2)), (2, Run(tp=2))])
def test_its_losses_are_those_of_one_document_at_a_time(ranks: int, run: Run, tmp_path: Path) -> None:
    pieces = together(run_processes(ranks, train, run, tmp_path, 20, {}, []))
    written = scalars(tmp_path / "to 20")
    expected = plain(np.concatenate(pieces).tobytes(), tuple(map(len, pieces)))
    np.testing.assert_allclose(written["lm loss"], expected, atol=1e-5, rtol=0)
    assert expected[-1] < expected[0] - 0.01
    assert len(written["wlb/imbalance"]) == 20
    assert all(1 <= value < 2 for value in written["wlb/imbalance"])
    assert written["wlb/tokens"] == [rows[:, 2].sum() for rows in pieces]


@pytest.mark.long
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = together(run_processes(2, train, Run(), tmp_path / "whole", 8, {}, []))
    with pytest.raises(RankFailed, match="died"):
        run_processes(2, train, Run(), tmp_path / "cut", 9, {"dies_in": 7}, ["--save-interval", "5"])
    rest = together(run_processes(2, train, Run(), tmp_path / "cut", 8, {}, []))
    assert all(np.array_equal(*pair) for pair in zip(whole[5:], rest, strict=True))
    losses = [scalars(tmp_path / name)["lm loss"] for name in ("whole/to 8", "cut/to 8")]
    assert losses[0][5:] == losses[1]
    (found,) = (tmp_path / "cut").glob("iter_0000005/*/train_dataloader_dprank000.pt")
    found.unlink()
    (tmp_path / "cut" / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(RankFailed, match=r"load = .* nobody knows where the data stood"):
        run_processes(2, train, Run(), tmp_path / "cut", 8, {}, [])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["twice without reading", "other ranks", "another batch"])
def test_a_resumed_run_trains_what_comes_next(kind: str, tmp_path: Path) -> None:
    """Of other ranks the same steps; of a batch of another size what was not yet trained, once."""
    begun = together(run_processes(1, train, Run(), tmp_path, 3, {"num_epochs": 1}, ["--save-interval", "3"]))
    ranks = 2 if kind == "other ranks" else 1
    if kind == "twice without reading":
        run_processes(1, train, Run(), tmp_path, 3, {"num_epochs": 1}, [])
    more = ["--global-batch-size", "4"] if kind == "another batch" else []
    steps = 9 if kind == "another batch" else 6
    rest = together(run_processes(ranks, train, Run(), tmp_path, steps, {"num_epochs": 1}, more))
    assert (len(begun), len(rest)) == (3, steps - 3)
    whole = together(run_processes(1, train, Run(), tmp_path / "whole", 6, {"num_epochs": 1}, []))
    assert all(np.array_equal(*pair) for pair in zip(whole[:3], begun, strict=True))
    if kind == "another batch":
        found = [tuple(row) for rows in begun + rest for row in rows.tolist()]
        assert len(found) == len(set(found))
        held = sum(rows[:, 2].sum() for rows in rest)
        assert held == pytest.approx(sum(rows[:, 2].sum() for rows in whole[3:]), rel=0.2), (
            "half as much, twice as often"
        )
    else:
        assert all(np.array_equal(*pair) for pair in zip(whole[3:], rest, strict=True))


@pytest.mark.parametrize(
    ("changes", "more", "message"),
    [
        ({}, ["--dataloader-type", "single"], "give --dataloader-type external"),
        ({}, ["--micro-batch-size", "2"], "give --micro-batch-size 1"),
        ({"dynamic_cp": True}, [], "takes as many micro-batches in every step"),
        ({"tokens_per_batch": 100}, [], "follows from Megatron's arguments and loop"),
        ({"max_delais": 1}, [], "is no option here"),
    ],
)
def test_arguments_that_are_against_it_are_named(
    changes: dict[str, Any], more: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RankFailed, match=message):
        run_processes(1, train, Run(), tmp_path, 2, changes, more)
