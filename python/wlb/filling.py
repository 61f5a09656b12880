"""Choice of the documents that enter the packer in a step: at most what it admits, enough for a step worth training."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wlb._core import Packer, Packing, WlbError
from wlb._errors import check_integer, error


@dataclass(frozen=True)
class Offer:
    """Pieces of documents that could enter next, in order.

    Attributes:
        ids: int64 [pieces], the packer's names of their documents.
        starts: int [pieces], where each begins in its document; None: all are whole documents.
        lengths: int64 [pieces], tokens.
        costs: float64 [pieces, columns], where documents bring their costs to the packer; else None.
        more: Whether there are further ones.
        rest_waits: Whether what does not enter now has to make a step of its own later: more than a few tokens, then.
        early: int64 [pieces], by how many iterations each comes before its turn; None: all come in order.
        numbers: int64 [pieces], documents as who gave them counts them, for errors; None: as `ids`.
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
        """A global batch, and `extra` more, as far as there are documents; the same again until `advance`."""
        ...

    def advance(self, pieces: int) -> None:
        """Marks the first `pieces` of the last offer as entered into the packer."""
        ...


def next_packing(packer: Packer, source: Source, *, min_step_tokens: int) -> tuple[Packer, Packing]:
    """Packs the next step worth training, and gives the packer after it; `packer` itself stays as it is.

    No more enters than the packer admits, so that what waits stays within `packer.bounds()` whatever the documents are.
    Where the step would train fewer than `min_step_tokens`, because its documents wait for others, further ones are
    read first: pushed along with it or, where nothing at all would be trained, before it. Where no more may be read
    the packer has to let go enough of what waits, at the price of balance.

    Complexity:
        A copy of what waits and one push; a few where much has to be read.

    Raises:
        WlbError: The packer refuses a document, of which the index is the number in `Offer.numbers`.
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
        after = offer.lengths[::-1].cumsum()[::-1]  # tokens of each and all that follow
        if after[admitted] < min_step_tokens:
            fewer = int(np.searchsorted(-after, -min_step_tokens, side="right")) - 1
            return fewer if fewer > 0 else admitted
    return admitted


def _refused(offer: Offer, cause: WlbError) -> WlbError:
    """Turns a packer's error about an offer into an error about the document, which alone the caller knows."""
    row, column = cause.index if isinstance(cause.index, tuple) else (cause.index, None)
    if row is None or cause.argument not in ("lengths", "costs"):
        return cause
    number = int((offer.ids if offer.numbers is None else offer.numbers)[row])
    if column is None:
        said = str(cause).partition("] ")[2]  # without the prefix `lengths[17]`, whose index counts in the offer
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
    """Selects which of the upcoming pieces, in order, are offered to the packer.

    Attributes:
        end: So many have their turn now, those included that have entered before it.
        last: Whether there are none behind.
        offered: int64, places in that order: of those that have their turn now, then of those that come before it.
        due: How many of them have their turn.
        early: int64 [offered], by how many iterations each comes before it; None: none does.
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

    The last of all offers leaves no rest of less than a step.

    Args:
        packer: Says how early a piece should come.
        lengths: int64 [pieces], tokens of those that come next: enough to know that a step is left behind.
        new: bool [pieces], whether it has not entered before its turn; some have not.
        whole: bool [pieces], whether it is all of a document: only those come early.
        wanted: Tokens that have their turn, one piece at least.
        tokens_per_batch: Those of a global batch.
        min_step_tokens: Those that a step trains at least.
        max_early: Iterations that a piece comes before its turn, at most.
        to_the_end: Whether none are behind these.
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
    """Checks `tokens_per_batch`, or gives the packer's.

    Raises:
        wlb.WlbError: It is no integer from 1 on, or more than a step can train; or the packer bounds the work of steps
            in global batches of other sizes.
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
    """Checks `min_step_tokens`, or gives what it is by default: a tenth of a global batch.

    Raises:
        wlb.WlbError: It is no integer, below 0, or so much that no packing could keep it: documents of little more than
            half of `max_tokens` fill half of a step, and all but one micro-batch of an odd number count. A single
            micro-batch is filled as far as goes: a short document, and behind it one of `max_tokens`, make two steps.
    """
    most = max(packer.num_micro_batches * packer.max_tokens // 3, 1)
    if min_step_tokens is None:
        return min(max(tokens_per_batch // 10, 1), most)
    check_integer("min_step_tokens", min_step_tokens, minimum=0)
    if min_step_tokens > most:
        message = f"= {min_step_tokens}: from 0 to a third of num_micro_batches * max_tokens = {most}"
        raise error("min_step_tokens", message, value=min_step_tokens)
    return min_step_tokens


def warn_of_long(name: str, length: int, tokens_per_batch: int, *, stacklevel: int) -> None:
    """Says that a document is longer than what enters a step.

    Warns:
        UserWarning: It is.
    """
    if length > tokens_per_batch:
        warnings.warn(
            f"{name} has {length} tokens, more than tokens_per_batch = {tokens_per_batch}: it enters over several "
            "steps, which train little else. Raise tokens_per_batch, cut such documents beforehand, or give the packer "
            'oversize="truncate"',
            stacklevel=stacklevel + 1,
        )


def check_ranks(packer: Packer, dp_size: int, argument: str) -> None:
    """Whether a packer plans for this number of ranks, or for any.

    Raises:
        wlb.WlbError: It plans for another number.
    """
    if packer.dp_size not in (None, dp_size):
        message = f"= {dp_size}: the packer plans for dp_size = {packer.dp_size}; make it for the ranks that train"
        raise error(argument, message, value=dp_size)


def check_max_early(max_early: int, packer: Packer) -> None:
    """Whether documents may enter a packer this many iterations before their turn.

    Raises:
        wlb.WlbError: It is no integer from 0 to 1024, or above 0 for a packer that does not ask when a document comes.
    """
    check_integer("max_early", max_early, minimum=0, maximum=1024)
    if max_early and (packer.release != "adaptive" or packer.cost_model is None):
        message = f'= {max_early}: needs a packer with release="adaptive" and a cost model'
        raise error("max_early", message, value=max_early)
