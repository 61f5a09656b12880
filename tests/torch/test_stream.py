"""Streams without an index: what several ranks read together is what one would."""

import json
import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import wlb
from tests.torch import processes
from wlb._seal import seal
from wlb.torch.data import IGNORE, BalancedStream, Document, PackedBatch, Step, collate

COST = wlb.CostModel(attention=1e-3, linear=1e-2)
Micro = dict[tuple[int, int], list[Any]]  # (step, micro-batch) -> ids, tokens, labels


class Text:
    """Documents of one file: lazily made, the same every time. Every third one has tokens that are not to be learnt."""

    def __init__(self, number: int, count: int) -> None:
        self.number, self.count = number, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        rng = np.random.default_rng(self.number)
        for number in range(self.count):
            length = rng.integers(1, 20) if rng.random() < 0.85 else rng.integers(30, 90)
            tokens = rng.integers(0, 1000, length).astype(np.uint16)
            labels = np.where(tokens % 3, tokens.astype(np.int64), IGNORE)
            yield {"input_ids": tokens, "labels": labels} if number % 3 == 2 else tokens


class StatefulText(Text):
    """The same, but knows where it stands."""

    def __init__(self, number: int, count: int) -> None:
        super().__init__(number, count)
        self.at = 0
        self.skip = 0

    def __iter__(self) -> Iterator[Any]:
        for self.at, document in enumerate(super().__iter__(), start=1):
            if self.at > self.skip:
                yield document

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["at"]


class Failing(Text):
    def __iter__(self) -> Iterator[Any]:
        for number, document in enumerate(super().__iter__()):
            if number == 12:
                raise OSError("the disk is gone")
            yield document


COUNTS = [40, 7, 0, 55, 23]  # documents of each stream: some end long before others
TEXTS = [Text(number, count) for number, count in enumerate(COUNTS)]


def packer(num_micro_batches: int = 4, oversize: Any = "split", **options: Any) -> wlb.Packer:
    options = {"max_tokens": 96, "max_document_tokens": 64, "outlier_thresholds": (24, 48)} | options
    return wlb.Packer(num_micro_batches=num_micro_batches, cost_model=COST, oversize=oversize, **options)


def stream(texts: Any = TEXTS, *, group: Any = None, **options: Any) -> BalancedStream[PackedBatch]:
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    of = options.pop("packer_", None) or packer()
    return BalancedStream(texts, **{"packer": of, "collate_fn": collate, "group": group, **options})


def contents(step: Step[PackedBatch]) -> Micro:
    return {
        (step.number, index): [batch.document_ids.tolist(), batch.tokens.tolist(), batch.labels.tolist()]
        for index, batch in zip(step.indices.tolist(), step.micro_batches, strict=True)
    }


def read(_rank: int, texts: Any, options: dict[str, Any], state: Any = None) -> tuple[Micro, int, int]:
    """All that this rank trains, the number of its steps, and the tokens that came from others."""
    of = stream(texts, **options)
    if state is not None:
        of.load_state_dict(state)
    steps = list(of)
    assert list(of) == []  # it stays ended
    micro: Micro = {}
    for step in steps:
        micro |= contents(step)
    return micro, len(steps), of.tokens_moved


def together(size: int, texts: Any = TEXTS, state: Any = None, **options: Any) -> Micro:
    parts = processes.run(size, read, texts, options, state)
    assert len({steps for _, steps, _ in parts}) == 1
    result: Micro = {}
    for micro, _, _ in parts:
        assert result.keys().isdisjoint(micro)
        result |= micro
    return result


def alone(texts: Any = TEXTS, **options: Any) -> Micro:
    return read(0, texts, options)[0]


def tokens_of(micro: Micro) -> Counter[int]:
    return Counter(token for _, tokens, _ in micro.values() for token in tokens)


