"""How much room the micro-batches of a trainer's step have beside its tokens, so that any documents can be balanced."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final

ROOM: Final = Fraction(5, 4)
"""What they may hold, over the tokens of the step."""


def step_tokens(held: int) -> int:
    """Tokens of a step whose micro-batches hold so many."""
    return max(1, math.floor(held / ROOM))


def micro_batches(tokens: int, *, ranks: int, max_tokens: int, together: int = 1) -> int:
    """Micro-batches of a rank: the fewest that leave a step of so many tokens its room.

    Args:
        tokens: Of the step, on all ranks.
        ranks: Data-parallel ones.
        max_tokens: Most tokens of a micro-batch.
        together: What their number has to be a multiple of.
    """
    return max(1, math.ceil(ROOM * tokens / (ranks * max_tokens * together))) * together
