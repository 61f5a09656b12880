"""States that travel with the step: exactly once under any consumer, a chain, and no changed byte accepted."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import queue
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

import wlb
import wlb.torch as wt
from tests.torch import processes
from wlb._seal import seal
from wlb.torch.data import (
    BalancedBatchSampler,
    BalancedStream,
    Document,
    Documents,
    DynamicCpLoader,
    Step,
    StepLoader,
    collate,
)
from wlb.torch.data.content import fingerprint

RNG = np.random.default_rng(7)
LENGTHS = np.where(RNG.random(120) < 0.85, RNG.integers(1, 20, 120), RNG.integers(30, 90, 120))
DATA = [RNG.integers(0, 40_000, length) for length in LENGTHS]
EPOCHS = 2
COST = wlb.CostModel(attention=1e-3, linear=1e-2)


def packer(num_micro_batches: int = 4) -> wlb.Packer:
    return wlb.Packer(
        num_micro_batches=num_micro_batches,
        max_tokens=96,
        max_document_tokens=64,
        outlier_thresholds=(24, 48),
        oversize="split",
        cost_model=COST,
    )


def sampler(rank: int = 0, size: int = 1, **options: Any) -> BalancedBatchSampler:
    return BalancedBatchSampler(LENGTHS, packer=packer(), dp_rank=rank, dp_size=size, num_epochs=EPOCHS, **options)


def step_loader(num_workers: int = 0, work: Any = collate) -> StepLoader[Any]:
    return StepLoader(
        DataLoader(Documents(DATA), batch_sampler=sampler(), collate_fn=work, num_workers=num_workers)  # type: ignore[arg-type]
    )


def stream(work: Any = collate) -> BalancedStream[Any]:
    group = dist.group.WORLD if dist.is_initialized() else None
    texts = [DATA[number::3] * EPOCHS for number in range(3)]
    return BalancedStream(texts, packer=packer(), collate_fn=work, group=group)


def dynamic(source: Callable[..., Any] = step_loader) -> DynamicCpLoader[Any]:
    plan = functools.partial(wlb.plan_dynamic_cp, world_size=1, num_stages=1, max_tokens_per_rank=400, cost_model=COST)
    return DynamicCpLoader(source(work=list), plan=plan)


SOURCES: dict[str, Callable[[], Any]] = {
    "steps": step_loader,
    "workers": functools.partial(step_loader, 2),
    "stream": stream,
    "dynamic": dynamic,
    "dynamic stream": functools.partial(dynamic, stream),
}


class Steps(IterableDataset[Any]):
    """All steps of a run, as one data set."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        for _ in range(EPOCHS):  # what is left of one after a resume may be nothing
            yield from self.source


def tokens_of(step: Any) -> Counter[int]:
    return Counter(token for batch in step.micro_batches for token in batch.tokens.tolist())


def everything() -> Counter[int]:
    return Counter(token for document in DATA for token in document.tolist() * EPOCHS)


# --- consumers that fetch ahead --------------------------------------------------------------------------------------


def accelerated(source: Any) -> Iterator[Any]:
    """A loader prepared by accelerate fetches one step ahead. Each process keeps its own steps: they are shared out."""
    accelerate = pytest.importorskip("accelerate")
    own = accelerate.DataLoaderConfiguration(dispatch_batches=False)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=own)
    yield from accelerator.prepare(DataLoader(Steps(source), batch_size=None))


def thread(source: Any) -> Iterator[Any]:
    """Three ahead."""
    ahead: queue.Queue[Any] = queue.Queue(3)
    left = threading.Event()

    def fetch() -> None:
        for step in [*Steps(source), None]:
            while not left.is_set():
                try:
                    ahead.put(step, timeout=0.05)
                    break
                except queue.Full:
                    continue

    fetching = threading.Thread(target=fetch)
    fetching.start()
    try:
        while (step := ahead.get(timeout=500)) is not None:
            yield step
    finally:
        left.set()
        fetching.join()


def worker(source: Any) -> Iterator[Any]:
    """A process that makes the steps, as many ahead as it is told."""
    yield from DataLoader(Steps(source), batch_size=None, num_workers=1, prefetch_factor=4, timeout=500)


