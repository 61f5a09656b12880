"""One stream of documents: its position, and how it is read again from there."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb._errors import error
from wlb.reading.documents import Document
from wlb.reading.given_costs import cost_row
from wlb.reading.joined_rows import num_documents
from wlb.reading.rows import RowReader
from wlb.reading.split_prompts import SplitPrompts
from wlb.reading.state import field
from wlb.reading.values import as_arrays

_END = object()
_NOTED = 64  # documents by whose content a stream is known

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ReadDocument:
    """A document as its rank has read it, with its costs in each column."""

    document: Document
    costs: tuple[float, ...]


def costs_of(costs: Callable[[Any], Any], columns: int, document: Any, argument: str, index: int) -> Floats:
    """Calls the cost function on a document and checks its answer: float64[columns]."""
    return cost_row(costs(document), columns, f"{argument}.costs", index)


def restores_itself(stream: Any) -> bool:
    """Whether a stream saves and restores its own position.

    torchdata's `StatefulDataLoader` over an iterable data set without a state does not: torchdata 0.11 counts the items
    that it skips after a resume a second time, so that the next resume skips too many. Such a stream is read again from
    its start.

    Raises:
        wlb.WlbError: its `state_dict` needs arguments, which are not known where the stream is read.
    """
    if not all(hasattr(stream, f"{verb}state_dict") for verb in ("", "load_")):
        return False
    dataset = getattr(stream, "dataset", None)
    skips = any(base.__name__ == "IterableDataset" for base in type(dataset).__mro__)
    if skips and type(stream).__name__ == "StatefulDataLoader" and not hasattr(dataset, "state_dict"):
        return False
    try:
        inspect.signature(stream.state_dict).bind()
    except TypeError:
        message = (
            f"is a {type(stream).__name__}, whose state_dict asks for arguments: give a stream whose "
            "state_dict takes none"
        )
        raise error("streams", message, value=stream) from None
    except ValueError:  # the function has no signature
        pass
    return True


class _Noted(dict[str, Any]):
    """A row that notes which of its columns are read."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        super().__init__({name: row[name] for name in row})
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Like `dict.get`; remembers that the column was read."""
        self.read.add(name)
        return super().get(name, default)


class OneStream:
    """One stream and its position. It is opened only when it is read."""

    def __init__(
        self,
        documents: Iterable[Any],
        longest: int | None,
        costs: Callable[[Any, str, int], Floats] | None,
        reader: RowReader,
        split: SplitPrompts,
    ) -> None:
        self._reader, self._split = reader, split
        self._documents: Any = documents
        self._costs = costs
        self._longest = longest  # the most tokens that a document counts for; None: all
        self._iterator: Iterator[Any] | None = None
        self._read = 0  # documents so far
        self._tokens = 0  # their tokens, at most `longest` each
        self._credit = 0  # tokens that it may still give, below 0 if the last document was longer than its share
        self._saved: Any = None
        self._content = ""  # a hash of the first documents
        self.ended = False

    def read(self, tokens: int, argument: str) -> list[ReadDocument]:
        """Documents until the stream's share is used up; if one is longer, later shares are smaller."""
        self._credit += 0 if self.ended else tokens
        if self.ended or self._credit <= 0:
            return []  # leave it closed: a stream that was just opened does not know its position yet
        return self._rows_while(lambda: self._credit > 0, argument)

    def again(self, end: int, argument: str) -> list[ReadDocument]:
        """Documents up to number `end`, which were read before the stream was restored; fewer if it ends before."""
        return self._rows_while(lambda: self._read < end, argument)

    def _rows_while(self, wanted: Callable[[], bool], argument: str) -> list[ReadDocument]:
        if self._iterator is None:
            self._iterator = self._open(argument)
        documents: list[ReadDocument] = []
        while wanted():
            row = next(self._iterator, _END)
            if row is _END:
                self.ended = True
                break
            documents += self._documents_of(row, argument)
        # A stream knows its position only after a row was read, which is so here.
        if restores_itself(self._documents):
            self._saved = copy.deepcopy(self._documents.state_dict())
        return documents

    def _documents_of(self, row: Any, argument: str) -> list[ReadDocument]:
        """The documents of the next row: all of them, because a stream resumes at a row."""
        if isinstance(row, Document):
            raise error(argument, "is a Document: give what it is made of", index=self._read)
        given = _Noted(row) if self._costs is not None and isinstance(row, Mapping) else row
        costs = None if self._costs is None else self._costs(given, argument, self._read)
        used = given.read if isinstance(given, _Noted) else ()  # columns that the function of costs read are known
        read = self._reader.documents(row, self._read, argument, used=used)
        found = [as_arrays(each, argument, self._read) for each in read]
        size = sum(document.tokens.size for document in found)
        documents = []
        for document in found:
            self._split.look(document, f"{argument}[{self._read}]")
            length = document.tokens.size
            kept = length if self._longest is None else min(length, self._longest)
            of_document = () if costs is None else tuple((costs * (kept / size)).tolist())
            documents.append(ReadDocument(self._kept(document), of_document))
            if self._read < _NOTED:
                self._content = content_with(self._content, document)
            self._read += 1
            self._tokens += kept
            self._credit -= kept
        return documents

    def _kept(self, document: Document) -> Document:
        """The trainable part of a document, with the token after it, which the last token predicts."""
        if self._longest is None or document.tokens.size <= self._longest + 1:
            return document
        end = self._longest + 1
        labels = None if document.labels is None else document.labels[:end]
        columns = {name: values[..., :end] for name, values in document.columns.items()}
        return replace(document, tokens=document.tokens[:end], labels=labels, columns=columns)

    def tokens_left(self, documents: int, mean: float) -> float:
        """Estimated tokens that are left, by the mean length of documents read, or `mean` if none was read."""
        left = max(documents - self._read, 1)
        return left * (self._tokens / self._read if self._read else mean)

    @property
    def so_far(self) -> tuple[int, int]:
        """Tokens and documents that were read."""
        return self._tokens, self._read

    def state_dict(self) -> dict[str, Any]:
        """Position of the stream."""
        return {
            "read": self._read,
            "tokens": self._tokens,
            "credit": self._credit,
            "ended": self.ended,
            "own": self._saved,
            "content": self._content,
        }

    def stands(self, state: Mapping[str, Any]) -> None:
        """Sets the position that the reading rank reports."""
        self._read, self._tokens = field(state, "read", int), field(state, "tokens", int)
        self._credit = field(state, "credit", int)
        self.ended, self._saved = field(state, "ended", bool), field(state, "own", object)
        self._content = field(state, "content", str)

    def check(self, content: str, argument: str) -> None:
        """Refuses a stream that began with other documents when it was read up to this position another time.

        A stream that restores itself may give other tokens each time: it is known by its own position.

        Raises:
            wlb.WlbError: naming the stream.
        """
        if content != self._content and not restores_itself(self._documents):
            raise error(
                argument,
                f"begins with other documents than when its state was saved (one of the first {_NOTED}), so that some"
                " would be trained twice and others never: shuffle with a seed, list files in one order, or give a"
                " stream that restores its own position, with state_dict and load_state_dict",
            )

    def restored(self, state: Mapping[str, Any]) -> OneStream:
        """Opens the stream again at the saved position."""
        result = OneStream(self._documents, self._longest, self._costs, self._reader, self._split)
        result.stands(state)
        return result

    def _open(self, argument: str) -> Iterator[Any]:
        if self._saved is not None:
            self._documents.load_state_dict(self._saved)
        iterator: Iterator[Any] = iter(self._documents)
        if self._saved is not None:
            return iterator
        already, content = 0, ""
        while already < self._read:
            row = next(iterator, _END)
            if row is _END:
                raise ValueError(f"ends after {already} documents, {self._read} were read before")
            if already < _NOTED:
                used = row.keys() if isinstance(row, Mapping) else ()
                for document in self._reader.documents(row, already, argument, used=used)[: _NOTED - already]:
                    content = content_with(content, as_arrays(document, argument, already))
            already += num_documents(row, already)
        self.check(content, argument)
        return iterator


def content_with(content: str, document: Document) -> str:
    """A hash of documents, with one more; `content` is that of those before, "" for none."""
    digest = hashlib.blake2b(content.encode(), digest_size=16)
    for array in (document.tokens, document.labels):
        digest.update(b"-" if array is None else np.asarray(array).astype(np.int64).tobytes())
    return digest.hexdigest()
