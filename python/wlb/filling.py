"""Chooses the documents that enter the packer in a step: at most what it admits, enough for a useful step."""

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
            entering = _entering(packer, offer, min_step_tokens)
            may_read = offer.more and entering == offer.lengths.size
            packing = _push(after, offer, entering, 0 if may_read else max(min_step_tokens, 1))
        except WlbError as cause:
            raise _refused(offer, cause) from cause
        tokens = int(packing.tokens.sum())
        if not may_read or tokens >= max(min_step_tokens, 1):
            source.advance(entering)
            return after, packing
        if tokens == 0 and entering:  # all documents entered and wait: go on with the next batch
            packer = after
            source.advance(entering)
            extra = 0
        else:
            extra = 2 * extra + 1  # doubled each time, so that small batches need few offers


def _entering(packer: Packer, offer: Offer, min_step_tokens: int) -> int:
    """Number of the offer's first pieces that enter the packer."""
    admitted = packer.admits(offer.lengths, costs=offer.costs)
    if offer.rest_waits and admitted < offer.lengths.size:
        after = offer.lengths[::-1].cumsum()[::-1]  # tokens of each piece and all later ones
        if after[admitted] < min_step_tokens:
            fewer = int(np.searchsorted(-after, -min_step_tokens, side="right")) - 1
            return fewer if fewer > 0 else admitted
    return admitted


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


def _push(packer: Packer, offer: Offer, pieces: int, min_step_tokens: int) -> Packing:
    starts = None if offer.starts is None else offer.starts[:pieces]
    costs = None if offer.costs is None else offer.costs[:pieces]
    early = None if offer.early is None else offer.early[:pieces]
    return packer.push(
        offer.lengths[:pieces],
        offer.ids[:pieces],
        starts=starts,
        costs=costs,
        min_step_tokens=min_step_tokens,
        early=early,
    )


@dataclass(frozen=True)
class Turns:
    """The upcoming pieces that are offered to the packer.

    Attributes:
        end: Number of upcoming pieces whose turn is now, including pieces that entered before it.
        last: Whether there are no pieces after these.
        offered: int64, indices of upcoming pieces: first those whose turn is now, then those that come before their
            turn.
        due: Number of offered pieces whose turn is now.
        early: int64 [offered], iterations by which each comes before its turn; None: all come in order.
    """

    end: int
    last: bool
    offered: NDArray[np.int64]
    due: int
    early: NDArray[np.int64] | None


def next_turns(
    packer: Packer,
    lengths: NDArray[np.int64],
    *,
    new: NDArray[np.bool_],
    whole: NDArray[np.bool_],
    wanted: int,
    tokens_per_batch: int,
    min_step_tokens: int,
    max_early: int,
    to_the_end: bool,
) -> Turns:
    """Chooses the pieces that a reader offers for a step, and pieces of later steps that come early (`Packer.leads`).

    The last offer takes a rest with it that is too small for a step.

    Args:
        packer: says how early a piece should come.
        lengths: int64 [pieces], tokens of the upcoming pieces: enough of them to know whether a whole step remains.
        new: bool [pieces], False for a piece that entered before its turn; at least one is True.
        whole: bool [pieces], whether the piece is a whole document: only such pieces come early.
        wanted: tokens whose turn is now; at least one piece.
        tokens_per_batch: tokens of a global batch.
        min_step_tokens: least tokens of a step.
        max_early: most iterations by which a piece comes before its turn.
        to_the_end: whether there are no pieces after these.
    """
    least = max(min_step_tokens, 1)
    passed = lengths.cumsum()  # in the order of turns, documents that entered early included
    outside = np.where(new, lengths, 0).cumsum()
    turn = max(int(np.searchsorted(passed, wanted, side="right")), int(new.argmax()) + 1)
    if to_the_end and outside[-1] - outside[turn - 1] < least:
        turn = lengths.size
    last = to_the_end and turn == lengths.size
    offered = np.flatnonzero(new[:turn])
    due, early = offered.size, None
    if max_early and not last:
        iterations = 1 + (passed - lengths - passed[turn - 1]) // tokens_per_batch
        leads = packer.leads(lengths, tokens_per_batch=tokens_per_batch, most=max_early)
        comes = turn + np.flatnonzero((new & whole & (leads >= iterations))[turn:])
        rest = outside[-1] - outside[turn - 1] - lengths[comes].sum()
        if comes.size and (not to_the_end or rest >= least):
            offered = np.concatenate([offered, comes])
            early = np.where(offered < turn, 0, iterations[offered])
    return Turns(turn, last, offered, due, early)


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