CONSUMERS = {"plain": Steps, "accelerate": accelerated, "thread": thread, "worker": worker}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_exactly_once_whatever_was_fetched(consumer: str, source: str) -> None:
    if consumer == "worker" and source != "steps":
        pytest.skip("a process that belongs to a loader has no workers, nor the threads of its parent")
    loader = SOURCES[source]()
    trained: Counter[int] = Counter()
    for done, step in enumerate(CONSUMERS[consumer](loader), start=1):
        trained += tokens_of(step)
        state = json.loads(json.dumps(step.state))
        if done == 9:
            break
    if consumer in ("accelerate", "thread"):
        assert loader.state_dict()["step"] > state["step"], "the loader stands further: its state would lose a step"
    again = SOURCES[source]()
    again.load_state_dict(state)
    for step in CONSUMERS[consumer](again):
        trained += tokens_of(step)
    assert trained == everything()


def test_lightning_fetches_ahead() -> None:
    """Its Trainer moves steps to the device, fetches one ahead, and stops in the middle of an epoch."""
    lightning = pytest.importorskip("lightning")
    trained: list[Any] = []

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, step: Step[Any], _index: int) -> torch.Tensor:
            trained.append(step)
            return self.weight.sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loader = step_loader()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", max_steps=6, enable_checkpointing=False, barebones=False, **quiet)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Model(), train_dataloaders=Steps(loader))
    assert len(trained) == 6
    state = trained[-1].state
    assert loader.state_dict()["step"] > state["step"]
    again = step_loader()
    again.load_state_dict(state)
    counts = [tokens_of(step) for step in [*trained, *Steps(again)]]
    assert sum(counts, Counter()) == everything()


def test_a_step_moves_with_what_it_holds() -> None:
    step = next(iter(step_loader()))
    there = step.to("meta")
    assert all(batch.tokens.device.type == "meta" for batch in there.micro_batches)
    assert there.state == step.state
    mapped = next(iter(step_loader(work=lambda documents: {"documents": documents, "x": torch.zeros(1)})))
    assert mapped.to("meta").micro_batches[0]["x"].device.type == "meta"
    again: Step[Any] = pickle.loads(pickle.dumps(step))
    assert again.state == step.state
    assert (again.number, again.snapshot.digest) == (step.number, step.snapshot.digest)  # type: ignore[union-attr]


def test_a_state_belongs_to_who_reads_it() -> None:
    for make in SOURCES.values():
        loader = make()
        steps = iter(loader)
        step = next(steps)
        for state in (step.state, loader.state_dict()):
            state.clear()
        assert step.state == loader.state_dict() != {}
        following = next(steps)
        assert following.state["previous"] == step.snapshot.digest
        assert loader.state_dict() == following.state


# --- one rank alone --------------------------------------------------------------------------------------------------


def saved_by_one(rank: int) -> list[str]:
    """Rank 0 reads the states of all steps, the others none."""
    of = stream()
    return [json.dumps(step.state) for step in of if rank == 0]


def test_one_rank_reads_the_states_of_a_stream() -> None:
    saved, nothing = processes.run(2, saved_by_one)
    assert nothing == []
    alone = [step.state for step in stream()]
    assert [json.loads(state) for state in saved] == alone, "the same on any number of ranks"
    assert any(state["waiting"] for state in alone)


def test_states_are_compact() -> None:
    """Two bytes a token below 65,536, and what base64 makes of them."""
    of = stream()
    largest = max((step.state for step in of), key=lambda state: len(state["waiting"]))
    lengths = [len(DATA[number]) for number in range(len(DATA))]
    assert len(largest["waiting"]) > 2
    for saved in largest["waiting"]:
        assert saved["tokens"].startswith("u2:")
        assert len(saved["tokens"]) <= 2 * max(lengths) * 4 / 3 + 8
        assert saved["labels"] is None


@pytest.mark.parametrize(
    ("tokens", "text"),
    [([1, 255], "u1"), ([256], "u2"), ([65535], "u2"), ([65536], "u4"), ([2**32], "i8"), ([0, 2**62], "i8")],
)
def test_tokens_keep_their_value(tokens: list[int], text: str) -> None:
    """Also labels, of which some are negative."""
    labels = [-100, *tokens[1:]]
    documents = [[{"input_ids": tokens, "labels": labels}] * 9]

    def make() -> BalancedStream[list[Document]]:
        config = wlb.Packer(
            num_micro_batches=4, max_tokens=9, max_document_tokens=9, outlier_thresholds=(1,), cost_model=COST
        )
        return BalancedStream(documents, packer=config, collate_fn=list, tokens_per_batch=3 * len(tokens))

    state = next(make()).state
    assert state["waiting"][0]["tokens"].startswith(text)
    again = make()
    again.load_state_dict(json.loads(json.dumps(state)))
    found = [document for step in again for part in step.micro_batches for document in part]
    assert len(found) == 9 - 4
    assert all(np.asarray(document.tokens).tolist() == tokens for document in found)
    assert all(np.asarray(document.labels).tolist() == labels for document in found)


