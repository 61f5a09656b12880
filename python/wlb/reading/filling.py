"""Reads until a packer has documents for a useful step: the packer says which enter (`Packer.offered`, `fill`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wlb._core import Packer, Packing, WlbError
from wlb._errors import error


@dataclass(frozen=True)
class Offer:
    """Pieces of documents that could enter next, in order.

    Attributes:
        ids: int64 [pieces], the packer's ids of their documents.
        starts: int [pieces], position of each piece in its document; None: all are whole documents.
        lengths: int64 [pieces], tokens.
        costs: float64 [pieces, columns], if documents bring their costs to the packer; else None.
        more: whether there are further pieces.
        rest_waits: whether pieces that do not enter now must make a step of their own later, for which a few tokens
            are not enough.
        early: int64 [pieces], iterations by which each piece comes before its turn; None: all come in order.
        numbers: int64 [pieces], numbers of the documents for the user's errors; None: as `ids`.
    """

    ids: NDArray[np.int64]
    starts: NDArray[np.integer[Any]] | None
    lengths: NDArray[np.int64]
    more: bool
    rest_waits: bool
    costs: NDArray[np.float64] | None = None
    early: NDArray[np.int64] | None = None
    numbers: NDArray[np.int64] | None = None


class Source(Protocol):
    """Documents that have not entered the packer yet."""

    def offer(self, extra: int) -> Offer:
        """A global batch and `extra` more, if there are enough documents; unchanged until `advance` is called."""
        ...

    def advance(self, pieces: int) -> None:
        """Marks the first `pieces` of the last offer as entered into the packer."""
        ...


def next_packing(packer: Packer, source: Source, *, min_step_tokens: int) -> tuple[Packer, Packing]:
    """Packs the next step worth training. Returns the packer after it; `packer` itself is not changed.

    At most as many documents enter as the packer admits, so the backlog stays within `packer.bounds()`. If the step
    would train fewer than `min_step_tokens` because its documents wait for others, further documents are read first.
    They are pushed together with these, or after these if nothing at all would be trained. If no more may be read, the
    packer must release waiting documents, and the step is less even.

    Complexity:
        A copy of the waiting documents and one push; a few of both if many documents must be read.

    Raises:
        WlbError: the packer refuses a document; its index is the number in `Offer.numbers`.
    """
    extra = 0
    while True:
        offer = source.offer(extra)
        after = packer.copy()
        try:
            entering, packing = after.fill(
                offer.lengths,
                offer.ids,
                starts=offer.starts,
                costs=offer.costs,
                early=offer.early,
                min_step_tokens=min_step_tokens,
                more=offer.more,
                rest_waits=offer.rest_waits,
            )
        except WlbError as cause:
            raise _refused(offer, cause) from cause
        may_read, tokens = offer.more and entering == offer.lengths.size, packing.num_tokens
        if not may_read or tokens >= max(min_step_tokens, 1):
            source.advance(entering)
            return after, packing
        if tokens == 0 and entering:  # all documents entered and wait: go on with the next batch
            packer = after
            source.advance(entering)
            extra = 0
        else:
            extra = 2 * extra + 1  # doubled each time, so that small batches need few offers


def _refused(offer: Offer, cause: WlbError) -> WlbError:
    """Turns a packer's error about an offer into an error about the document, the only name that the caller knows."""
    row, column = cause.index if isinstance(cause.index, tuple) else (cause.index, None)
    if row is None or cause.argument not in ("lengths", "costs"):
        return cause
    number = int((offer.ids if offer.numbers is None else offer.numbers)[row])
    if column is None:
        said = str(cause).partition("] ")[2]  # without the prefix `lengths[17]`, whose index is that of the offer
    else:
        said = f"has {cause.value} in column {column}: {str(cause).partition(': ')[2]}"
    return error(cause.argument, said, index=number, value=cause.value)
