"""Reads until a packer has documents for a useful step: the packer says which enter (`Packer.offered`, `fill`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from wlb._core import Packer, Packing, WlbError
from wlb._errors import check_integer, error
from wlb._warned import warn

ROOM: Final = Fraction(5, 4)
"""Capacity of a step's micro-batches, divided by the tokens of the step; leaves room to balance any documents."""


@dataclass(frozen=True)
class Offer:
    """Pieces of documents that could enter next, in order.

    Attributes:
        ids: int64 [pieces], the packer's ids of their documents.
        starts: int [pieces], position of each piece in its document; None: all are whole documents.
        lengths: int64 [pieces], tokens.
        costs: float64 [pieces, columns], if documents bring their costs to the packer; else None.
        more: Whether there are further pieces.
        rest_waits: Whether pieces that do not enter now must make a step of their own later, for which a few tokens
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
        WlbError: The packer refuses a document; its index is the number in `Offer.numbers`.
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


def batch_tokens(packer: Packer, tokens_per_batch: int | None) -> int:
    """Checks `tokens_per_batch`; None is the packer's.

    Raises:
        wlb.WlbError: It is no integer from 1 on, or more than a step can train; or the packer bounds the work of steps
            relative to global batches of another size.
    """
    if tokens_per_batch is None:
        return packer.tokens_per_batch
    check_integer("tokens_per_batch", tokens_per_batch, minimum=1)
    most = packer.num_micro_batches * packer.max_tokens
    if tokens_per_batch > most:
        message = f"= {tokens_per_batch}: from 1 to num_micro_batches * max_tokens = {most}"
        raise error("tokens_per_batch", message, value=tokens_per_batch)
    if packer.max_step_cost is not None and tokens_per_batch != packer.tokens_per_batch:
        message = (
            f"= {tokens_per_batch}: the packer tells max_step_cost in global batches of {packer.tokens_per_batch} "
        )
        message += f"tokens; make it with tokens_per_batch={tokens_per_batch}"
        raise error("tokens_per_batch", message, value=tokens_per_batch)
    return tokens_per_batch


def least_tokens(packer: Packer, tokens_per_batch: int, min_step_tokens: int | None) -> int:
    """Checks `min_step_tokens`; None is a tenth of a global batch.

    Raises:
        wlb.WlbError: It is no integer, below 0, or more than every packing can reach. (Documents of just over half of
            `max_tokens` fill half of a step, and of an odd number of micro-batches one may stay empty. In a single
            micro-batch, a short document followed by one of `max_tokens` makes two steps.)
    """
    most = max(packer.num_micro_batches * packer.max_tokens // 3, 1)
    if min_step_tokens is None:
        return min(max(tokens_per_batch // 10, 1), most)
    check_integer("min_step_tokens", min_step_tokens, minimum=0)
    if min_step_tokens > most:
        message = f"= {min_step_tokens}: from 0 to a third of num_micro_batches * max_tokens = {most}"
        raise error("min_step_tokens", message, value=min_step_tokens)
    return min_step_tokens


def warn_of_long(name: str, length: int, tokens_per_batch: int) -> None:
    """Warns about a document that is longer than a global batch.

    Warns:
        UserWarning: The document is longer.
    """
    if length > tokens_per_batch:
        warn(
            f"{name} has {length} tokens, more than tokens_per_batch = {tokens_per_batch}: it enters over several "
            "steps, which train little else. Raise tokens_per_batch, cut such documents beforehand, or give the packer "
            'oversize="truncate"'
        )


def check_ranks(packer: Packer, dp_size: int, argument: str) -> None:
    """Checks that a packer plans for this number of ranks, or for any number.

    Raises:
        wlb.WlbError: It plans for another number.
    """
    if packer.dp_size not in (None, dp_size):
        message = f"= {dp_size}: the packer plans for dp_size = {packer.dp_size}; make it for the ranks that train"
        raise error(argument, message, value=dp_size)


def check_share(packer: Packer, rank: int, ranks: int, *, names: tuple[str, str]) -> None:
    """Checks that a rank can take its share of a packer's steps.

    Args:
        packer: plans the steps of all ranks.
        rank: the rank.
        ranks: number of data-parallel ranks.
        names: of `rank` and `ranks`, for errors.

    Raises:
        wlb.WlbError: There is no such rank; the ranks do not divide the packer's micro-batches, or are not its own.
    """
    check_integer(names[1], ranks, minimum=1)
    check_integer(names[0], rank, minimum=0)
    if packer.num_micro_batches % ranks:
        raise error(names[1], f"= {ranks} does not divide {packer.num_micro_batches} micro-batches", value=ranks)
    if rank >= ranks:
        raise error(names[0], f"= {rank}: the group has ranks 0 to {ranks - 1}", value=rank)
    check_ranks(packer, ranks, names[1])


def check_max_early(max_early: int, packer: Packer) -> None:
    """Checks that documents may enter a packer this many iterations before their turn.

    Raises:
        wlb.WlbError: It is no integer from 0 to 1024; or above 0 for a packer with queues or without a cost model.
    """
    check_integer("max_early", max_early, minimum=0, maximum=1024)
    if max_early and (packer.release != "adaptive" or packer.cost_model is None):
        message = f'= {max_early}: needs a packer with release="adaptive" and a cost model'
        raise error("max_early", message, value=max_early)


def step_tokens(held: int) -> int:
    """Tokens of a step whose micro-batches hold at most `held` tokens together, with some room."""
    return max(1, math.floor(held / ROOM))


def micro_batches(tokens: int, *, ranks: int, max_tokens: int, together: int = 1) -> int:
    """Fewest micro-batches of a rank for a step of this many tokens, with some room.

    Args:
        tokens: of the step, on all ranks.
        ranks: number of data-parallel ranks.
        max_tokens: most tokens of a micro-batch.
        together: the number of micro-batches is a multiple of it.
    """
    return max(1, math.ceil(ROOM * tokens / (ranks * max_tokens * together))) * together
