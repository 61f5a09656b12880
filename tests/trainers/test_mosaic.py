"""MosaicML's `StreamingDataset` under `BalancedStream`: real shards, every sample once, resumed exactly."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

import wlb
import wlb.torch as wt
from tests.torch import processes
from tests.trainers.page import block
from tests.trainers.small_corpus import llama
from wlb.integrations.huggingface import balance
from wlb.integrations.mosaic import streams_of

streaming = pytest.importorskip("streaming")
World = pytest.importorskip("streaming.base.world").World
LENGTHS = np.random.default_rng(2).lognormal(3.5, 1.0, 121).astype(int).clip(2, 300)
SHARED = Path("/dev/shm")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Shards of some dozen documents; a document's tokens are its number."""
    before = set(SHARED.glob("*"))
    folder = str(tmp_path_factory.mktemp("mds"))
    with streaming.MDSWriter(out=folder, columns={"input_ids": "ndarray:int32"}, size_limit=4096) as out:
        for number, length in enumerate(LENGTHS.tolist()):
            out.write({"input_ids": np.full(length, number, np.int32)})
    assert len(list(Path(folder).glob("shard.*"))) > 4
    yield folder
    for left in set(SHARED.glob("*")) - before:  # by processes that were killed; streaming numbers its own
        if re.match(r"\d{6}_", left.name):
            left.unlink()


def data(corpus: str, **options: Any) -> Any:
    os.environ["LOCAL_WORLD_SIZE"] = os.environ.get("WORLD_SIZE", "1")  # as torchrun says: all ranks are on one node
    return streaming.StreamingDataset(local=corpus, **{"batch_size": 2, "shuffle": True} | options)


def stream(streams: list[Any]) -> wt.BalancedStream[wt.PackedBatch]:
    packer = wlb.Packer(
        num_micro_batches=4,
        max_tokens=256,
        max_document_tokens=128,
        oversize="split",
        cost_model=wlb.CostModel(attention=1.0, linear=50.0),
        release="adaptive",
        max_delay=4,
    )
    group = dist.group.WORLD if dist.is_initialized() else None
    return wt.BalancedStream(streams, packer=packer, collate_fn=wt.collate, group=group, tokens_per_batch=700)


def tokens(step: Any) -> list[list[int]]:
    return [batch.tokens.tolist() for batch in step.micro_batches]


class Watched:
    """Which samples are read here."""

    def __init__(self, dataset: Any) -> None:
        self.read: list[int] = []
        own = type(dataset).get_item

        class Watching(type(dataset)):  # type: ignore[misc]
            def get_item(_, sample: int, *args: Any) -> Any:
                self.read.append(sample)
                return own(dataset, sample, *args)

        dataset.__class__ = Watching


