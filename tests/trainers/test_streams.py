"""Hugging Face's streaming data sets under `BalancedStream`, in a loop of one's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import wlb
import wlb.torch as wt
from tests.torch import processes
from tests.trainers.page import block
from tests.trainers.small_corpus import llama
from wlb.integrations.huggingface import streams_of

datasets = pytest.importorskip("datasets")
LENGTHS = np.random.default_rng(1).lognormal(3.5, 1.0, 120).astype(int).clip(2, 300)


def stream() -> wt.BalancedStream[wt.PackedBatch]:
    rows = [{"input_ids": [number] * length, "source": "x"} for number, length in enumerate(LENGTHS.tolist())]
    data = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=4)
    data = data.map(lambda row: {"labels": [-100, *row["input_ids"][1:]]})
    cost = wlb.CostModel(attention=1.0, linear=50.0)
    packer = wlb.Packer(
        num_micro_batches=4,
        max_tokens=256,
        max_document_tokens=128,
        oversize="split",
        cost_model=cost,
        release="adaptive",
        max_delay=4,
    )
    group = dist.group.WORLD if dist.is_initialized() else None
    return wt.BalancedStream(streams_of(data), packer=packer, collate_fn=wt.collate, group=group, tokens_per_batch=700)


def tokens(step: Any) -> list[list[int]]:
    return [batch.tokens.tolist() for batch in step.micro_batches]


def read(rank: int) -> tuple[list[Any], list[Any]]:
    whole = stream()
    states, found = [], []
    for step in whole:
        found.append(tokens(step))
        states.append(step.state)
    whole.close()
    again = stream()
    again.load_state_dict(states[2])
    rest = [tokens(step) for step in again]
    again.close()
    return found, rest


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_document_once_and_on_from_the_data_sets_state(ranks: int) -> None:
    results = processes.run(ranks, read)
    everything: list[int] = []
    for found, rest in results:
        assert rest == found[3:]
        everything += [token for step in found for batch in step for token in batch]
    np.testing.assert_array_equal(np.bincount(everything), LENGTHS)


# --- shards, and states, of what others have made of a data set ------------------------------------------------------


def rows(first: int = 0, count: int = 40) -> Any:
    data = datasets.Dataset.from_dict({"input_ids": [[number] * 3 for number in range(first, first + count)]})
    return data.to_iterable_dataset(num_shards=4)


def generated() -> Any:
    def make(shards: list[int]) -> Iterator[dict[str, list[int]]]:
        for shard in shards:
            yield from ({"input_ids": [shard * 10 + number] * 3} for number in range(10))

    return datasets.IterableDataset.from_generator(make, gen_kwargs={"shards": [0, 1, 2, 3]})


def even(row: Any) -> bool:
    return bool(row["input_ids"][0] % 2 == 0)


def fours(batch: Any) -> Any:
    """As texts are joined to rows of one length: what is left at the end of a batch is dropped."""
    return {name: values[: len(values) // 4 * 4] for name, values in batch.items()}


def first_ones(batch: Any) -> list[bool]:
    return [place == 0 for place in range(len(batch["input_ids"]))]


MADE: dict[str, tuple[Callable[[], Any], int]] = {
    "tables": (rows, 4),
    "generated": (generated, 4),
    "map": (lambda: rows().map(lambda row: row), 4),
    "map of batches": (lambda: rows().map(fours, batched=True, batch_size=4), 1),
    "generated, map of batches": (lambda: generated().map(fours, batched=True, batch_size=4), 1),
    "map of all": (lambda: generated().map(fours, batched=True, batch_size=None), 1),
    "map of batches of one": (lambda: rows().map(lambda batch: batch, batched=True, batch_size=1), 4),
    "whole batches of one": (
        lambda: rows().map(lambda batch: batch, batched=True, batch_size=1, drop_last_batch=True),
        4,
    ),
    "filter": (lambda: rows().filter(even), 4),
    "generated, filter": (lambda: generated().filter(even), 4),
    "filter of batches": (lambda: rows().filter(first_ones, batched=True, batch_size=4), 1),
    "map, filter of batches": (lambda: generated().map(dict).filter(first_ones, batched=True, batch_size=4), 1),
    "filter of batches, shuffle": (
        lambda: generated().filter(first_ones, batched=True, batch_size=4).shuffle(seed=1, buffer_size=5),
        1,
    ),
    "shuffle": (lambda: rows().shuffle(seed=1, buffer_size=5), 4),
    "repeat": (lambda: rows().repeat(2), 4),
    "torch": (lambda: rows().with_format("torch"), 4),
    "columns": (lambda: rows().select_columns(["input_ids"]), 4),
    "skip": (lambda: rows().skip(5), 1),
    "take": (lambda: rows().take(9), 1),
    "shuffle and skip": (lambda: rows().shuffle(seed=1, buffer_size=5).skip(5), 1),
    "filter by place": (lambda: rows().filter(lambda row, place: place >= 5, with_indices=True), 1),
    "map by place": (lambda: rows().map(lambda row, place: {"input_ids": [place]}, with_indices=True), 1),
    "whole batches": (lambda: rows().map(lambda batch: batch, batched=True, batch_size=5, drop_last_batch=True), 1),
    "interleave": (lambda: datasets.interleave_datasets([rows(), rows(100, 8)]), 1),
    "interleave by chance": (
        lambda: datasets.interleave_datasets([rows(), rows(100, 8)], probabilities=[0.7, 0.3], seed=1),
        1,
    ),
    "interleave all": (
        lambda: datasets.interleave_datasets([rows(), rows(100, 8)], stopping_strategy="all_exhausted"),
        1,
    ),
    "concatenate": (lambda: datasets.concatenate_datasets([rows(), rows(100, 8)]), 1),
    "concatenate and shuffle": (
        lambda: datasets.concatenate_datasets([rows(), rows(100, 8)]).shuffle(seed=1, buffer_size=5),
        1,
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_streams_have_the_rows_of_the_data_set_and_go_on_where_they_stood(name: str) -> None:
    """In its order, where that matters; and by a state of its own only where that loses no row and repeats none."""
    make, shards = MADE[name]

    def first_tokens(stream: Any) -> list[int]:
        return [int(row["input_ids"][0]) for row in stream]

    streams, whole = streams_of(make()), first_tokens(make())
    assert len(streams) == shards
    found = [first_tokens(stream) for stream in streams]
    if shards == 1:
        assert found == [whole]
    assert Counter(token for part in found for token in part) == Counter(whole)
    if not hasattr(streams[0], "state_dict"):
        return  # what was read is read again
    for given in range(1, len(found[0])):
        stream, again = streams_of(make())[0], streams_of(make())[0]
        iterator = iter(stream)
        for _ in range(given):
            next(iterator)
        again.load_state_dict(stream.state_dict())
        assert first_tokens(again) == found[0][given:]


def test_long_documents_come_once_however_often_a_run_is_resumed() -> None:
    """A data set that was opened and not read says that it stands at its beginning."""
    lengths = [300 if number % 5 == 0 and number < 20 else 6 for number in range(200)]  # in the first of two shards
    data = datasets.Dataset.from_dict({"input_ids": [[number] * size for number, size in enumerate(lengths)]})
    packer = wlb.Packer(
        num_micro_batches=2,
        max_tokens=96,
        max_document_tokens=64,
        oversize="split",
        cost_model=wlb.CostModel(attention=1.0, linear=50.0),
        release="adaptive",
        max_delay=2,
    )
    found: list[int] = []
    state: Any = None
    step: Any = True
    while step is not None:
        streams = streams_of(data.to_iterable_dataset(num_shards=2))
        of = wt.BalancedStream(streams, packer=packer, collate_fn=wt.collate, tokens_per_batch=60)
        if state is not None:
            of.load_state_dict(state)
        step = next(of, None)
        of.close()
        if step is not None:
            state = step.state
            found += [token for batch in tokens(step) for token in batch]
    np.testing.assert_array_equal(np.bincount(found), lengths)


def test_streams_of_two_data_sets_need_weights() -> None:
    packer = wlb.Packer(num_micro_batches=2, max_tokens=96, cost_model=wlb.CostModel(attention=1.0, linear=50.0))
    both = streams_of(rows()) + streams_of(rows(100, 8))
    with pytest.raises(wlb.WlbError, match=r"weights is missing: streams\[0\] \(a ResumableRowStream\)"):
        wt.BalancedStream(both, packer=packer, collate_fn=wt.collate)
    wt.BalancedStream(both, packer=packer, collate_fn=wt.collate, weights=[3] * 4 + [1] * 4).close()


def test_the_page_says_what_runs() -> None:
    rows = [{"words": "w " * length} for length in LENGTHS.tolist()]
    names: dict[str, Any] = {
        "load_dataset": lambda *_, streaming: datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=4),
        "tokenise": lambda row: {"input_ids": [3] * len(row["words"].split())},
        "wt": wt,
        "packer": wlb.Packer(
            num_micro_batches=4, max_tokens=512, cost_model=wlb.CostModel(attention=1.0, linear=50.0), release="fifo"
        ),
        "data_parallel_group": None,
        "model": llama(max_position_embeddings=512),
        "optimizer": None,
    }
    code = block("load_dataset")
    assert "  # optimizer; save step.state" in code
    exec(code.replace("...  #", "model.zero_grad()  #"), names)
    names["stream"].close()
    assert 0 < float(names["loss"]) < 10
