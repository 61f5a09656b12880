"""Streams of others: where they stand when nobody has read them since a resume, and what each gives of a step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import wlb
from tests.torch import processes
from wlb.torch.data import BalancedStream, collate

COST = wlb.CostModel(attention=1e-3, linear=1e-2)
LONG = [300 if number % 5 == 0 else 6 for number in range(60)]  # a long one pays for many steps


def packer(num_micro_batches: int = 2, **options: Any) -> wlb.Packer:
    defaults: dict[str, Any] = {"max_tokens": 96, "max_document_tokens": 64, "oversize": "split", "max_delay": 2}
    return wlb.Packer(num_micro_batches=num_micro_batches, cost_model=COST, release="adaptive", **defaults | options)


class Rows:
    """Documents that name themselves by their tokens; with a state that is known once the first was read."""

    def __init__(self, first: int, lengths: list[int]) -> None:
        self.first, self.lengths = first, lengths
        self.at = self.begin = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Any]:
        self.at, self.begin = self.begin, 0
        while self.at < len(self.lengths):
            self.at += 1
            yield np.full(self.lengths[self.at - 1], self.first + self.at - 1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin, self.at = state["at"], 0


class Read(IterableDataset[Any]):
    """The same for a loader, without a state."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


class StatefulRead(Read):
    """With it."""

    def state_dict(self) -> dict[str, int]:
        return self.rows.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rows.load_state_dict(state)


def torchdata(first: int, lengths: list[int]) -> Any:
    return StatefulDataLoader(StatefulRead(Rows(first, lengths)), batch_size=None)


def torchdata_that_counts(first: int, lengths: list[int]) -> Any:
    return StatefulDataLoader(Read(Rows(first, lengths)), batch_size=None)


def stream(make: Any) -> BalancedStream[Any]:
    group = dist.group.WORLD if dist.is_initialized() else None
    streams = [make(0, LONG), make(1000, LONG[::-1])]
    return BalancedStream(
        streams, weights=[1, 1], packer=packer(), collate_fn=collate, group=group, tokens_per_batch=60
    )


def resumed_again_and_again(rank: int, make: Any) -> list[int]:
    """The tokens that a rank trains in runs of a single step each, to the end."""
    found: list[int] = []
    state: Any = None
    for _ in range(1000):
        of = stream(make)
        if state is not None:
            of.load_state_dict(json.loads(state) if make is Rows else state)
        step = next(of, None)
        of.close()
        if step is None:
            return found
        found += [token for batch in step.micro_batches for token in batch.tokens.tolist()]
        state = json.dumps(step.state) if make is Rows else step.state
    raise AssertionError("has no end")


@pytest.mark.filterwarnings("ignore:document .* more than tokens_per_batch", "ignore:'set_vital'")
@pytest.mark.parametrize(
    ("make", "ranks"),
    [(Rows, 1), (Rows, 2), (torchdata, 1), (torchdata_that_counts, 1)],
)
def test_a_stream_that_was_not_read_since_a_resume_stands_where_it_stood(make: Any, ranks: int) -> None:
    """After a long document its stream gives nothing for some steps; resumed and saved meanwhile, it began anew."""
    parts = [resumed_again_and_again(0, make)] if ranks == 1 else processes.run(ranks, resumed_again_and_again, make)
    expected = Counter(dict(enumerate(LONG)))
    expected |= Counter({1000 + number: length for number, length in enumerate(LONG[::-1])})
    assert Counter(token for part in parts for token in part) == expected


# --- shares ----------------------------------------------------------------------------------------------------------


def shares(streams: Any, parts: int = 10, **options: Any) -> list[float]:
    """The share of the tokens of the last stream in each tenth of a run."""
    of = BalancedStream(streams, packer=packer(4, max_delay=0), collate_fn=collate, tokens_per_batch=200, **options)
    tokens = np.concatenate([batch.tokens.numpy() for step in of for batch in step.micro_batches])
    return [float((part >= 1000).mean()) for part in np.array_split(tokens, parts)]


def test_unequal_streams_end_together() -> None:
    """Also where their documents have other lengths: 5 % of the tokens are 5 % of every tenth of the run."""
    few, many = Rows(1000, [20] * 25), Rows(0, [10] * 950)
    found = shares([many, few])
    assert max(found) < 0.08
    assert min(found) > 0.02
    halves = shares([Rows(0, [4] * 1000), Rows(1000, [40] * 100)])
    assert 0.4 < min(halves) <= max(halves) < 0.6


def test_weights_stand_as_they_are_given() -> None:
    found = shares([Rows(0, [10] * 400), Rows(1000, [10] * 400)], parts=4, weights=[3, 1])
    assert found[0] == pytest.approx(0.25, abs=0.04)
    assert found[-1] > 0.9, "the first has ended"


def shared(rank: int) -> list[list[int]]:
    """What the ranks train of streams of other sizes, of the whole and resumed in its middle."""

    def make() -> BalancedStream[Any]:
        streams = [Rows(0, [10] * 90), Rows(1000, [30] * 8), Rows(2000, [7] * 30)]
        group = dist.group.WORLD
        return BalancedStream(streams, packer=packer(4), collate_fn=collate, group=group, tokens_per_batch=120)

    def tokens(step: Any) -> list[int]:
        return [token for batch in step.micro_batches for token in batch.tokens.tolist()]

    whole = make()
    steps = [(tokens(step), step.state) for step in whole]
    again = make()
    again.load_state_dict(json.loads(json.dumps(steps[3][1])))
    assert [tokens(step) for step in again] == [found for found, _ in steps[4:]]
    return [found for found, _ in steps]


def test_shares_do_not_depend_on_ranks_and_resume() -> None:
    (one,) = processes.run(1, shared)
    two = processes.run(2, shared)
    assert [Counter(tokens) for tokens in one] == [
        Counter(first) + Counter(second) for first, second in zip(*two, strict=True)
    ]


@pytest.mark.parametrize(
    ("streams", "weights", "message"),
    [
        ([Rows(0, [3]), iter([[1]])], None, r"weights is missing: streams\[1\] \(a list_iterator\) does not say"),
        ([[[1]], [[2]]], [1], "weights has 1 values for 2 streams"),
        ([[[1]], [[2]]], [1, 0], r"weights\[1\] = 0.0: must be a finite number above 0"),
        ([[[1]], [[2]]], [1, float("nan")], r"weights\[1\] = nan"),
        ([[[1]], [[2]]], "ab", "weights must be a number for each stream"),
    ],
)
def test_shares_that_are_not_known_are_asked_for(streams: Any, weights: Any, message: str) -> None:
    with pytest.raises(wlb.WlbError, match=message):
        BalancedStream(streams, packer=packer(), collate_fn=collate, weights=weights)
