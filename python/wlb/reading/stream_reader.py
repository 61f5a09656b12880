"""The global steps of a stream that every rank reads whole: no lengths are known before, and no ranks communicate."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import wlb
from wlb._errors import error
from wlb._seal import check_seal
from wlb.ledger import waiting_pieces
from wlb.reading.documents import Document
from wlb.reading.filling import next_packing
from wlb.reading.given_costs import check_given
from wlb.reading.one_stream import OneStream, costs_of
from wlb.reading.rows import RowReader
from wlb.reading.sizes import batch_tokens, least_tokens, warn_of_long
from wlb.reading.split_prompts import SplitPrompts
from wlb.reading.state import Progress, SavedChain, Snapshot, check_outside, field, outside, read_outside, same
from wlb.reading.waiting import Outside, Waiting

FORMAT: Final = "wlb.stream_reader"
VERSION: Final = 2


@dataclass(frozen=True)
class _Read:
    """Documents that were read together, one of which may still wait.

    Attributes:
        first: number of the first of them.
        before: position of the stream before them.
    """

    first: int
    before: dict[str, Any]


class StreamReader:
    """Plans the steps of a stream, and holds the documents of each; its position is between two steps.

    Every rank reads all rows and makes the same plan, so ranks exchange nothing. Documents have the running number in
    which they were read. Only admitted documents enter the packer, so those that wait stay within `packer.bounds()`,
    and nothing is read before the last global batch has entered.

    The state has no tokens: it has the position of the stream before the oldest document that waits. After a resume the
    stream is read again from there, at most `max_delay` global batches, and documents that were trained are left out.

    Args:
        stream: an iterable of rows with `state_dict` and `load_state_dict`, which gives the same rows again from a
            state.
        packer: gives the configuration; it is not changed.
        tokens_per_batch: tokens that are read for a step on average; None: the packer's.
        min_step_tokens: least tokens of a step, as for `wlb.torch.BalancedStream`.
        costs: a function of a row, if the packer was made with `cost_columns`.
        reader: reads rows as documents.
        argument: name of the stream in errors.

    Attributes:
        documents: the pieces of the last step: a list of documents for each micro-batch of its plan.

    Raises:
        wlb.WlbError: an argument is invalid.
    """

    def __init__(
        self,
        stream: Iterable[Any],
        packer: wlb.Packer,
        *,
        tokens_per_batch: int | None = None,
        min_step_tokens: int | None = None,
        costs: Callable[[Any], Any] | None = None,
        reader: RowReader,
        argument: str,
    ) -> None:
        check_given(costs, packer)
        if packer.pending:
            raise error("packer", f"holds {packer.pending} documents; give one that is new", value=packer.pending)
        self._config = packer
        self._tokens_per_batch = batch_tokens(packer, tokens_per_batch)
        self._min_step_tokens = least_tokens(packer, self._tokens_per_batch, min_step_tokens)
        self._longest = packer.max_document_tokens if packer.oversize == "truncate" else None
        self._argument = argument
        of_document = None if costs is None else partial(costs_of, costs, packer.cost_columns or 0)
        self._stream = OneStream(stream, self._longest, of_document, reader, SplitPrompts(packer))
        self._packer = packer.empty_copy()
        self._waiting: dict[int, Waiting] = {}
        self._reads: deque[_Read] = deque()  # from the oldest with a document that waits
        self._again: Mapping[str, Any] | None = None  # a loaded state whose documents are not read again yet
        self._chain = SavedChain()
        self._saved: dict[str, Any] | None = None
        self._warned = False
        self.step = 0
        self.documents: list[list[Document]] = []

    @property
    def packer(self) -> wlb.Packer:
        """A packer with the configuration, without documents."""
        return self._config

    def next_step(self) -> wlb.Packing | None:
        """Reads and packs the next step; None after the last.

        Raises:
            wlb.WlbError: a row cannot be read, or the packer refuses a document.
        """
        self._read_again()
        chain = SavedChain.after(self._state())
        unentered = Outside(self._waiting, self._packer, self._read, lambda due: [], lambda early: None)
        if unentered.tokens < self._tokens_per_batch:
            unentered.read()
        if unentered.ids:
            self._packer, packing = next_packing(self._packer, unentered, min_step_tokens=self._min_step_tokens)
        elif self._packer.pending:
            packing = self._packer.drain()
        else:
            return None
        self.documents = [self._pieces(part) for part in packing]
        while len(self._reads) > 1 and min(self._waiting, default=self._reads[1].first) >= self._reads[1].first:
            self._reads.popleft()
        if not self._waiting:
            self._reads.clear()
        self.step += 1
        self._chain, self._saved = chain, None
        return packing

    def snapshot(self) -> Snapshot:
        """The state, to be written out later: plain JSON values, the same on every rank. O(documents that wait)."""
        state = self._state()
        return Snapshot.of(state, Progress.of(state["stream"]["read"], state))

    def load_state_dict(self, state: Mapping[str, Any], *, allow_config_change: bool = False) -> None:
        """Resumes after the step of the state; on an error nothing has changed.

        Raises:
            wlb.WlbError: the state was changed after it was saved, is of another packer configuration, or was not saved
                here.
        """
        same(state, {"format": FORMAT, "version": VERSION}, "this version of wlb")
        check_seal(state)
        packer = self._config.empty_copy()
        packer.load_state_dict(field(state, "packer", dict), allow_config_change=allow_config_change)
        check_outside(read_outside(state), self._config)
        stream, before = field(state, "stream", dict), field(state, "before", dict)
        firsts = field(state, "reads", list)
        ids = waiting_pieces({"packer": packer.state_dict(), "outside": state["outside"]}).ids
        if ids.size and not (firsts and firsts[0] <= ids.min() and ids.max() < field(stream, "read", int)):
            raise error("state", "has documents that wait, and were not read from its position on", value=firsts)
        opened = self._stream.restored(before if firsts else stream)
        chain, step = SavedChain.of(state), field(state, "step", int)
        self._packer, self._stream, self._chain, self.step = packer, opened, chain, step
        self._waiting, self._reads, self.documents = {}, deque(), []
        self._again = state if firsts else None
        self._saved = dict(state)

    def _state(self) -> dict[str, Any]:
        if self._saved is None:
            unentered = [(id, each) for id, each in sorted(self._waiting.items()) if each.rest]
            self._saved = self._chain.sealed(
                {
                    "format": FORMAT,
                    "version": VERSION,
                    "step": self.step,
                    "stream": self._stream.state_dict(),
                    "before": self._reads[0].before if self._reads else {},
                    "reads": [read.first for read in self._reads],
                    "packer": self._packer.state_dict(),
                    "outside": outside(
                        (id for id, _ in unentered),
                        (each.entered for _, each in unentered),
                        (each.rest for _, each in unentered),
                    ),
                }
            )
        return self._saved

    def _read(self) -> dict[int, Waiting] | None:
        """The documents of the next global batch, which wait from now on; None at the end of the stream."""
        if self._stream.ended:
            return None
        before = self._stream.state_dict()
        read = self._stream.read(self._tokens_per_batch, self._argument)
        self._reads.append(_Read(before["read"], before))
        new = {id: self._new(document.document, document.costs) for id, document in enumerate(read, before["read"])}
        for id, document in new.items():
            if self._config.oversize == "split" and not self._warned:
                self._warned = document.length > self._tokens_per_batch
                warn_of_long(f"document {id} (of {self._argument})", document.length, self._tokens_per_batch)
        self._waiting.update(new)
        return new

    def _new(self, document: Document, costs: tuple[float, ...]) -> Waiting:
        length = document.tokens.size
        left = length if self._longest is None else min(length, self._longest)
        return Waiting(0, length, document.labels is not None, left, left, 0, document, None, costs)

    def _read_again(self) -> None:
        """After a resume, reads the documents that wait."""
        if self._again is None:
            return
        state = self._again
        pieces = waiting_pieces({"packer": self._packer.state_dict(), "outside": state["outside"]})
        left: dict[int, int] = defaultdict(int)
        for id, length in zip(pieces.ids.tolist(), pieces.lengths.tolist(), strict=True):
            left[id] += length
        rest = {id: (start, length) for id, start, length in read_outside(state)}
        stream, firsts = self._stream.restored(state["before"]), state["reads"]
        reads: deque[_Read] = deque()
        waiting: dict[int, Waiting] = {}
        for first, end in zip(firsts, [*firsts[1:], state["stream"]["read"]], strict=True):
            reads.append(_Read(first, stream.state_dict()))
            for id, document in enumerate(stream.again(end, self._argument), first):
                if id in left:
                    new = self._new(document.document, document.costs)
                    entered, length = rest.get(id, (new.left, 0))
                    if left[id] > new.left or entered + length != new.left:
                        raise error(self._argument, self._other(f"document {id} has {new.length} tokens"), index=id)
                    waiting[id] = replace(new, left=left[id], rest=length, entered=entered)
        if waiting.keys() != left.keys():
            raise error(self._argument, self._other("it ends before documents that wait"))
        stream.check(field(state["stream"], "content", str), self._argument)
        stream.stands(state["stream"])
        self._stream, self._reads, self._waiting, self._again = stream, reads, waiting, None

    @staticmethod
    def _other(found: str) -> str:
        return f"gives other rows than before its state was saved: {found}; give the pipeline that was saved"

    def _pieces(self, part: wlb.MicroBatch) -> list[Document]:
        """The documents of a micro-batch of the plan, which no longer wait."""
        found = []
        for id, start, length in zip(
            part.document_ids.tolist(), part.starts.tolist(), part.lengths.tolist(), strict=True
        ):
            waiting = self._waiting.pop(id)
            found.append(waiting.piece(id, start, length, []))
            if waiting.left > length:
                self._waiting[id] = replace(waiting, left=waiting.left - length)
        return found
