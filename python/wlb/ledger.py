"""The format of a ledger, in which one line for each step says what a run trained.

A ledger is a folder with one file for each data-parallel rank: `ledger-00000.jsonl` and so on. `wlb.torch.Ledger`
writes it during training. A line is a JSON object with its own hash and the hash of the line before it. There are two
kinds. The begin of a run, or of its continuation, says which rank of how many this is, and which documents there are. A
trained step has its plan, the state before and after it, and the pieces of documents that this rank trained, by
micro-batch. After a crash the run continues from a checkpoint; lines of steps that are trained again replace the
earlier ones.

`wlb_tools.audit` reads the files of all ranks.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

FORMAT: Final = "wlb.ledger"
VERSION: Final = 1
_COLUMNS: Final = 3  # of `Pieces`: ids, starts, lengths


@dataclass(frozen=True, eq=False)
class Pieces:
    """Parts of documents: int64 [pieces] each.

    Attributes:
        ids: ids of the documents in the packer: document i of epoch e is `e * documents + i`; a document of a stream
            has the running number in which it was read.
        starts: position of each piece's first token in its document.
        lengths: tokens of each piece.
    """

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, ids: Iterable[ArrayLike], starts: Iterable[ArrayLike], lengths: Iterable[ArrayLike]) -> Pieces:
        """All pieces of several micro-batches."""
        empty = np.empty(0, np.int64)
        columns = [np.concatenate([empty, *map(np.asarray, column)]) for column in (ids, starts, lengths)]
        return cls(*(column.astype(np.int64) for column in columns))

    @property
    def tokens(self) -> int:
        """Tokens of all pieces."""
        return int(self.lengths.sum())

    def encode(self) -> str:
        """Writes the pieces as text, a few bytes each, sorted by document and start. O(pieces log pieces)."""
        order = np.lexsort((self.starts, self.ids))
        columns = [np.diff(self.ids[order], prepend=0), self.starts[order], self.lengths[order]]
        small = [column.astype(_smallest(column)) for column in columns]
        data = zlib.compress(b"".join(column.tobytes() for column in small))
        return ":".join(
            [str(self.ids.size), *(column.dtype.str[1:] for column in small), base64.b64encode(data).decode()]
        )

    @classmethod
    def decode(cls, text: str) -> Pieces:
        """Reads the text that `encode` wrote.

        Raises:
            ValueError: the text is something else.
        """
        count, *dtypes, encoded = text.split(":")
        data, columns, at = zlib.decompress(base64.b64decode(encoded, validate=True)), [], 0
        if len(dtypes) != _COLUMNS or any(dtype not in _UNSIGNED for dtype in dtypes):
            raise ValueError(f"has columns {dtypes}")
        for dtype in dtypes:
            columns.append(np.frombuffer(data, f"<{dtype}", int(count), at).astype(np.int64))
            at += int(count) * int(dtype[1:])
        return cls(np.cumsum(columns[0]), columns[1], columns[2])


@dataclass(frozen=True, eq=False)
class Share:
    """The part of a step that a data-parallel rank trains, in the order of its plan.

    Attributes:
        micro_batches: for each micro-batch of this rank, its number in the plan and its number of pieces.
        pieces: the pieces of all micro-batches, one micro-batch after the other.
    """

    micro_batches: tuple[tuple[int, int], ...]
    pieces: Pieces

    @classmethod
    def of(cls, numbers: Iterable[int], parts: Sequence[Pieces]) -> Share:
        """A share of these micro-batches, with the pieces of each."""
        pieces = Pieces.of(*([getattr(part, name) for part in parts] for name in ("ids", "starts", "lengths")))
        return cls(tuple((int(number), part.ids.size) for number, part in zip(numbers, parts, strict=True)), pieces)

    def encode(self) -> dict[str, Any]:
        """JSON for a line: the pieces sorted by document, and the place of each in the order of the plan."""
        place = np.lexsort((self.pieces.starts, self.pieces.ids))
        return {
            "micro_batches": [list(part) for part in self.micro_batches],
            "places": _packed(place),
            "pieces": self.pieces.encode(),
        }

    @classmethod
    def decode(cls, line: Mapping[str, Any]) -> Share:
        """The share that `encode` wrote.

        Raises:
            ValueError: the line is something else.
        """
        pieces, places = Pieces.decode(line["pieces"]), _unpacked(line["places"])
        micro_batches = tuple((int(number), int(count)) for number, count in line["micro_batches"])
        counts = [count for _, count in micro_batches]
        if min(counts, default=0) < 0 or sum(counts) != pieces.ids.size:
            raise ValueError(f"has {pieces.ids.size} pieces in micro-batches of {sum(counts)}")
        if not np.array_equal(np.sort(places), np.arange(pieces.ids.size)):
            raise ValueError("has places that are no order of its pieces")
        order = np.empty_like(places)
        order[places] = np.arange(places.size)
        return cls(micro_batches, Pieces(pieces.ids[order], pieces.starts[order], pieces.lengths[order]))


def plan_hash(shares: Sequence[Share]) -> str:
    """The hash of a plan: which rank trains which pieces, in which micro-batches and in which order.

    Args:
        shares: the share of every data-parallel rank.

    O(pieces).
    """
    hashed = hashlib.blake2b(digest_size=16)
    for share in shares:
        head = [len(share.micro_batches), *(value for part in share.micro_batches for value in part)]
        columns = (np.array(head), share.pieces.ids, share.pieces.starts, share.pieces.lengths)
        for column in columns:
            hashed.update(column.astype("<i8").tobytes())
    return hashed.hexdigest()


def _packed(values: NDArray[np.int64]) -> str:
    small = values.astype(_smallest(values))
    data = base64.b64encode(zlib.compress(small.tobytes())).decode()
    return f"{values.size}:{small.dtype.str[1:]}:{data}"


def _unpacked(text: str) -> NDArray[np.int64]:
    count, dtype, encoded = text.split(":")
    if dtype not in _UNSIGNED:
        raise ValueError(f"has a column {dtype}")
    data = zlib.decompress(base64.b64decode(encoded, validate=True))
    return np.frombuffer(data, f"<{dtype}", int(count)).astype(np.int64)


def waiting_pieces(state: Mapping[str, Any]) -> Pieces:
    """The pieces that were read and not trained, from the state of a sampler or stream. O(pieces).

    They wait in its packer, or "outside" of it: read, but not yet admitted.
    """
    packer = state["packer"]
    levels = [packer["carried"], *packer["queues"], state["outside"]]
    return Pieces.of(*([level[name] for level in levels] for name in ("ids", "starts", "lengths")))


_UNSIGNED: Final = ("u1", "u2", "u4", "u8")


def _smallest(values: NDArray[np.int64]) -> str:
    largest = int(values.max(initial=0))
    return next(f"<{dtype}" for dtype in _UNSIGNED if largest <= np.iinfo(dtype).max)


def ledger_file(folder: Path, dp_rank: int) -> Path:
    """Path of a rank's ledger file."""
    return folder / f"ledger-{dp_rank:05d}.jsonl"


def as_line(content: Mapping[str, Any], after: str | None) -> tuple[str, str]:
    """A line of a ledger, and its hash.

    Args:
        content: JSON values.
        after: hash of the line before it in the file; None for the first line.
    """
    content = {**content, "after": after}
    check = line_check(content)
    return json.dumps({**content, "check": check}, separators=(",", ":")) + "\n", check


def read_line(text: bytes) -> tuple[dict[str, Any], str] | None:
    """The content of a line and its hash; None if the line is incomplete or was changed."""
    try:
        line = json.loads(text)
        check = line.pop("check")
        return (line, check) if check == line_check(line) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def line_check(content: Mapping[str, Any]) -> str:
    """The hash of a line."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
