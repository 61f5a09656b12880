"""One stream of documents: how far it was read, and how it is read from there again."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from wlb._errors import error
from wlb.torch.data.documents import Document, as_arrays
from wlb.torch.data.given_costs import cost_row
from wlb.torch.data.state import field

_END = object()

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ReadDocument:
    """A document as its rank has read it, and what it costs in each column."""

    document: Document
    costs: tuple[float, ...]


def costs_of(costs: Callable[[Any], Any], columns: int, document: Any, argument: str, index: int) -> Floats:
    """Calls the cost function on a document and checks its answer: float64[columns]."""
    return cost_row(costs(document), columns, f"{argument}.costs", index)


def restores_itself(stream: Any) -> bool:
    """Whether a stream gives and takes a state of its own that says where it stands.

    torchdata's `StatefulDataLoader` over an iterable data set without a state does not: torchdata 0.11 counts what it
    skips after a resume a second time, so that the next resume skips too much. What was read of it is read again.

    Raises:
        wlb.WlbError: it does, but asks for arguments that say what was trained, which nobody knows where it is read.
    """
    if not all(hasattr(stream, f"{verb}state_dict") for verb in ("", "load_")):
        return False
    dataset = getattr(stream, "dataset", None)
    skips = isinstance(dataset, IterableDataset) and not hasattr(dataset, "state_dict")
    if skips and type(stream).__name__ == "StatefulDataLoader":
        return False
    try:
        inspect.signature(stream.state_dict).bind()
    except TypeError:
        message = (
            f"is a {type(stream).__name__}, whose state_dict asks for arguments: give a stream whose "
            "state_dict takes none"
        )
        raise error("streams", message, value=stream) from None
    except ValueError:  # a function that does not say what it takes
        pass
    return True


class OneStream:
    """One stream and how far it was read. Not opened before it is read."""

    def __init__(
        self, documents: Iterable[Any], longest: int | None, costs: Callable[[Any, str, int], Floats] | None
    ) -> None:
        self._documents: Any = documents
        self._costs = costs
        self._longest = longest  # what a document counts for at most; None: all that it has
        self._iterator: Iterator[Any] | None = None
        self._read = 0  # documents so far
        self._tokens = 0  # of them, as far as they count
        self._credit = 0  # tokens that it may still give, below 0 if the last document was longer than its share
        self._saved: Any = None
        self.ended = False

    def read(self, tokens: int, number: int) -> list[ReadDocument]:
        """Documents until its share is used up; a long one is paid for in the steps after."""
        self._credit += 0 if self.ended else tokens
        if self.ended or self._credit <= 0:
            return []  # not opened: a stream that was just opened does not yet know where it stands
        if self._iterator is None:
            self._iterator = self._open()
        documents: list[ReadDocument] = []
        while self._credit > 0:
            document = next(self._iterator, _END)
            if document is _END:
                self.ended = True
                break
            if isinstance(document, Document):
                raise error(f"streams[{number}]", "is a Document: give what it is made of", index=self._read)
            read = as_arrays(document, self._read, f"streams[{number}]")
            size = read.tokens.size
            kept = size if self._longest is None else min(size, self._longest)
            costs: tuple[float, ...] = ()
            if self._costs is not None:
                share = kept / size
                costs = tuple((self._costs(document, f"streams[{number}]", self._read) * share).tolist())
            documents.append(ReadDocument(self._kept(read), costs))
            self._read += 1
            self._tokens += kept
            self._credit -= kept
        # Here the stream has been asked for a document since it was opened: only then its state is where it stands.
        if restores_itself(self._documents):
            self._saved = copy.deepcopy(self._documents.state_dict())
        return documents

    def _kept(self, document: Document) -> Document:
        """The trainable part of a document, and the token after it, which the last token predicts."""
        if self._longest is None or document.tokens.size <= self._longest + 1:
            return document
        end = self._longest + 1
        labels = None if document.labels is None else document.labels[:end]
        return replace(document, tokens=document.tokens[:end], labels=labels)

    def tokens_left(self, documents: int, mean: float) -> float:
        """Tokens that are left of so many documents in all, by the mean of those read, or a given one before."""
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
        }

    def stands(self, state: Mapping[str, Any]) -> None:
        """Sets the position that the reading rank reports."""
        self._read, self._tokens = field(state, "read", int), field(state, "tokens", int)
        self._credit = field(state, "credit", int)
        self.ended, self._saved = field(state, "ended", bool), field(state, "own", object)

    def restored(self, state: Mapping[str, Any]) -> OneStream:
        """Opens the stream again at the saved position."""
        result = OneStream(self._documents, self._longest, self._costs)
        result.stands(state)
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
