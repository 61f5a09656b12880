"""Sizes of steps, and how far documents may move, as a packer allows."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final

from wlb._core import Packer
from wlb._errors import check_integer, error
from wlb._warned import warn

ROOM: Final = Fraction(5, 4)
"""Capacity of a step's micro-batches, divided by the tokens of the step; leaves room to balance any documents."""


def batch_tokens(packer: Packer, tokens_per_batch: int | None) -> int:
    """Checks `tokens_per_batch`; None is the packer's.

    Raises:
        wlb.WlbError: it is no integer from 1 on, or more than a step can train; or the packer bounds the work of steps
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
        wlb.WlbError: it is no integer, below 0, or more than every packing can reach. (Documents of just over half of
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
        UserWarning: the document is longer.
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
        wlb.WlbError: it plans for another number.
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
        wlb.WlbError: there is no such rank; the ranks do not divide the packer's micro-batches, or are not its own.
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
        wlb.WlbError: it is no integer from 0 to 1024; or above 0 for a packer with queues or without a cost model.
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