def rows(texts: Any = TEXTS) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels, not shifted, of all documents."""
    documents = [document for text in texts for document in text]
    columns = [
        (document["input_ids"], document["labels"]) if isinstance(document, dict) else (document,) * 2
        for document in documents
    ]
    return [(tokens.tolist(), labels.tolist()) for tokens, labels in columns]


def all_tokens(texts: Any = TEXTS) -> Counter[int]:
    return Counter(token for tokens, _ in rows(texts) for token in tokens)


def test_one_process_reads_everything_once() -> None:
    micro = alone()
    assert tokens_of(micro) == all_tokens()
    # Every token but the first of its document is predicted, if it is to be.
    labels = Counter(label for _, _, labels in micro.values() for label in labels if label >= 0)
    assert labels == Counter(label for _, labels in rows() for label in labels[1:] if label >= 0)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_read_what_one_would(size: int) -> None:
    assert together(size) == alone()


def test_fewer_streams_than_ranks_and_fewer_documents_than_micro_batches() -> None:
    texts = [Text(0, 2)]
    micro = together(4, texts)
    assert micro == alone(texts)
    assert tokens_of(micro) == all_tokens(texts)
    assert any(not tokens for _, tokens, _ in micro.values())


def test_empty_streams_have_no_steps() -> None:
    assert together(2, [Text(0, 0), Text(1, 0)]) == {}


def test_tokens_per_batch_is_kept_on_average() -> None:
    steps = list(stream([Text(0, 3000), Text(1, 3000)], tokens_per_batch=200))
    total = sum(step.packing.num_tokens for step in steps)
    assert total / len(steps) == pytest.approx(200, rel=0.03)


def moving(_rank: int, texts: Any, options: dict[str, Any]) -> tuple[list[int], set[int], int]:
    """The documents that this rank trains, in every step those that wait after it, and the tokens that came."""
    of = stream(texts, **options)
    ids: list[int] = []
    waited: set[int] = set()
    for step in of:
        ids += [id for batch in step.micro_batches for id in batch.document_ids.tolist()]
        waited |= {saved["id"] for saved in step.state["waiting"]}
    return ids, waited, of.tokens_moved


def test_a_document_moves_once() -> None:
    """Every stream read by rank 0 alone: to the other comes what waits, and what it trains at once; to rank 0 nothing.

    Without cuts; a document that waits is not sent again when it is due.
    """
    texts = [Text(0, 60), Text(1, 0)]
    lengths = [len(tokens) for tokens, _ in rows(texts)]
    options = {"packer_": packer(max_document_tokens=96)}
    (_, _, to_reader), (ids, waited, to_other) = processes.run(2, moving, texts, options)
    assert to_reader == 0
    assert waited
    assert set(ids) - waited
    assert to_other == sum(lengths[id] for id in waited.union(ids))


def test_truncated_documents_are_done_with() -> None:
    options = {"packer_": packer(oversize="truncate")}
    expected = Counter(token for tokens, _ in rows() for token in tokens[:64])
    micro = together(2, **options)
    assert tokens_of(micro) == expected
    of = stream(**options)
    assert list(of)
    assert of.state_dict()["waiting"] == []


# --- states ----------------------------------------------------------------------------------------------------------


WAITING: dict[str, Any] = {
    "max_document_tokens": 96,
    "outlier_thresholds": (),
    "release": "adaptive",
    "delay_price": 0.02,
}
EARLY: dict[str, Any] = {"packer_": packer(8, **WAITING), "tokens_per_batch": 200, "max_early": 3}


def states(_rank: int, texts: Any, every: int, options: dict[str, Any]) -> list[tuple[int, str]]:
    of = stream(texts, **options)
    result = [(0, json.dumps(of.state_dict()))]
    for step in of:
        state = json.dumps(of.state_dict())
        if step.number % every == 0:
            result.append((step.number + 1, state))
    return [*result, (step.number + 1, state)]


@pytest.mark.parametrize("kind", [Text, StatefulText])
@pytest.mark.parametrize("options", [{}, EARLY])
def test_resume_on_other_ranks(kind: type[Text], options: dict[str, Any]) -> None:
    """Saved on 2 ranks, all states the same; continued on 1 after any step, on 4 after some."""

    def texts() -> list[Text]:
        return [kind(number, count) for number, count in enumerate(COUNTS)]

    expected = alone(**options)
    assert tokens_of(expected) == all_tokens()
    saved, same = processes.run(2, states, texts(), 2, options)
    assert saved == same
    assert any("taken" in json.loads(state) for _, state in saved) == bool(options)
    for at, state in saved:
        rest = {key: value for key, value in expected.items() if key[0] >= at}
        assert read(0, texts(), options, json.loads(state))[0] == rest
    at, state = saved[len(saved) // 2]
    assert together(4, texts(), json.loads(state), **options) == {
        key: value for key, value in expected.items() if key[0] >= at
    }


@pytest.mark.parametrize("options", [{}, EARLY])
def test_resume_with_other_settings(options: dict[str, Any]) -> None:
    """Other numbers of micro-batches and of tokens, and nothing read ahead any more: every document once."""
    of = stream(**options)
    before: Micro = {}
    waiting = WAITING if options else {}
    for step in of:
        before |= contents(step)
        rest = read(0, TEXTS, {"packer_": packer(2, **waiting), "tokens_per_batch": 100}, of.state_dict())[0]
        assert tokens_of(before) + tokens_of(rest) == all_tokens()


def test_what_is_read_ahead_is_trained_nearer_to_its_turn() -> None:
    """At equal balance, where long documents are rare."""
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(2.4, 1.4, 15_000), 1, 1024).astype(np.int64)
    found = []
    for most in (0, 4):
        points = []
        for price in (0.06, 0.03, 0.016):
            made = packer(
                16,
                max_tokens=1536,
                max_document_tokens=1024,
                outlier_thresholds=(),
                release="adaptive",
                delay_price=price,
            )
            of = stream([[np.zeros(length, np.uint8) for length in lengths]], packer_=made, max_early=most)
            for _ in of:
                pass
            metrics = of.metrics()
            assert (metrics.early_mean > 0) == (most > 0)
            points.append((metrics.imbalance_mean, metrics.delay_mean + metrics.early_mean))
        found.append(sorted(points))
    level = max(points[0][0] for points in found) * 1.001
    moved = [np.interp(level, *zip(*points, strict=True)) for points in found]
    assert moved[1] < 0.9 * moved[0]


def train(rank: int, folder: Path, kill: tuple[int, int, bool]) -> Micro:
    of = stream()
    checkpoint = folder / "checkpoint.json"
    if checkpoint.exists():
        of.load_state_dict(json.loads(checkpoint.read_text()))
    micro: Micro = {}
    for step in of:
        micro |= contents(step)
        (folder / f"{step.number}-{rank}.json").write_text(json.dumps(list(contents(step).items())))
        if kill == (rank, step.number, False):
            os.kill(os.getpid(), signal.SIGKILL)
        state = of.state_dict()
        if rank == 0:
            (folder / "next.json").write_text(json.dumps(state))
            os.replace(folder / "next.json", checkpoint)
        if kill == (rank, step.number, True):
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    return micro


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_killed_and_resumed(size: int, tmp_path: Path) -> None:
    expected = alone()
    chance = random.Random(size)
    kill = (chance.randrange(2), chance.randrange(max(number for number, _ in expected)), bool(size == 4))
    with pytest.raises(processes.RankFailed):
        processes.run(2, train, tmp_path, kill)
    checkpoint = tmp_path / "checkpoint.json"
    resumed_at = json.loads(checkpoint.read_text())["step"] if checkpoint.exists() else 0
    found: Micro = {}
    for path in tmp_path.glob("*-*.json"):
        written = {tuple(key): value for key, value in json.loads(path.read_text())}
        found |= {key: value for key, value in written.items() if key[0] < resumed_at}
    for micro in processes.run(size, train, tmp_path, (-1, -1, False)):
        assert found.keys().isdisjoint(micro)
        found |= micro
    assert found == expected


# --- what goes wrong -------------------------------------------------------------------------------------------------


def failure(_rank: int, texts: Any, options: dict[str, Any]) -> list[str]:
    of = stream(texts, **options)
    saved, messages = [of.state_dict()], []

    def read_all() -> None:
        saved.extend(of.state_dict() for _ in of)

    with pytest.raises(wlb.WlbError) as caught:
        read_all()
    messages.append(str(caught.value))
    with pytest.raises(wlb.WlbError) as caught:
        next(of)
    messages.append(str(caught.value))
    assert of.state_dict() == saved[-1], "what was given stands, and may be saved"
    of.close()
    with pytest.raises(wlb.WlbError, match="closed"):
        next(of)
    assert of.state_dict() == saved[-1]
    return messages


def test_a_failing_stream_fails_all_ranks_with_its_reason() -> None:
    answers = processes.run(4, failure, [Text(0, 50), Failing(1, 50), Text(2, 50)], {})
    assert all(answer == answers[0] for answer in answers)
    first, then = answers[0]
    assert first == "streams failed in step 1 on rank 1: OSError: the disk is gone"
    assert "earlier step" in then


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([1.5], "rank 1: WlbError: streams[1][0] holds float64, not integers"),
        ([], "rank 1: WlbError: streams[1][0] has no tokens"),
        (Document([1], 0), "rank 1: WlbError: streams[1][0] is a Document"),
    ],
)
def test_a_bad_document_fails_all_ranks(document: Any, message: str) -> None:
    answers = processes.run(2, failure, [Text(0, 50), [document]], {})
    assert answers[0] == answers[1]
    assert message in answers[0][0]


def test_a_document_that_is_too_long_fails_all_ranks() -> None:
    answers = processes.run(2, failure, TEXTS, {"packer_": packer(oversize="error")})
    assert answers[0] == answers[1]
    assert "max_document_tokens" in answers[0][0]


def bad_collate(documents: list[Document]) -> PackedBatch:
    if dist.get_rank() == 1:
        raise KeyError("x")
    return collate(documents)


def test_a_collate_fn_that_fails_on_one_rank_fails_all() -> None:
    answers = processes.run(2, failure, TEXTS, {"collate_fn": bad_collate})
    assert answers[0] == answers[1]
    assert answers[0][0] == "step 0 failed on rank 1: KeyError: 'x'"


def test_a_step_is_made_while_the_one_before_is_trained() -> None:
    made = threading.Semaphore(0)

    def slow(documents: list[Document]) -> PackedBatch:
        made.release()
        return collate(documents)

    of = stream(collate_fn=slow)
    next(of)
    state = of.state_dict()
    # Two steps of four micro-batches, one of them not asked for.
    assert all(made.acquire(timeout=500) for _ in range(8))
    assert of.state_dict() == state
    assert of.metrics().steps == 1
    of.close()


def test_who_is_interrupted_while_waiting_goes_on_with_the_same_step() -> None:
    main, interrupted = threading.main_thread().ident or 0, threading.Event()

    def interrupt(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def waits() -> bool:
        """Inside `Condition.wait`, with the lock given back: Python's own locks are not safe from signals elsewhere."""
        frame = sys._current_frames()[main]
        return frame.f_code is threading.Condition.wait.__code__ and "gotit" in frame.f_locals

    def interrupting(documents: list[Document]) -> PackedBatch:
        while not interrupted.wait(0.05):  # a signal that comes just before a thread waits does not wake it
            if waits():
                signal.pthread_kill(main, signal.SIGINT)
        return collate(documents)

    of = stream(collate_fn=interrupting)
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(of)
    finally:
        signal.signal(signal.SIGINT, before)
    micro: Micro = {}
    for step in of:
        micro |= contents(step)
    assert micro == alone()


