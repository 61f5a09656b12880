"""Steps of balanced work from streams of documents that no index describes."""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final, Generic, TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

import wlb
from wlb._errors import error
from wlb.torch.data.documents import Document, as_arrays, cut
from wlb.torch.data.packer import StepPacker
from wlb.torch.data.peers import Peers, told
from wlb.torch.data.sampler import batch_tokens
from wlb.torch.data.state import field, same
from wlb.torch.data.step import Step
from wlb.torch.data.thread import Made, StepsAhead

FORMAT: Final = "wlb.balanced_stream"
VERSION: Final = 1
_END = object()

T = TypeVar("T")


class BalancedStream(Generic[T]):
    """An iterator of steps over streams of documents, read by the ranks of a data-parallel group together.

    In every step each rank reads its streams, the lengths are gathered, every rank makes the same plan, and only the
    documents that another rank trains move there, once, when they are due; those that the packer holds back stay where
    they were read. When a stream ends the others fill its share; after the last, what waits is drained.

    What a step reads depends on the streams, not on the ranks: with the same streams, 2 ranks and 4 train the same
    micro-batches. For that take more streams than ranks (files, say).

    A thread reads, plans, moves and collates a step while the one before is trained, over a process group of its own.
    It belongs in the main process, not in a loader's workers. A stream may itself be a loader with workers, but it may
    not wait for what the step in training produces.

    Args:
        streams: Iterables of documents (as `collate` takes them, without `Document`), the same number of them in the
            same order on every rank. Rank r reads `streams[r::dp_size]` and does not touch the others. One with
            `state_dict` and `load_state_dict` restores itself; of others the documents already read are skipped.
        packer: Gives the configuration; it stays as it is. `packer.num_micro_batches` is that of the whole step.
        collate_fn: Makes a micro-batch of its documents: `functools.partial(collate, ...)`. Their ids are running
            numbers in the order read.
        group: The data-parallel group; its size divides `packer.num_micro_batches`. None: one process.
        tokens_per_batch: Tokens read in a step, on average, by all ranks together. By default
            `num_micro_batches * max_document_tokens`.
        timeout: Of what the threads exchange: longer than a rank may be behind the others. By default that of gloo.

    Attributes:
        tokens_moved: Tokens that came to this rank from others so far.

    Raises:
        wlb.WlbError: An argument makes no sense.

    With a group, making one is a collective of the whole world: every rank makes its own at the same point. Close it
    before the process groups are destroyed.
    """

    def __init__(
        self,
        streams: Sequence[Iterable[Any]],
        *,
        packer: wlb.Packer,
        collate_fn: Callable[[list[Document]], T],
        group: dist.ProcessGroup | None = None,
        tokens_per_batch: int | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self._peers = Peers(group, timeout=timeout, description="balanced_stream")
        self._rank, self._size = self._peers.rank, self._peers.size
        if packer.num_micro_batches % self._size:
            message = f"has {self._size} ranks, which do not divide {packer.num_micro_batches} micro-batches"
            raise error("group", message, value=self._size)
        if not streams:
            raise error("streams", "is empty")
        if packer.pending:
            raise error("packer", f"holds {packer.pending} documents; give one that is new", value=packer.pending)
        self._tokens_per_batch = batch_tokens(packer, tokens_per_batch)
        self._config = packer
        config = packer.state_dict()["config"]
        self._longest = packer.max_document_tokens if config["oversize"] == "truncate" else None
        self._collate = collate_fn
        self._streams = [_Stream(stream) for stream in streams]
        self._packer = StepPacker(packer)
        self._waiting: dict[int, _Waiting] = {}
        self._next_id = 0
        self._number = 0  # of the step that is made next
        make = self._peers.making(self._make, lambda: self._number)
        self._steps = StepsAhead(make, self._standing(), name="wlb-balanced-stream", argument="streams")
        self.tokens_moved = 0

    def __iter__(self) -> Iterator[Step[T]]:
        """Itself: a loop that was left goes on in the next one."""
        return self

    def __next__(self) -> Step[T]:
        """The next step. A collective, but it only waits for what the ranks' threads do; all have as many.

        Raises:
            wlb.WlbError: A stream or `collate_fn` failed on some rank (all ranks say which, and why), ranks have
                different configurations, or the packer refuses a document. Or it is closed.
            PeerFailed: A rank ended, or hangs for longer than the timeout.
        """
        step = self._steps.take()
        if step is None:
            raise StopIteration
        return step

    def metrics(self) -> wlb.PackerMetrics:
        """Balance and delay, up to the last step given."""
        return self._steps.standing.metrics

    def state_dict(self) -> dict[str, Any]:
        """Where the next step begins, with the tokens of documents that wait; the same on every rank.

        It stands after the last step given, whatever was read ahead, also where what follows has failed. A collective:
        all ranks of the group call it, after as many steps. Plain JSON values, but for what streams save of themselves.

        Raises:
            wlb.WlbError: It is closed.
        """
        standing = self._steps.standing
        mine = {
            "streams": standing.streams,
            "waiting": {
                id: {"tokens": _text(waiting.document.tokens), "labels": _text(waiting.document.labels)}
                for id, waiting in standing.waiting.items()
                if waiting.document is not None
            },
        }
        parts = self._steps.after(lambda: self._peers.gather(mine))
        streams = {number: state for part in parts for number, state in part["streams"].items()}
        texts = {id: saved for part in parts for id, saved in part["waiting"].items()}
        return {
            "format": FORMAT,
            "version": VERSION,
            "num_streams": len(self._streams),
            "step": standing.number,
            "next_id": standing.next_id,
            "streams": [streams[number] for number in range(len(self._streams))],
            "waiting": [
                {"id": id, "stream": waiting.stream, "left": waiting.left, **texts[id]}
                for id, waiting in standing.waiting.items()
            ],
            **standing.packer,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow_config_change: bool = False) -> None:
        """Goes on where the saved one stood, on any number of ranks. No communication; before the first step.

        Raises:
            wlb.WlbError: The state is of another number of streams or another packer configuration, or was not saved
                here.
        """
        if self._steps.begun:
            number = self._steps.standing.number
            raise error("state", f"is loaded after {number} steps; load it into a new stream", value=number)
        same(state, {"format": FORMAT, "version": VERSION}, "this version of wlb")
        same(state, {"num_streams": len(self._streams)}, "this one")
        packer = StepPacker(self._config)
        packer.load_state_dict(state, allow_config_change=allow_config_change)
        saved_streams = zip(self._streams, field(state, "streams", list), strict=True)
        streams = [stream.restored(saved) for stream, saved in saved_streams]
        waiting = {}
        for saved in field(state, "waiting", list):
            number = field(saved, "stream", int)
            id, tokens, labels = field(saved, "id", int), _tokens(field(saved, "tokens", str)), None
            if field(saved, "labels", object) is not None:
                labels = _tokens(field(saved, "labels", str))
            kept = Document(tokens, id, labels=labels) if number % self._size == self._rank else None
            waiting[id] = _Waiting(number, tokens.size, labels is not None, field(saved, "left", int), kept)
        self._number, self._next_id = field(state, "step", int), field(state, "next_id", int)
        self._packer, self._streams, self._waiting = packer, streams, waiting
        self._steps.standing = self._standing()

    def close(self) -> None:
        """Waits for what the thread does with the other ranks, and destroys its process group."""
        if self._steps.close():
            self._peers.close()

    # In the thread.

    def _standing(self) -> _Standing:
        streams = {number: stream.state_dict() for number, stream in self._own_streams()}
        packer, metrics = self._packer.state_dict(), self._packer.metrics()
        return _Standing(self._number, self._next_id, streams, dict(self._waiting), packer, metrics)

    def _make(self) -> Made[Step[T], _Standing]:
        packing = self._plan()
        if packing is None:
            return self._peers.finished(lambda: Made(None, self._standing()))
        deal = packing.deal(self._size)
        documents = self._exchange(packing, deal)

        def finish() -> Made[Step[T], _Standing]:
            micro_batches = [self._collate(part) for part in documents]
            step = Step(self._number, 0, packing, deal[self._rank], micro_batches)
            self._number += 1
            return Made(step, self._standing())

        return self._peers.finished(finish)

    def _own_streams(self) -> list[tuple[int, _Stream]]:
        return list(enumerate(self._streams))[self._rank :: self._size]

    def _plan(self) -> wlb.Packing | None:
        """The plan of the next step; None after the last."""
        if self._packer.carried_tokens >= self._tokens_per_batch:
            return self._packer.push([], [])  # as `Planner.next_step`: first what is carried over
        while not all(stream.ended for stream in self._streams):
            new = self._read()
            if new:
                lengths, ids = [waiting.length for waiting in new], np.arange(self._next_id, self._next_id + len(new))
                packing = self._packer.push(lengths, ids)
                self._waiting.update(zip(ids.tolist(), new, strict=True))
                self._next_id += len(new)
                return packing
        return self._packer.drain() if self._packer.pending else None

    def _read(self) -> list[_Waiting]:
        """New documents of all streams, with the tokens of those read here."""
        live = sum(not stream.ended for stream in self._streams)
        share = max(1, self._tokens_per_batch // live)
        read: dict[int, list[Document]] = {}
        failure: BaseException | None = None
        try:
            for number, stream in self._own_streams():
                read[number] = stream.read(share, number)
        except BaseException as cause:  # whatever it is, the other ranks wait for an answer
            failure = cause
        parts = self._peers.gather(
            {
                "failure": told(failure),
                "agreement": (
                    self._config.fingerprint,
                    self._config.num_micro_batches,
                    self._tokens_per_batch,
                    len(self._streams),
                    self._number,
                ),
                "documents": {
                    number: [(document.tokens.size, document.labels is not None) for document in documents]
                    for number, documents in read.items()
                },
                "ended": {number: stream.ended for number, stream in self._own_streams()},
            }
        )
        what = "packer, tokens_per_batch, number of streams or step"
        self._peers.agree(parts, failure, argument="streams", what=what)

        new = []
        for number, stream in enumerate(self._streams):
            part = parts[number % self._size]
            stream.ended = part["ended"][number]
            for at, (length, labelled) in enumerate(part["documents"][number]):
                left = length if self._longest is None else min(length, self._longest)
                new.append(_Waiting(number, length, labelled, left, read[number][at] if number in read else None))
        return new

    def _exchange(self, packing: wlb.Packing, deal: NDArray[np.int64]) -> list[list[Document]]:
        """The documents of this rank's micro-batches, fetched from where they were read."""
        incoming: list[list[int]] = [[] for _ in range(self._size)]  # sizes, by source
        outgoing: list[list[NDArray[Any]]] = [[] for _ in range(self._size)]  # tokens (and labels), by destination
        expected: list[list[Document | _Coming]] = []
        for destination, index in ((rank, index) for rank, row in enumerate(deal.tolist()) for index in row):
            part = packing[index]
            rows = zip(part.document_ids.tolist(), part.starts.tolist(), part.lengths.tolist(), strict=True)
            here: list[Document | _Coming] = []
            for id, start, length in rows:
                waiting = self._waiting.pop(id)
                if waiting.left > length:
                    self._waiting[id] = replace(waiting, left=waiting.left - length)
                source = waiting.stream % self._size
                # What follows goes with a piece: its last token predicts that.
                size = min(length + 1, waiting.length - start)
                if (document := waiting.document) is not None:
                    if destination == self._rank:
                        here.append(cut(replace(document, id=id), start, length))
                    else:
                        for row in (document.tokens, document.labels):
                            if row is not None:
                                outgoing[destination].append(row[start : start + size])
                elif destination == self._rank:
                    incoming[source] += [size] * (1 + waiting.labelled)
                    self.tokens_moved += size
                    here.append(_Coming(source, id, start, length, waiting.labelled))
            if destination == self._rank:
                expected.append(here)
        arrived = self._peers.all_to_all(outgoing, incoming)
        return [
            [row if isinstance(row, Document) else row.received(arrived[row.source]) for row in here]
            for here in expected
        ]


@dataclass(frozen=True, eq=False)
class _Standing:
    """Where the stream stands: what a state holds.

    Attributes:
        number: Steps so far.
        next_id: Documents read so far, on all ranks.
        streams: The states of those that this rank reads.
        waiting: Documents that wait, by id.
        packer: The packer's state.
        metrics: The packer's.
    """

    number: int
    next_id: int
    streams: dict[int, dict[str, Any]]
    waiting: dict[int, _Waiting]
    packer: dict[str, Any]
    metrics: wlb.PackerMetrics


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A document that was read and not yet trained, or not all of it.

    Attributes:
        stream: Where it was read.
        length: All its tokens.
        labelled: Whether it brings labels.
        left: Tokens that the plan has not yet given out.
        document: Of arrays, under any name; on the rank that reads the stream.
    """

    stream: int
    length: int
    labelled: bool
    left: int
    document: Document | None


@dataclass(frozen=True)
class _Coming:
    """A piece that another rank sends."""

    source: int
    id: int
    start: int
    length: int
    labelled: bool

    def received(self, arrived: Iterator[NDArray[np.int64]]) -> Document:
        tokens = next(arrived)
        sent = Document(tokens, self.id, self.start, labels=next(arrived) if self.labelled else None)
        return cut(sent, 0, self.length)


class _Stream:
    """One stream and how far it was read. Not opened before it is read."""

    def __init__(self, documents: Iterable[Any]) -> None:
        self._documents: Any = documents
        self._iterator: Iterator[Any] | None = None
        self._read = 0  # documents so far
        self._credit = 0  # tokens that it may still give, below 0 if the last document was longer than its share
        self._saved: Any = None
        self.ended = False

    def read(self, tokens: int, number: int) -> list[Document]:
        """Documents until its share is used up; a long one is paid for in the steps after."""
        if self.ended:
            return []
        if self._iterator is None:
            self._iterator = self._open()
        self._credit += tokens
        documents = []
        while self._credit > 0:
            document = next(self._iterator, _END)
            if document is _END:
                self.ended = True
                break
            if isinstance(document, Document):
                raise error(f"streams[{number}]", "is a Document: give what it is made of", index=self._read)
            documents.append(as_arrays(document, self._read, f"streams[{number}]"))
            self._read += 1
            self._credit -= documents[-1].tokens.size
        return documents

    def state_dict(self) -> dict[str, Any]:
        own = self._saved
        if self._iterator is not None and all(hasattr(self._documents, f"{verb}state_dict") for verb in ("", "load_")):
            own = copy.deepcopy(self._documents.state_dict())
        return {"read": self._read, "credit": self._credit, "ended": self.ended, "own": own}

    def restored(self, state: Mapping[str, Any]) -> _Stream:
        """The same stream where the state was saved."""
        result = _Stream(self._documents)
        result._read, result._credit = field(state, "read", int), field(state, "credit", int)
        result.ended, result._saved = field(state, "ended", bool), field(state, "own", object)
        return result

    def _open(self) -> Iterator[Any]:
        if self._saved is not None:
            self._documents.load_state_dict(self._saved)
        iterator: Iterator[Any] = iter(self._documents)
        if self._saved is not None:
            return iterator
        for already in range(self._read):
            if next(iterator, _END) is _END:
                raise ValueError(f"ends after {already} documents, {self._read} were read before")
        return iterator


def _text(numbers: NDArray[Any] | None) -> str | None:
    return None if numbers is None else base64.b64encode(numbers.astype("<i8").tobytes()).decode()


def _tokens(text: str) -> NDArray[np.int64]:
    return np.frombuffer(base64.b64decode(text), "<i8").astype(np.int64)
