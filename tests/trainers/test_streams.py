"""Hugging Face's streaming data sets under `BalancedStream`, in a loop of one's own."""

from __future__ import annotations

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