@pytest.mark.parametrize("steps", [0, 1])
def test_who_is_interrupted_while_a_step_is_asked_for_loses_none_in_silence(steps: int) -> None:
    def interrupt(frame: FrameType, event: str, _: object) -> None:
        """As a signal does that comes before what `submit` returns is kept."""
        if event == "return" and frame.f_code is ThreadPoolExecutor.submit.__code__:
            raise KeyboardInterrupt

    of = stream()
    for _ in range(steps):
        next(of)
    state = of.state_dict()
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(of)
    finally:
        sys.setprofile(None)
    with pytest.raises(wlb.WlbError, match="failed in an earlier step; load a state saved before"):
        next(of)
    assert of.state_dict() == state
    of.close()


def disagree(rank: int) -> str:
    with pytest.raises(wlb.WlbError) as caught:
        next(stream(tokens_per_batch=100 + rank // 2))
    return str(caught.value)


def test_ranks_with_other_settings_are_named() -> None:
    answers = processes.run(4, disagree)
    assert set(answers) == {
        "group has ranks [2, 3] with another packer, tokens_per_batch, min_step_tokens, max_early, number, sizes or "
        "weights of streams or step than rank 0"
    }


def group_of_three(_rank: int) -> str:
    with pytest.raises(wlb.WlbError) as caught:
        stream()
    return str(caught.value)


def test_a_group_that_does_not_divide_is_refused() -> None:
    assert set(processes.run(3, group_of_three)) == {"group has 3 ranks, which do not divide 4 micro-batches"}


def test_bad_arguments_and_states_are_named() -> None:
    used = packer()
    used.push([60])
    with pytest.raises(wlb.WlbError, match="packer holds 1"):
        stream(packer_=used)
    with pytest.raises(wlb.WlbError, match="streams is empty"):
        stream([])
    with pytest.raises(wlb.WlbError, match="tokens_per_batch"):
        stream(tokens_per_batch=0)
    with pytest.raises(wlb.WlbError, match="max_early = 2: needs a packer with release"):
        stream(max_early=2)
    of = stream()
    next(of)
    state = of.state_dict()
    for taken in ([3], [[0, -1]], [[5, 60]], [[0, 1.5]], {}, [[0, 0]]):  # the last: its turn has been
        with pytest.raises(wlb.WlbError, match="'taken'"):
            stream().load_state_dict(seal({**state, "taken": taken}))
    with pytest.raises(wlb.WlbError, match="after 1 steps"):
        of.load_state_dict(state)
    with pytest.raises(wlb.WlbError, match="num_streams = 5"):
        stream(TEXTS[:2]).load_state_dict(state)
    with pytest.raises(wlb.WlbError, match="max_tokens"):
        stream(packer_=packer(max_tokens=100)).load_state_dict(state)
    untouched = stream()
    with pytest.raises(wlb.WlbError, match="no 'waiting'"):
        untouched.load_state_dict(seal({name: value for name, value in state.items() if name != "waiting"}))
    assert untouched.state_dict() == stream().state_dict()
    with pytest.raises(wlb.WlbError, match="ends after 0 documents"):
        list(stream_loaded([Text(number, 0) for number in range(5)], state))


def stream_loaded(texts: Any, state: Any) -> BalancedStream[PackedBatch]:
    of = stream(texts)
    of.load_state_dict(state)
    return of