def read(rank: int, corpus: str, stop: int, num_epochs: int = 1) -> Any:
    """All steps, and those after a state of a stream that is thrown away; the second on data made anew."""
    dataset = data(corpus)
    watched = Watched(dataset)
    whole = stream(streams_of(dataset, num_epochs=num_epochs))
    states, found = [], []
    for step in whole:
        found.append(tokens(step))
        states.append(step.state)
    whole.close()
    again = stream(streams_of(data(corpus), num_epochs=num_epochs))
    again.load_state_dict(states[stop])
    rest = [tokens(step) for step in again]
    again.close()
    return found, rest, states, watched.read


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_document_once_and_on_from_the_data_sets_state(ranks: int, corpus: str) -> None:
    results = processes.run(ranks, read, corpus, 2)
    everything = list(chain(*(chain(*chain(*found)) for found, *_ in results)))
    np.testing.assert_array_equal(np.bincount(everything), LENGTHS)
    for found, rest, *_ in results:
        assert rest == found[3:]
        assert len(rest) > 3
    parts = [sorted(samples) for *_, samples in results]
    assert sorted(chain(*parts)) == list(range(len(LENGTHS))), "each reads its own"
    assert all(len(part) in (len(LENGTHS) // ranks, -(-len(LENGTHS) // ranks)) for part in parts)


def test_epochs_follow_each_other_each_in_an_order_of_its_own(corpus: str) -> None:
    found, _, states, samples = processes.run(1, read, corpus, 1, 2)[0]
    first, second = samples[: len(LENGTHS)], samples[len(LENGTHS) :]
    assert sorted(first) == sorted(second) == list(range(len(LENGTHS)))
    assert first != second
    late = next(at for at, state in enumerate(states) if state["streams"][0]["own"]["epoch"] == 1)
    again, rest, *_ = processes.run(1, read, corpus, late, 2)[0]
    assert again == found
    assert rest == found[late + 1 :]
    assert rest


def resumed(rank: int, corpus: str, state: Any) -> Any:
    again = stream(streams_of(data(corpus), num_streams=2))
    again.load_state_dict(state)
    rest = [tokens(step) for step in again]
    again.close()
    return rest


def test_a_state_resumes_on_another_number_of_ranks(corpus: str) -> None:
    two = processes.run(2, read, corpus, 2)
    rest = processes.run(1, resumed, corpus, two[0][2][2])[0]
    for one, *both in zip(rest, *(found[3:] for found, *_ in two), strict=True):
        assert sorted(one) == sorted(chain(*both))


def own_order(rank: int, corpus: str, shuffle: bool) -> tuple[list[int], list[int], list[int]]:
    """What the data set gives this rank by itself, and what it reads here; before and after a state of its own."""
    options = {"shuffle": shuffle, "batch_size": 1}
    by_itself = [int(sample["input_ids"][0]) for sample in data(corpus, **options)]
    dist.barrier()
    ours = [int(row["input_ids"][0]) for row in streams_of(data(corpus, **options))[rank]]
    dist.barrier()
    begun = data(corpus, **options)
    state = begun.state_dict(num_samples=20, from_beginning=True) | {"epoch": 0}
    dist.barrier()  # they share memory, which is read above and written below
    begun.load_state_dict(state)
    return by_itself, ours, [int(row["input_ids"][0]) for row in streams_of(begun)[rank]]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_is_the_data_sets_own(shuffle: bool, corpus: str) -> None:
    """But for what it repeats to make ranks even: the 121st sample has no other."""
    for by_itself, ours, begun in processes.run(2, own_order, corpus, shuffle):
        assert ours == by_itself[: len(ours)]
        assert len(by_itself) - len(ours) in (0, 1)
        assert begun == ours[10:]


def test_nodes_read_their_own_halves(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each fetches the shards of its half; two streams for each of two nodes."""
    dataset = data(corpus, shuffle=False, num_canonical_nodes=2)
    two = World(2, 2, 1, 0)
    monkeypatch.setattr(World, "detect", classmethod(lambda cls: two))
    parts = [[int(row["input_ids"][0]) for row in each] for each in streams_of(dataset)]
    assert [len(part) for part in parts] == [31, 30, 31, 30]  # one sample twice: nodes have as many
    assert max(parts[0] + parts[1]) <= min(parts[2] + parts[3])
    assert sorted({*chain(*parts)}) == list(range(len(LENGTHS)))


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, save_steps=4, **options
    )


def test_inside_a_trainer(corpus: str, tmp_path: Path) -> None:
    """Trained, and resumed from a checkpoint."""

    def trained(max_steps: int, resume: str | None = None) -> list[float]:
        options = {"max_steps": max_steps, "gradient_accumulation_steps": 4}
        trainer: Any = Trainer(llama(vocab_size=128), arguments(tmp_path, **options), train_dataset=data(corpus))
        balance(trainer, max_tokens=128).train(resume_from_checkpoint=resume)
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    whole = trained(7)
    assert len(whole) == 7
    assert trained(7, str(tmp_path / "checkpoint-4")) == whole


def test_a_trainer_needs_a_number_of_steps(corpus: str, tmp_path: Path) -> None:
    trainer: Any = Trainer(llama(vocab_size=128), arguments(tmp_path), train_dataset=data(corpus))
    with pytest.raises(wlb.WlbError, match="max_steps"):
        balance(trainer, max_tokens=128)


def test_stratified_batches_keep_their_proportions(corpus: str, tmp_path: Path) -> None:
    """In what all ranks read of them together, though documents are packed by their work."""
    with streaming.MDSWriter(out=str(tmp_path), columns={"input_ids": "ndarray:int32"}) as out:
        for number in range(60):
            out.write({"input_ids": np.full(3, 1000 + number, np.int32)})
    both = [streaming.Stream(local=folder, repeat=1) for folder in (corpus, str(tmp_path))]
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    dataset = streaming.StreamingDataset(streams=both, batch_size=6, shuffle=True, batching_method="stratified")
    parts = [[int(row["input_ids"][0]) for row in each] for each in streams_of(dataset, num_streams=3)]
    everything = list(chain(*parts))
    own = sorted(int(sample["input_ids"][0]) for sample in dataset)  # all but what does not fill a batch
    assert sorted(everything) == own
    assert len(own) > len(dataset) - 6
    together = list(chain(*zip(*parts, strict=True)))  # as the ranks read side by side
    for at in range(0, len(together), 6):
        assert sum(number >= 1000 for number in together[at : at + 6]) == 2  # 60 of 181


def test_the_page_says_what_runs(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(corpus).parent)
    (Path(corpus).parent / "corpus").symlink_to(corpus)
    packer = wlb.Packer(
        num_micro_batches=4, max_tokens=512, cost_model=wlb.CostModel(attention=1.0, linear=50.0), release="fifo"
    )
    names: dict[str, Any] = {"wt": wt, "packer": packer, "data_parallel_group": None}
    exec(block("from streaming import"), names)
    steps = list(names["stream"])
    names["stream"].close()
    everything = list(chain(*chain(*map(tokens, steps))))
    np.testing.assert_array_equal(np.bincount(everything), LENGTHS)


def test_what_cannot_be_exact_is_refused(corpus: str) -> None:
    dataset = data(corpus)
    with pytest.raises(wlb.WlbError, match=r"state_dict asks for arguments.*mosaic.streams_of") as refused:
        stream([dataset])
    assert refused.value.argument == "streams"
    with pytest.raises(wlb.WlbError, match="is a StreamingDataLoader, not a StreamingDataset"):
        streams_of(streaming.StreamingDataLoader(dataset))
    with pytest.raises(wlb.WlbError, match="batch_size=1"):
        streams_of(data(corpus, batch_size=None))
    with pytest.raises(wlb.WlbError, match="'per_stream': documents are packed by their work"):
        streams_of(data(corpus, batching_method="per_stream"))
    state = streams_of(dataset)[0].state_dict()
    with pytest.raises(wlb.WlbError, match="is of a data set of 121 samples, this one has 60"):
        streams_of(data(corpus, epoch_size=60))[0].load_state_dict(state)
    for change in ({"shuffle": False}, {"shuffle_algo": "py1b"}, {"batching_method": "stratified"}):
        name, value = next(iter(change.items()))
        with pytest.raises(wlb.WlbError, match=f"{name} = {value!r}, but the state is of .*another order"):
            streams_of(data(corpus, **change))[0].load_state_dict(state)
    as_saved = data(corpus, batch_size=5, shuffle_block_size=64)
    (again,) = streams_of(as_saved)
    again.load_state_dict(state)
    assert as_saved.shuffle_block_size == dataset.shuffle_block_size
    gone_on = data(corpus)
    gone_on.next_epoch = 3
    with pytest.raises(wlb.WlbError, match="begins in epoch 0, but the data set is in epoch 3 already"):
        streams_of(gone_on)[0].load_state_dict(state)
    with pytest.raises(wlb.WlbError, match="num_streams"):
        stream(streams_of(dataset, num_streams=2)).load_state_dict(stream(streams_of(dataset)).state_dict())


def test_an_old_package_is_named(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = data(corpus)
    monkeypatch.setattr("wlb.integrations.versions.version", lambda package: "0.7.6")
    with pytest.raises(wlb.WlbError, match=r"mosaicml-streaming is 0.7.6: 0.8 or newer is needed"):
        streams_of(dataset)
