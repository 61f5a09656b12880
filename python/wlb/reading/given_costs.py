"""Costs given by the user: an array beside the lengths, or a function of a document."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import wlb
from wlb._errors import error
from wlb.reading.sidecar import Facts, Sidecar

Floats = NDArray[np.float64]
_CHUNK = 1 << 18  # numbers checked at a time


def check_given(costs: object, packer: wlb.Packer) -> None:
    """Checks that costs are given if and only if the packer takes them.

    Raises:
        wlb.WlbError: they are missing, or not needed.
    """
    if costs is None and packer.cost_columns is not None:
        message = f"are missing: the packer was made with cost_columns={packer.cost_columns}, so documents bring them"
        raise error("costs", message)
    if costs is not None and packer.cost_columns is None:
        raise error("costs", "have no meaning for a packer with a cost model: make it with cost_columns instead")


def cost_row(costs: Any, columns: int, argument: str, index: int) -> Floats:
    """float64 [columns]: the costs of the document at `index`.

    Raises:
        wlb.WlbError: there is another number of costs, or one is negative or not finite.
    """
    try:
        given = np.asarray(costs)
    except (TypeError, ValueError, RuntimeError):  # rows of several lengths, or a tensor elsewhere
        given = np.empty(0, object)
    if given.dtype.kind not in "fiu":
        raise error(argument, f"are {costs!r}: no numbers", index=index, value=costs)
    row = given.astype(np.float64).reshape(-1)
    if row.size != columns:
        message = f"are {row.size} numbers for a document; the packer has cost_columns={columns}"
        raise error(argument, message, index=index, value=row.size)
    if not ((row >= 0) & (row < np.inf)).all():
        raise error(argument, f"are {row.tolist()}: must be finite numbers, 0 or above", index=index, value=costs)
    return row


class CorpusCosts:
    """Costs of documents that have numbers.

    An array is checked once, and neither copied nor changed. If it is mapped read-only from a file, it is read only
    once, like lengths (`Corpus`). A function is called whenever a step is planned, also in a resumed run, so it has to
    return the same on every rank and every time.

    Attributes:
        fingerprint: a hash of the array; None for a function.
    """

    def __init__(self, costs: ArrayLike | Callable[[int], Any], packer: wlb.Packer, lengths: NDArray[Any]) -> None:
        """Costs of a corpus. The packer gives the number of columns and their limits.

        Raises:
            wlb.WlbError: the array has another shape, or a number that is negative, not finite or above its limit, or a
                column of zeros.
        """
        assert packer.cost_columns is not None
        assert packer.limits is not None
        self._columns = packer.cost_columns
        self._function: Callable[[int], Any] | None = None
        self._array: NDArray[Any] = np.empty((0, self._columns))
        self.fingerprint: str | None = None
        if callable(costs):
            self._function = costs
            return
        try:
            array = np.asanyarray(costs)
        except ValueError:
            raise error("costs", "are rows of several lengths", value=costs) from None
        shapes = [(lengths.size, self._columns)] + ([(lengths.size,)] if self._columns == 1 else [])
        if array.shape not in shapes or array.dtype.kind not in "fiu":
            message = f"is {array.dtype} of shape {array.shape}, not numbers {list(shapes[-1])}"
            raise error("costs", message, value=array.shape)
        self._array = array.reshape(-1, self._columns)
        sidecar = (
            Sidecar.of(self._array.reshape(-1), f" costs[{self._columns}]") if self._array.flags.c_contiguous else None
        )
        facts = self._read() if sidecar is None else sidecar.facts(self._read)
        self.fingerprint = facts["fingerprint"]
        largest = np.array(facts["largest"])
        if not (facts["least"] >= 0 and (largest < np.inf).all()):
            refused = self._refused(np.full(self._columns, np.inf), None, lengths)
            assert refused is not None
            raise refused
        if not largest.all():
            raise error("costs", f"has nothing but 0 in column {int(largest.argmin())}: leave this column out")
        limits = np.array(packer.limits)
        if (largest > limits).any():
            cut = None if packer.oversize == "error" else packer.max_document_tokens
            refused = self._refused(limits, cut, lengths)
            if refused is not None:
                raise refused

    def rows(self, documents: NDArray[np.int64]) -> Floats:
        """float64 [n, columns] of documents by their numbers."""
        if self._function is None:
            return np.asarray(self._array[documents], np.float64)
        of_each = [cost_row(self._function(number), self._columns, "costs", number) for number in documents.tolist()]
        return np.array(of_each).reshape(-1, self._columns)

    def _chunk(self, first: int) -> Floats:
        return np.ascontiguousarray(self._array[first : first + _CHUNK], "<f8")

    def _read(self) -> Facts:
        least, largest = np.inf, np.zeros(self._columns)
        digest = hashlib.blake2b(f"{self._columns}".encode(), digest_size=16)
        for first in range(0, len(self._array), _CHUNK):
            chunk = self._chunk(first)
            least, largest = np.minimum(least, chunk.min()), np.maximum(largest, chunk.max(axis=0))  # NaN stays
            digest.update(chunk.data)
        return {"least": float(least), "largest": largest.tolist(), "fingerprint": digest.hexdigest()}

    def _refused(self, limits: Floats, cut: int | None, lengths: NDArray[Any]) -> Exception | None:
        """The error for the first invalid cost, or one for which no piece has room; None if there is none."""
        for first in range(0, len(self._array), _CHUNK):
            chunk = self._chunk(first)
            whole = np.asarray(lengths[first : first + _CHUNK], np.float64)[:, None]
            share = np.minimum(whole, whole if cut is None else cut) / whole
            bad = ~((chunk >= 0) & (chunk < np.inf) & (chunk * share <= limits))
            if bad.any():
                row, column = np.argwhere(bad)[0].tolist()
                value = float(chunk[row, column])
                legal = 0 <= value < np.inf
                message = (
                    f"exceeds the limit {limits[column]:g} of its column" if legal else "must be finite, 0 or above"
                )
                return error("costs", f"has {value} in column {column}: {message}", index=first + row, value=value)
        return None
