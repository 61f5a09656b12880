"""Saved states: their content is checked, and each names the one before."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import wlb
from wlb._errors import error
from wlb._seal import seal
from wlb.ledger import waiting_pieces

T = TypeVar("T")


def field(state: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """`state[name]`, if it is of that type.

    Raises:
        wlb.WlbError: it is missing, or something else, or a negative number.
    """
    if not isinstance(state, Mapping) or name not in state:
        raise error("state", f"has no {name!r}: not what state_dict() gave")
    value = state[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise error("state", f"has {name!r} = {value!r}, not of type {kind.__name__}", value=value)
    if isinstance(value, int) and value < 0 and name not in ("seed", "credit"):
        raise error("state", f"has {name!r} = {value!r}, below 0", value=value)
    return value


def same(state: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    """Checks that `state` has the `expected` values; names the first that differs.

    Raises:
        wlb.WlbError: it is missing or differs.
    """
    for name, value in expected.items():
        found = field(state, name, object)
        if found != value:
            raise error("state", f"was saved with {name} = {found!r}; {where} has {value!r}", value=found)


# --- the chain -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedChain:
    """A state's place in the chain, in which each state names the one after the step before.

    A state that was saved without a completed step, after a change of epoch or configuration or inside a step, says
    that it has "moved", and names the state after the last step. So the chain of steps does not depend on states in
    between.

    Attributes:
        previous: digest of the state before the last step; None before the first.
        head: digest of the state after the last step; None: the state sealed here.
    """

    previous: str | None = None
    head: str | None = None

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> SavedChain:
        """Chain of a saved state whose seal has been checked."""
        previous = field(state, "previous", object)
        if previous is not None:
            previous = field(state, "previous", str)
        return cls(previous, previous if field(state, "moved", bool) else field(state, "digest", str))

    def sealed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state with its chain and its digest."""
        linked = seal({**state, "previous": self.previous, "moved": False})
        if self.head not in (None, linked["digest"]):
            linked = seal({**state, "previous": self.head, "moved": True})
        return linked

    @staticmethod
    def after(state: Mapping[str, Any]) -> SavedChain:
        """Chain of the state after the next step."""
        return SavedChain(previous=state["previous"] if state["moved"] else state["digest"])

    @staticmethod
    def moved(state: Mapping[str, Any]) -> SavedChain:
        """Chain of a state that follows without a completed step."""
        head = SavedChain.after(state).previous
        return SavedChain(head, head)


def outside(ids: Iterable[int] = (), starts: Iterable[int] = (), lengths: Iterable[int] = ()) -> dict[str, list[int]]:
    """Pieces that were read and have not entered the packer, in the form of a state: the rest of each document."""
    return {"ids": list(ids), "starts": list(starts), "lengths": list(lengths)}


def read_outside(state: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """Reads `outside` of a state: id, start and length of each piece.

    Raises:
        wlb.WlbError: the state has something else.
    """
    saved = field(state, "outside", dict)
    columns = [field(saved, name, list) for name in ("ids", "starts", "lengths")]
    rows = list(zip(*columns, strict=False))
    if len({len(column) for column in columns}) > 1 or not all(isinstance(value, int) for row in rows for value in row):
        raise error("state", "has no pieces in 'outside'")
    return rows


def check_outside(rows: Iterable[tuple[int, int, int]], packer: wlb.Packer) -> None:
    """Checks that a packer can continue with pieces that wait outside.

    Raises:
        wlb.WlbError: one is the rest of a document, or longer than the packer's limit, and it does not split documents.
    """
    for id, start, length in rows:
        if packer.oversize != "split" and (start or length > packer.max_document_tokens):
            message = (
                f'has document {id} from token {start} on waiting to enter: only oversize="split" can go on with it'
            )
            raise error("state", message, value=id)


# --- the state that travels with a step ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """Progress of a run after a step, over all ranks.

    Attributes:
        documents: documents read of this epoch, or of a stream. None: not known.
        pieces: pieces of documents that were read and wait.
        tokens: their tokens.
    """

    documents: int | None = None
    pieces: int | None = None
    tokens: int | None = None

    @classmethod
    def of(cls, documents: int, state: Mapping[str, Any]) -> Progress:
        """From the state of a sampler or stream; O(pieces that wait)."""
        waiting = waiting_pieces(state)
        return cls(documents, waiting.ids.size, waiting.tokens)


class Snapshot:
    """A state that was taken, and is written out only if it is needed.

    Attributes:
        digest: the state's.
        previous: digest of the state before the step after which it was taken.
        progress: progress of the run.
    """

    def __init__(self, state: Mapping[str, Any], progress: Progress, write: Callable[[], dict[str, Any]]) -> None:
        """A sealed state, or a state that `write` completes when it is read."""
        self.digest: str = state["digest"]
        self.previous: str | None = state["previous"]
        self.progress = progress
        self._write: Callable[[], dict[str, Any]] | None = write

    @functools.cached_property
    def _written(self) -> dict[str, Any]:
        assert self._write is not None
        return self._write()

    @property
    def state(self) -> dict[str, Any]:
        """Plain JSON values; the caller's own."""
        return copy.deepcopy(self._written)

    @property
    def text(self) -> str:
        """The state as JSON."""
        return json.dumps(self._written)

    def __repr__(self) -> str:
        return f"Snapshot(digest={self.digest[:8]!r})"

    def __getstate__(self) -> dict[str, Any]:
        # A worker sends the finished state with its step, not the objects from which it is made.
        return {**vars(self), "_written": self.state, "_write": None}

    @classmethod
    def of(cls, state: dict[str, Any], progress: Progress) -> Snapshot:
        """Snapshot of a sealed state that other code continues to read."""
        return cls(state, progress, lambda: copy.deepcopy(state))