# --- the chain -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["steps", "stream", "dynamic"])
def test_states_are_a_chain(source: str) -> None:
    """Across epochs, interruptions, and states that no step left."""
    loader = SOURCES[source]()
    head = loader.state_dict()["digest"]
    for epoch in range(EPOCHS):
        for step in loader:
            assert step.state["previous"] == head == step.snapshot.previous
            assert not step.state["moved"]
            head = step.state["digest"]
            assert head == step.snapshot.digest
            if step.number % 4 == 0:
                again = SOURCES[source]()
                again.load_state_dict(step.state)
                assert again.state_dict() == step.state
                assert next(iter(Steps(again))).state["previous"] == head
        if source != "stream":
            between = loader.state_dict()  # the next epoch has begun
            assert (between["previous"], between["moved"]) == (head, True)
            again = SOURCES[source]()
            again.load_state_dict(between)
            assert again.state_dict() == between
            if epoch + 1 < EPOCHS:
                assert next(iter(again)).state["previous"] == head


def test_the_chain_goes_on_under_another_configuration() -> None:
    loader = step_loader()
    for step in loader:
        if step.number == 3:
            break
    other = BalancedBatchSampler(LENGTHS, packer=packer(8), dp_rank=0, dp_size=1, num_epochs=EPOCHS)
    other.load_state_dict(step.state)
    saved = other.state_dict()
    assert saved["digest"] != step.state["digest"]
    assert saved["previous"] == step.state["digest"]
    once_more = StepLoader(
        DataLoader(Documents(DATA), batch_sampler=other, collate_fn=collate)  # type: ignore[arg-type]
    )
    assert next(iter(once_more)).state["previous"] == step.state["digest"]


def test_the_chain_goes_on_from_inside_a_step() -> None:
    plain = [step.snapshot.digest for step in step_loader()]  # type: ignore[union-attr]
    of = sampler()
    of.reader.know(fingerprint(Documents(DATA)))  # as the loader of steps does
    batches = iter(of)
    for _ in range(4 * 3 + 1):
        next(batches)
    state = of.state_dict()
    assert state["micro_batches"] == 1
    again = sampler()
    again.reader.know(fingerprint(Documents(DATA)))
    again.load_state_dict(state)
    rest = iter(again)
    for _ in range(3):
        next(rest)
    assert again.state_dict()["digest"] == plain[3]


# --- nothing changed is accepted -------------------------------------------------------------------------------------


def inside_a_step() -> dict[str, Any]:
    of = sampler()
    batches = iter(of)
    for _ in range(4 * 5 + 2):
        next(batches)
    return of.state_dict()


def waiting(loader: Any, number: int) -> dict[str, Any]:
    """The state of the first step from `number` on after which something waits."""
    found = (step for step in loader if step.number >= number and step.snapshot.progress.pieces)
    state: dict[str, Any] = next(found).state
    return state


@functools.cache
def targets() -> list[tuple[Any, str]]:
    """Loaders that have not begun, and the text of a state that each accepts."""
    states = [inside_a_step(), waiting(step_loader(), 3), waiting(stream(), 6), waiting(dynamic(), 3)]
    return list(zip([sampler(), step_loader(), stream(), dynamic()], map(json.dumps, states), strict=True))


def check_refused(loader: Any, text: str, damaged: Any) -> None:
    if json.dumps(damaged, sort_keys=True) == json.dumps(json.loads(text), sort_keys=True):
        return
    before = loader.state_dict()
    with pytest.raises(wlb.WlbError) as refused:
        loader.load_state_dict(damaged)
    assert refused.value.argument == "state" or isinstance(refused.value, wlb.StateError)
    assert loader.state_dict() == before


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.floats(), st.text(max_size=4), st.just([]), st.just({})
)


@given(st.sampled_from(range(4)), st.data())
def test_a_changed_leaf_is_refused(which: int, data: st.DataObject) -> None:
    loader, text = targets()[which]
    damaged = json.loads(text)
    parent, key = damaged, data.draw(st.sampled_from(sorted(damaged)))
    while isinstance(parent[key], dict | list) and parent[key] and data.draw(st.integers(0, 9)):
        parent = parent[key]
        key = data.draw(st.sampled_from(sorted(parent) if isinstance(parent, dict) else range(len(parent))))
    change = data.draw(st.sampled_from(["set", "add", "drop", "new"]))
    if change == "set":
        parent[key] = data.draw(VALUES)
    elif change == "add" and type(parent[key]) in (int, float):
        parent[key] += data.draw(st.sampled_from([1, -1, 256]))
    elif change == "new" and isinstance(parent, dict):
        parent[data.draw(st.text(max_size=5))] = data.draw(VALUES)
    else:
        del parent[key]
    check_refused(loader, text, damaged)


