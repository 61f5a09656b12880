"""The lengths of all documents of a run, checked."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._errors import error
from wlb.reading.sidecar import Facts, Sidecar

_CHUNK = 1 << 18  # lengths that are checked at a time, so that they fit into a cache


@dataclass(frozen=True)
class Corpus:
    """The lengths of all documents, checked once. The array is neither copied nor changed.

    Attributes:
        lengths: int [documents], in memory or mapped from a file.
        tokens: their sum.
        longest: the greatest.
        fingerprint: a hash of them, whatever their type.
    """

    lengths: NDArray[Any]
    tokens: int
    longest: int
    fingerprint: str

    @classmethod
    def of(cls, lengths: ArrayLike, *, longest: int | None) -> Corpus:
        """Reads all lengths once, a block at a time; or not at all if they are mapped from a known file.

        For an array that is mapped read-only, the result is kept beside its file (`Sidecar` says what is trusted).

        Complexity:
            O(documents), about 10 ns each; milliseconds for a known file.

        Raises:
            wlb.WlbError: a length is not positive, or above `longest`, or there is none.
        """
        array = np.asanyarray(lengths)
        if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
            message = f"is {array.dtype} of shape {array.shape}, not integers [documents], at least one"
            raise error("lengths", message, value=array.shape)
        sidecar = Sidecar.of(array)
        facts = _read(array) if sidecar is None else sidecar.facts(lambda: _read(array))
        if facts["shortest"] < 1 or (longest is not None and facts["longest"] > longest):
            raise _refused(array, longest)
        return cls(array, facts["tokens"], facts["longest"], facts["fingerprint"])

    def __getstate__(self) -> dict[str, Any]:
        # A worker process maps the file again, instead of a copy of all lengths for each.
        sidecar = Sidecar.of(self.lengths)
        return vars(self) if sidecar is None else {**vars(self), "lengths": sidecar.place}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["lengths"], tuple):
            path, dtype, offset, shape = state["lengths"]
            state = {**state, "lengths": np.memmap(path, dtype, "r", offset, shape)}
        vars(self).update(state)

    def longer_than(self, tokens: int) -> NDArray[np.int64]:
        """int64 [documents]: numbers of the documents with more tokens."""
        firsts = range(0, self.lengths.size, _CHUNK)
        found = [np.flatnonzero(_chunk(self.lengths, first) > tokens) + first for first in firsts]
        return np.concatenate(found).astype(np.int64)


def _read(array: NDArray[Any]) -> Facts:
    shortest, longest, tokens = 2**63 - 1, -(2**63), 0
    digest = hashlib.blake2b(digest_size=16)
    for first in range(0, array.size, _CHUNK):
        chunk = _chunk(array, first)
        shortest, longest = min(shortest, int(chunk.min())), max(longest, int(chunk.max()))
        tokens += int(chunk.sum())
        digest.update(chunk.data)
    return {"shortest": shortest, "longest": longest, "tokens": tokens, "fingerprint": digest.hexdigest()}


def _chunk(array: NDArray[Any], first: int) -> NDArray[np.int64]:
    return np.ascontiguousarray(array[first : first + _CHUNK], "<i8")


def _refused(array: NDArray[Any], longest: int | None) -> Exception:
    """The error for the first length that is not positive or too long, of which there is one."""
    for first in range(0, array.size, _CHUNK):
        chunk = _chunk(array, first)
        bad = chunk < 1 if longest is None else (chunk < 1) | (chunk > longest)
        if bad.any():
            break
    at = int(bad.argmax())
    allowed = "at least 1" if longest is None else f"from 1 to max_document_tokens = {longest}"
    message = f"= {chunk[at]}: a document has {allowed} tokens"
    if chunk[at] > 0:
        message += '; a packer with oversize="split" or "truncate" accepts it'
    return error("lengths", message, index=first + at, value=int(chunk[at]))
