"""Steps of balanced work from streams of documents without an index."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Generic, TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

import wlb
from wlb._errors import error
from wlb._seal import check_seal
from wlb.ledger import waiting_pieces
from wlb.reading.columns import layout_of
from wlb.reading.documents import Document
from wlb.reading.filling import next_packing
from wlb.reading.given_costs import check_given
from wlb.reading.one_stream import OneStream, ReadDocument, content_with, costs_of, restores_itself
from wlb.reading.rows import RowReader
from wlb.reading.sizes import batch_tokens, check_max_early, check_ranks, least_tokens, warn_of_long
from wlb.reading.split_prompts import SplitPrompts
from wlb.reading.state import Progress, SavedChain, Snapshot, check_outside, field, outside, read_outside, same
from wlb.reading.waiting import Early, Outside, ReadBatch, Waiting
from wlb.torch.data.content import HEADS, warn_of_equal_streams
from wlb.torch.data.peers import Peers, failure_text
from wlb.torch.data.shares import Shares
from wlb.torch.data.step import Step, check_batch
from wlb.torch.data.thread import Position, PreparedStep, StepIterator, StepsAhead

FORMAT: Final = "wlb.balanced_stream"
VERSION: Final = 4

T = TypeVar("T")


class BalancedStream(StepIterator[Step[T]], Generic[T]):
    """An iterator of steps over streams of documents, read by the ranks of a data-parallel group together.

    In every step each rank reads its streams, lengths are gathered, every rank makes the same plan, and documents move
    to the ranks that train them. Documents that the packer holds back go to all ranks once and are there when they are
    due, so each rank knows everything that is in a state. Each stream gives its share of a step (`weights`). When a
    stream ends, the others fill its share; after the last one, waiting documents are trained.

    The documents of a step depend on the streams, not on the ranks: with the same streams, 2 ranks and 4 train the same
    micro-batches. So use more streams than ranks, such as files.

    Memory is bounded for any documents: only admitted documents enter the packer, so that at most
    `packer.bounds().tokens` wait in it; nothing is read before the last global batch has entered, except `max_early`
    further ones; and a stream reads at most one document beyond its share.

    **State.** Each step has the state to save once it is trained (`Step.state`), whatever was read since. It is the
    same on every rank, and each rank may read it alone, without communication. It has the position of every stream, and
    the documents that wait with their tokens, in the smallest integer type.

    A thread reads, plans, moves and collates a step while the one before is trained, over a process group of its own.
    Use it in the main process, not in a loader's workers. A stream may itself be a loader with workers, but it may not
    wait for results of the running step.

    Args:
        streams: iterables of documents (as `collate` takes them, but no `Document`), equally many in the same order on
            every rank. Rank r reads `streams[r::dp_size]` and does not touch the others. A stream with `state_dict` and
            `load_state_dict` restores itself; for others, documents already read are skipped.
        weights: float [streams], the share of each stream in the tokens of a step, in any unit. By default shares
            follow the sizes: the documents that are left (`len(stream)`) times the mean length of those read, so that
            all streams end together; shards of one data set (`streams_of`) have equal shares. Streams without `len`
            need weights.
        packer: gives the configuration; it is not changed. `packer.num_micro_batches` is that of the whole step.
        collate_fn: makes a micro-batch of its documents: `functools.partial(collate, ...)`. Their ids are running
            numbers in the order read.
        group: the data-parallel group; its size divides `packer.num_micro_batches`, and is the packer's `dp_size`, if
            that has one. None: one process.
        tokens_per_batch: tokens that all ranks together read in a step, on average. By default the packer's, as for
            `BalancedBatchSampler`.
        min_step_tokens: least tokens of a step: if its documents wait for others, more are read first. By default a
            tenth of `tokens_per_batch`; at most a third of `num_micro_batches * max_tokens`. Only the steps after the
            end of all streams may be smaller, and steps of a single micro-batch, if a short document and one of
            `max_tokens` do not fit into it together.
        max_early: iterations that a document may be trained before its turn, for a packer with release="adaptive" and a
            cost model, as for `BalancedBatchSampler`. That many further global batches are read ahead. The ranks that
            read them keep their tokens, and no state has them: after a resume they are read again, except those that
            were trained or wait.
        costs: costs of documents, if the packer was made with `cost_columns`: a function of what the stream yields,
            such as `lambda row: [encoder(row["patches"]), language(len(row["input_ids"]))]`, that returns a float or
            floats. Called once, in the thread of the rank that reads it; the others are told. A piece of a document has
            the share of its tokens. Waiting documents keep their costs, in states too.
        columns: names of further columns of rows to carry (`wlb.torch.RowReader` says which are always carried).
        labels_ahead: how many tokens ahead every token predicts (`collate`).

    Attributes:
        tokens_moved: tokens that this rank received from others so far.

    Raises:
        wlb.WlbError: an argument is invalid.

    With a group, its ranks make their streams together. Close it before the process groups are destroyed.
    """

    def __init__(
        self,
        streams: Sequence[Iterable[Any]],
        *,
        packer: wlb.Packer,
        collate_fn: Callable[[list[Document]], T],
        weights: Sequence[float] | None = None,
        group: dist.ProcessGroup | None = None,
        tokens_per_batch: int | None = None,
        min_step_tokens: int | None = None,
        max_early: int = 0,
        costs: Callable[[Any], Any] | None = None,
        columns: Sequence[str] = (),
        labels_ahead: int = 1,
    ) -> None:
        reader = RowReader(columns, labels_ahead)
        check_given(costs, packer)
        check_max_early(max_early, packer)
        if costs is not None and not callable(costs):
            raise error("costs", 'is not a function of a document: lambda row: row["costs"], say', value=costs)
        self._peers = Peers(group, description="balanced_stream")
        self._rank, self._size = self._peers.rank, self._peers.size
        if packer.num_micro_batches % self._size:
            message = f"has {self._size} ranks, which do not divide {packer.num_micro_batches} micro-batches"
            raise error("group", message, value=self._size)
        check_ranks(packer, self._size, "group")
        if not streams:
            raise error("streams", "is empty")
        for stream in streams:
            restores_itself(stream)  # raises if it cannot
        self._shares = Shares(streams, weights)
        if packer.pending:
            raise error("packer", f"holds {packer.pending} documents; give one that is new", value=packer.pending)
        self._tokens_per_batch = batch_tokens(packer, tokens_per_batch)
        self._config = packer
        self._min_step_tokens = least_tokens(packer, self._tokens_per_batch, min_step_tokens)
        self._max_early = max_early
        self._longest = packer.max_document_tokens if packer.oversize == "truncate" else None
        self._collate = collate_fn
        cost_columns = packer.cost_columns or 0
        of_document = None if costs is None else partial(costs_of, costs, cost_columns)
        split = SplitPrompts(packer)
        self._streams = [OneStream(stream, self._longest, of_document, reader, split) for stream in streams]
        self._packer = packer.empty_copy()
        self._waiting: dict[int, Waiting] = {}
        self._cursors = [stream.state_dict() for stream in self._streams]  # states behind the last turn
        self._ahead: deque[ReadBatch] = deque()  # documents that were read beyond these states
        self._taken: set[tuple[int, int]] = set()  # of these, documents that have entered: (stream, document)
        self._warned = False  # whether a document longer than a global batch was reported
        self._heads: dict[int, list[str]] = {}  # hashes of the first documents of each stream that was read from there
        self._warned_of_equal = False
        self._chain = SavedChain()
        self._next_id = 0
        self._number = 0  # of the step that is made next
        self._latest = self._position()  # after the step that was made last
        self._steps = StepsAhead(self._make, self._latest, name="wlb-balanced-stream", argument="streams")
        self.tokens_moved = 0

    def __next__(self) -> Step[T]:
        """The next step. All ranks call this, equally often, and each only waits for the threads of all ranks.

        Raises:
            wlb.WlbError: a stream or `collate_fn` failed on some rank (all ranks say which, and why), ranks have
                different configurations, or the packer refuses a document. Or it is closed.
            RuntimeError: a rank has ended, or is later than the timeout.
        """
        step = self._steps.take()
        if step is None:
            raise StopIteration
        return step

    @property
    def num_micro_batches_per_rank(self) -> int:
        """Micro-batches of a rank in every step."""
        return self._config.num_micro_batches // self._size

    def describe(self) -> dict[str, Any]:
        """Description of the documents for a ledger: plain JSON values. The number of documents is not known."""
        return {"documents": None, "tokens": None, "fingerprint": None, "longest": self._longest, "num_epochs": None}

    def metrics(self) -> wlb.PackerMetrics:
        """Balance and delay, up to the last step given."""
        metrics = self._steps.position.metrics
        assert metrics is not None
        return metrics

    @property
    def packer(self) -> wlb.Packer:
        """A packer with the configuration, without documents."""
        return self._config

    def load_state_dict(self, state: Mapping[str, Any], *, allow_config_change: bool = False) -> None:
        """Resumes after the step of the state, on any number of ranks. Call it before the first step.

        Raises:
            wlb.WlbError: the state was changed after it was saved, or is of another number of streams or another packer
                configuration, or was not saved here.
        """
        if self._steps.begun:
            number = self._steps.position.number
            raise error("state", f"is loaded after {number} steps; load it into a new stream", value=number)
        same(state, {"format": FORMAT, "version": VERSION}, "this version of wlb")
        check_seal(state)
        same(state, {"num_streams": len(self._streams)}, "this one")
        packer = self._config.empty_copy()
        packer.load_state_dict(field(state, "packer", dict), allow_config_change=allow_config_change)
        saved_streams = zip(self._streams, field(state, "streams", list), strict=True)
        streams = [stream.restored(saved) for stream, saved in saved_streams]
        saved_documents = field(state, "waiting", list)
        check_outside(read_outside(state), self._config)
        rest = {id: (start, length) for id, start, length in read_outside(state)}
        waiting = {}
        for saved in saved_documents:
            id = field(saved, "id", int)
            waiting[id] = Waiting.of(saved, len(streams), rest.get(id), self._config.cost_columns or 0)
        taken = _taken(state)
        number, next_id, chain = field(state, "step", int), field(state, "next_id", int), SavedChain.of(state)
        if len(waiting) != len(saved_documents) or max(waiting, default=-1) >= next_id:
            raise error("state", f"has a document that waits twice, or one beyond 'next_id' = {next_id}", value=next_id)
        pieces = waiting_pieces({"packer": packer.state_dict(), "outside": state["outside"]})
        left: dict[int, int] = defaultdict(int)
        for id, length in zip(pieces.ids.tolist(), pieces.lengths.tolist(), strict=True):
            left[id] += length
        if left != {id: document.left for id, document in waiting.items()}:
            raise error("state", "has other documents in 'waiting' than in 'packer' and 'outside'")
        self._number, self._next_id, self._chain = number, next_id, chain
        self._packer, self._streams, self._waiting = packer, streams, waiting
        self._cursors, self._taken = [stream.state_dict() for stream in streams], taken
        self._ahead.clear()
        self._steps.position = self._latest = self._position()

    # In the thread.

    def _position(self) -> Position:
        waiting = dict(self._waiting)
        unentered = [id for id, document in sorted(waiting.items()) if document.rest]
        known: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "num_streams": len(self._streams),
            "step": self._number,
            "next_id": self._next_id,
            "streams": self._cursors,
            **({"taken": [list(taken) for taken in sorted(self._taken)]} if self._taken else {}),
            "waiting": [
                {
                    "id": id,
                    "stream": document.stream,
                    "left": document.left,
                    **({"costs": list(document.costs)} if document.costs else {}),
                    **(document.hashes or {}),
                }
                for id, document in waiting.items()
            ],
            "packer": self._packer.state_dict(),
            "outside": outside(
                unentered, (waiting[id].entered for id in unentered), (waiting[id].rest for id in unentered)
            ),
        }
        known = self._chain.sealed(known)

        def write() -> dict[str, Any]:
            state = copy.deepcopy(known)
            for record, document in zip(state["waiting"], waiting.values(), strict=True):
                record.update(document.texts())
            return state

        snapshot = Snapshot(known, Progress.of(self._next_id, known), write)
        return Position(self._number, snapshot, SavedChain.after(known), self._packer.metrics())

    def _make(self) -> PreparedStep[Step[T], Position]:
        packing = self._plan()
        if packing is None:
            return PreparedStep(None, self._latest)
        deal = packing.deal(self._size)
        documents = self._exchange(packing, deal)

        def finish() -> PreparedStep[Step[T], Position]:
            micro_batches = [self._collate(part) for part in documents]
            padded = packing.padded_tokens
            for index, batch in zip(deal[self._rank].tolist(), micro_batches, strict=True):
                planned = packing[index]
                most = self._packer.max_documents
                check_batch(batch, planned, int(padded[index]), most, planned.document_ids, "collate_fn")
            number = self._number
            self._number, self._chain = number + 1, self._latest.chain
            self._latest = self._position()
            step = Step(number, 0, packing, deal[self._rank], micro_batches, snapshot=self._latest.snapshot)
            return PreparedStep(step, self._latest)

        return self._peers.finished(finish, step=self._number)

    def _own_streams(self) -> list[tuple[int, OneStream]]:
        return list(enumerate(self._streams))[self._rank :: self._size]

    def _plan(self) -> wlb.Packing | None:
        """The plan of the next step; None after the last."""
        unentered = Outside(self._waiting, self._packer, self._read, self._early, self._take)
        if unentered.tokens < self._tokens_per_batch:
            unentered.read()
        if not unentered.ids:
            return self._packer.drain() if self._packer.pending else None
        self._packer, packing = next_packing(self._packer, unentered, min_step_tokens=self._min_step_tokens)
        return packing

    def _read(self) -> dict[int, Waiting] | None:
        """The documents of all streams whose turn is now; None if all have ended.

        They wait from now on, except those that entered before their turn.
        """
        batch = self._ahead.popleft() if self._ahead else self._fetch()
        if batch is None:
            return None
        self._cursors = batch.cursors
        documents = [each for place, each in batch.documents.items() if place not in self._taken]
        self._taken.difference_update(batch.documents)
        new = dict(enumerate(documents, self._next_id))
        self._next_id += len(new)
        for id, document in new.items():
            if self._config.oversize == "split" and not self._warned:
                self._warned = document.length > self._tokens_per_batch
                name = f"document {id} (of streams[{document.stream}])"
                warn_of_long(name, document.length, self._tokens_per_batch)
        self._waiting.update(new)
        return new

    def _early(self, due: list[int]) -> list[Early]:
        """Documents that may enter before their turn, besides the `due` ones, as early as the packer says.

        At least a step is left at the end of all streams.
        """
        while len(self._ahead) < self._max_early:
            batch = self._fetch()
            if batch is None:
                break
            self._ahead.append(batch)
        ahead = [
            (place, document, iterations)
            for iterations, batch in enumerate(self._ahead, start=1)
            for place, document in batch.documents.items()
        ]
        if not ahead:
            return []
        longest = self._packer.max_document_tokens
        most = [
            -1 if place in self._taken else self._max_early if document.left <= longest else 0
            for place, document, _ in ahead
        ]
        _, offered, first, _ = self._packer.offered(
            [*due, *(document.left for _, document, _ in ahead)],
            most_early=[0] * len(due) + most,
            steps=[0] * len(due) + [iterations for *_, iterations in ahead],
            tokens_per_batch=self._tokens_per_batch,
            min_step_tokens=self._min_step_tokens,
            to_the_end=all(stream.ended for stream in self._streams),
        )
        comes = (ahead[at - len(due)] for at in offered[first:].tolist())
        return [Early(id, *each) for id, each in enumerate(comes, self._next_id)]

    def _take(self, early: list[Early]) -> None:
        """Marks documents that entered before their turn."""
        for each in early:
            length = each.document.left
            self._waiting[each.id] = replace(each.document, entered=length, rest=0)
            self._taken.add(each.place)
        self._next_id += len(early)

    def _fetch(self) -> ReadBatch | None:
        """A global batch of documents of all streams, with the tokens of those read here; None if all have ended.

        All ranks know its lengths, and the positions of all streams after it.
        """
        if all(stream.ended for stream in self._streams):
            return None
        shares = self._shares.tokens(self._streams, self._tokens_per_batch)
        first = [stream.state_dict()["read"] for stream in self._streams]
        read: dict[int, list[ReadDocument]] = {}
        states: dict[int, dict[str, Any]] = {}
        failure: BaseException | None = None
        try:
            for number, stream in self._own_streams():
                read[number] = stream.read(shares[number], f"streams[{number}]")
            states = {number: stream.state_dict() for number, stream in self._own_streams()}
        except BaseException as cause:  # of any kind: the other ranks wait for an answer
            failure = cause
        parts = self._peers.gather(
            {
                "failure": failure_text(failure),
                "agreement": (
                    self._config.fingerprint,
                    self._config.num_micro_batches,
                    self._tokens_per_batch,
                    self._min_step_tokens,
                    self._max_early,
                    len(self._streams),
                    self._shares.weights,
                    self._shares.sizes,
                    self._number,
                ),
                "documents": {
                    number: [
                        (
                            each.document.tokens.size,
                            each.document.labels is not None,
                            each.costs,
                            layout_of(each.document),
                        )
                        for each in all
                    ]
                    for number, all in read.items()
                },
                "streams": states,
                "heads": self._new_heads(read, first),
            }
        )
        what = "packer, tokens_per_batch, min_step_tokens, max_early, number, sizes or weights of streams or step"
        self._peers.agree(parts, failure, step=self._number, argument="streams", what=what)

        for number, heads in (each for part in parts for each in part["heads"].items()):
            self._heads.setdefault(number, []).extend(heads)
        if not self._warned_of_equal and any(part["heads"] for part in parts):
            self._warned_of_equal = warn_of_equal_streams(self._heads)
        documents = {}
        for number, stream in enumerate(self._streams):
            part = parts[number % self._size]
            stream.stands(part["streams"][number])
            for at, (length, has_labels, costs, layout) in enumerate(part["documents"][number]):
                left = length if self._longest is None else min(length, self._longest)
                document = read[number][at].document if number in read else None
                waiting = Waiting(number, length, has_labels, left, left, 0, document, None, costs, layout)
                documents[number, first[number] + at] = waiting
        return ReadBatch(documents, [stream.state_dict() for stream in self._streams])

    def _new_heads(self, read: Mapping[int, list[ReadDocument]], first: list[int]) -> dict[int, list[str]]:
        """Hashes of documents with which streams begin that are read here, as far as they are not known."""
        found = {}
        for number, documents in read.items():
            known = self._heads.get(number, [] if first[number] == 0 else None)  # None: it was resumed further on
            if documents and known is not None and len(known) < HEADS:
                found[number] = [content_with("", each.document) for each in documents[: HEADS - len(known)]]
        return found

    def _exchange(self, packing: wlb.Packing, deal: NDArray[np.int64]) -> list[list[Document]]:
        """The documents of this rank's micro-batches. Documents read for this step that still wait go to all ranks."""
        before = dict(self._waiting)
        for id, length in (
            (id, length) for part in packing for id, length in zip(*_ids_and_lengths(part), strict=True)
        ):
            waiting = self._waiting.pop(id)
            if waiting.left > length:
                self._waiting[id] = replace(waiting, left=waiting.left - length)
        incoming: list[list[int]] = [[] for _ in range(self._size)]  # sizes, by source
        outgoing: list[list[NDArray[Any]]] = [[] for _ in range(self._size)]  # of documents or pieces, by destination

        staying = sorted(id for id, waiting in self._waiting.items() if waiting.hashes is None)
        for id in staying:
            waiting = self._waiting[id]
            if waiting.document is None:
                incoming[waiting.stream % self._size].append(waiting.length * waiting.width)
                self.tokens_moved += waiting.length
            else:
                for destination in range(self._size):
                    if destination != self._rank:
                        outgoing[destination].append(waiting.sent())

        everywhere = {id for id, waiting in before.items() if waiting.hashes is not None}.union(staying)
        expected: list[list[tuple[int, int, int]]] = []  # id, start, length of each piece
        for destination, index in ((rank, index) for rank, row in enumerate(deal.tolist()) for index in row):
            part = packing[index]
            pieces = list(zip(part.document_ids.tolist(), part.starts.tolist(), part.lengths.tolist(), strict=True))
            if destination == self._rank:
                expected.append(pieces)
            for id, start, length in pieces:
                waiting = before[id]
                if id in everywhere or waiting.stream % self._size == destination:
                    continue
                # The next token goes with a piece, because the last token of the piece predicts it.
                size = min(length + 1, waiting.length - start)
                if waiting.document is not None:
                    outgoing[destination].append(waiting.sent(start, size))
                elif destination == self._rank:
                    incoming[waiting.stream % self._size].append(size * waiting.width)
                    self.tokens_moved += size

        arrived = self._peers.all_to_all(outgoing, incoming)
        for id in staying:
            waiting = self._waiting[id]
            document = waiting.document or waiting.received(arrived)
            self._waiting[id] = before[id] = waiting.kept(document)
        return [[before[id].piece(id, start, length, arrived) for id, start, length in pieces] for pieces in expected]


def _taken(state: Mapping[str, Any]) -> set[tuple[int, int]]:
    """Stream and number in it of each document that entered before its turn.

    Raises:
        wlb.WlbError: the state has something else.
    """
    found, streams = state.get("taken", []), state["streams"]

    def is_ahead(place: Any) -> bool:
        if not isinstance(place, list) or [type(number) for number in place] != [int, int]:
            return False
        stream, number = place
        return 0 <= stream < len(streams) and bool(number >= streams[stream]["read"])

    if not isinstance(found, list) or not all(map(is_ahead, found)):
        raise error("state", "has 'taken' that is no list of streams and documents ahead of them", value=found)
    return {(stream, number) for stream, number in found}


def _ids_and_lengths(part: wlb.MicroBatch) -> tuple[list[int], list[int]]:
    return part.document_ids.tolist(), part.lengths.tolist()