@given(st.sampled_from(range(4)), st.data())
def test_a_changed_byte_is_refused(which: int, data: st.DataObject) -> None:
    loader, text = targets()[which]
    raw = bytearray(text.encode())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(
        st.one_of(st.just(raw[at] ^ 1 << data.draw(st.integers(0, 6))), st.sampled_from(b"0123456789Aa+"))
    )
    try:
        damaged = json.loads(bytes(raw))
    except ValueError:
        return
    check_refused(loader, text, damaged)


def test_ranges_are_checked_behind_the_seal() -> None:
    """Whoever seals a state anew is told what is wrong with it."""
    for which, change, message in (
        (1, {"epoch": 2**60}, "beyond what ids can count"),
        (1, {"position": 121}, "beyond the last document"),
        (2, {"next_id": 1}, "beyond 'next_id' = 1"),
        (2, {"waiting": []}, "other documents in 'waiting'"),
    ):
        loader, text = targets()[which]
        with pytest.raises(wlb.WlbError, match=message):
            loader.load_state_dict(seal(json.loads(text) | change))
    loader, text = targets()[2]
    for change, message in (({"stream": 3}, "of stream 3"), ({"left": 10**6}, "1000000 tokens of")):
        state = json.loads(text)
        state["waiting"][0].update(change)
        with pytest.raises(wlb.WlbError, match=message):
            loader.load_state_dict(seal(state))
    early = json.loads(targets()[1][1])
    early["packer"] = waiting(Steps(step_loader()), 14)["packer"]
    with pytest.raises(wlb.WlbError, match="waiting, of an epoch after 'epoch' = 0"):
        targets()[1][0].load_state_dict(seal(early))


def test_what_no_hash_can_cover_is_refused() -> None:
    loader, text = targets()[1]
    for strange in (object(), {1, 2}, float("nan")):
        state = json.loads(text) | {"strange": strange}
        with pytest.raises(wlb.WlbError, match="digest"):
            loader.load_state_dict(state)
    cyclic = json.loads(text)
    cyclic["packer"]["queues"].append(cyclic)
    with pytest.raises(wlb.WlbError):
        loader.load_state_dict(cyclic)
    for foreign in (None, [], {}, {"format": "torch"}, "state"):
        with pytest.raises(wlb.WlbError):
            loader.load_state_dict(copy.copy(foreign))


class Generated:
    """A stream whose state holds what torch's generators do."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.numpy = np.random.default_rng(1)
        self.left = 40

    def __iter__(self) -> Iterator[Any]:
        while self.left:
            self.left -= 1
            yield torch.randint(0, 99, (int(self.numpy.integers(1, 40)),), generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"torch": self.generator.get_state(), "numpy": self.numpy.bit_generator.state, "left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["torch"])
        self.numpy.bit_generator.state = state["numpy"]
        self.left = state["left"]


def test_a_stream_may_save_arrays() -> None:
    def make() -> BalancedStream[Any]:
        return BalancedStream([Generated()], packer=packer(), collate_fn=collate)

    steps = list(make())
    again = make()
    again.load_state_dict(pickle.loads(pickle.dumps(steps[1].state)))
    assert [tokens_of(step) for step in again] == [tokens_of(step) for step in steps[2:]]
    damaged = copy.deepcopy(steps[1].state)
    damaged["streams"][0]["own"]["torch"][5] ^= 1
    with pytest.raises(wlb.WlbError, match="changed after it was saved"):
        make().load_state_dict(damaged)


def test_a_data_set_that_grew_is_refused() -> None:
    """Its new documents would not be trained."""
    data = [{"input_ids": [number] * 5} for number in range(20)]
    loader = wt.balanced_loader(
        data, max_tokens=64, tokens_per_batch=30, cost_model=wlb.CostModel(attention=1, linear=50)
    )
    next(iter(loader))
    data.append({"input_ids": [20] * 5})
    with pytest.raises(wlb.WlbError, match="dataset has 21 documents, but had 20 when this loader was made"):
        next(iter(loader))
