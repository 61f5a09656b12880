"""Documents of streams that were read and not yet trained: the ranks' copies, and the offers to the packer."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import wlb
from wlb._errors import error
from wlb._seal import Hashed
from wlb.reading.columns import Layout, as_bits, num_rows, of_bits
from wlb.reading.documents import Document, cut
from wlb.reading.filling import Offer
from wlb.reading.given_costs import cost_row
from wlb.reading.state import field


@dataclass(frozen=True, eq=False)
class Waiting:
    """A document that was read and not yet trained completely.

    Attributes:
        stream: number of its stream.
        length: all its tokens.
        has_labels: whether it has labels.
        left: tokens that are not yet in a plan.
        rest: tokens at its end that have not entered the packer.
        entered: tokens that have.
        document: as arrays, under any name; None if another rank has read it in this step.
        hashes: of its tokens and labels in the form of a state, once all ranks have it; None before.
        costs: costs of its trainable part, in each column of the packer's.
        layout: its columns besides tokens and labels.
    """

    stream: int
    length: int
    has_labels: bool
    left: int
    rest: int
    entered: int
    document: Document | None
    hashes: dict[str, Hashed | None] | None
    costs: tuple[float, ...] = ()
    layout: Layout = ()

    @property
    def width(self) -> int:
        """Numbers that are sent for each token: the token, perhaps its label, and its columns."""
        return 1 + self.has_labels + num_rows(self.layout)

    def received(self, arrived: list[Iterator[NDArray[np.int64]]]) -> Document:
        """The document from the message of the rank that reads the stream."""
        rows = next(arrived[self.stream % len(arrived)]).reshape(self.width, -1)
        columns = of_bits(rows[1 + self.has_labels :], self.layout)
        return Document(rows[0], 0, labels=rows[1] if self.has_labels else None, columns=columns)

    def sent(self, start: int = 0, size: int | None = None) -> NDArray[np.int64]:
        """Message for `received`, with `size` tokens from `start` on: int64 [width * size]."""
        assert self.document is not None
        document, end = self.document, self.length if size is None else start + size
        rows = [document.tokens, *([] if document.labels is None else [document.labels])]
        parts = [row[None, start:end].astype(np.int64) for row in rows]
        parts += [row[:, start:end] for row in as_bits({name: document.columns[name] for name, *_ in self.layout})]
        return np.concatenate(parts).ravel()

    def piece(self, id: int, start: int, length: int, arrived: list[Iterator[NDArray[np.int64]]]) -> Document:
        """A part of it, sent by the rank that read it if it is not here."""
        if self.document is not None:
            return cut(replace(self.document, id=id), start, length)
        return cut(replace(self.received(arrived), id=id, start=start), 0, length)

    def kept(self, document: Document) -> Waiting:
        """The waiting document as every rank keeps it: in little memory, without the row from which it was cut."""
        labels = None if document.labels is None else _compact(document.labels)
        columns = {name: _compact(values) for name, values in document.columns.items()}
        kept = replace(self, document=Document(_compact(document.tokens), 0, labels=labels, columns=columns))
        hashes = {name: None if text is None else Hashed.of(text) for name, text in kept.texts().items()}
        return replace(kept, hashes=hashes)

    def texts(self) -> dict[str, str | None]:
        """Tokens, labels and columns as texts of a state."""
        assert self.document is not None
        labels = self.document.labels
        columns = {
            f"{_COLUMN}{name} {dtype} {'x'.join(map(str, shape))}": _text(self.document.columns[name])
            for name, dtype, shape in self.layout
        }
        tokens = _text(self.document.tokens)
        return {"tokens": tokens, "labels": None if labels is None else _text(labels), **columns}

    @classmethod
    def of(cls, saved: Mapping[str, Any], num_streams: int, outside: tuple[int, int] | None, columns: int) -> Waiting:
        """Reads a waiting document from a state. `outside`: start and tokens of the part outside the packer."""
        tokens, labels = _tokens(field(saved, "tokens", str)), None
        if field(saved, "labels", object) is not None:
            labels = _tokens(field(saved, "labels", str))
        stream, left = field(saved, "stream", int), field(saved, "left", int)
        start, length = outside or (tokens.size, 0)
        if (
            stream >= num_streams
            or not 0 < left <= tokens.size
            or not 0 <= start <= start + length <= tokens.size
            or (labels is not None and labels.size != tokens.size)
        ):
            raise error("state", f"has a document of stream {stream} of which {left} tokens of {tokens.size} wait")
        costs = tuple(cost_row(field(saved, "costs", list), columns, "state", stream).tolist()) if columns else ()
        further: dict[str, NDArray[Any]] = {}
        layout = []
        for key in sorted(key for key in saved if key.startswith(_COLUMN)):
            column, values = _column(key, field(saved, key, str), tokens.size, stream)
            layout.append(column)
            further[column[0]] = values
        waiting = cls(
            stream, tokens.size, labels is not None, left, length, start, None, None, costs, tuple(sorted(layout))
        )
        return waiting.kept(Document(tokens, 0, labels=labels, columns=further))


@dataclass(frozen=True, eq=False)
class ReadBatch:
    """Documents that all streams gave for one global batch.

    Attributes:
        documents: by stream and number in it, in the order read.
        cursors: positions of the streams after it.
    """

    documents: dict[tuple[int, int], Waiting]
    cursors: list[dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Early:
    """A document that could enter before its turn.

    Attributes:
        id: its id, if it does.
        place: its stream and number in it.
        iterations: iterations until its turn.
    """

    id: int
    place: tuple[int, int]
    document: Waiting
    iterations: int


class Outside:
    """Documents that were read and have not entered the packer, as a source for `next_packing`.

    Attributes:
        ids: ids of documents whose turn has come.
    """

    def __init__(
        self,
        waiting: dict[int, Waiting],
        packer: wlb.Packer,
        read: Callable[[], dict[int, Waiting] | None],
        early: Callable[[list[int]], list[Early]],
        take: Callable[[list[Early]], None],
    ) -> None:
        self._early_beside, self._take = early, take
        self._waiting = waiting
        self._limit = packer.max_document_tokens
        self._split = packer.oversize == "split"
        self._columns = packer.cost_columns or 0
        self._read = read
        self._ended = False
        self._extra = 0  # batches read for this step beyond the first
        self.ids = [id for id in sorted(waiting) if waiting[id].rest]

    @property
    def tokens(self) -> int:
        """Tokens of all these documents."""
        return sum(self._waiting[id].rest for id in self.ids)

    def read(self) -> None:
        """Reads further documents, if there are any."""
        while not self._ended:
            new = self._read()
            self._ended = new is None
            if new:
                self.ids += new
                return

    def offer(self, extra: int) -> Offer:
        """See `Source`."""
        for _ in range(extra - self._extra if self.ids else 1):
            self.read()
        self._extra = extra
        lengths = np.array([self._waiting[id].rest for id in self.ids], np.int64)
        ids, starts = np.array(self.ids, np.int64), None
        if self._split and lengths.size:
            at, starts, lengths = wlb.split_documents(lengths, max_document_tokens=self._limit)
            entered = np.array([self._waiting[id].entered for id in self.ids], np.int64)
            ids, starts = ids[at], starts + entered[at]
        self._offered = ids.tolist(), lengths.tolist()
        costs = self._costs(*self._offered) if self._columns else None
        self._early = self._early_beside(lengths.tolist())
        offer = Offer(ids, starts, lengths, more=not self._ended, rest_waits=False, costs=costs)
        if not self._early:
            return offer
        iterations = np.array([0] * lengths.size + [each.iterations for each in self._early], np.int64)
        return replace(
            offer,
            ids=np.append(ids, [each.id for each in self._early]),
            starts=None if starts is None else np.append(starts, [0] * len(self._early)),
            lengths=np.append(lengths, [each.document.left for each in self._early]),
            early=iterations,
        )

    def _costs(self, ids: list[int], lengths: list[int]) -> NDArray[np.float64]:
        """Costs of pieces: each has the share of its tokens in the document."""
        whole = [self._waiting[id].length for id in ids] if self._split else lengths
        rows = np.array([self._waiting[id].costs for id in ids], np.float64).reshape(len(ids), self._columns)
        return rows * (np.array(lengths, np.float64) / np.array(whole, np.float64))[:, None]

    def advance(self, pieces: int) -> None:
        """See `Source`."""
        for id, length in zip(*(row[:pieces] for row in self._offered), strict=True):
            waiting = self._waiting[id]
            self._waiting[id] = replace(waiting, entered=waiting.entered + length, rest=waiting.rest - length)
        self.ids = [id for id in self.ids if self._waiting[id].rest]
        self._take(self._early[: max(pieces - len(self._offered[0]), 0)])
        self._extra = 0


# --- tokens in a state -----------------------------------------------------------------------------------------------

_DTYPES: Final = ("u1", "u2", "i2", "u4", "i4", "i8")
_FLOATS: Final = ("f4", "f8")
_COLUMN: Final = "column "  # before the name, the type and the shape without tokens of a column, in a state


def _compact(numbers: NDArray[Any]) -> NDArray[Any]:
    """A copy in the smallest integer type, as ranks and states keep it."""
    if numbers.dtype.kind == "f":
        return np.array(numbers)
    least, most = int(numbers.min()), int(numbers.max())
    limits = ((dtype, np.iinfo(dtype)) for dtype in _DTYPES)
    smallest = next(dtype for dtype, limit in limits if limit.min <= least and most <= limit.max)
    return np.array(numbers, f"<{smallest}")


def _text(numbers: NDArray[Any]) -> str:
    """`type:base64`, such as `u2:...` for 16 bits without a sign."""
    return f"{numbers.dtype.str[1:]}:{base64.b64encode(numbers.tobytes()).decode()}"


def _column(key: str, text: str, size: int, stream: int) -> tuple[tuple[str, str, tuple[int, ...]], NDArray[Any]]:
    """A column of a document from a state: its layout, and [..., tokens]."""
    try:
        name, dtype, sizes = key[len(_COLUMN) :].rsplit(" ", 2)
        shape = tuple(int(part) for part in sizes.split("x") if part)
        if dtype not in ("i8", *_FLOATS):
            raise ValueError
        values = _tokens(text).astype(dtype).reshape(*shape, size)
    except ValueError as cause:
        if isinstance(cause, wlb.WlbError):
            raise
        message = f"has {key!r} of a document of stream {stream} that is no column of {size} tokens"
        raise error("state", message, value=key) from None
    return (name, dtype, shape), values


def _tokens(text: str) -> NDArray[Any]:
    dtype, _, encoded = text.partition(":")
    try:
        if dtype not in _DTYPES + _FLOATS:
            raise ValueError
        numbers = np.frombuffer(base64.b64decode(encoded, validate=True), f"<{dtype}")
    except ValueError:
        numbers = np.empty(0, np.int64)
    if not numbers.size:
        raise error("state", f"has tokens {text[:20]!r}..., which are none", value=text[:20])
    return numbers
