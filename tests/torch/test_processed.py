"""Rows whose lengths only a processor knows: workers process them ahead, and a run resumes exactly."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import wlb
import wlb.torch as wt
from tests.torch import processes

COST = wlb.CostModel(attention=1e-3, linear=1e-2)
LENGTHS = np.random.default_rng(2).geometric(0.1, 90).clip(1, 50)
TEXTS = [f"{number} " * length for number, length in enumerate(LENGTHS.tolist())]
EPOCHS = 2


def tokenised(text: str) -> Any:
    """A token for each word. Some texts are left out, some make two documents, and some draw a random token."""
    ids = [int(word) for word in text.split()]
    if ids[0] % 10 == 3:
        return None
    if ids[0] % 10 == 4:
        return [{"input_ids": ids}, {"input_ids": ids[:1]}]
    return {"input_ids": ids}


def drawn(number: int) -> Any:
    """As users draw."""
    return [number, int(random.random() * 1e6), int(np.random.rand() * 1e6), int(torch.rand(()) * 1e6)]  # noqa: NPY002


def loader(workers: int, **options: Any) -> Any:
    group = dist.group.WORLD if dist.is_initialized() else None
    rows = wt.ProcessedRows(TEXTS, tokenised, num_workers=workers, num_epochs=EPOCHS, num_shards=5, ahead=3)
    sizes: dict[str, Any] = {"max_tokens": 64, "tokens_per_batch": 200, "release": "adaptive", "max_delay": 3}
    packer = wlb.Packer(num_micro_batches=6, cost_model=COST, oversize="split", **sizes)
    return wt.BalancedStream(rows.streams(), packer=packer, collate_fn=wt.collate, group=group, **options)


def tokens(step: Any) -> list[list[int]]:
    return [batch.tokens.tolist() for batch in step.micro_batches]


def read(rank: int, workers: int, state: dict[str, Any] | None = None) -> list[tuple[list[list[int]], dict[str, Any]]]:
    steps = loader(workers)
    if state is not None:
        steps.load_state_dict(state)
    assert not steps.ended
    found = [(tokens(step), step.state) for step in steps]
    assert steps.ended
    steps.close()
    return found


def together(of_ranks: list[Any]) -> list[Counter[tuple[int, ...]]]:
    """The micro-batches of each step, on all ranks."""
    return [Counter(tuple(batch) for found, _ in ranks for batch in found) for ranks in zip(*of_ranks, strict=True)]


def test_every_row_is_processed_once_an_epoch_whatever_ranks_and_workers() -> None:
    alone = together([read(0, 0)])
    given: Counter[int] = Counter()
    for step in alone:
        for micro_batch, count in step.items():
            given.update(count * list(micro_batch))
    expected: Counter[int] = Counter()
    for number, length in enumerate(LENGTHS.tolist()):
        expected[number] = EPOCHS * (0 if number % 10 == 3 else length + (number % 10 == 4))
    assert +given == +expected
    for ranks, workers in ((1, 2), (2, 0), (3, 2)):
        assert together(processes.run(ranks, read, workers)) == alone


@pytest.mark.parametrize("done", [0, 3, 5])
def test_a_run_resumes_on_other_ranks_and_workers_also_inside_a_row(done: int) -> None:
    alone = read(0, 0)
    state = json.loads(json.dumps(alone[done][1]))
    for ranks, workers in ((1, 0), (2, 2)):
        rest = together(processes.run(ranks, read, workers, state))
        assert rest == together([alone[done + 1 :]])


def test_a_row_that_makes_many_documents_resumes_in_the_middle() -> None:
    rows = wt.ProcessedRows(range(4), lambda number: [{"input_ids": [number, at]} for at in range(5)], shuffle=False)
    whole = [row["input_ids"] for row in rows.shard(1, 0)]
    for given in range(len(whole)):
        first, second = rows.shard(1, 0), rows.shard(1, 0)
        read_rows = iter(first)
        for _ in range(given):
            next(read_rows)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [row["input_ids"] for row in second] == whole[given:]


def test_balanced_loader_takes_them() -> None:
    rows = wt.ProcessedRows(TEXTS, tokenised, num_workers=1, num_shards=3)
    steps = wt.balanced_loader(rows, max_tokens=64, tokens_per_batch=200, cost_model=COST)
    assert isinstance(steps, wt.BalancedStream)
    found = Counter(token for step in steps for batch in step.micro_batches for token in batch.tokens.tolist())
    assert found[7] == LENGTHS[7]
    assert found[13] == 0
    steps.close()
    with pytest.raises(wlb.WlbError, match="num_workers is an option of ProcessedRows"):
        wt.balanced_loader(rows, max_tokens=64, tokens_per_batch=200, cost_model=COST, num_workers=2)


PROGRAM = """
import os, time
import wlb.torch as wt

rows = iter(wt.ProcessedRows(range(100), lambda number: [number, os.getpid()], num_workers=2).shard(1, 0))
print(*{next(rows)[1] for _ in range(20)}, flush=True)
time.sleep(600)
"""


def test_workers_end_with_a_rank_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        workers = [int(word) for word in rank.stdout.readline().split()]
        rank.kill()
    assert workers
    until = time.monotonic() + 60
    while alive := [worker for worker in workers if Path(f"/proc/{worker}").exists()]:
        assert time.monotonic() < until, alive
        time.sleep(0.2)


def broken(text: str) -> Any:
    raise KeyError("no such column")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_function_reaches_the_loop(workers: int) -> None:
    rows = wt.ProcessedRows(TEXTS, broken, num_workers=workers)
    steps = wt.balanced_loader(rows, max_tokens=64, tokens_per_batch=200, cost_model=COST)
    with pytest.raises(Exception, match="no such column"):
        next(steps)
    steps.close()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dataset": iter(TEXTS)}, "without an index"),
        ({"dataset": []}, "is empty"),
        ({"process": "tokenise"}, "is not a function"),
        ({"num_workers": -1}, "num_workers"),
        ({"ahead": 0}, "ahead"),
        ({"num_shards": 0}, "num_shards"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(wlb.WlbError, match=match):
        wt.ProcessedRows(**{"dataset": TEXTS, "process": tokenised} | change)


def test_states_of_other_data_are_refused() -> None:
    state = wt.ProcessedRows(TEXTS, tokenised).shard(4, 1).state_dict()
    with pytest.raises(wlb.WlbError, match="was saved with"):
        wt.ProcessedRows(TEXTS[:-1], tokenised).shard(4, 1).load_state_dict(state)
    with pytest.raises(wlb.WlbError, match="was saved with"):
        wt.ProcessedRows(TEXTS, tokenised).shard(4, 2).load_state_dict(state)


def test_random_numbers_of_a_row_are_the_same_in_any_worker_and_after_a_resume() -> None:
    def rows(workers: int) -> wt.ProcessedRows:
        return wt.ProcessedRows(range(12), drawn, num_workers=workers, num_epochs=2, seed=5).shard(1, 0)

    whole = list(rows(1))
    assert len({tuple(row) for row in whole}) == 24
    half = rows(2)
    assert [row for row, _ in zip(half, range(9), strict=False)] == whole[:9]
    rest = rows(2)
    rest.load_state_dict(half.state_dict())
    assert list(rest) == whole[9 + (half.state_dict()["place"] - 9) :]
